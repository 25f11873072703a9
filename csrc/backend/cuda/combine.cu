// The kernel of a combine. Its crews run side by side in every block: folding what came here, merging what comes back.
#include "backend/cuda/fold.cuh"
#include "backend/cuda/merge.cuh"

namespace uccl_ep::cuda {
namespace {

// Warps of the crews, after one that speaks for the block. Sums by bulk copies need shared memory for each.
template <bool kBulk>
constexpr uint32_t kFoldWarps = kBulk ? 7 : 12;
template <bool kBulk>
constexpr uint32_t kMergeWarps = kBulk ? 4 : 8;
template <bool kBulk>
constexpr uint32_t kThreads = (1 + kFoldWarps<kBulk> + kMergeWarps<kBulk>)*kWarp;
constexpr uint32_t kBulkBytes = (kFoldWarps<true> + kMergeWarps<true>)*kSumWarpBytes;

// By a crew. In: dtype of the addends, Out: of the sums.
template <bool kBulk, typename In, typename Out, typename Work>
__device__ void sum_all(const Summers& by, const Domain& d, const Work& work, uint32_t hidden, RingState& ring) {
  if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
    sum_rows_bulk(by, d, work, hidden * 2, ring);
#endif
  } else {
    sum_rows<In, Out>(by, d, work, hidden);
  }
}

// By both crews: the one that folds joins the other when it has done so.
template <bool kBulk, typename Row, typename Wire>
__device__ void merge_all(const Crew& crew, bool has_folded, const Domain& d, const Op& op, const PlanView& plan,
                          const CombineArgs& args, RingState& ring) {
  const StepClock clock(crew, d, Step::kMerge, has_folded ? gridDim.x : 0);
  const Merge merge(d, op, plan, args);
  if (!has_folded) merge.fill_empty(crew);
  sum_all<kBulk, Wire, Row>({crew, kMergeWarps<kBulk>, has_folded}, d, merge, args.hidden, ring);
  if (!has_folded) finish_merge(crew, d, op, plan, args);
  clock.stop();
}

__device__ void finish(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan, const CombineArgs& args) {
  if (!last_block(crew, d, Arrival::kMerged, gridDim.x)) return;
  if (crew.thread == 0) {
    keep(d, op, OpKind::kCombine);
    put_back(d, Taken::kFolded);
    put_back(d, Taken::kMerged);
  }
  if (going(crew, d)) {
    publish_all(crew, d, d.at.merged, op.epoch);
    return;
  }
  fill_nan(crew, args.out, uint64_t{plan.num_tokens} * args.hidden * dtype_bytes(args.dtype));
  if (args.values != nullptr) fill_nan(crew, args.values, args.value_bytes);
}

template <bool kBulk, typename Row, typename Wire>
__global__ void __launch_bounds__(kThreads<kBulk>, 1)
    combine(const __grid_constant__ Domain d, const __grid_constant__ PlanView plan,
            const __grid_constant__ CombineArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ FoldRange range;
  __shared__ __align__(8) uint64_t barriers[(kFoldWarps<true> + kMergeWarps<true>)*kRing];  // of bulk copies
  constexpr uint32_t kFold = kFoldWarps<kBulk>, kMerge = kMergeWarps<kBulk>;
  const Op op = enter(d, OpKind::kCombine);
  const uint32_t warp = threadIdx.x / kWarp;
  if (warp == 0) {
    const Crew crew = Crew::of(1, 0, 1);
    find_fold_range(crew, d, plan, args, range);
    if (blockIdx.x == 0 && going(crew, d)) {
      if (crew.thread == 0) write_header(d, op, args.signature, plan.num_tokens);
      crew.sync();
      publish_all(crew, d, d.at.header_full, op.epoch);
    }
  }
  __syncthreads();
  if (warp == 0) {
    const Crew crew = Crew::of(1, 0, 1);
    if (blockIdx.x == 0 && going(crew, d)) {
      tell_empty_chunks(crew, d, op, plan, range);
      all_alike(crew, d, op.epoch);
    }
  } else {
    const bool folds = warp <= kFold;
    const Crew crew = folds ? Crew::of(2, 1, kFold) : Crew::of(3, 1 + kFold, kMerge);
    RingState ring{shared + (warp - 1) * kSumWarpBytes, barriers + (warp - 1) * kRing};
#if __CUDA_ARCH__ >= 900
    if (kBulk) begin_ring(ring, crew.lane());
#endif
    bool good = going(crew, d);
    if (folds) {
      // The pieces of the last combine must have been merged.
      good = good && wait_all(crew, d, d.at.merged, op.free_after, Step::kFold);
      if (good) {
        const StepClock clock(crew, d, Step::kFold);
        sum_all<kBulk, Row, Wire>({crew, kFold, false}, d, Fold{d, op, plan, args, range}, args.hidden, ring);
        finish_fold(crew, d, op, plan, args);
        clock.stop();
      }
    }
    if (good) merge_all<kBulk, Row, Wire>(crew, folds, d, op, plan, args, ring);
  }
  __syncthreads();  // what the other crews have found counts
  if (warp > kFold) finish(Crew::of(3, 1 + kFold, kMerge), d, op, plan, args);
}

template <bool kBulk, typename Row, typename Wire>
void launch(const Domain& domain, const PlanView& plan, const CombineArgs& args, uint32_t num_sms,
            cudaStream_t stream) {
  combine<kBulk, Row, Wire><<<num_sms, kThreads<kBulk>, kBulk ? kBulkBytes : 0, stream>>>(domain, plan, args);
}

}  // namespace

cudaError_t launch_combine(const Domain& domain, const PlanView& plan, const CombineArgs& args, uint32_t num_sms,
                           cudaStream_t stream) {
  if (args.dtype == Dtype::kFp32)
    launch<false, float, float>(domain, plan, args, num_sms, stream);
  else if (args.wire == Dtype::kFp32)
    launch<false, uint16_t, float>(domain, plan, args, num_sms, stream);
  else if (!domain.bulk_copies || domain.shared_bytes < kBulkBytes)
    launch<false, uint16_t, uint16_t>(domain, plan, args, num_sms, stream);
  else
    launch<true, uint16_t, uint16_t>(domain, plan, args, num_sms, stream);
  return cudaGetLastError();
}

cudaError_t load_combine(uint32_t shared_bytes) {
  return load_all(shared_bytes, combine<false, float, float>, combine<false, uint16_t, float>,
                  combine<false, uint16_t, uint16_t>, combine<true, uint16_t, uint16_t>);
}

}  // namespace uccl_ep::cuda
