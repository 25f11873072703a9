// Merge: sums the pieces that the domain's ranks put into our memory into the output, ranks ascending.
#include "backend/cuda/device.cuh"
#include "backend/cuda/steps.h"
#include "backend/cuda/sum.cuh"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarp;

// Our tokens, as sums of the pieces that came back; none for a token that no expert got.
struct Merge {
  const Domain& d;
  const PlanView& plan;
  const MergeArgs& args;
  const OpState& op;
  bool reports;
  uint32_t token, first, count;

  __device__ uint32_t end() const { return plan.num_tokens; }
  __device__ bool find(uint32_t n) {
    token = n;
    first = plan.piece_begin[n];
    count = plan.piece_begin[n + 1] - first;
    return true;
  }
  // By a warp: the chunks that hold the token's pieces have arrived, a piece a lane.
  __device__ bool wait(uint32_t) const {
    if (!args.by_chunk) return true;
    bool good = true;
    for (uint32_t i = threadIdx.x % kWarp; i < count; i += kWarp) {
      const uint32_t piece = plan.piece_rows[first + i];
      uint32_t from = 0;
      while (plan.sent_begin[from + 1] <= piece) ++from;
      const uint32_t chunk = (piece - plan.sent_begin[from]) / kRowsPerChunk;
      good &= wait_flag(d, folded(d, d.rank, from) + chunk, op.epoch, Step::kMerge, static_cast<int>(from),
                        static_cast<int>(chunk));
    }
    proxy_fence();
    return __all_sync(kFullWarp, good);
  }
  __device__ const uint8_t* addend(uint32_t i) const {
    return at<uint8_t>(d, d.rank, d.at.pieces) +
           uint64_t{plan.piece_rows[first + i]} * args.hidden * dtype_bytes(args.wire);
  }
  __device__ uint8_t* out() const { return args.out + uint64_t{token} * args.hidden * dtype_bytes(args.dtype); }
  __device__ void complete(uint32_t) const {}
};

__device__ void finish_merge(const Domain& d, const PlanView& plan, const OpState& op, const MergeArgs& args) {
  if (args.values != nullptr && wait_all(d, at<uint64_t>(d, d.rank, d.at.folded_all), op.epoch, Step::kMerge))
    for (uint32_t p = blockIdx.x * blockDim.x + threadIdx.x; p < plan.sent_pairs; p += gridDim.x * blockDim.x)
      args.values[plan.pair_place[p]] = at<float>(d, d.rank, d.at.piece_values)[p];
  if (!last_block(d, Kernel::kMerge)) return;
  if (!stopped(d)) {
    publish_all(d, d.at.merged, op.epoch);
    return;
  }
  fill_nan(args.out, uint64_t{plan.num_tokens} * args.hidden * dtype_bytes(args.dtype));
  if (args.values != nullptr) fill_nan(args.values, args.value_bytes);
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads, 1)
    merge(const __grid_constant__ Domain d, const PlanView plan, const MergeArgs args) {
  const OpState op = local(d).op;
  const uint32_t lane = threadIdx.x % kWarp;
  Merge m{d, plan, args, op, false, 0, 0, 0};
  for (uint32_t n = threadIdx.x / kWarp * gridDim.x + blockIdx.x; n < plan.num_tokens; n += gridDim.x * kWarps) {
    m.find(n);
    if (!m.wait(n)) break;
    sum_row(
        args.hidden, lane, m.count, [&](uint32_t i) { return reinterpret_cast<const In*>(m.addend(i)); },
        reinterpret_cast<Out*>(m.out()));
  }
  finish_merge(d, plan, op, args);
}

__global__ void __launch_bounds__(kSumWarps* kWarp, 1)
    merge_bulk(const __grid_constant__ Domain d, const PlanView plan, const MergeArgs args) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  const OpState op = local(d).op;
  sum_rows_bulk(Merge{d, plan, args, op, false, 0, 0, 0}, args.hidden * 2, blockIdx.x, gridDim.x, shared);
  finish_merge(d, plan, op, args);
#endif
}

// One block: all pieces have arrived.
__global__ void await_pieces(const __grid_constant__ Domain d) {
  wait_all(d, at<uint64_t>(d, d.rank, d.at.folded_all), local(d).op.epoch, Step::kMerge);
}

}  // namespace

cudaError_t launch_merge(const Domain& domain, const PlanView& plan, const MergeArgs& args, uint32_t num_sms,
                         cudaStream_t stream) {
  if (args.dtype == Dtype::kFp32)
    merge<float, float><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else if (args.wire == Dtype::kFp32)
    merge<float, uint16_t><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else if (!domain.bulk_copies || domain.shared_bytes < kSumBytes)
    merge<uint16_t, uint16_t><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else if (const cudaError_t status = cudaFuncSetAttribute(merge_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                           static_cast<int>(kSumBytes));
           status != cudaSuccess)
    return status;
  else
    merge_bulk<<<num_sms, kSumWarps * kWarp, kSumBytes, stream>>>(domain, plan, args);
  return cudaGetLastError();
}

cudaError_t launch_await_pieces(const Domain& domain, cudaStream_t stream) {
  await_pieces<<<1, kMaxDomainRanks, 0, stream>>>(domain);
  return cudaGetLastError();
}

cudaError_t load_merge() {
  return load_all(merge<float, float>, merge<float, uint16_t>, merge<uint16_t, uint16_t>, merge_bulk, await_pieces,
                  await_pieces);
}

}  // namespace uccl_ep::cuda
