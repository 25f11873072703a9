#include "backend/gpu/layout.h"

#include <algorithm>

#include "backend/gpu/low_latency_net.h"
#include "backend/gpu/net.h"
#include "backend/gpu/packet_sizes.h"
#include "backend/gpu/words.h"
#include "common/units.h"

namespace uccl_ep::gpu {
namespace {

constexpr uint32_t kFewPairs = 8;  // of a token beyond the usual ones, where memory is short
constexpr uint32_t kMostWindows = 8;  // of an operation, where a window's tokens are given
constexpr uint32_t kLeastStreams = 8;  // of a batch, if there are more

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

// Of the ranks of domains of one size: domains, and the most streams that a rank merges (its own tokens are one).
struct Shape {
  uint32_t ranks, domains, members, streams = 1;
  uint32_t most_members = 0;  // of the largest domain
  Shape(const Topology& topo, int size)
      : ranks(static_cast<uint32_t>(topo.num_ranks)),
        domains(static_cast<uint32_t>(topo.num_domains())),
        members(static_cast<uint32_t>(size)) {
    for (const auto& [other, number] : topo.domains_of_size)
      most_members = std::max(most_members, static_cast<uint32_t>(other));
    for (int rank : topo.classes())
      if (topo.size_of(topo.domain_of[rank]) == size) streams = std::max(streams, 1 + topo.num_relayed(rank));
  }
};

// What there is room for at once.
struct Room {
  // Token blocks in a ring back. One: the next window of a combine waits for the network, and weights for the last one.
  uint32_t returned_blocks;
  uint32_t further_pairs;
  uint32_t batch_streams, stream_batches;
  // `relayed`: streams that go in batches of at most `most`.
  Room(uint32_t blocks, uint32_t further, uint32_t relayed, uint32_t most)
      : returned_blocks(blocks), further_pairs(further), batch_streams(relayed), stream_batches(1) {
    if (most >= relayed) return;
    stream_batches = (relayed + most - 1) / most;
    batch_streams = (relayed + stream_batches - 1) / stream_batches;
  }
};

// The rings between domains hold a window in chunks of 512 KiB. There are at least 8 chunks, with at least one row
// each. Rows of more than 128 KiB may need larger chunks.
DeviceRings rings_for(const Topology& topo, const DeviceMap& map, uint32_t window, const Room& room,
                      const PacketRoom& packets) {
  constexpr uint64_t kUsualBytes = 512 << 10, kLeastTail = 4 << 10, kAllTails = 4 << 20;
  DeviceRings rings;
  if (map.num_domains == 1) return rings;
  // Many domains have short chunks, so that a slot of each takes no more than that.
  const uint64_t tail_bytes = std::min<uint64_t>(
      packets.tail_bytes, std::max(kLeastTail, kAllTails / (map.num_domains - 1) / kLeastTail * kLeastTail));
  const uint64_t least = (window + kMaxRelayedChunks - 1) / kMaxRelayedChunks;
  const uint64_t per_chunk =
      std::clamp<uint64_t>(kUsualBytes / map.row_bytes, least, std::max<uint64_t>(least, window / 8));
  const uint32_t slots = static_cast<uint32_t>((window + per_chunk - 1) / per_chunk);
  rings.rows_slot_bytes = rings.return_slot_bytes = round_up(per_chunk * map.row_bytes, kAlign);
  rings.rows_slots = slots;
  const uint32_t block_slots = static_cast<uint32_t>((kTokenBlock + per_chunk - 1) / per_chunk);
  rings.return_slots = std::max(slots, room.returned_blocks * block_slots);
  for (const auto& [size, number] : topo.domains_of_size) {
    const uint32_t members = static_cast<uint32_t>(size);
    const uint64_t most = most_packet_bytes(map, members), head = head_bytes_for(map, members, packets.head_tokens);
    // A tail has to save memory.
    const bool has_tail = kHeaderSlots * (most - head) > packets.tail_slots * tail_bytes;
    rings.packet_bytes[size] = has_tail ? head : most;
    rings.tail_chunks[size] = has_tail ? tail_chunks(most, head, tail_bytes) : 1;
    if (has_tail) rings.tail_slots = packets.tail_slots;
    rings.sent_packet_bytes[size] = most_sent_bytes(topo, map, size);
    const uint32_t weights = weight_chunks(most_pairs_in(map, members), rings.return_slot_bytes);
    rings.weight_slots[size] = !map.weights_apart             ? weights
                               : weights > rings.return_slots ? weights - rings.return_slots
                                                              : 0;
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
  layout.head_bytes = layout.num_domains == 1 ? 0 : rings.packet_bytes.at(members);
  layout.tail_bytes = rings.tail_slot_bytes;
  layout.tail_slots = rings.tail_slots;
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
  cursor.take(l.weights_full, "flags.values_full", ranks);
  cursor.take(l.lists_full, "flags.lists_full", members);
  cursor.take(l.read, "flags.read", members);
  cursor.take(l.folded_all, "flags.folded_all", members);
  cursor.take(l.merged, "flags.merged", members);
  cursor.take(l.rows_full, "flags.rows_full", members * (tokens / kRowGroup));
  cursor.take(l.folded, "flags.folded", streams * members * (tokens / kTokenBlock));
}

// Pieces of a stream for which a token of a window has memory, beside those of a token block with the most. Domains
// share the few ranks that most tokens reach.
uint32_t usual_pieces(const Shape& shape) {
  const uint32_t share = (kUneven * kUsualRanks + shape.domains - 1) / shape.domains;
  return std::min({share, kUsualRanks, shape.most_members});
}

// Has memory for the routing of `num_tokens` tokens, and for rows and pieces of a window of `window` tokens.
DeviceRegionLayout layout_for(const Topology& topo, const Shape& shape, const RegionNeeds& needs, uint32_t num_tokens,
                              uint32_t window, const Room& room) {
  const uint64_t row_bytes = needs.row_bytes;
  DeviceRegionLayout l;
  l.num_ranks = shape.ranks;
  l.num_members = shape.members;
  l.num_streams = shape.streams;
  l.batch_streams = room.batch_streams;
  l.stream_batches = room.stream_batches;
  l.weights_apart = room.returned_blocks == 1;
  l.num_domains = shape.domains;
  l.num_experts = needs.num_experts;
  l.row_bytes = row_bytes;
  l.max_tokens = num_tokens;
  l.max_pairs = pairs_of(num_tokens, room.further_pairs);
  l.stream_pairs = most_pairs_in(l, shape.members);
  l.half_bytes = window * row_bytes;
  // A half holds a token block.
  const uint64_t most_pieces = uint64_t{kTokenBlock} * shape.most_members;
  l.piece_bytes = std::max(window * usual_pieces(shape) + most_pieces, kHalves * most_pieces + 1) * row_bytes;
  const uint64_t ranks = shape.ranks, members = shape.members, streams = shape.streams, domains = shape.domains;
  const uint64_t tokens = num_tokens, pairs = l.max_pairs, token_blocks = tokens / kTokenBlock;
  const uint32_t experts_per_rank = needs.num_experts / shape.ranks;
  l.packet_bytes = most_packet_bytes(l, shape.members);
  take_rings(l, rings_for(topo, l, window, room, needs.packets));
  l.rings.slots = size_low_latency(shape, needs.beside, l.low_latency);
  const uint64_t several = domains > 1;
  Cursor cursor(l);
  cursor.take("rings", several ? device_ring_bytes(topo, l.rings, static_cast<int>(members))
                               : 0);  // first: the transport counts from 0
  take_flags(cursor, shape, l);
  cursor.take(l.token_block_counts, "chunk_counts", ranks * token_blocks);
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
  cursor.take(l.sent_token_blocks, "sent_chunks", several * domains * (token_blocks + 1));
  cursor.take(l.packets, "packets", kHalves * l.packet_bytes);
  cursor.take(l.pair_origin, "pair_origin", pairs);
  cursor.take(l.piece_weights, "piece_values", streams * l.stream_pairs);
  cursor.take(l.rows, "rows", kHalves * l.half_bytes);
  // A rank that is alone in its domain folds for others straight into the rings.
  const uint64_t at_once = 1 + std::min<uint64_t>(streams - 1, room.batch_streams);
  cursor.take(l.pieces, "pieces", (members > 1 ? at_once : 1) * l.piece_bytes);
  SlotNet slot_net;
  SlotNetState slot_net_state;
  take_low_latency(cursor, shape, l.low_latency, lay_out_slot_net(slot_net, slot_net_state, nullptr, l));
  return l;
}

uint32_t tiles_of(uint64_t tokens) {
  return static_cast<uint32_t>(std::min<uint64_t>(round_up(tokens, kTileTokens), kMaxTokens) / kTileTokens);
}

// The largest number, up to `most`, for which fits(number).
template <typename Fits>
uint32_t largest(uint32_t most, Fits fits) {
  uint32_t low = 1, high = most;
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    (fits(middle) ? low : high) = fits(middle) ? middle : middle - 1;
  }
  return low;
}

// The layouts of all domains: one for each size.
class Layouts {
 public:
  Layouts(const Topology& topo, const RegionNeeds& needs) : topo_(topo), needs_(needs) {
    for (const auto& [size, number] : topo.domains_of_size) {
      shapes_.emplace_back(topo, size);
      if (size > 1) most_relayed_ = std::max(most_relayed_, shapes_.back().streams - 1);
    }
  }
  // The tokens whose routing fits in any case, if that is possible.
  uint32_t wanted_tiles() const { return tiles_of(needs_.window_tokens == 0 ? kUsualTokens : needs_.window_tokens); }
  // The room that takes the least memory; with it the group is refused, or not.
  void take_least_room() { room_ = {1, kFewPairs, most_relayed_, kLeastStreams}; }
  // The most that leaves memory for the wanted tokens and the shortest window. Many pairs of many tokens may have a
  // quarter of the memory, because rows need it, too.
  void take_room(uint64_t budget_bytes) {
    const auto needed = [&](const Room& room) {
      room_ = room;
      return bytes(wanted_tiles(), 1);
    };
    const auto fits = [&](const Room& room) { return needed(room) <= budget_bytes; };
    const auto all = [&](uint32_t pairs) { return Room(kHalves, pairs, most_relayed_, most_relayed_); };
    const auto some = [&](uint32_t most) { return Room(1, kFewPairs, most_relayed_, most); };
    if (needs_.window_tokens > kUsualTokens && needed(all(kPairsPerToken)) <= budget_bytes / 4) return;
    if (fits(all(kFewPairs)) || fits(some(most_relayed_))) return;
    const uint32_t most = largest(std::max(most_relayed_, 1u), [&](uint32_t n) { return fits(some(n)); });
    room_ = some(std::max(most, kLeastStreams));
  }
  DeviceRegionLayout of(const Shape& shape, uint32_t tiles, uint32_t window_blocks) const {
    return layout_for(topo_, shape, needs_, tiles * kTileTokens, window_blocks * kTokenBlock, room_);
  }
  const std::vector<Shape>& shapes() const { return shapes_; }
  // Of the rank that needs most.
  uint64_t used(uint32_t tiles, uint32_t window_blocks) const {
    uint64_t most = 0;
    for (const Shape& shape : shapes_) most = std::max(most, of(shape, tiles, window_blocks).total_bytes);
    return most;
  }
  uint64_t bytes(uint32_t tiles, uint32_t window_blocks) const {
    return round_up(used(tiles, window_blocks), kDevicePage);
  }

 private:
  const Topology& topo_;
  const RegionNeeds& needs_;
  std::vector<Shape> shapes_;
  uint32_t most_relayed_ = 0;  // by a rank that is not alone in its domain
  Room room_{kHalves, 0, 0, 0};
};

// FNV-1a of names and sizes, continued from `hash`.
uint64_t hash_of(const DeviceRegionLayout& layout, uint64_t hash) {
  const auto add = [&](uint64_t byte) { hash = (hash ^ byte) * 0x100000001B3u; };
  for (const auto& [name, bytes] : layout.entries) {
    for (char letter : name) add(static_cast<uint8_t>(letter));
    for (uint32_t shift = 0; shift < 64; shift += 8) add(bytes >> shift & 0xFF);
  }
  return hash;
}

}  // namespace

uint64_t least_budget_bytes(const Topology& topo, const RegionNeeds& needs) {
  Layouts layouts(topo, needs);
  layouts.take_least_room();
  return layouts.bytes(tiles_of(std::max(needs.window_tokens, 1u)), 1);
}

// The routing, which is not split into windows, may take half of the budget for what usual tokens need, a tenth for
// more of them, and gets at least what `window_tokens` tokens need. Rows, which are split into windows, get the rest.
DeviceRegionLayout make_layout(const Topology& topo, int domain, const RegionNeeds& needs, uint64_t budget_bytes) {
  budget_bytes = std::min(budget_bytes, kMostRegionBytes);
  Layouts layouts(topo, needs);
  layouts.take_room(budget_bytes);
  // Bytes beyond the least routing; what fits into its last page costs nothing.
  const auto routing = [&](uint32_t tiles) {
    return layouts.bytes(tiles, 1) == layouts.bytes(1, 1) ? 0 : layouts.used(tiles, 1) - layouts.used(1, 1);
  };
  const uint32_t given = needs.window_tokens, wanted = given == 0 ? kMaxTokens : given;
  const uint32_t tiles = largest(tiles_of(uint64_t{wanted} * kMostWindows), [&](uint32_t n) {
    const uint64_t most = budget_bytes / (n <= tiles_of(kUsualTokens) ? 2 : 10);
    return ((given != 0 && n <= tiles_of(given)) || routing(n) <= most) && layouts.bytes(n, 1) <= budget_bytes;
  });
  constexpr uint32_t kBlocks = kTileTokens / kTokenBlock;  // of a tile
  const uint32_t window = largest(std::min(tiles, tiles_of(wanted)) * kBlocks,
                                  [&](uint32_t n) { return layouts.bytes(tiles, n) <= budget_bytes; });
  DeviceRegionLayout own;
  uint64_t hash = 0xCBF29CE484222325u;
  for (const Shape& shape : layouts.shapes()) {
    DeviceRegionLayout l = layouts.of(shape, tiles, window);
    const uint64_t unused = round_up(l.total_bytes, kDevicePage) - l.total_bytes;
    l.entries.emplace_back("unused", unused);
    l.total_bytes += unused;
    hash = hash_of(l, hash);
    if (static_cast<int>(shape.members) == topo.size_of(domain)) own = std::move(l);
  }
  own.group_hash = hash;
  return own;
}

}  // namespace uccl_ep::gpu
