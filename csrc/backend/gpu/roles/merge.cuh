// The role that merges what comes back: first the streams that we relay, then our own tokens.
#pragma once

#include "backend/gpu/merge.cuh"
#include "backend/gpu/roles.cuh"
#include "backend/gpu/sum_bulk.cuh"

namespace uccl_ep::gpu {

template <bool kBulk, bool kNet, bool kCopies, typename Row, typename Wire>
struct MergeRole {
  static constexpr uint32_t kWarps = kBulk ? 4 : warps_by_lanes(8, 6);
  struct Shared {
    MergeRange merges;
  };

  // By its crew, and by the crew that folds after it has folded (`has_folded`).
  static __device__ __forceinline__ void run(const CombineKernel& k, const Shared& shared, SumPipeline& pipeline,
                                             bool has_folded) {
    const StepClock clock(k, Step::kMerge, has_folded ? gridDim.x : 0);
    const Summers by{k.crew, kWarps, has_folded};
    if constexpr (kNet) {
      if (!wait_returns_gone(k)) return;
      if (!is_alone(k.g)) sum_all<kBulk, Wire, Wire>(by, k.g, Relay{k, shared.merges}, k.args.hidden, pipeline);
    }
    const Merge<kNet, kCopies> merge(k, shared.merges);
    if (!has_folded) merge.template fill_empty<Row>();
    sum_all<kBulk, Wire, Row>(by, k.g, merge, k.args.hidden, pipeline);
    if (!has_folded) finish_merge(k, shared.merges);
    clock.stop();
  }

  // By its crew in the last block, when all sums are written, or (not good) after an error.
  static __device__ void finish(const CombineKernel& k, bool good) {
    if (k.crew.thread == 0) {
      keep(k.g, k.op, OpKind::kCombine);
      for (SharedWork what : {SharedWork::kFolded, SharedWork::kMerged, SharedWork::kRelayed}) reset_shares(k.g, what);
    }
    if (good) {
      publish_to_members(k, k.g.map.merged);
      return;
    }
    fill_nan(k.crew, k.args.out, uint64_t{k.plan.num_tokens} * k.args.hidden * dtype_bytes(k.args.dtype));
    if (k.args.weights != nullptr) fill_nan(k.crew, k.args.weights, k.args.weight_bytes);
  }
};

}  // namespace uccl_ep::gpu
