#include "backend/gpu/layout.h"

#include <algorithm>

#include "backend/gpu/low_latency_net.h"
#include "backend/gpu/net.h"
#include "backend/gpu/packet.h"
#include "backend/gpu/words.h"
#include "common/units.h"

namespace uccl_ep::gpu {
namespace {

constexpr uint64_t kAlign = 256;
constexpr uint32_t kUsualRanks = 8;  // that a token reaches
constexpr uint32_t kMostWindows = 8;  // of an operation, where a window's tokens are given

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

// The most members that a domain has, and the most streams that a rank merges (its own tokens are one).
struct Shape {
  uint32_t ranks, domains, members = 0, streams = 1;
  explicit Shape(const Topology& topo)
      : ranks(static_cast<uint32_t>(topo.num_ranks)), domains(static_cast<uint32_t>(topo.num_domains())) {
    for (const auto& [size, number] : topo.domains_of_size) members = std::max(members, static_cast<uint32_t>(size));
    for (int rank : topo.classes()) streams = std::max(streams, 1 + topo.num_relayed(rank));
  }
};

// The rings between domains hold a window in chunks of 512 KiB. There are at least 8 chunks, with at least one row
// each. Rows of more than 128 KiB may need larger chunks.
DeviceRings rings_for(const Shape& shape, uint64_t packet_bytes, uint64_t row_bytes, uint32_t window,
                      uint32_t max_pairs) {
  constexpr uint64_t kUsualBytes = 512 << 10;
  DeviceRings rings;
  if (shape.domains == 1) return rings;
  const uint64_t least = (window + kMaxRelayedChunks - 1) / kMaxRelayedChunks;
  const uint64_t per_chunk =
      std::clamp<uint64_t>(kUsualBytes / row_bytes, least, std::max<uint64_t>(least, window / 8));
  const uint32_t slots = static_cast<uint32_t>((window + per_chunk - 1) / per_chunk);
  rings.packet_bytes = packet_bytes;
  rings.rows_slot_bytes = rings.return_slot_bytes = round_up(per_chunk * row_bytes, kAlign);
  rings.rows_slots = slots;
  rings.return_slots = slots + weight_chunks(max_pairs, rings.return_slot_bytes);
  return rings;
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
  map.routing_bytes = round_up(sizeof(SlotHeader) + sizeof(int32_t) * places, kAlign);
  map.weights_bytes = round_up(sizeof(SlotHeader) + (sizeof(int32_t) + sizeof(float)) * places, kAlign);
  return {map.routing_bytes, map.weights_bytes, map.row_chunk_bytes, map.sum_chunk_bytes, map.chunks};
}

void take_low_latency(Cursor& cursor, const Shape& shape, LowLatencyMap& map, uint64_t net_bytes) {
  if (map.tokens == 0) return;
  const uint64_t ranks = shape.ranks, members = shape.members, streams = shape.streams, places = map.places();
  const uint64_t several = shape.domains > 1;
  cursor.take(map.routing_full, "flags.slot_routing", ranks);
  cursor.take(map.rows_full, "flags.slot_rows", members * kMaxSlotBlocks);
  cursor.take(map.rows_read, "flags.slot_rows_read", members);
  cursor.take(map.pairs_entered, "flags.pairs_entered", ranks);
  cursor.take(map.pair_full, "flags.pairs", kHalves * streams * places);
  cursor.take(map.pairs_read, "flags.pairs_read", members);
  cursor.take(map.headers, "slots.headers", 2 * kHalves * ranks);
  cursor.take(map.votes, "slots.votes", 4 * members);
  cursor.take(map.decisions, "slots.decisions", 2 * members);
  cursor.take(map.routing, "slots.routing", kHalves * ranks * places);
  cursor.take(map.rows, "slots.rows", kHalves * members * map.tokens * map.row_bytes);
  cursor.take(map.pairs, "slots.pairs", kHalves * streams * places * map.pair_bytes);
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

// Has memory for the routing of `num_tokens` tokens, and for rows and pieces of a window of `window` tokens.
DeviceRegionLayout layout_for(const Topology& topo, uint32_t num_experts, uint64_t row_bytes, uint32_t num_tokens,
                              uint32_t window, const LowLatencyRoom& beside) {
  const Shape shape(topo);
  DeviceRegionLayout l;
  l.num_ranks = shape.ranks;
  l.num_members = shape.members;
  l.num_streams = shape.streams;
  l.num_domains = shape.domains;
  l.num_experts = num_experts;
  l.row_bytes = row_bytes;
  l.max_tokens = num_tokens;
  l.max_pairs = num_tokens * kPairsPerToken;
  l.half_bytes = window * row_bytes;
  // Most tokens reach fewer ranks than there are; a window takes what fits. A half holds a token block.
  const uint64_t most_pieces = uint64_t{kTokenBlock} * shape.members;
  l.piece_bytes =
      std::max(window * std::min(shape.members, kUsualRanks) + most_pieces, kHalves * most_pieces + 1) * row_bytes;
  const uint64_t ranks = shape.ranks, members = shape.members, streams = shape.streams, domains = shape.domains;
  const uint64_t tokens = num_tokens, pairs = l.max_pairs, token_blocks = tokens / kTokenBlock;
  const uint32_t experts_per_rank = num_experts / shape.ranks;
  const uint32_t stream_rows = domains > 1 ? num_tokens : 0;
  l.packet_bytes = round_up(packet_parts({shape.members, experts_per_rank, num_tokens, shape.members * num_tokens,
                                          l.max_pairs, stream_rows, true})
                                .end,
                            kAlign);
  l.rings = rings_for(shape, l.packet_bytes, row_bytes, window, l.max_pairs);
  l.rings.slots = size_low_latency(shape, beside, l.low_latency);
  l.row_slots = l.rings.rows_slots;
  l.return_slots = l.rings.return_slots;
  l.slot_bytes = l.rings.rows_slot_bytes;
  const uint64_t several = domains > 1;
  Cursor cursor(l);
  cursor.take("rings", several ? device_ring_bytes(topo, l.rings) : 0);  // first: the transport counts from 0
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
  cursor.take(l.sent_tokens, "sent_tokens", several * domains * tokens);
  cursor.take(l.packets, "packets", kHalves * l.packet_bytes);
  cursor.take(l.pair_origin, "pair_origin", pairs);
  cursor.take(l.piece_weights, "piece_values", streams * pairs);
  cursor.take(l.rows, "rows", kHalves * l.half_bytes);
  // Where every rank is alone in its domain, what is folded for others goes into the rings.
  cursor.take(l.pieces, "pieces", (members > 1 ? streams : 1) * l.piece_bytes);
  SlotNet slot_net;
  SlotNetState slot_net_state;
  take_low_latency(cursor, shape, l.low_latency, lay_out_slot_net(slot_net, slot_net_state, nullptr, l));
  return l;
}

uint32_t blocks_of(uint64_t tokens) {
  return static_cast<uint32_t>(std::min<uint64_t>(round_up(tokens, kTileTokens), kMaxTokens) / kTileTokens);
}

// The most blocks of tokens, up to `most`, for which fits(blocks).
template <typename Fits>
uint32_t largest(uint32_t most, Fits fits) {
  uint32_t low = 1, high = most;
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    (fits(middle) ? low : high) = fits(middle) ? middle : middle - 1;
  }
  return low;
}

}  // namespace

uint64_t least_budget_bytes(const Topology& topo, uint32_t num_experts, uint64_t row_bytes, uint32_t window_tokens,
                            const LowLatencyRoom& beside) {
  const uint32_t tokens = blocks_of(std::max(window_tokens, 1u)) * kTileTokens;
  return round_up(layout_for(topo, num_experts, row_bytes, tokens, kTileTokens, beside).total_bytes, kDevicePage);
}

// The routing, which is not split into windows, gets an eighth of the budget, or a sixteenth with several domains. It
// gets at least what `window_tokens` tokens need. Rows, which are split into windows, get the rest.
DeviceRegionLayout make_layout(const Topology& topo, uint32_t num_experts, uint64_t row_bytes, uint64_t budget_bytes,
                               uint32_t window_tokens, const LowLatencyRoom& beside) {
  const auto used = [&](uint32_t tokens, uint32_t window) {
    return layout_for(topo, num_experts, row_bytes, tokens * kTileTokens, window * kTileTokens, beside).total_bytes;
  };
  const auto bytes = [&](uint32_t tokens, uint32_t window) { return round_up(used(tokens, window), kDevicePage); };
  // Bytes beyond the least routing; what fits into its last page costs nothing.
  const auto routing = [&](uint32_t tokens) {
    return bytes(tokens, 1) == bytes(1, 1) ? 0 : used(tokens, 1) - used(1, 1);
  };
  const uint64_t share = topo.num_domains() > 1 ? 16 : 8;
  const uint32_t wanted = window_tokens == 0 ? kMaxTokens : window_tokens;
  const uint32_t tokens = largest(blocks_of(uint64_t{wanted} * kMostWindows), [&](uint32_t n) {
    const bool is_wanted = window_tokens != 0 && n <= blocks_of(window_tokens);
    return (is_wanted || routing(n) <= budget_bytes / share) && bytes(n, 1) <= budget_bytes;
  });
  const uint32_t window =
      largest(std::min(tokens, blocks_of(wanted)), [&](uint32_t n) { return bytes(tokens, n) <= budget_bytes; });
  DeviceRegionLayout l = layout_for(topo, num_experts, row_bytes, tokens * kTileTokens, window * kTileTokens, beside);
  const uint64_t unused = round_up(l.total_bytes, kDevicePage) - l.total_bytes;
  l.entries.emplace_back("unused", unused);
  l.total_bytes += unused;
  return l;
}

namespace {

// Points arrays into memory, one behind the other; null: only counts their bytes.
class Arrays {
 public:
  explicit Arrays(uint8_t* memory) : memory_(memory) {}
  template <typename T>
  void take(T*& pointer, uint64_t count) {
    pointer = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += sizeof(T) * count;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  uint8_t* const memory_;
  uint64_t bytes_ = 0;
};

// What high throughput and low latency both have: where the transport's rings lie, and chunks by channel.
template <typename AnyNet, typename AnyState>
Arrays take_channels(AnyNet& net, AnyState& state, uint8_t* memory, const DeviceMap& map) {
  Arrays arrays(memory);
  arrays.take(net.to, map.num_domains);
  arrays.take(net.from, map.num_ranks);
  arrays.take(net.relayed, map.num_streams);
  arrays.take(net.polled, AnyNet::most_polled(map));
  arrays.take(state.sent, map.num_domains);
  arrays.take(state.received, map.num_ranks);
  arrays.take(state.returned, map.num_domains);
  arrays.take(state.relayed, map.num_streams);
  return arrays;
}

}  // namespace

uint64_t lay_out_net(Net& net, NetState& state, uint8_t* memory, const DeviceMap& map) {
  Arrays arrays = take_channels(net, state, memory, map);
  arrays.take(state.ended, 1);
  arrays.take(state.producer, 1);
  arrays.take(state.rows_there, map.num_ranks);
  arrays.take(state.returns_there, map.num_domains);
  arrays.take(state.packets_gone, map.num_domains);
  arrays.take(state.rows_gone, map.num_domains);
  arrays.take(state.returns_gone, map.num_streams);
  return arrays.bytes();
}

uint64_t lay_out_slot_net(SlotNet& net, SlotNetState& state, uint8_t* memory, const DeviceMap& map) {
  Arrays arrays = take_channels(net, state, memory, map);
  arrays.take(state.routing_there, map.num_ranks);
  arrays.take(state.rows_there, map.num_ranks);
  arrays.take(state.weights_there, map.num_ranks);
  arrays.take(state.sums_there, map.num_domains);
  arrays.take(state.routing_gone, map.num_domains);
  arrays.take(state.rows_gone, map.num_domains);
  arrays.take(state.weights_gone, map.num_domains);
  arrays.take(state.sums_gone, map.num_streams);
  return arrays.bytes();
}

uint64_t lay_out_plan(PlanView& view, const PlanSizes& sizes, uint8_t* memory, const DeviceMap& of) {
  Arrays arrays(memory);
  const auto take = [&](auto*& pointer, uint64_t count) { arrays.take(pointer, count); };
  const uint64_t ranks = of.num_ranks, experts = of.num_experts / of.num_ranks;
  const uint64_t entries = uint64_t{view.num_token_blocks} + 1;
  take(view.routing_hash, 1);
  take(view.tokens_per_expert, experts);
  take(view.overflow, 1);
  take(view.most_tokens, 1);
  take(view.row_begin, ranks);
  take(view.row_end, ranks);
  take(view.weight_begin, ranks);
  take(view.token_block_rows, ranks * entries);
  take(view.token_block_pieces, ranks * entries);
  take(view.token_blocks, ranks);
  take(view.padding, 2 * experts);
  take(view.row_token, sizes.received_rows);
  take(view.row_piece, sizes.received_rows);
  take(view.row_pair_begin, uint64_t{sizes.received_rows} + 1);
  take(view.out_rows, sizes.received_pairs);
  take(view.addend_begin, uint64_t{view.num_tokens} + 1);
  take(view.pair_begin, ranks + 1);
  take(view.pair_place, sizes.sent_pairs);
  if (of.num_domains == 1) return arrays.bytes();
  take(view.row_position, sizes.received_rows);
  take(view.token_block_streams, ranks * entries);
  take(view.sent_token_blocks, of.num_domains * entries);
  take(view.sent_begin, uint64_t{of.num_domains} + 1);
  take(view.sent_tokens, sizes.shipped_rows);
  take(view.addends, sizes.sent_addends);
  take(view.relayed_begin, of.num_streams);
  take(view.relayed_pairs, of.num_streams);
  take(view.relayed_piece, uint64_t{sizes.relayed_rows} + of.num_streams);
  return arrays.bytes();
}

}  // namespace uccl_ep::gpu
