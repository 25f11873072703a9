#include "layout/region.h"

#include <algorithm>
#include <string_view>

#include "common/units.h"
#include "layout/votes.h"
#include "layout/words.h"

namespace uccl_ep {
namespace {

// Assigns consecutive offsets and records them under a name.
class Cursor {
 public:
  explicit Cursor(RegionLayout& layout, bool slots_on_device = false)
      : layout_(layout), slots_on_device_(slots_on_device) {}

  uint64_t take(std::string_view name, uint64_t bytes) {
    const uint64_t offset = layout_.total_bytes;
    const uint64_t size = round_up(bytes, kLineBytes);
    layout_.total_bytes += size;
    entry_of(name) += size;
    return offset;
  }

  RingLayout ring(std::string_view name, RingKind kind, uint64_t slot_bytes, uint32_t num_slots, uint32_t num_readers) {
    RingLayout ring = flags_of(kind, slot_bytes, num_slots, num_readers);
    ring.slots_offset = slots_on_device_ ? take_device(slot_bytes * num_slots) : take(name, slot_bytes * num_slots);
    return ring;
  }
  // A send ring in memory of the device that it shares with others.
  RingLayout sharing_ring(RingKind kind, uint64_t slot_bytes, uint32_t num_slots, uint64_t offset, uint64_t bytes) {
    RingLayout ring = flags_of(kind, slot_bytes, num_slots, 0);
    ring.slots_offset = offset;
    ring.shared_bytes = bytes;
    return ring;
  }
  uint64_t take_device(uint64_t bytes) {
    const uint64_t offset = layout_.device_bytes;
    layout_.device_bytes += round_up(bytes, kDeviceRingAlignBytes);
    return offset;
  }

 private:
  RingLayout flags_of(RingKind kind, uint64_t slot_bytes, uint32_t num_slots, uint32_t num_readers) {
    RingLayout ring;
    ring.kind = kind;
    ring.slot_bytes = slot_bytes;
    ring.num_slots = num_slots;
    ring.num_readers = num_readers;
    ring.stamps_offset = take("flags", num_slots * sizeof(uint64_t));
    ring.consumed_offset = take("flags", num_readers * kLineBytes);
    return ring;
  }
  // A layout of many ranks takes thousands of parts under few names, which are literals.
  uint64_t& entry_of(std::string_view name) {
    for (size_t i = 0; i < names_.size(); ++i)
      if (names_[i].data() == name.data()) return layout_.entries[places_[i]].second;
    auto it = std::find_if(layout_.entries.begin(), layout_.entries.end(), [&](auto& e) { return e.first == name; });
    if (it == layout_.entries.end()) it = layout_.entries.insert(it, {std::string(name), 0});
    names_.push_back(name);
    places_.push_back(static_cast<size_t>(it - layout_.entries.begin()));
    return it->second;
  }
  RegionLayout& layout_;
  const bool slots_on_device_;
  std::vector<std::string_view> names_;
  std::vector<size_t> places_;  // by name
};

uint64_t header_bytes(const Topology& topo, const RingParams& rings, int domain) {
  const uint64_t experts_per_rank = rings.num_experts / static_cast<uint32_t>(topo.num_ranks);
  const uint64_t num_counts = (experts_per_rank + 1) * static_cast<uint64_t>(topo.size_of(domain));
  return round_up(sizeof(OpHeader) + sizeof(uint32_t) * num_counts, kLineBytes);
}

uint32_t send_slots(const RegionLayout& layout) {
  uint32_t slots = 0;
  const RegionLayout::Slots& of_slots = layout.slots;
  for (const auto* rings :
       {&layout.header_send, &layout.meta_send, &layout.rows_send, &layout.tail_send, &layout.return_send,
        &of_slots.routing_send, &of_slots.rows_send, &of_slots.weights_send, &of_slots.sums_send})
    for (const RingLayout& ring : *rings) slots += ring.num_slots;
  return slots;
}

std::vector<int> incoming_of(const Topology& topo, int rank) {
  std::vector<int> sources = topo.landed(rank);
  std::rotate(sources.begin(), std::lower_bound(sources.begin(), sources.end(), rank), sources.end());
  return sources;
}

// The start of every region.
void take_control(Cursor& cursor, const Topology& topo, int rank, RegionLayout& layout) {
  layout.rank = rank;
  layout.incoming = incoming_of(topo, rank);
  cursor.take("control", kPageBytes + layout.incoming.size() * kRemoteSignsBytes);
}

// The end of every region, which depends on the rings.
void take_commands(Cursor& cursor, RegionLayout& layout) {
  layout.num_commands = command_capacity(send_slots(layout));
  layout.commands_offset = cursor.take("command ring", kLineBytes + layout.num_commands * kCommandBytes);
  cursor.take("control", round_up(layout.total_bytes, kPageBytes) - layout.total_bytes);
}

void take_votes(Cursor& cursor, const Topology& topo, RegionLayout& layout) {
  layout.votes_offset = cursor.take("flags", (1 + static_cast<uint64_t>(topo.num_ranks)) * sizeof(RankVotes));
}

// Of low latency on the host.
void take_slot_rings(Cursor& cursor, const Topology& topo, const RingParams::Slots& rings, RegionLayout& layout) {
  const int own = topo.domain_of[layout.rank];
  const uint32_t n = static_cast<uint32_t>(topo.size_of(own));
  const auto ring = [&](RingKind kind, uint64_t bytes, uint32_t num_readers) {
    return cursor.ring("low latency", kind, bytes, rings.operations, num_readers);
  };
  const auto rows = [&](uint32_t readers) { return ring(RingKind::kSlotRows, rings.dispatch_bytes, readers); };
  const auto weights = [&](uint32_t readers) { return ring(RingKind::kSlotWeights, rings.weights_bytes, readers); };
  const auto sums = [&](uint32_t readers) { return ring(RingKind::kSlotSums, rings.sums_bytes, readers); };
  RegionLayout::Slots& slots = layout.slots;
  slots.own_rows = rows(n);
  slots.own_weights = weights(n);
  for (auto* by_domain : {&slots.rows_send, &slots.weights_send, &slots.sums_landing})
    by_domain->resize(topo.members.size());
  for (int d = 0; d < topo.num_domains(); ++d) {
    if (d == own) continue;
    slots.rows_send[d] = rows(0);
    slots.weights_send[d] = weights(0);
    slots.sums_landing[d] = sums(1);
  }
  slots.pieces.resize(1 + layout.incoming.size());
  for (auto& of_stream : slots.pieces)
    while (of_stream.size() < n) of_stream.push_back(ring(RingKind::kPieces, rings.sums_bytes, 1));
  for (size_t i = 0; i < layout.incoming.size(); ++i) {
    slots.rows_landing.push_back(rows(n));
    slots.weights_landing.push_back(weights(n));
    slots.sums_send.push_back(sums(0));
  }
  if (rings.votes) take_votes(cursor, topo, layout);
}

}  // namespace

RegionLayout make_region_layout(const Topology& topo, const RingParams& params, int rank) {
  RegionLayout layout;
  const int own = topo.domain_of[rank];
  const uint32_t n = static_cast<uint32_t>(topo.size_of(own));
  const uint64_t own_header_bytes = header_bytes(topo, params, own);
  Cursor cursor(layout);
  take_control(cursor, topo, rank, layout);

  layout.own_header = cursor.ring("routing", RingKind::kHeader, own_header_bytes, kHeaderSlots, n);
  layout.own_meta = cursor.ring("routing", RingKind::kMeta, params.meta_slot_bytes, params.num_slots, n);
  layout.own_rows = cursor.ring("staging", RingKind::kRows, params.slot_bytes, params.num_slots, n);
  layout.header_send.resize(topo.members.size());
  layout.meta_send.resize(topo.members.size());
  layout.rows_send.resize(topo.members.size());
  layout.return_landing.resize(topo.members.size());
  for (int d = 0; d < topo.num_domains(); ++d) {
    if (d == own) continue;
    layout.header_send[d] = cursor.ring("routing", RingKind::kHeader, header_bytes(topo, params, d), kHeaderSlots, 0);
    layout.meta_send[d] = cursor.ring("routing", RingKind::kMeta, params.meta_slot_bytes, params.num_slots, 0);
    layout.rows_send[d] = cursor.ring("staging", RingKind::kRows, params.slot_bytes, params.num_slots, 0);
    layout.return_landing[d] = cursor.ring("landing", RingKind::kReturn, params.slot_bytes, params.num_slots, 1);
  }
  layout.pieces.resize(1 + layout.incoming.size());
  for (uint32_t q = 0; q < n; ++q)
    layout.pieces[0].push_back(cursor.ring("fold pieces", RingKind::kPieces, params.slot_bytes, params.num_slots, 1));
  for (auto* rings : {&layout.header_landing, &layout.meta_landing, &layout.rows_landing, &layout.return_send})
    rings->reserve(layout.incoming.size());
  for (auto& of_stream : layout.pieces) of_stream.reserve(n);
  for (size_t i = 0; i < layout.incoming.size(); ++i) {
    layout.header_landing.push_back(cursor.ring("landing", RingKind::kHeader, own_header_bytes, kHeaderSlots, n));
    layout.meta_landing.push_back(cursor.ring("landing", RingKind::kMeta, params.meta_slot_bytes, params.num_slots, n));
    layout.rows_landing.push_back(cursor.ring("landing", RingKind::kRows, params.slot_bytes, params.num_slots, n));
    layout.return_send.push_back(
        cursor.ring("relay output", RingKind::kReturn, params.slot_bytes, params.num_slots, 0));
    for (uint32_t q = 0; q < n; ++q)
      layout.pieces[1 + i].push_back(
          cursor.ring("fold pieces", RingKind::kPieces, params.slot_bytes, params.num_slots, 1));
  }
  if (params.slots.operations > 0) take_slot_rings(cursor, topo, params.slots, layout);
  take_commands(cursor, layout);
  return layout;
}

RegionLayout make_member_layout(const Topology& topo, const RingParams& params, const RegionLayout& own, int member) {
  if (topo.num_relayed(member) != own.incoming.size()) return make_region_layout(topo, params, member);
  RegionLayout layout = own;
  layout.rank = member;
  layout.incoming = incoming_of(topo, member);
  return layout;
}

namespace {

// Rings of low latency: each holds two operations.
void take_slot_rings(Cursor& cursor, const Topology& topo, const DeviceRings::Slots& rings, RegionLayout& layout) {
  constexpr uint32_t kOperations = 2;
  const int own = topo.domain_of[layout.rank];
  const uint32_t n = static_cast<uint32_t>(topo.size_of(own));
  const auto ring = [&](RingKind kind, uint32_t num_readers) {
    const bool of_rows = kind == RingKind::kSlotRows || kind == RingKind::kSlotSums;
    const uint64_t bytes = kind == RingKind::kSlotRouting   ? rings.routing_bytes
                           : kind == RingKind::kSlotWeights ? rings.weights_bytes
                           : kind == RingKind::kSlotRows    ? rings.row_slot_bytes
                                                            : rings.sum_slot_bytes;
    return cursor.ring("", kind, bytes, kOperations * (of_rows ? rings.chunks : 1), num_readers);
  };
  const uint64_t routing = cursor.take_device(kOperations * rings.routing_bytes);
  const uint64_t weights = cursor.take_device(kOperations * rings.weights_bytes);
  const auto sent_to_all = [&](RingKind kind, uint64_t offset, uint64_t bytes) {
    return cursor.sharing_ring(kind, bytes, kOperations, offset, kOperations * bytes);
  };
  RegionLayout::Slots& slots = layout.slots;
  for (auto* by_domain : {&slots.routing_send, &slots.rows_send, &slots.weights_send, &slots.sums_landing})
    by_domain->resize(topo.members.size());
  for (int d = 0; d < topo.num_domains(); ++d) {
    if (d == own) continue;
    slots.routing_send[d] = sent_to_all(RingKind::kSlotRouting, routing, rings.routing_bytes);
    slots.rows_send[d] = ring(RingKind::kSlotRows, 0);
    slots.weights_send[d] = sent_to_all(RingKind::kSlotWeights, weights, rings.weights_bytes);
    slots.sums_landing[d] = ring(RingKind::kSlotSums, 1);
  }
  for (size_t i = 0; i < layout.incoming.size(); ++i) {
    slots.routing_landing.push_back(ring(RingKind::kSlotRouting, n));
    slots.rows_landing.push_back(ring(RingKind::kSlotRows, n));
    slots.weights_landing.push_back(ring(RingKind::kSlotWeights, n));
    slots.sums_send.push_back(ring(RingKind::kSlotSums, 0));
  }
}

}  // namespace

RegionLayout make_device_layout(const Topology& topo, const DeviceRings& rings, int rank) {
  RegionLayout layout;
  const int own = topo.domain_of[rank];
  const uint32_t n = static_cast<uint32_t>(topo.size_of(own));
  Cursor cursor(layout, true);
  take_control(cursor, topo, rank, layout);
  const auto packet_bytes = [&](int domain) { return rings.packet_bytes.at(topo.size_of(domain)); };
  auto rows = [&](uint32_t num_readers) {
    return cursor.ring("", RingKind::kRows, rings.rows_slot_bytes, rings.rows_slots, num_readers);
  };
  auto sums = [&](int domain, uint32_t num_readers) {
    const uint32_t slots = rings.slots_back_from(topo.size_of(domain));
    return cursor.ring("", RingKind::kReturn, rings.return_slot_bytes, slots, num_readers);
  };
  const bool has_tails = !rings.tail_chunks.empty();
  layout.header_send.resize(topo.members.size());
  layout.rows_send.resize(topo.members.size());
  if (has_tails) layout.tail_send.resize(topo.members.size());
  layout.return_landing.resize(topo.members.size());
  uint64_t sent_bytes = 0;
  if (const auto sent = rings.sent_packet_bytes.find(static_cast<int>(n)); sent != rings.sent_packet_bytes.end())
    sent_bytes = kHeaderSlots * sent->second;
  else
    for (int d = 0; d < topo.num_domains(); ++d)
      if (d != own) sent_bytes += kHeaderSlots * round_up(packet_bytes(d), kSharedUnitBytes);
  const uint64_t sent_packets = cursor.take_device(sent_bytes);
  for (int d = 0; d < topo.num_domains(); ++d) {
    if (d == own) continue;
    layout.header_send[d] =
        cursor.sharing_ring(RingKind::kHeader, packet_bytes(d), kHeaderSlots, sent_packets, sent_bytes);
    layout.rows_send[d] = rows(0);
    if (has_tails)
      layout.tail_send[d] = cursor.sharing_ring(RingKind::kTail, rings.tail_slot_bytes,
                                                rings.tail_chunks.at(topo.size_of(d)), sent_packets, sent_bytes);
    layout.return_landing[d] = sums(d, 1);
  }
  for (size_t i = 0; i < layout.incoming.size(); ++i) {
    layout.header_landing.push_back(cursor.ring("", RingKind::kHeader, packet_bytes(own), kHeaderSlots, n));
    layout.rows_landing.push_back(rows(n));
    if (has_tails)
      layout.tail_landing.push_back(cursor.ring("", RingKind::kTail, rings.tail_slot_bytes, rings.tail_slots, n));
    layout.return_send.push_back(sums(own, 0));
  }
  if (rings.slots.chunks > 0) take_slot_rings(cursor, topo, rings.slots, layout);
  const Channels channels = list_channels(topo, layout);
  layout.board_offset = cursor.take("flags", (channels.in.size() + channels.out.size()) * sizeof(uint64_t));
  for (uint32_t ring = 0; ring < kNumEventRings; ++ring) {
    const uint32_t capacity = event_capacity(channels.board_of(static_cast<EventRing>(ring)).size());
    layout.events[ring] = {cursor.take("events", capacity * sizeof(uint64_t)), capacity};
  }
  layout.ended_offset = cursor.take("flags", kLineBytes);
  if (rings.slots.votes) take_votes(cursor, topo, layout);
  take_commands(cursor, layout);
  return layout;
}

uint64_t device_ring_bytes(const Topology& topo, const DeviceRings& rings, int size) {
  uint64_t bytes = 0;
  for (int rank : topo.classes())
    if (topo.size_of(topo.domain_of[rank]) == size)
      bytes = std::max(bytes, make_device_layout(topo, rings, rank).device_bytes);
  return bytes;
}

namespace {

uint64_t largest_region(const Topology& topo, const RingParams& rings) {
  uint64_t bytes = 0;
  for (int rank : topo.classes()) bytes = std::max(bytes, make_region_layout(topo, rings, rank).total_bytes);
  return bytes;
}

uint64_t least_slot_bytes(const Topology& topo, uint32_t num_experts, uint64_t least_row_bytes) {
  size_t widest = 0;
  for (auto& members : topo.members) widest = std::max(widest, members.size());
  const uint64_t domain_experts = num_experts / static_cast<uint64_t>(topo.num_ranks) * widest;
  // One row with a value for every expert of the largest domain.
  return round_up(least_row_bytes + 4 * domain_experts, kLineBytes);
}

uint64_t meta_slot_bytes_for(uint64_t slot_bytes) {
  return round_up(std::max<uint64_t>(slot_bytes / 8, 64), kLineBytes);
}

RingParams ring_params_of(const Topology& topo, const MemoryNeeds& needs, uint64_t slot_bytes, uint32_t num_slots) {
  size_t widest = 0;
  for (auto& members : topo.members) widest = std::max(widest, members.size());
  const uint64_t domain_experts = needs.num_experts / static_cast<uint64_t>(topo.num_ranks) * widest;
  RingParams rings;
  rings.slots = needs.slots;
  rings.slot_bytes = slot_bytes;
  rings.meta_slot_bytes = std::max(meta_slot_bytes_for(slot_bytes), round_up(4 * (1 + domain_experts), kLineBytes));
  rings.num_slots = num_slots;
  rings.num_experts = needs.num_experts;
  return rings;
}

constexpr uint64_t kDefaultChunkBytes = 256 << 10;
constexpr uint32_t kDefaultRingSlots = 8;
constexpr uint32_t kLeastRingSlots = 2;

uint64_t slot_bytes_of(uint64_t chunk_bytes) { return round_up(chunk_bytes, kLineBytes); }

}  // namespace

uint64_t least_budget_bytes(const Topology& topo, const MemoryNeeds& needs) {
  const uint64_t slot_bytes = needs.chunk_bytes == 0 ? least_slot_bytes(topo, needs.num_experts, needs.least_row_bytes)
                                                     : slot_bytes_of(needs.chunk_bytes);
  const uint32_t slots = needs.window_chunks == 0 ? kLeastRingSlots : needs.window_chunks;
  return needs.beside_bytes + largest_region(topo, ring_params_of(topo, needs, slot_bytes, slots));
}

RingParams choose_rings(const Topology& topo, const MemoryNeeds& needs) {
  const uint64_t least_slot = least_slot_bytes(topo, needs.num_experts, needs.least_row_bytes);
  const bool choose_chunk = needs.chunk_bytes == 0;
  const bool choose_slots = needs.window_chunks == 0;
  if (!choose_chunk && needs.chunk_bytes < least_slot)
    throw UsageFailure(UsageKind::kConfig, "chunk_bytes = " + std::to_string(needs.chunk_bytes) +
                                               ": one row with its weights needs " + std::to_string(least_slot) +
                                               " bytes");
  if (needs.window_chunks >= kMaxRingSlots)
    throw UsageFailure(UsageKind::kConfig, "window_chunks = " + std::to_string(needs.window_chunks) +
                                               ": allowed 1 to " + std::to_string(kMaxRingSlots - 1));
  uint32_t slots = choose_slots ? kDefaultRingSlots : needs.window_chunks;
  uint64_t slot_bytes = choose_chunk ? std::max(kDefaultChunkBytes, least_slot) : slot_bytes_of(needs.chunk_bytes);
  auto rings = [&] { return ring_params_of(topo, needs, slot_bytes, slots); };
  auto need = [&] { return needs.beside_bytes + largest_region(topo, rings()); };
  auto shrink_chunk = [&](uint64_t least) {
    while (choose_chunk && slot_bytes > least && need() > needs.budget_bytes)
      slot_bytes = std::max(least, round_up(slot_bytes / 2, kLineBytes));
  };
  // Shrink what the caller left open: first chunks to an eighth, then their number, then chunks to the minimum.
  shrink_chunk(std::max(least_slot, kDefaultChunkBytes / 8));
  while (choose_slots && slots > kLeastRingSlots && need() > needs.budget_bytes) --slots;
  shrink_chunk(least_slot);
  if (need() > needs.budget_bytes)
    throw UsageFailure(UsageKind::kBudget, "budget_bytes = " + std::to_string(needs.budget_bytes) +
                                               " is too small: the least is " +
                                               std::to_string(least_budget_bytes(topo, needs)) + " bytes for " +
                                               std::to_string(topo.num_ranks) + " ranks in " +
                                               std::to_string(topo.num_domains()) + " domains");
  for (int rank : topo.classes()) checked_channels(topo, make_region_layout(topo, rings(), rank));
  return rings();
}

}  // namespace uccl_ep
