#include "backend/cuda/layout.h"

#include <algorithm>

namespace uccl_ep::cuda {
namespace {

constexpr uint64_t kAlign = 256;
constexpr uint32_t kUsualRanks = 8;  // that a token reaches

class Cursor {
 public:
  explicit Cursor(RegionLayout& layout) : layout_(layout) {}
  uint64_t take(const std::string& name, uint64_t bytes) {
    const uint64_t at = layout_.total_bytes;
    const uint64_t size = round_up(bytes, kAlign);
    layout_.total_bytes += size;
    layout_.entries.emplace_back(name, size);
    return at;
  }

 private:
  RegionLayout& layout_;
};

// Routing for `num_tokens`, rows and pieces for a window of `window` of them.
RegionLayout layout_for(uint32_t num_ranks, uint32_t num_experts, uint64_t row_bytes, uint32_t num_tokens,
                        uint32_t window) {
  RegionLayout l;
  l.num_ranks = num_ranks;
  l.num_experts = num_experts;
  l.row_bytes = row_bytes;
  l.max_tokens = num_tokens;
  l.max_pairs = num_tokens * kPairsPerToken;
  l.half_bytes = window * row_bytes;
  // Most tokens reach fewer ranks than there are; a window takes what fits.
  l.piece_bytes = (uint64_t{window} * std::min(num_ranks, kUsualRanks) + kChunkTokens * num_ranks) * row_bytes;
  const uint64_t ranks = num_ranks, tokens = num_tokens, pairs = l.max_pairs, chunks = tokens / kChunkTokens;
  const uint64_t experts_per_rank = num_experts / num_ranks;
  Cursor cursor(l);
  l.header_full = cursor.take("flags.header_full", 8 * ranks);
  l.values_full = cursor.take("flags.values_full", 8 * ranks);
  l.read = cursor.take("flags.read", 8 * ranks);
  l.folded_all = cursor.take("flags.folded_all", 8 * ranks);
  l.merged = cursor.take("flags.merged", 8 * ranks);
  l.rows_full = cursor.take("flags.rows_full", 8 * ranks * (tokens / kStageRows));
  l.folded = cursor.take("flags.folded", 8 * ranks * chunks);
  l.chunk_counts = cursor.take("chunk_counts", 4 * ranks * chunks);
  l.local = cursor.take("local", sizeof(Local));
  l.header_bytes = round_up(sizeof(DeviceHeader) + 4 * uint64_t{num_experts}, kAlign);
  l.headers = cursor.take("headers", kHalves * l.header_bytes);
  l.plan_scratch = cursor.take("plan", sizeof(PlanScratch) + 4 * experts_per_rank * (ranks + 3));
  l.tile_counts = cursor.take("tile_counts", 4 * (tokens / kTileTokens) * (num_experts + 2 * ranks + 2));
  l.token_pieces = cursor.take("token_pieces", 4 * (tokens + 1));
  l.lists = cursor.take("lists", kHalves * ranks * tokens * sizeof(ListEntry));
  l.chunk_rows = cursor.take("chunk_rows", kHalves * ranks * (chunks + 1) * 4);
  l.chunk_pieces = cursor.take("chunk_pieces", kHalves * (chunks + 1) * 4);
  l.pairs = cursor.take("pairs", kHalves * pairs * sizeof(PairEntry));
  l.pair_origin = cursor.take("pair_origin", pairs * 4);
  l.values = cursor.take("values", kHalves * pairs * sizeof(float));
  l.piece_values = cursor.take("piece_values", pairs * sizeof(float));
  l.rows = cursor.take("rows", kHalves * l.half_bytes);
  l.pieces = cursor.take("pieces", l.piece_bytes);
  return l;
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

uint64_t least_budget_bytes(uint32_t num_ranks, uint32_t num_experts, uint64_t row_bytes) {
  return round_up(layout_for(num_ranks, num_experts, row_bytes, kTileTokens, kTileTokens).total_bytes, kDevicePage);
}

// An eighth of the budget for the routing, which goes in one piece; the rest for rows, which go in windows.
RegionLayout make_layout(uint32_t num_ranks, uint32_t num_experts, uint64_t row_bytes, uint64_t budget_bytes) {
  const auto bytes = [&](uint32_t tokens, uint32_t window) {
    const RegionLayout l = layout_for(num_ranks, num_experts, row_bytes, tokens * kTileTokens, window * kTileTokens);
    return round_up(l.total_bytes, kDevicePage);
  };
  const uint64_t rest = bytes(1, 1);
  const uint32_t tokens = largest(kMaxTokens / kTileTokens, [&](uint32_t n) {
    return bytes(n, 1) - rest <= budget_bytes / 8 && bytes(n, 1) <= budget_bytes;
  });
  const uint32_t window = largest(tokens, [&](uint32_t n) { return bytes(tokens, n) <= budget_bytes; });
  RegionLayout l = layout_for(num_ranks, num_experts, row_bytes, tokens * kTileTokens, window * kTileTokens);
  const uint64_t unused = round_up(l.total_bytes, kDevicePage) - l.total_bytes;
  l.entries.emplace_back("unused", unused);
  l.total_bytes += unused;
  return l;
}

}  // namespace uccl_ep::cuda
