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

// Into device memory.
template <typename T>
void copy(T* to, const std::vector<T>& from) {
  gpu::copy_now(to, from.data(), sizeof(T) * from.size());
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
    : plane_(plane),
      layout_(layout),
      topo_(plane.topology()),
      rank_(rank),
      hosts_(regions.size()),
      to_(topo_.members.size()),
      from_(regions.size()),
      relayed_(layout.num_streams) {
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
  const gpu::Net::From& from = from_[number];
  return group.base[from.holder - group.first] + from.packets;
}

uint64_t* Network::consumed_by_us(int holder, const RingLayout& ring) const {
  return at<uint64_t>(host(holder), ring.consumed_offset + static_cast<uint64_t>(topo_.local_of[rank_]) * kLineBytes);
}

// Streams of other ranks to our domain, and the rings in which we return their sums.
void Network::fill_sources(const RankNumbers& numbers) {
  const int own = topo_.domain_of[rank_];
  for (int src = 0; src < topo_.num_ranks; ++src) {
    gpu::Net::From& from = from_[numbers.number_of[src]];
    from.holder = numbers.number_of[src];
    if (topo_.domain_of[src] == own) continue;
    const int holder = topo_.rail(src, own);
    const RegionLayout& theirs = layouts_[topo_.local_of[holder]];
    const size_t i = index_of(theirs.incoming, src);
    from.holder = numbers.number_of[holder];
    from.stream = static_cast<uint32_t>(1 + i);
    from.packets = theirs.header_landing[i].slots_offset;
    from.rows = theirs.rows_landing[i].slots_offset;
    from.rows_consumed = consumed_by_us(holder, theirs.rows_landing[i]);
  }
  const RegionLayout& mine = plane_.layout();
  for (size_t i = 0; i < mine.incoming.size(); ++i)
    relayed_[1 + i] = {numbers.number_of[mine.incoming[i]], plane_.channels().out_of(mine.return_send[i]),
                       mine.return_send[i].slots_offset};
}

// Our streams to other domains.
void Network::fill_destinations(gpu::Net& net) {
  const RegionLayout& mine = plane_.layout();
  for (int d = 0; d < topo_.num_domains(); ++d) {
    if (d == topo_.domain_of[rank_]) continue;
    gpu::Net::To& to = to_[d];
    to.packets = mine.header_send[d].slots_offset;
    to.packet_bytes = mine.header_send[d].slot_bytes;
    to.rows = mine.rows_send[d].slots_offset;
    to.returns = mine.return_landing[d].slots_offset;
    to.packet_channel = plane_.channels().out_of(mine.header_send[d]);
    to.row_channel = plane_.channels().out_of(mine.rows_send[d]);
    to.returns_consumed = at<uint64_t>(host(rank_), mine.return_landing[d].consumed_offset);
  }
  net.domain = static_cast<uint32_t>(topo_.domain_of[rank_]);
  net.num_relayed = static_cast<uint32_t>(mine.incoming.size());
  net.commands.ring = at<uint64_t>(host(rank_), mine.commands_offset);
  net.commands.capacity = mine.num_commands;
  net.ended = at<uint64_t>(host(rank_), mine.ended_offset);
}

void Network::poll(std::vector<gpu::Net::Polled>& polled, const Seen& what, const void* word, uint64_t* flag,
                   uint64_t* also) {
  seen_.push_back(what);
  polled.push_back({static_cast<const uint64_t*>(word), flag, also});
}

// Calls visit(what, word) for what has arrived at a member of our domain, and for what of ours has left.
template <typename Visit>
void Network::each_word(Visit visit) const {
  for (int member : topo_.members[topo_.domain_of[rank_]]) {
    const RegionLayout& theirs = layouts_[topo_.local_of[member]];
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
std::vector<gpu::Net::Polled> Network::fill_polled(const gpu::Group& group, const RankNumbers& numbers) {
  std::vector<gpu::Net::Polled> polled;
  const gpu::NetState& state = group.net_state;
  each_word([&](const Seen& what, const uint64_t* word) {
    const uint32_t peer = numbers.number_of[what.peer], domain = numbers.domain_of[peer];
    const bool gone = what.kind == TraceKind::kSeenFlushed;
    if (what.ring == RingKind::kHeader && gone)
      poll(polled, what, word, &state.packets_gone[domain].value);
    else if (what.ring == RingKind::kHeader)
      poll(polled, what, word, &layout_.header_full.in(group.own)[peer].value,
           &layout_.weights_full.in(group.own)[peer].value);
    else if (what.ring == RingKind::kRows)
      poll(polled, what, word, gone ? &state.rows_gone[domain].value : &state.rows_there[peer].value);
    else if (what.ring == RingKind::kReturn && gone)
      poll(polled, what, word, &state.returns_gone[stream_of(what.peer)].value);
    else if (what.ring == RingKind::kReturn && what.member == rank_)
      poll(polled, what, word, &state.returns_there[domain].value);
  });
  return polled;
}

// The rings of low latency.
void Network::fill_slots(gpu::SlotNet& net, const RankNumbers& numbers) {
  const int own = topo_.domain_of[rank_];
  std::vector<gpu::SlotNet::To> to(topo_.members.size());
  std::vector<gpu::SlotNet::From> from(static_cast<size_t>(topo_.num_ranks));
  std::vector<gpu::SlotNet::Relayed> relayed(layout_.num_streams);
  for (int src = 0; src < topo_.num_ranks; ++src) {
    if (topo_.domain_of[src] == own) continue;
    const int holder = topo_.rail(src, own);
    const RegionLayout& theirs = layouts_[topo_.local_of[holder]];
    const size_t i = index_of(theirs.incoming, src);
    const RegionLayout::Slots& rings = theirs.slots;
    from[numbers.number_of[src]] = {
        rings.routing_landing[i].slots_offset,         rings.rows_landing[i].slots_offset,
        rings.weights_landing[i].slots_offset,         consumed_by_us(holder, rings.routing_landing[i]),
        consumed_by_us(holder, rings.rows_landing[i]), consumed_by_us(holder, rings.weights_landing[i])};
  }
  const RegionLayout& mine = plane_.layout();
  const Channels& channels = plane_.channels();
  for (size_t i = 0; i < mine.incoming.size(); ++i)
    relayed[1 + i] = {mine.slots.sums_send[i].slots_offset, channels.out_of(mine.slots.sums_send[i])};
  for (int d = 0; d < topo_.num_domains(); ++d) {
    if (d == own) continue;
    const RingLayout &routing = mine.slots.routing_send[d], &rows = mine.slots.rows_send[d];
    const RingLayout &weights = mine.slots.weights_send[d], &sums = mine.slots.sums_landing[d];
    to[d] = {routing.slots_offset,     rows.slots_offset,
             weights.slots_offset,     sums.slots_offset,
             channels.out_of(routing), channels.out_of(rows),
             channels.out_of(weights), at<uint64_t>(host(rank_), sums.consumed_offset)};
  }
  copy(net.to, to);
  copy(net.from, from);
  copy(net.relayed, relayed);
}

// As fill_polled().
std::vector<gpu::Net::Polled> Network::fill_slots_polled(const gpu::Group& group, const RankNumbers& numbers) {
  std::vector<gpu::Net::Polled> polled;
  const gpu::SlotNetState& state = group.slot_net_state;
  each_word([&](const Seen& what, const uint64_t* word) {
    const uint32_t peer = numbers.number_of[what.peer], domain = numbers.domain_of[peer];
    const bool gone = what.kind == TraceKind::kSeenFlushed;
    if (what.ring == RingKind::kSlotRouting)
      poll(polled, what, word, gone ? &state.routing_gone[domain].value : &state.routing_there[peer].value);
    else if (what.ring == RingKind::kSlotRows)
      poll(polled, what, word, gone ? &state.rows_gone[domain].value : &state.rows_there[peer].value);
    else if (what.ring == RingKind::kSlotWeights)
      poll(polled, what, word, gone ? &state.weights_gone[domain].value : &state.weights_there[peer].value);
    else if (what.ring == RingKind::kSlotSums && gone)
      poll(polled, what, word, &state.sums_gone[stream_of(what.peer)].value);
    else if (what.ring == RingKind::kSlotSums && what.member == rank_)
      poll(polled, what, word, &state.sums_there[domain].value);
  });
  return polled;
}

void Network::fill(gpu::Group& group, const RankNumbers& numbers) {
  for (int member : topo_.members[topo_.domain_of[rank_]])
    layouts_.push_back(make_device_layout(topo_, layout_.rings, member));
  gpu::Net& net = group.net;
  lay_out_net(net, group.net_state, layout_.net.in(group.own), layout_);
  net.commands.state = group.net_state.producer;
  fill_sources(numbers);
  fill_destinations(net);
  const auto polled = fill_polled(group, numbers);
  net.num_polled = static_cast<uint32_t>(polled.size());
  copy(net.to, to_);
  copy(net.from, from_);
  copy(net.relayed, relayed_);
  copy(net.polled, polled);
  if (layout_.low_latency.tokens == 0) return;
  gpu::SlotNet& slots = group.slot_net;
  lay_out_slot_net(slots, group.slot_net_state, layout_.low_latency.net.in(group.own), layout_);
  fill_slots(slots, numbers);
  const auto slots_polled = fill_slots_polled(group, numbers);
  slots.num_polled = static_cast<uint32_t>(slots_polled.size());
  copy(slots.polled, slots_polled);
}

}  // namespace uccl_ep
