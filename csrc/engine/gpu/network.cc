#include "engine/gpu/network.h"

#include <unistd.h>

#include <algorithm>
#include <bit>

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
    if (theirs.tail_landing.empty()) continue;
    from.tails = theirs.tail_landing[i].slots_offset;
    from.tails_consumed = consumed_by_us(holder, theirs.tail_landing[i]);
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
    net.packets = mine.header_send[d].slots_offset;
    net.packets_half_bytes = mine.header_send[d].shared_bytes / kHeaderSlots;
    to.rows = mine.rows_send[d].slots_offset;
    to.returns = mine.return_landing[d].slots_offset;
    to.return_slots = mine.return_landing[d].num_slots;
    to.packet_channel = plane_.channels().out_of(mine.header_send[d]);
    to.row_channel = plane_.channels().out_of(mine.rows_send[d]);
    to.head_bytes = mine.header_send[d].slot_bytes;
    if (!mine.tail_send.empty()) to.tail_channel = plane_.channels().out_of(mine.tail_send[d]);
    to.returns_consumed = at<uint64_t>(host(rank_), mine.return_landing[d].consumed_offset);
  }
  net.domain = static_cast<uint32_t>(topo_.domain_of[rank_]);
  net.num_relayed = static_cast<uint32_t>(mine.incoming.size());
  net.commands.ring = at<uint64_t>(host(rank_), mine.commands_offset);
  net.commands.capacity = mine.num_commands;
  net.ended = at<uint64_t>(host(rank_), mine.ended_offset);
}

// Of a rank whose rail we are.
size_t Network::stream_of(int source) const { return 1 + index_of(plane_.layout().incoming, source); }

// Calls flags_of(what) for each channel of the rings of events, which returns the flags that follow its word.
template <typename FlagsOf>
void Network::follow(gpu::Followed& followed, EventRing of_domain, EventRing of_ours, FlagsOf flags_of) {
  std::vector<gpu::Followed::Ring> rings;
  std::vector<gpu::Followed::Word> words;
  followed.first_traced = static_cast<uint32_t>(seen_.size());
  const auto add = [&](int member, EventRing which) {
    const RegionLayout& theirs = layouts_[topo_.local_of[member]];
    const RegionLayout::Events& events = theirs.events[static_cast<uint32_t>(which)];
    if (events.capacity == 0) return;
    const Channels channels = make_device_channels(topo_, layout_.rings, member);
    gpu::Followed::Ring& ring = rings.emplace_back();
    ring.slots = at<uint64_t>(host(member), events.offset);
    ring.capacity_bits = static_cast<uint32_t>(std::countr_zero(events.capacity));
    ring.first = static_cast<uint32_t>(words.size());
    for (const uint32_t idx : channels.board_of(which)) {
      if (idx < channels.in.size())
        seen_.push_back({TraceKind::kSeenArrived, channels.in[idx].landing.kind, channels.in[idx].peer, member});
      else
        seen_.push_back({TraceKind::kSeenFlushed, channels.out[idx - channels.in.size()].send.kind,
                         channels.out[idx - channels.in.size()].peer, member});
      const auto [flag, also] = flags_of(seen_.back());
      words.push_back({at<uint64_t>(host(member), theirs.board_offset) + idx, flag, also});
    }
    ring.end = static_cast<uint32_t>(words.size());
  };
  for (int member : topo_.members[topo_.domain_of[rank_]]) add(member, of_domain);
  add(rank_, of_ours);
  followed.num_rings = static_cast<uint32_t>(rings.size());
  copy(followed.rings, rings);
  copy(followed.words, words);
}

void Network::follow_events(const gpu::Group& group, gpu::Followed& followed, const RankNumbers& numbers) {
  const gpu::NetState& state = group.net_state;
  follow(followed, EventRing::kDomain, EventRing::kOwn, [&](const Seen& what) -> Flags {
    const uint32_t peer = numbers.number_of[what.peer], domain = numbers.domain_of[peer];
    const bool gone = what.kind == TraceKind::kSeenFlushed;
    if (what.ring == RingKind::kHeader && gone) return {&state.packets_gone[domain].value, nullptr};
    if (what.ring == RingKind::kHeader)
      return {&layout_.header_full.in(group.own)[peer].value, &layout_.weights_full.in(group.own)[peer].value};
    if (what.ring == RingKind::kRows)
      return {gone ? &state.rows_gone[domain].value : &state.rows_there[peer].value, nullptr};
    if (what.ring == RingKind::kTail)
      return {gone ? &state.tails_gone[domain].value : &state.tails_there[peer].value, nullptr};
    return {gone ? &state.returns_gone[stream_of(what.peer)].value : &state.returns_there[domain].value, nullptr};
  });
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
    net.routing = routing.slots_offset;
    net.weights = weights.slots_offset;
    to[d] = {rows.slots_offset,     sums.slots_offset,        channels.out_of(routing),
             channels.out_of(rows), channels.out_of(weights), at<uint64_t>(host(rank_), sums.consumed_offset)};
  }
  copy(net.to, to);
  copy(net.from, from);
  copy(net.relayed, relayed);
  if (mine.votes_offset == 0) return;
  net.own_votes = at<gpu::SlotVotes>(host(rank_), mine.votes_offset);
  net.far_votes = net.own_votes + 1;
}

void Network::follow_slot_events(const gpu::Group& group, gpu::Followed& followed, const RankNumbers& numbers) {
  const gpu::SlotNetState& state = group.slot_net_state;
  follow(followed, EventRing::kSlotDomain, EventRing::kSlotOwn, [&](const Seen& what) -> Flags {
    const uint32_t peer = numbers.number_of[what.peer], domain = numbers.domain_of[peer];
    const bool gone = what.kind == TraceKind::kSeenFlushed;
    if (what.ring == RingKind::kSlotRouting)
      return {gone ? &state.routing_gone[domain].value : &state.routing_there[peer].value, nullptr};
    if (what.ring == RingKind::kSlotRows)
      return {gone ? &state.rows_gone[domain].value : &state.rows_there[peer].value, nullptr};
    if (what.ring == RingKind::kSlotWeights)
      return {gone ? &state.weights_gone[domain].value : &state.weights_there[peer].value, nullptr};
    return {gone ? &state.sums_gone[stream_of(what.peer)].value : &state.sums_there[domain].value, nullptr};
  });
}

void Network::fill(gpu::Group& group, const RankNumbers& numbers) {
  for (int member : topo_.members[topo_.domain_of[rank_]])
    layouts_.push_back(make_device_layout(topo_, layout_.rings, member));
  gpu::Net& net = group.net;
  lay_out_net(net, group.net_state, layout_.net.in(group.own), layout_);
  net.commands.state = group.net_state.producer;
  fill_sources(numbers);
  fill_destinations(net);
  copy(net.to, to_);
  copy(net.from, from_);
  copy(net.relayed, relayed_);
  follow_events(group, net.followed, numbers);
  if (layout_.low_latency.tokens == 0) return;
  gpu::SlotNet& slots = group.slot_net;
  lay_out_slot_net(slots, group.slot_net_state, layout_.low_latency.net.in(group.own), layout_);
  fill_slots(slots, numbers);
  follow_slot_events(group, slots.followed, numbers);
}

}  // namespace uccl_ep
