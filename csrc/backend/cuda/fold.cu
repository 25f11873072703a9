// Fold: at the expert, sums a token's rows of this rank in fp32 and puts one row into its source's piece memory.
#include "backend/cuda/device.cuh"
#include "backend/cuda/steps.h"
#include "backend/cuda/sum.cuh"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarp;

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads, 1)
    fold(const __grid_constant__ Domain d, const PlanView plan, const FoldArgs args) {
  const OpState op = local(d).op;
  // The pieces of the last combine must have been merged.
  if (!wait_all(d, at<uint64_t>(d, d.rank, d.at.merged), op.free_after, Step::kFold)) return;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t ranks = d.at.num_ranks;
  uint32_t most = 0;
  for (uint32_t r = 0; r < ranks; ++r) most = max(most, plan.row_begin[r + 1] - plan.row_begin[r]);
  const In* const in = reinterpret_cast<const In*>(args.rows);
  for (uint32_t n = threadIdx.x / kWarp * gridDim.x + blockIdx.x; n < most * ranks; n += gridDim.x * kWarps) {
    const uint32_t source = rotated(d, n % ranks);
    const uint32_t row = plan.row_begin[source] + n / ranks;
    if (row >= plan.row_begin[source + 1]) continue;
    const uint32_t first = plan.row_slot[row], last = plan.row_slot[row + 1];
    Out* const out = at<Out>(d, source, d.at.pieces) + uint64_t{plan.piece_base[source] + n / ranks} * args.hidden;
    sum_row(
        args.hidden, lane, last - first, [&](uint32_t i) { return in + uint64_t{plan.slots[first + i]} * args.hidden; },
        out);
    if (args.row_values != nullptr && lane < last - first)
      for (uint32_t s = first + lane; s < last; s += kWarp)
        at<float>(d, source, d.at.piece_values)[plan.row_pair[row] + s - first] = args.row_values[plan.slots[s]];
  }
  if (last_block(d, Kernel::kFold) && !stopped(d)) publish_all(d, d.at.folded, op.epoch);
}

}  // namespace

cudaError_t launch_fold(const Domain& domain, const PlanView& plan, const FoldArgs& args, uint32_t num_sms,
                        cudaStream_t stream) {
  if (args.dtype == Dtype::kFp32)
    fold<float, float><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else if (args.wire == Dtype::kFp32)
    fold<uint16_t, float><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else
    fold<uint16_t, uint16_t><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  return cudaGetLastError();
}

cudaError_t load_fold() { return load_all(fold<float, float>, fold<uint16_t, float>, fold<uint16_t, uint16_t>); }

}  // namespace uccl_ep::cuda
