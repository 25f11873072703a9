// Merge: sums the pieces that the domain's ranks put into our memory into the output, ranks ascending.
#include "backend/cuda/device.cuh"
#include "backend/cuda/steps.h"
#include "backend/cuda/sum.cuh"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarp;

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads, 1)
    merge(const __grid_constant__ Domain d, const PlanView plan, const MergeArgs args) {
  const OpState op = local(d).op;
  if (!wait_all(d, at<uint64_t>(d, d.rank, d.at.folded), op.epoch, Step::kMerge)) return;
  const uint32_t lane = threadIdx.x % kWarp;
  const In* const pieces = at<In>(d, d.rank, d.at.pieces);
  Out* const out = reinterpret_cast<Out*>(args.out);
  for (uint32_t t = threadIdx.x / kWarp * gridDim.x + blockIdx.x; t < plan.num_tokens; t += gridDim.x * kWarps) {
    const uint32_t first = plan.piece_begin[t], last = plan.piece_begin[t + 1];
    sum_row(
        args.hidden, lane, last - first,
        [&](uint32_t i) { return pieces + uint64_t{plan.piece_rows[first + i]} * args.hidden; },
        out + uint64_t{t} * args.hidden);
  }
  if (args.values != nullptr)
    for (uint32_t p = blockIdx.x * blockDim.x + threadIdx.x; p < plan.sent_pairs; p += gridDim.x * blockDim.x)
      args.values[plan.pair_place[p]] = at<float>(d, d.rank, d.at.piece_values)[p];
  if (last_block(d, Kernel::kMerge)) publish_all(d, d.at.merged, op.epoch);
}

__global__ void poison(const __grid_constant__ Domain d, uint32_t* rows, uint64_t row_words, uint32_t* values,
                       uint64_t value_words) {
  if (!stopped(d)) return;
  const uint64_t first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  for (uint64_t i = first; i < row_words; i += stride) rows[i] = 0xFFFFFFFFu;  // a NaN in every dtype
  for (uint64_t i = first; i < value_words; i += stride) values[i] = 0xFFFFFFFFu;
}

}  // namespace

cudaError_t launch_merge(const Domain& domain, const PlanView& plan, const MergeArgs& args, uint32_t num_sms,
                         cudaStream_t stream) {
  if (args.dtype == Dtype::kFp32)
    merge<float, float><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else if (args.wire == Dtype::kFp32)
    merge<float, uint16_t><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else
    merge<uint16_t, uint16_t><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  return cudaGetLastError();
}

cudaError_t launch_poison(const Domain& domain, void* rows, uint64_t row_bytes, void* values, uint64_t value_bytes,
                          cudaStream_t stream) {
  poison<<<8, kThreads, 0, stream>>>(domain, static_cast<uint32_t*>(rows), row_bytes / 4,
                                     static_cast<uint32_t*>(values), value_bytes / 4);
  return cudaGetLastError();
}

cudaError_t load_merge() {
  return load_all(merge<float, float>, merge<float, uint16_t>, merge<uint16_t, uint16_t>, poison);
}

}  // namespace uccl_ep::cuda
