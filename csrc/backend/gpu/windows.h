// How many tokens and weights go at once, with the memory that a region has for them.
#pragma once

#include "backend/gpu/layout.h"
#include "common/units.h"

namespace uccl_ep::gpu {

// From one staged row to the next. Bulk copies are slow where source and destination lie differently in 128 bytes.
constexpr uint64_t staged_bytes(uint64_t row_bytes) { return round_up(row_bytes, 128); }
constexpr uint64_t staged_row_bytes(Dtype wire, uint64_t hidden, uint64_t num_metadata = 0) {
  return staged_bytes(wire_row_bytes(wire, hidden, num_metadata));
}

// Chunks of a ring that the weights of a stream take.
constexpr uint32_t weight_chunks(uint32_t num_pairs, uint32_t slot_weights) {
  return (num_pairs + slot_weights - 1) / slot_weights;
}
// Whole token blocks of which at most `most` rows are, up to all.
constexpr uint32_t whole_token_blocks(const DeviceMap& map, uint64_t most) {
  const uint64_t tokens = most / kTokenBlock * kTokenBlock;
  return tokens < map.max_tokens ? static_cast<uint32_t>(tokens) : map.max_tokens;
}
// Tokens whose staged rows fit a half here, and the rings to other domains, whatever their experts are.
constexpr uint32_t window_tokens(const DeviceMap& map, uint64_t row_bytes) {
  const uint64_t staged = map.half_bytes / row_bytes, shipped = map.row_slots * (map.slot_bytes / row_bytes);
  return whole_token_blocks(map, map.num_domains > 1 && shipped < staged ? shipped : staged);
}
// Windows of a dispatch: tokens [0, first), [first, each), [each, 2 each), ... While the first one of a new plan is
// staged, nobody knows how many rows streams have.
struct DispatchWindows {
  uint32_t first = 0, each = 0;  // whole token blocks; `each` is at least `first`

  constexpr uint32_t begin(uint32_t window) const {
    if (window == 0) return 0;
    return first == each ? window * each : window == 1 ? first : (window - 1) * each;
  }
  // Of a rank with so many tokens: at least one.
  constexpr uint32_t count(uint32_t tokens) const {
    return tokens <= first ? 1 : (tokens + each - 1) / each + (first < each);
  }
};
// Tokens of the windows but the first, if streams have at most so many rows: `most_rows` of a token block, and those of
// spans. A window consists of whole spans of one length.
constexpr uint32_t later_window_tokens(const DeviceMap& map, uint64_t row_bytes, uint32_t most_rows,
                                       const SpanRows& spans) {
  const uint32_t least = window_tokens(map, row_bytes);
  if (map.num_domains == 1) return least;
  const auto staged = static_cast<uint32_t>(map.half_bytes / row_bytes / kTokenBlock);
  const auto shipped = static_cast<uint32_t>(map.row_slots * (map.slot_bytes / row_bytes));
  const auto blocks = [&](uint32_t length, uint32_t rows) {
    const uint32_t most = staged / length, fit = rows == 0 ? most : shipped / rows;
    return (fit < most ? fit : most) * length;
  };
  uint32_t longest = blocks(1, most_rows);
  for (uint32_t i = 0; i < SpanRows::kLengths; ++i)
    if (const uint32_t found = blocks(SpanRows::blocks(i), spans.most[i]); found > longest) longest = found;
  const uint32_t tokens = whole_token_blocks(map, uint64_t{longest} * kTokenBlock);
  return tokens < least ? least : tokens;
}
// Where the pieces of the second half of a stream's memory begin.
constexpr uint64_t piece_half_bytes(const DeviceMap& map) { return map.piece_bytes / kHalves / 256 * 256; }
// Pieces of a stream that fit its memory, or one of the halves.
inline uint32_t piece_slots(const DeviceMap& map, uint64_t row_bytes, bool in_halves) {
  return static_cast<uint32_t>((in_halves ? piece_half_bytes(map) : map.piece_bytes) / row_bytes);
}
// Tokens whose pieces fit the memory, or one of its halves, if a token block has at most `most_pieces` in any domain.
// At least a token block. Batches of streams always have halves. The ring back may hold a single token block; of one a
// domain has at most `most_rows` rows.
inline uint32_t combine_window_tokens(const DeviceMap& map, uint64_t row_bytes, uint32_t most_pieces,
                                      bool in_halves = false, uint32_t most_rows = kTokenBlock) {
  in_halves |= map.stream_batches > 1;
  const uint64_t pieces = piece_slots(map, row_bytes, in_halves);
  const uint64_t folded = most_pieces == 0 ? map.max_tokens : pieces / most_pieces * kTokenBlock;
  const uint64_t sums = map.sum_slots / (in_halves ? kHalves : 1) * (map.slot_bytes / row_bytes);
  const uint64_t blocks = most_rows == 0 ? map.max_tokens : sums / most_rows;
  const uint64_t returned = (blocks == 0 ? 1 : blocks) * kTokenBlock;
  return whole_token_blocks(map, map.num_domains > 1 && returned < folded ? returned : folded);
}
// Windows that weights' gradients have for themselves in a combine of at most `most_pairs` pairs of a rank.
inline uint32_t weight_windows(const DeviceMap& map, uint32_t most_pairs) {
  const uint32_t most = most_pairs < map.most_stream_pairs ? most_pairs : map.most_stream_pairs;
  return !map.weights_apart ? 0 : most == 0 ? 1 : (most + map.weight_pairs - 1) / map.weight_pairs;
}

}  // namespace uccl_ep::gpu
