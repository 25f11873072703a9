// The role of one warp of a combine: it works out what the block folds and merges, and then tells of folded rows.
#pragma once

#include "backend/gpu/roles/fold.cuh"
#include "backend/gpu/roles/merge.cuh"

namespace uccl_ep::gpu {

// By a warp of one block: tells the other ranks what this rank has called. False: an error is known.
__device__ inline bool write_packets(const CombineKernel& k) {
  if (!going(k) || !wait_packets_gone(k)) return false;
  place_packets(k, false);
  write_headers(k, k.args.signature, k.plan.num_tokens);
  k.crew.sync();
  publish_packet(k, k.g.map.header_full);
  return true;
}

// How many rows of a stream are folded in parts: those of the first chunk, rounded up to token blocks where flags tell
// of these. A rank that is alone folds its first chunk so fast that it folds the second one in parts, too.
__device__ __forceinline__ uint32_t first_folded(const Group& g, uint32_t row_bytes) {
  const uint32_t rows = rows_per_chunk(g, row_bytes);
  return is_alone(g) ? 2 * rows : (rows + kTokenBlock - 1) / kTokenBlock * kTokenBlock;
}

template <typename FoldsRows, bool kBulk, bool kNet, CombineForm kForm>
struct TellFoldedRole {
  static constexpr uint32_t kWarps = 1;
  struct Shared {};

  // Before the block's barrier: what a window folds and merges.
  static __device__ __forceinline__ void begin(const CombineKernel& k, uint32_t window,
                                               typename FoldsRows::Shared& shared, MergeRange (&ranges)[kHalves]) {
    MergeRange& merges = ranges[window % kHalves];
    if (window > 0 && k.crew.thread == 0) shared.boxes.ended = 0;
    find_merge_range(k, window, ranges[(window + 1) % kHalves], merges);
    find_fold_range(k, merges, shared.folds);
    if ((kNet || kForm == CombineForm::kFoldsFirst) && threadIdx.x == 0) part_rows(k, shared.folds, merges);
    k.crew.sync();  // as in find_merge_range
  }
  // After it.
  static __device__ __forceinline__ void run(const CombineKernel& k, typename FoldsRows::Shared& shared) {
    if (!kNet && blockIdx.x == 0 && shared.folds.window == 0) write_packets(k);
    if (going(k)) tell_empty_token_blocks(k, shared.folds.window);
    tell_folded(Fold<kNet, kForm>{k, shared.folds, nullptr, 0}, FoldsRows::folding(k.g, shared.folds), shared.boxes);
    if (is_last(k.args, shared.folds.window) || has_weights(k.args, shared.folds.window))
      tell_all_folded(k, shared.folds.window);
  }

 private:
  static __device__ __forceinline__ void part_rows(const CombineKernel& k, FoldRange& folds, MergeRange& merges) {
    if constexpr (!kNet) {
      merges.last = few_rows(k, merges.end_token - merges.first_token);
      return;
    }
    const uint32_t row_bytes = k.args.hidden * dtype_bytes(k.args.wire);
    folds.parted = first_rows(k, num_far(k.g), first_folded(k.g, row_bytes));
    folds.parted.num_parted = min(folds.parted.num_parted, folds.most.far_sum(k.g));
    folds.hurried = min(first_folded(k.g, row_bytes) * num_far(k.g), folds.most.far_sum(k.g));
    merges.parted = first_rows(k, k.g.net.num_relayed, rows_per_chunk(k.g, row_bytes));
    merges.last = last_rows(k, merges.end_token - merges.first_token);
  }
  // All `rows` tokens in parts, if a warp gets few of them. Otherwise some warps have a row more than the others.
  static __device__ __forceinline__ PartedRows few_rows(const CombineKernel& k, uint32_t rows) {
    return rows <= kFewRows * SumCrews<kBulk>::kAll * workers(k.g) ? PartedRows{rows, segments_of(k.args.hidden * 2)}
                                                                   : PartedRows{};
  }
  // The first `rows` rows of each of `streams` streams, as far as there are warps for them.
  static __device__ __forceinline__ PartedRows first_rows(const CombineKernel& k, uint32_t streams, uint32_t rows) {
    if constexpr (!kBulk) return {};
    return {min(rows * streams, SumCrews<kBulk>::kMerges * workers(k.g)), segments_of(k.args.hidden * 2)};
  }
  // The last of `rows` tokens, whose addends come with the last chunk: at most one part for each warp.
  static __device__ __forceinline__ PartedRows last_rows(const CombineKernel& k, uint32_t rows) {
    if constexpr (!kBulk) return {};
    const uint32_t parts = segments_of(k.args.hidden * 2);
    const uint32_t num_parted = min(rows, SumCrews<kBulk>::kAll * workers(k.g) / parts);
    return {num_parted, parts, rows - num_parted};
  }
};

}  // namespace uccl_ep::gpu
