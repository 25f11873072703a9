// The role that merges what comes back: first the streams that we relay, then our own tokens.
#pragma once

#include "backend/gpu/merge_weights.cuh"
#include "backend/gpu/roles.cuh"
#include "backend/gpu/sum_bulk.cuh"

namespace uccl_ep::gpu {

template <bool kBulk, bool kNet, CombineForm kForm, typename Row, typename Wire>
struct MergeRole {
  static constexpr uint32_t kWarps = SumCrews<kBulk>::kMerges;
  struct Shared {
    MergeRange merges[kHalves];  // by window mod 2
  };

  // By its crew, and by the crew that folds after it has folded the window (`has_folded`): writes its sums into the
  // rings to their sources. After an error it returns at once.
  static __device__ __forceinline__ void return_sums(const CombineKernel& k, const MergeRange& range,
                                                     SumPipeline& pipeline, bool has_folded) {
    // Two windows ago the shares of this half were taken, too: all of them, when our own flag says so.
    const uint32_t w = range.window;
    const Awaited ended{member_flag(k.g, k.g.rank, k.g.map.merged, k.g.rank), k.op.window(w) - (w == 0 ? 1 : kHalves),
                        k.g.rank};
    if (w >= kHalves && !has_folded && !k.crew.all(k.crew.thread != 0 || wait_flag(k.g, ended))) return;
    if constexpr (kNet) {
      const StepClock clock(k, Step::kMerge, has_folded ? gridDim.x : 0);
      if (!begin_returns(k, range, !has_folded)) return;
      if (!is_alone(k.g))
        sum_all<kBulk, Wire, Wire>(summers(k, has_folded), k.g, Relay{k, range}, k.args.hidden, pipeline);
      clock.stop();
    }
  }
  // By both crews: sums what comes back for the window.
  static __device__ __forceinline__ void merge(const CombineKernel& k, const MergeRange& range, SumPipeline& pipeline,
                                               bool has_folded) {
    const StepClock clock(k, Step::kMerge, has_folded ? gridDim.x : 0);
    const Merge<kNet, kForm> merge(k, range);
    if (!has_folded) merge.template fill_empty<Row>();
    sum_all<kBulk, Wire, Row>(summers(k, has_folded), k.g, merge, k.args.hidden, pipeline);
    if (!is_last(k.args, range.window))
      end_window(k, range, has_folded);
    else if (!has_folded)
      finish_merge(k, range);
    clock.stop();
  }

  // By its crew in the last block, when all sums are written, or (not good) after an error.
  static __device__ void finish(const CombineKernel& k, bool good) {
    const uint32_t last = k.args.num_windows - 1;
    if (k.crew.thread == 0) {
      keep_epoch(k.g, k.op);
      keep_windows(k.g, k.op, OpKind::kCombine, k.args.num_windows);
      reset_all_shares(k.g, last);
    }
    if (good) {
      publish_to_members(k, k.g.map.merged, k.op.window(last));
      return;
    }
    fill_nan(k.crew, k.args.out, uint64_t{k.plan.num_tokens} * k.args.hidden * dtype_bytes(k.args.dtype));
    if (k.args.weights != nullptr) fill_nan(k.crew, k.args.weights, k.args.weight_bytes);
  }

 private:
  // If both crews fold first, they merge together.
  static __device__ __forceinline__ Summers summers(const CombineKernel& k, bool has_folded) {
    if constexpr (kForm == CombineForm::kFoldsFirst)
      return {k.crew, has_folded ? kWarps : 0, SumCrews<kBulk>::kAll, false};
    return {k.crew, 0, kWarps, has_folded};
  }
  static __device__ __forceinline__ void reset_all_shares(const Group& g, uint32_t window) {
    for (SharedWork what : {SharedWork::kFolded, SharedWork::kMerged, SharedWork::kRelayed})
      reset_shares(g, what, window % kHalves);
  }
  // By both crews of all blocks, at the end of a window that is not the last: the last of them says that its pieces
  // have been merged, and its weights. Not inlined, because its caller has no registers to spare.
  static __device__ __noinline__ void end_window(const CombineKernel k, const MergeRange& range, bool has_folded) {
    const uint32_t w = range.window;
    if (kNet && !has_folded && k.args.weights != nullptr && has_weights(k.args, w) && going(k)) merge_weights(k, range);
    if (!going(k) || !last_block(k, w % kHalves == 0 ? Phase::kEvenWindow : Phase::kOddWindow, 2 * workers(k.g)))
      return;
    if (k.crew.thread == 0) reset_all_shares(k.g, w);
    if (kNet && k.crew.warp() == 1) note_returned(k, w);
    k.crew.sync();
    publish_to_members(k, k.g.map.merged, k.op.window(w));
  }
};

}  // namespace uccl_ep::gpu
