#include "backend/cuda/layout.h"

#include <algorithm>

namespace uccl_ep::cuda {
namespace {

constexpr uint64_t kAlign = 256;

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

RegionLayout layout_for(uint32_t num_ranks, uint32_t num_experts, uint64_t row_bytes, uint32_t max_tokens) {
  RegionLayout l;
  l.num_ranks = num_ranks;
  l.num_experts = num_experts;
  l.row_bytes = row_bytes;
  l.max_tokens = max_tokens;
  l.max_pairs = max_tokens * kPairsPerToken;
  const uint64_t ranks = num_ranks, tokens = max_tokens, pairs = l.max_pairs;
  const uint64_t experts_per_rank = num_experts / num_ranks;
  Cursor cursor(l);
  l.header_full = cursor.take("flags.header_full", 8 * ranks);
  l.values_full = cursor.take("flags.values_full", 8 * ranks);
  l.read = cursor.take("flags.read", 8 * ranks);
  l.folded_all = cursor.take("flags.folded_all", 8 * ranks);
  l.merged = cursor.take("flags.merged", 8 * ranks);
  l.rows_full = cursor.take("flags.rows_full", 8 * ranks * (tokens / kRowsPerChunk));
  l.folded = cursor.take("flags.folded", 8 * ranks * (tokens / kRowsPerChunk));
  l.chunk_counts = cursor.take("chunk_counts", 4 * ranks * (tokens / kRowsPerChunk));
  l.local = cursor.take("local", sizeof(Local));
  l.header_bytes = round_up(sizeof(DeviceHeader) + 4 * uint64_t{num_experts}, kAlign);
  l.headers = cursor.take("headers", kHalves * l.header_bytes);
  l.plan_scratch = cursor.take("plan", sizeof(PlanScratch) + 4 * experts_per_rank * (ranks + 2));
  l.block_counts = cursor.take("block_counts", 4 * (tokens / kTokensPerBlock) * (num_experts + 2 * ranks + 2));
  l.token_begin = cursor.take("token_begin", 2 * 4 * (tokens + 1));
  l.lists = cursor.take("lists", kHalves * ranks * tokens * sizeof(ListEntry));
  l.pairs = cursor.take("pairs", kHalves * pairs * sizeof(PairEntry));
  l.values = cursor.take("values", kHalves * pairs * sizeof(float));
  l.piece_values = cursor.take("piece_values", pairs * sizeof(float));
  l.rows = cursor.take("rows", kHalves * tokens * row_bytes);
  l.pieces = cursor.take("pieces", tokens * std::min<uint64_t>(ranks, kPairsPerToken) * row_bytes);
  return l;
}

}  // namespace

uint64_t least_budget_bytes(uint32_t num_ranks, uint32_t num_experts, uint64_t row_bytes) {
  return layout_for(num_ranks, num_experts, row_bytes, kTokensPerBlock).total_bytes;
}

RegionLayout make_layout(uint32_t num_ranks, uint32_t num_experts, uint64_t row_bytes, uint64_t budget_bytes) {
  const uint64_t least = least_budget_bytes(num_ranks, num_experts, row_bytes);
  if (budget_bytes < least)
    throw UsageFailure(UsageKind::kBudget, "budget_bytes = " + std::to_string(budget_bytes) +
                                               ": this buffer needs at least " + std::to_string(least));
  // The size grows with the tokens, so the most that fit are found by halving.
  uint32_t low = 1, high = 1u << 20;  // blocks of tokens
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const bool fits =
        layout_for(num_ranks, num_experts, row_bytes, middle * kTokensPerBlock).total_bytes <= budget_bytes;
    (fits ? low : high) = fits ? middle : middle - 1;
  }
  return layout_for(num_ranks, num_experts, row_bytes, low * kTokensPerBlock);
}

}  // namespace uccl_ep::cuda
