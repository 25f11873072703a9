#include "backend/gpu/layout_parts.h"

#include <algorithm>

#include "backend/gpu/low_latency_net.h"
#include "backend/gpu/net.h"
#include "backend/gpu/packet_sizes.h"
#include "backend/gpu/windows.h"
#include "backend/gpu/words.h"
#include "common/units.h"

namespace uccl_ep::gpu {
namespace {

class Cursor {
 public:
  explicit Cursor(DeviceRegionLayout& layout) : layout_(layout) {}
  void take(const std::string& name, uint64_t bytes) {
    const uint64_t size = round_up(bytes, kAlign);
    layout_.total_bytes += size;
    layout_.entries.emplace_back(name, size);
  }
  // `count` elements, and `more_bytes` behind them.
  template <typename T>
  void take(Part<T>& part, const std::string& name, uint64_t count, uint64_t more_bytes = 0) {
    part.offset = layout_.total_bytes;
    take(name, count * sizeof(T) + more_bytes);
  }

 private:
  DeviceRegionLayout& layout_;
};

// The rings between domains hold a window in chunks of 512 KiB. There are at least 8 chunks, with at least one row
// each. Rows of more than 128 KiB may need larger chunks.
DeviceRings rings_for(const Topology& topo, const DeviceMap& map, const Shape& shape, uint32_t window, const Room& room,
                      const PacketRoom& packets) {
  constexpr uint64_t kUsualBytes = 512 << 10, kLeastTail = 4 << 10, kAllTails = 2 << 20;
  DeviceRings rings;
  if (map.num_domains == 1) return rings;
  // Where a rank has packets of many, chunks are short, so that a slot of each takes no more than that.
  const uint64_t tail_bytes = std::min<uint64_t>(
      packets.tail_bytes, std::max(kLeastTail, kAllTails / shape.most_relayed / kLeastTail * kLeastTail));
  const uint64_t least = (window + kMaxRelayedChunks - 1) / kMaxRelayedChunks;
  const uint64_t per_chunk =
      std::clamp<uint64_t>(kUsualBytes / map.row_bytes, least, std::max<uint64_t>(least, window / 8));
  const uint32_t slots = static_cast<uint32_t>((window + per_chunk - 1) / per_chunk);
  rings.rows_slot_bytes = rings.return_slot_bytes = round_up(per_chunk * map.row_bytes, kAlign);
  rings.rows_slots = slots;
  const uint32_t block_slots = static_cast<uint32_t>((kTokenBlock + per_chunk - 1) / per_chunk);
  rings.return_slots = std::max(slots, room.returned_blocks * block_slots);
  // Tails have to save memory in domains of some size. Then all have slots for them.
  const auto beyond_head = [&](uint32_t members) {
    return most_packet_bytes(map, members) - head_bytes_for(map, members, packets.head_tokens);
  };
  const bool have_tails = std::ranges::any_of(topo.domains_of_size, [&](const auto& of_size) {
    return kHeaderSlots * beyond_head(static_cast<uint32_t>(of_size.first)) > packets.tail_slots * tail_bytes;
  });
  for (const auto& [size, number] : topo.domains_of_size) {
    const uint32_t members = static_cast<uint32_t>(size);
    const uint64_t most = most_packet_bytes(map, members), head = most - beyond_head(members);
    const bool has_tail = have_tails && head < most;
    rings.packet_bytes[size] = has_tail ? head : most;
    rings.tail_chunks[size] = has_tail ? tail_chunks(most, head, tail_bytes) : 1;
    if (has_tail) rings.tail_slots = packets.tail_slots;
    rings.sent_packet_bytes[size] = most_sent_bytes(topo, map, size);
    rings.weight_slots[size] = map.weights_apart ? 0
                                                 : weight_chunks(most_pairs_in(map, members),
                                                                 static_cast<uint32_t>(rings.return_slot_bytes / 4));
  }
  if (rings.tail_slots == 0) rings.tail_chunks.clear();
  rings.tail_slot_bytes = rings.tail_slots == 0 ? 0 : tail_bytes;
  return rings;
}

// What kernels know of the rings.
void take_rings(DeviceRegionLayout& layout, const DeviceRings& rings) {
  const int members = static_cast<int>(layout.num_members);
  layout.rings = rings;
  layout.row_slots = rings.rows_slots;
  layout.sum_slots = rings.return_slots;
  layout.return_slots = rings.slots_back_from(members);
  layout.slot_bytes = rings.rows_slot_bytes;
  layout.slot_weights = std::max(static_cast<uint32_t>(layout.slot_bytes / sizeof(float)), 1u);
  layout.head_bytes = layout.num_domains == 1 ? 0 : rings.packet_bytes.at(members);
  layout.tail_bytes = rings.tail_slot_bytes;
  layout.tail_slots = rings.tail_slots;
}

// Where weights' gradients have windows of their own: pairs of a stream that go in one, in the slots of sums; of usual
// tokens all. On all ranks equally many.
void size_weights(DeviceMap& map) {
  constexpr uint64_t kMost = kUsualTokens * kUsualRanks;
  const uint64_t slots = uint64_t{map.sum_slots} * map.slot_weights;
  const uint32_t most = map.most_stream_pairs;
  map.weight_pairs = map.weights_apart ? static_cast<uint32_t>(std::min<uint64_t>({most, kMost, slots})) : most;
  map.weight_halves = map.weight_pairs < map.stream_pairs ? kHalves : 1;
  map.stream_weights = std::min(map.stream_pairs, map.weight_pairs);
}

// Sizes of low latency, and its rings between domains. A dispatch's rows go in about four chunks, so that the first are
// placed while the last travel.
DeviceRings::Slots size_low_latency(const Shape& shape, const LowLatencyRoom& room, LowLatencyMap& map) {
  constexpr uint32_t kLeastRows = 8, kMostRows = 64;
  map.tokens = room.tokens;
  map.topk = room.topk;
  map.row_bytes = map.pair_bytes = round_up(room.row_bytes, 128);
  if (shape.domains == 1 || room.tokens == 0) return {};
  const uint64_t places = map.places();
  map.rows_of_chunk = std::clamp((room.tokens + 3) / 4, kLeastRows, kMostRows);
  map.chunks = (room.tokens + map.rows_of_chunk - 1) / map.rows_of_chunk;
  map.row_chunk_bytes = round_up(map.rows_of_chunk * map.row_bytes, kAlign);
  map.sum_chunk_bytes = round_up(map.rows_of_chunk * round_up(room.sum_bytes, 128), kAlign);
  static_assert(kAlign % kSharedUnitBytes == 0);
  map.routing_bytes = map.weights_bytes =
      round_up(sizeof(SlotHeader) + (sizeof(int32_t) + sizeof(float)) * places, kAlign);
  return {map.routing_bytes, map.weights_bytes, map.row_chunk_bytes, map.sum_chunk_bytes, map.chunks, room.masks};
}

void take_low_latency(Cursor& cursor, const Shape& shape, LowLatencyMap& map, uint64_t net_bytes) {
  if (map.tokens == 0) return;
  const uint64_t ranks = shape.ranks, members = shape.members, streams = shape.streams, places = map.places();
  const uint64_t several = shape.domains > 1;
  cursor.take(map.routing_full, "flags.slot_routing", ranks);
  cursor.take(map.rows_full, "flags.slot_rows", members * kMaxSlotBlocks);
  cursor.take(map.rows_read, "flags.slot_rows_read", members);
  cursor.take(map.pairs_entered, "flags.pairs_entered", ranks);
  cursor.take(map.pairs_full, "flags.pairs", members * kMaxSlotBlocks);
  cursor.take(map.pairs_read, "flags.pairs_read", members);
  cursor.take(map.headers, "slots.headers", 2 * kHalves * ranks);
  cursor.take(map.votes, "slots.votes", 4 * members);
  cursor.take(map.decisions, "slots.decisions", 3 * members);
  cursor.take(map.routing, "slots.routing", kHalves * ranks * places);
  cursor.take(map.routed, "slots.weights", kHalves * ranks * places);
  cursor.take(map.rows, "slots.rows", kHalves * members * map.tokens * map.row_bytes);
  cursor.take(map.pairs, "slots.pairs", kHalves * streams * places * map.pair_bytes);
  cursor.take(map.weights, "slots.weights", several ? 0 : kHalves * ranks * places);
  if (several) cursor.take(map.net, "slots.net", net_bytes);
  cursor.take(map.sent_counts, "slots.sent_counts", several * shape.domains * map.chunks);
  cursor.take(map.relayed_counts, "slots.relayed_counts", several * streams * map.chunks);
}

void take_flags(Cursor& cursor, const Shape& shape, DeviceMap& l) {
  const uint64_t ranks = shape.ranks, members = shape.members, streams = shape.streams, tokens = l.max_tokens;
  cursor.take(l.header_full, "flags.header_full", ranks);
  cursor.take(l.weights_full, "flags.weights_full", ranks);
  cursor.take(l.lists_full, "flags.lists_full", members);
  cursor.take(l.read, "flags.read", members);
  cursor.take(l.folded_all, "flags.folded_all", members);
  cursor.take(l.merged, "flags.merged", members);
  static_assert(kTileTokens % kRowGroup == 0 && kTileTokens % kTokenBlock == 0, "the last one has no flag");
  cursor.take(l.rows_full, "flags.rows_full", members * (tokens / kRowGroup));
  cursor.take(l.folded, "flags.folded", streams * members * (tokens / kTokenBlock));
}

// Pieces of a stream for which a token of a window has memory, beside those of a token block with the most. Domains
// share the few ranks that most tokens reach.
uint32_t usual_pieces(const Shape& shape) {
  const uint32_t share = (kUneven * kUsualRanks + shape.domains - 1) / shape.domains;
  return std::min({share, kUsualRanks, shape.most_members});
}

}  // namespace

DeviceRegionLayout layout_for(const Topology& topo, const Shape& shape, const RegionNeeds& needs, uint32_t num_tokens,
                              const WindowRoom& window, const Room& room) {
  const uint64_t row_bytes = needs.row_bytes;
  DeviceRegionLayout l;
  l.num_ranks = shape.ranks;
  l.num_members = shape.members;
  l.num_streams = shape.streams;
  l.batch_streams = room.batch_streams;
  l.stream_batches = room.stream_batches;
  l.weights_apart = shape.domains > 1 && room.returned_blocks == 1;
  l.num_domains = shape.domains;
  l.num_experts = needs.num_experts;
  l.row_bytes = row_bytes;
  l.max_tokens = num_tokens;
  l.max_pairs = pairs_of(num_tokens, room.full_tokens);
  l.stream_pairs = most_pairs_in(l, shape.members);
  l.most_stream_pairs = most_pairs_in(l, shape.most_members);
  l.half_bytes = window.staged * row_bytes;
  // A half holds a token block.
  const uint64_t most_pieces = uint64_t{kTokenBlock} * shape.most_members;
  l.piece_bytes = std::max(window.tokens * usual_pieces(shape) + most_pieces, kHalves * most_pieces + 1) * row_bytes;
  const uint64_t ranks = shape.ranks, members = shape.members, streams = shape.streams, domains = shape.domains;
  const uint64_t tokens = num_tokens, pairs = l.max_pairs, token_blocks = tokens / kTokenBlock;
  const uint32_t experts_per_rank = needs.num_experts / shape.ranks;
  l.packet_bytes = most_packet_bytes(l, shape.members);
  take_rings(l, rings_for(topo, l, shape, window.tokens, room, needs.packets));
  size_weights(l);
  l.rings.slots = size_low_latency(shape, needs.beside, l.low_latency);
  const uint64_t several = domains > 1;
  Cursor cursor(l);
  cursor.take("rings", several ? device_ring_bytes(topo, l.rings, static_cast<int>(members))
                               : 0);  // first: the transport counts from 0
  take_flags(cursor, shape, l);
  cursor.take(l.token_block_counts, "token_block_counts", ranks * token_blocks);
  cursor.take(l.sent_counts, "sent_counts", several * domains * l.row_slots);
  cursor.take(l.relayed_counts, "relayed_counts", several * streams * l.return_slots);
  cursor.take(l.local, "local", 1);
  cursor.take(l.waited_nsec, "waited", ranks);
  cursor.take(l.tables, "ranks", 4 * ranks + domains + 1);
  Net net;
  NetState net_state;
  cursor.take(l.net, "net", several * lay_out_net(net, net_state, nullptr, l));
  cursor.take(l.plan_scratch, "plan", 1, 4 * experts_per_rank * (ranks + 3));
  cursor.take(l.source_plans, "plan_sources", ranks);
  cursor.take(l.tile_counts, "tile_counts", (tokens / kTileTokens) * tile_words(l));
  cursor.take(l.token_addends, "token_addends", tokens + 1);
  cursor.take(l.addends, "addends", several * pairs);
  cursor.take(l.sent_token_blocks, "sent_token_blocks", several * domains * BlockRows::groups(token_blocks));
  cursor.take(l.packets, "packets", kHalves * l.packet_bytes);
  cursor.take(l.pair_origin, "pair_origin", pairs);
  cursor.take(l.piece_weights, "piece_weights", streams * l.weight_halves * l.stream_weights);
  cursor.take(l.rows, "rows", kHalves * l.half_bytes);
  // A rank that is alone in its domain folds for others straight into the rings.
  const uint64_t at_once = 1 + std::min<uint64_t>(streams - 1, room.batch_streams);
  cursor.take(l.pieces, "pieces", (members > 1 ? at_once : 1) * l.piece_bytes);
  SlotNet slot_net;
  SlotNetState slot_net_state;
  take_low_latency(cursor, shape, l.low_latency, lay_out_slot_net(slot_net, slot_net_state, nullptr, l));
  return l;
}

}  // namespace uccl_ep::gpu
