// The role that folds the rows that came here, and then joins the role that merges.
#pragma once

#include "backend/gpu/merge.cuh"
#include "backend/gpu/roles.cuh"
#include "backend/gpu/sum_bulk.cuh"

namespace uccl_ep::gpu {

// kBulk: sums by bulk copies, which need shared memory for each warp. kNet: there are several domains. Row and Wire:
// elements of rows here and on their way.
template <bool kBulk, bool kNet, CombineForm kForm, typename Row, typename Wire>
struct FoldRole {
  static constexpr uint32_t kWarps = SumCrews<kBulk>::kFolds;
  // The crew that merges may fold, too, as warps kWarps and on.
  static constexpr uint32_t kMost = kForm == CombineForm::kFoldsFirst ? SumCrews<kBulk>::kAll : kWarps;
  static_assert(kTold <= kBoxes<kNet>, "a warp would wait for boxes that it has filled itself");
  struct Shared {
    FoldRange folds;  // of the window that is folded
    Boxes<kNet, kMost> boxes;
  };
  // How many warps of a block fold: those that merge do not if a row for each of the others is enough.
  static __device__ __forceinline__ uint32_t folding(const Group& g, const FoldRange& folds) {
    return kMost > kWarps && folds.most.near_sum(g) > kWarps * workers(g) ? kMost : kWarps;
  }

  // By each crew that may fold, before the first window: what was in the memory before must have been merged. That
  // memory may all be of one window. False: an error is known, and nothing may be written there.
  static __device__ __forceinline__ bool begin(const CombineKernel& k) {
    return wait_members(k, k.g.map.merged, k.op.window(0) - 1);
  }
  // By each crew that folds, the first warp of which has number `first`: a window, whose `merges` say which slots of
  // rings it takes. After an error it returns at once.
  static __device__ __forceinline__ void run(const CombineKernel& k, Shared& shared, const MergeRange& merges,
                                             SumPipeline& pipeline, uint32_t first) {
    const uint32_t w = merges.window;
    if (w > 0 && !wait_members(k, k.g.map.merged, k.op.window(w) - kHalves)) return;
    if constexpr (kNet)
      if (is_alone(k.g) && !wait_returns_gone(k, merges)) return;
    const StepClock clock(k, Step::kFold, first == 0 ? 0 : gridDim.x);
    // Shuffled, because the compiler would otherwise work it out for every segment.
    const uint32_t units = __shfl_sync(kFullWarp, k.args.hidden * dtype_bytes(k.args.dtype) / 16, 0);
    const uint32_t warp = first + k.crew.warp();
    const Fold<kNet, kForm> fold{k, shared.folds, shared.boxes.of(warp), units, kNet ? 0 : warp * kTold};
    const uint32_t warps = folding(k.g, shared.folds);
    sum_all<kBulk, Row, Wire>({k.crew, first, warps, false}, k.g, fold, k.args.hidden, pipeline);
    if (k.args.row_weights != nullptr && first == 0 && has_weights(k.args, read_shared(&shared.folds.window)))
      fold_weights(k, read_shared(&shared.folds.window));
    __syncwarp();
    if (k.crew.lane() == 0) count_shared(&shared.boxes.ended);
    clock.stop();
  }
};

}  // namespace uccl_ep::gpu
