#include "engine/gpu/network.h"

#include <unistd.h>

#include <algorithm>

#include "common/units.h"

namespace uccl_ep {
namespace {

// The index of `rank` in a list.
size_t index_of(const std::vector<int>& ranks, int rank) {
  return static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

template <typename T>
T* at(uint8_t* base, uint64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

}  // namespace

void register_with_nics(ControlPlane& plane, const gpu::DeviceMapping& own) {
  const int fd = own.export_dmabuf();
  try {
    plane.register_device({own.base(), own.num_bytes(), "", fd});
  } catch (...) {
    if (fd >= 0) close(fd);
    throw;
  }
  if (fd >= 0) close(fd);
}

Network::Network(ControlPlane& plane, const gpu::DeviceRegionLayout& layout, int rank, int device, bool has_nics,
                 const std::vector<gpu::DeviceMapping>& regions)
    : plane_(plane), layout_(layout), topo_(plane.topology()), rank_(rank), hosts_(regions.size()) {
  DeviceRegions all;
  if (has_nics)
    visibility_ = std::make_unique<gpu::GpuVisibility>(device);
  else
    copies_ = std::make_unique<Copier>(std::make_unique<gpu::GpuCopies>(device));
  all.copies = copies_.get();
  if (visibility_ != nullptr && visibility_->needed()) all.nic_writes = visibility_.get();
  for (const gpu::DeviceMapping& region : regions)
    all.regions.push_back({region.base(), region.base() == nullptr ? 0 : region.num_bytes(), ""});
  plane.attach_device(std::move(all));
  for (int member : topo_.members[topo_.domain_of[rank]])
    hosts_[static_cast<size_t>(member)] =
        gpu::HostMapping(plane.region_base(member), round_up(plane.region_bytes(member), kPageBytes));
}

const uint8_t* Network::packets_of(const gpu::Group& group, uint32_t number) const {
  const gpu::Net::From& from = net_.from[number];
  return group.base[from.holder] + from.packets;
}

uint64_t* Network::consumed_by_us(int holder, const RingLayout& ring) const {
  return at<uint64_t>(host(holder), ring.consumed_offset + static_cast<uint64_t>(topo_.local_of[rank_]) * kLineBytes);
}

// Streams of other ranks to our domain, and the rings in which we return their sums.
void Network::fill_sources(const gpu::Group& group) {
  const int own = topo_.domain_of[rank_];
  for (int src = 0; src < topo_.num_ranks; ++src) {
    gpu::Net::From& from = net_.from[group.number_of[src]];
    from.holder = group.number_of[src];
    if (topo_.domain_of[src] == own) continue;
    const int holder = topo_.rail(src, own);
    const RegionLayout theirs = make_device_layout(topo_, layout_.rings, holder);
    const size_t i = index_of(theirs.incoming, src);
    from.holder = group.number_of[holder];
    from.stream = static_cast<uint32_t>(1 + i);
    from.packets = theirs.header_landing[i].slots_offset;
    from.rows = theirs.rows_landing[i].slots_offset;
    from.rows_consumed = consumed_by_us(holder, theirs.rows_landing[i]);
  }
  const RegionLayout& mine = plane_.layout();
  net_.num_relayed = static_cast<uint32_t>(mine.incoming.size());
  for (size_t i = 0; i < mine.incoming.size(); ++i)
    net_.relayed[1 + i] = {group.number_of[mine.incoming[i]], plane_.channels().out_of(mine.return_send[i]),
                           mine.return_send[i].slots_offset};
}

// Our streams to other domains.
void Network::fill_destinations(const gpu::Group& group) {
  const RegionLayout& mine = plane_.layout();
  for (int d = 0; d < topo_.num_domains(); ++d) {
    if (d == topo_.domain_of[rank_]) continue;
    gpu::Net::To& to = net_.to[d];
    to.packets = mine.header_send[d].slots_offset;
    to.rows = mine.rows_send[d].slots_offset;
    to.returns = mine.return_landing[d].slots_offset;
    to.packet_channel = plane_.channels().out_of(mine.header_send[d]);
    to.row_channel = plane_.channels().out_of(mine.rows_send[d]);
    to.returns_consumed = at<uint64_t>(host(rank_), mine.return_landing[d].consumed_offset);
  }
  net_.domain = static_cast<uint32_t>(topo_.domain_of[rank_]);
  net_.commands.ring = at<uint64_t>(host(rank_), mine.commands_offset);
  net_.commands.capacity = mine.num_commands;
  auto* const state = layout_.net_state.in(group.base[group.rank]);
  net_.commands.state = &state->producer;
  net_.ended = at<uint64_t>(host(rank_), mine.ended_offset);
}

void Network::poll(const Seen& what, const void* word, uint64_t* flag, uint64_t* also) {
  seen_.push_back(what);
  net_.polled[net_.num_polled++] = {static_cast<const uint64_t*>(word), flag, also};
}

// Calls visit(what, word) for what has arrived at a member of our domain, and for what of ours has left.
template <typename Visit>
void Network::each_word(Visit visit) const {
  for (int member : topo_.members[topo_.domain_of[rank_]]) {
    const RegionLayout theirs = make_device_layout(topo_, layout_.rings, member);
    const Channels channels = make_device_channels(topo_, layout_.rings, member);
    const uint64_t* word = at<uint64_t>(host(member), theirs.board_offset);
    for (const InChannel& in : channels.in)
      visit(Seen{TraceKind::kSeenArrived, in.landing.kind, in.peer, member}, word++);
    if (member != rank_) continue;
    for (const OutChannel& out : channels.out)
      visit(Seen{TraceKind::kSeenFlushed, out.send.kind, out.peer, member}, word++);
  }
}
// Of a rank whose rail we are.
size_t Network::stream_of(int source) const { return 1 + index_of(plane_.layout().incoming, source); }

// Returned sums arrive for us alone.
void Network::fill_polled(const gpu::Group& group) {
  uint8_t* const region = group.base[group.rank];
  auto* const state = layout_.net_state.in(region);
  each_word([&](const Seen& what, const uint64_t* word) {
    const uint32_t peer = group.number_of[what.peer], domain = group.domain_of[peer];
    const bool gone = what.kind == TraceKind::kSeenFlushed;
    if (what.ring == RingKind::kHeader && gone)
      poll(what, word, &state->packets_gone[domain].value);
    else if (what.ring == RingKind::kHeader)
      poll(what, word, &layout_.header_full.in(region)[peer].value, &layout_.weights_full.in(region)[peer].value);
    else if (what.ring == RingKind::kRows)
      poll(what, word, gone ? &state->rows_gone[domain].value : &state->rows_there[peer].value);
    else if (what.ring == RingKind::kReturn && gone)
      poll(what, word, &state->returns_gone[stream_of(what.peer)].value);
    else if (what.ring == RingKind::kReturn && what.member == rank_)
      poll(what, word, &state->returns_there[domain].value);
  });
}

void Network::poll_slots(const Seen& what, const void* word, uint64_t* flag) {
  seen_.push_back(what);
  slots_.polled[slots_.num_polled++] = {static_cast<const uint64_t*>(word), flag, nullptr};
}

// The rings of low latency.
void Network::fill_slots(const gpu::Group& group) {
  const int own = topo_.domain_of[rank_];
  for (int src = 0; src < topo_.num_ranks; ++src) {
    if (topo_.domain_of[src] == own) continue;
    const int holder = topo_.rail(src, own);
    const RegionLayout theirs = make_device_layout(topo_, layout_.rings, holder);
    const size_t i = index_of(theirs.incoming, src);
    const RegionLayout::Slots& rings = theirs.slots;
    slots_.from[group.number_of[src]] = {
        rings.routing_landing[i].slots_offset,         rings.rows_landing[i].slots_offset,
        rings.weights_landing[i].slots_offset,         consumed_by_us(holder, rings.routing_landing[i]),
        consumed_by_us(holder, rings.rows_landing[i]), consumed_by_us(holder, rings.weights_landing[i])};
  }
  const RegionLayout& mine = plane_.layout();
  const Channels& channels = plane_.channels();
  for (size_t i = 0; i < mine.incoming.size(); ++i)
    slots_.relayed[1 + i] = {mine.slots.sums_send[i].slots_offset, channels.out_of(mine.slots.sums_send[i])};
  for (int d = 0; d < topo_.num_domains(); ++d) {
    if (d == own) continue;
    const RingLayout &routing = mine.slots.routing_send[d], &rows = mine.slots.rows_send[d];
    const RingLayout &weights = mine.slots.weights_send[d], &sums = mine.slots.sums_landing[d];
    slots_.to[d] = {routing.slots_offset,     rows.slots_offset,
                    weights.slots_offset,     sums.slots_offset,
                    channels.out_of(routing), channels.out_of(rows),
                    channels.out_of(weights), at<uint64_t>(host(rank_), sums.consumed_offset)};
  }
}

// As fill_polled().
void Network::fill_slots_polled(const gpu::Group& group) {
  auto* const state = layout_.low_latency.net_state.in(group.base[group.rank]);
  each_word([&](const Seen& what, const uint64_t* word) {
    const uint32_t peer = group.number_of[what.peer], domain = group.domain_of[peer];
    const bool gone = what.kind == TraceKind::kSeenFlushed;
    if (what.ring == RingKind::kSlotRouting)
      poll_slots(what, word, gone ? &state->routing_gone[domain].value : &state->routing_there[peer].value);
    else if (what.ring == RingKind::kSlotRows)
      poll_slots(what, word, gone ? &state->rows_gone[domain].value : &state->rows_there[peer].value);
    else if (what.ring == RingKind::kSlotWeights)
      poll_slots(what, word, gone ? &state->weights_gone[domain].value : &state->weights_there[peer].value);
    else if (what.ring == RingKind::kSlotSums && gone)
      poll_slots(what, word, &state->sums_gone[stream_of(what.peer)].value);
    else if (what.ring == RingKind::kSlotSums && what.member == rank_)
      poll_slots(what, word, &state->sums_there[domain].value);
  });
}

const gpu::Net* Network::fill(const gpu::Group& group) {
  fill_sources(group);
  fill_destinations(group);
  fill_polled(group);
  gpu::Net* const to = layout_.net.in(group.base[group.rank]);
  gpu::copy_now(to, &net_, sizeof(net_));
  if (layout_.low_latency.tokens == 0) return to;
  fill_slots(group);
  fill_slots_polled(group);
  gpu::copy_now(layout_.low_latency.net.in(group.base[group.rank]), &slots_, sizeof(slots_));
  return to;
}

}  // namespace uccl_ep
