// Fold: at the expert, sums a token's rows of this rank in fp32 and puts one row into its source's piece memory.
#include "backend/cuda/device.cuh"
#include "backend/cuda/steps.h"
#include "backend/cuda/sum.cuh"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarp;

// The rows that came here, as sums. Row n is the (n / ranks)-th of the source that is (n % ranks)-th after us.
struct Fold {
  const Domain& d;
  const PlanView& plan;
  const FoldArgs& args;
  const OpState& op;
  bool reports;
  uint32_t source, number, row, first, count;

  __device__ uint32_t end() const {
    uint32_t most = 0;
    for (uint32_t r = 0; r < d.at.num_ranks; ++r) most = max(most, plan.row_begin[r + 1] - plan.row_begin[r]);
    return most * d.at.num_ranks;
  }
  __device__ bool find(uint32_t n) {
    source = rotated(d, n % d.at.num_ranks);
    number = n / d.at.num_ranks;
    row = plan.row_begin[source] + number;
    if (row >= plan.row_begin[source + 1]) return false;
    first = plan.row_slot[row];
    count = plan.row_slot[row + 1] - first;
    return true;
  }
  __device__ bool wait(uint32_t) const { return true; }
  __device__ const uint8_t* addend(uint32_t i) const {
    return args.rows + uint64_t{plan.slots[first + i]} * args.hidden * dtype_bytes(args.dtype);
  }
  __device__ uint8_t* out() const {
    return at<uint8_t>(d, source, d.at.pieces) +
           uint64_t{plan.piece_base[source] + number} * args.hidden * dtype_bytes(args.wire);
  }
  // One of a chunk of pieces is in its source's memory: the last tells the source.
  __device__ void complete(uint32_t n) const {
    const uint32_t to = rotated(d, n % d.at.num_ranks), chunk = n / d.at.num_ranks / kRowsPerChunk;
    const uint32_t rows = plan.row_begin[to + 1] - plan.row_begin[to];
    uint32_t* const counter = at<uint32_t>(d, d.rank, d.at.chunk_counts) + to * max_chunks(d) + chunk;
    if (count_last(counter, min(kRowsPerChunk, rows - chunk * kRowsPerChunk)))
      publish_flag(folded(d, to, d.rank) + chunk, op.epoch);
  }
};

// Weights' gradients, after the rows; then every source learns that it has all of both.
__device__ void finish_fold(const Domain& d, const PlanView& plan, const OpState& op, const FoldArgs& args) {
  if (args.row_values != nullptr)
    for (uint32_t source = 0; source < d.at.num_ranks; ++source)
      for (uint32_t row = plan.row_begin[source] + blockIdx.x * blockDim.x + threadIdx.x;
           row < plan.row_begin[source + 1]; row += gridDim.x * blockDim.x)
        for (uint32_t s = plan.row_slot[row]; s < plan.row_slot[row + 1]; ++s)
          at<float>(d, source, d.at.piece_values)[plan.row_pair[row] + s - plan.row_slot[row]] =
              args.row_values[plan.slots[s]];
  if (last_block(d, Kernel::kFold) && !stopped(d)) publish_all(d, d.at.folded_all, op.epoch);
}

// Plain loads: for every architecture and every dtype.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads, 1)
    fold(const __grid_constant__ Domain d, const PlanView plan, const FoldArgs args) {
  const OpState op = local(d).op;
  // The pieces of the last combine must have been merged.
  if (!wait_all(d, at<uint64_t>(d, d.rank, d.at.merged), op.free_after, Step::kFold)) return;
  const uint32_t lane = threadIdx.x % kWarp;
  Fold f{d, plan, args, op, args.by_chunk};
  const uint32_t end = f.end();
  for (uint32_t n = threadIdx.x / kWarp * gridDim.x + blockIdx.x; n < end; n += gridDim.x * kWarps) {
    if (!f.find(n)) continue;
    sum_row(
        args.hidden, lane, f.count, [&](uint32_t i) { return reinterpret_cast<const In*>(f.addend(i)); },
        reinterpret_cast<Out*>(f.out()));
    if (!f.reports) continue;
    __threadfence_system();
    __syncwarp();
    if (lane == 0) f.complete(n);
  }
  finish_fold(d, plan, op, args);
}

__global__ void __launch_bounds__(kSumWarps* kWarp, 1)
    fold_bulk(const __grid_constant__ Domain d, const PlanView plan, const FoldArgs args) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  const OpState op = local(d).op;
  if (!wait_all(d, at<uint64_t>(d, d.rank, d.at.merged), op.free_after, Step::kFold)) return;
  sum_rows_bulk(Fold{d, plan, args, op, args.by_chunk}, args.hidden * 2, blockIdx.x, gridDim.x, shared);
  finish_fold(d, plan, op, args);
#endif
}

}  // namespace

cudaError_t launch_fold(const Domain& domain, const PlanView& plan, const FoldArgs& args, uint32_t num_sms,
                        cudaStream_t stream) {
  if (args.dtype == Dtype::kFp32)
    fold<float, float><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else if (args.wire == Dtype::kFp32)
    fold<uint16_t, float><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else if (!domain.bulk_copies || domain.shared_bytes < kSumBytes)
    fold<uint16_t, uint16_t><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else if (const cudaError_t status = cudaFuncSetAttribute(fold_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                           static_cast<int>(kSumBytes));
           status != cudaSuccess)
    return status;
  else
    fold_bulk<<<num_sms, kSumWarps * kWarp, kSumBytes, stream>>>(domain, plan, args);
  return cudaGetLastError();
}

cudaError_t load_fold() {
  return load_all(fold<float, float>, fold<uint16_t, float>, fold<uint16_t, uint16_t>, fold_bulk);
}

}  // namespace uccl_ep::cuda
