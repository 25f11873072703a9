// Fold: at the expert, sums a token's rows of this rank in fp32 and puts one row into its source's piece memory.
#include "backend/cuda/bulk.cuh"
#include "backend/cuda/device.cuh"
#include "backend/cuda/steps.h"
#include "backend/cuda/sum.cuh"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarp;

// A row that comes from `source`, the `number`-th of those; its slots are [first, last).
struct Folded {
  uint32_t source, number, row, first, last;
  bool exists;
};
__device__ __forceinline__ Folded nth_row(const Domain& d, const PlanView& plan, uint32_t n) {
  Folded f{};
  f.source = rotated(d, n % d.at.num_ranks);
  f.number = n / d.at.num_ranks;
  f.row = plan.row_begin[f.source] + f.number;
  f.exists = f.row < plan.row_begin[f.source + 1];
  if (f.exists) {
    f.first = plan.row_slot[f.row];
    f.last = plan.row_slot[f.row + 1];
  }
  return f;
}
__device__ uint32_t most_rows(const Domain& d, const PlanView& plan) {
  uint32_t most = 0;
  for (uint32_t r = 0; r < d.at.num_ranks; ++r) most = max(most, plan.row_begin[r + 1] - plan.row_begin[r]);
  return most * d.at.num_ranks;
}
template <typename Out>
__device__ __forceinline__ Out* piece_of(const Domain& d, const PlanView& plan, const FoldArgs& args, const Folded& f) {
  return at<Out>(d, f.source, d.at.pieces) + uint64_t{plan.piece_base[f.source] + f.number} * args.hidden;
}

__device__ void finish_fold(const Domain& d, const PlanView& plan, const OpState& op, const FoldArgs& args) {
  if (args.row_values != nullptr)
    for (uint32_t source = 0; source < d.at.num_ranks; ++source)
      for (uint32_t row = plan.row_begin[source] + blockIdx.x * blockDim.x + threadIdx.x;
           row < plan.row_begin[source + 1]; row += gridDim.x * blockDim.x)
        for (uint32_t s = plan.row_slot[row]; s < plan.row_slot[row + 1]; ++s)
          at<float>(d, source, d.at.piece_values)[plan.row_pair[row] + s - plan.row_slot[row]] =
              args.row_values[plan.slots[s]];
  if (last_block(d, Kernel::kFold) && !stopped(d)) publish_all(d, d.at.folded, op.epoch);
}

// Plain loads: for every architecture and every dtype.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads, 1)
    fold(const __grid_constant__ Domain d, const PlanView plan, const FoldArgs args) {
  const OpState op = local(d).op;
  // The pieces of the last combine must have been merged.
  if (!wait_all(d, at<uint64_t>(d, d.rank, d.at.merged), op.free_after, Step::kFold)) return;
  const uint32_t lane = threadIdx.x % kWarp;
  const In* const in = reinterpret_cast<const In*>(args.rows);
  const uint32_t end = most_rows(d, plan);
  for (uint32_t n = threadIdx.x / kWarp * gridDim.x + blockIdx.x; n < end; n += gridDim.x * kWarps) {
    const Folded f = nth_row(d, plan, n);
    if (!f.exists) continue;
    sum_row(
        args.hidden, lane, f.last - f.first,
        [&](uint32_t i) { return in + uint64_t{plan.slots[f.first + i]} * args.hidden; },
        piece_of<Out>(d, plan, args, f));
  }
  finish_fold(d, plan, op, args);
}

// Bulk copies, BF16: a warp walks over (row, segment, slot), a ring of segments in shared memory is filled ahead of the
// sum, and sums go out through two more.
constexpr uint32_t kSegment = 2048;  // bytes
constexpr uint32_t kRing = 6;
constexpr uint32_t kBulkWarps = 12;
constexpr uint32_t kVectors = kSegment / 16 / kWarp;
constexpr uint32_t kBulkBytes = kBulkWarps * (kRing + 2) * kSegment;

__global__ void __launch_bounds__(kBulkWarps* kWarp, 1)
    fold_bulk(const __grid_constant__ Domain d, const PlanView plan, const FoldArgs args) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) uint64_t barriers[kBulkWarps * kRing];
  const OpState op = local(d).op;
  if (!wait_all(d, at<uint64_t>(d, d.rank, d.at.merged), op.free_after, Step::kFold)) return;
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint8_t* const ring = shared + warp * (kRing + 2) * kSegment;
  uint8_t* const sums = ring + kRing * kSegment;
  uint64_t* const full = barriers + warp * kRing;
  if (lane == 0) {
    for (uint32_t i = 0; i < kRing; ++i) init_barrier(full + i);
    fence_barriers();
  }
  __syncwarp();

  const uint32_t row_bytes = args.hidden * 2;
  const uint32_t end = most_rows(d, plan), step = gridDim.x * kBulkWarps;
  const auto find = [&](uint32_t& n) {
    Folded f{};
    for (; n < end; n += step) {
      f = nth_row(d, plan, n);
      if (f.exists) break;
    }
    return f;
  };
  // Where the loads are.
  uint32_t load_n = warp * gridDim.x + blockIdx.x, load_at = 0, load_slot = 0, loaded = 0;
  Folded load_row = find(load_n);
  const auto load_next = [&] {
    if (load_n >= end) return;
    const uint32_t bytes = min(kSegment, row_bytes - load_at);
    if (lane == 0)
      load_bulk(ring + loaded % kRing * kSegment,
                args.rows + uint64_t{plan.slots[load_row.first + load_slot]} * row_bytes + load_at, bytes,
                full + loaded % kRing);
    ++loaded;
    if (++load_slot < load_row.last - load_row.first) return;
    load_slot = 0;
    load_at += kSegment;
    if (load_at < row_bytes) return;
    load_at = 0;
    load_n += step;
    load_row = find(load_n);
  };
  for (uint32_t i = 0; i < kRing - 1; ++i) load_next();
  uint32_t summed = 0, written = 0;
  for (uint32_t n = warp * gridDim.x + blockIdx.x; n < end; n += step) {
    const Folded f = find(n);
    if (!f.exists) break;
    uint8_t* const piece = reinterpret_cast<uint8_t*>(piece_of<uint16_t>(d, plan, args, f));
    for (uint32_t begin = 0; begin < row_bytes; begin += kSegment) {
      const uint32_t bytes = min(kSegment, row_bytes - begin);
      float sum[kVectors][8] = {};
      for (uint32_t slot = f.first; slot < f.last; ++slot) {
        wait_barrier(full + summed % kRing, summed / kRing);
        const uint16_t* const from = reinterpret_cast<const uint16_t*>(ring + summed % kRing * kSegment);
#pragma unroll
        for (uint32_t v = 0; v < kVectors; ++v) add_values(sum[v], from + (v * kWarp + lane) * 8);
        __syncwarp();
        ++summed;
        load_next();
      }
      uint16_t* const out = reinterpret_cast<uint16_t*>(sums + written % 2 * kSegment);
      if (lane == 0) wait_stores_read<1>();  // of the sums before the last
      __syncwarp();
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) put_values(sum[v], out + (v * kWarp + lane) * 8);
      fence_shared();
      __syncwarp();
      if (lane == 0) {
        store_bulk(piece + begin, out, bytes);
        commit_stores();
      }
      ++written;
    }
  }
  if (lane == 0) {
    wait_stores();
    proxy_fence();  // what bulk stores wrote is published by an ordinary one
  }
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
  else if (!domain.bulk_copies || domain.shared_bytes < kBulkBytes)
    fold<uint16_t, uint16_t><<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
  else if (const cudaError_t status = cudaFuncSetAttribute(fold_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                           static_cast<int>(kBulkBytes));
           status != cudaSuccess)
    return status;
  else
    fold_bulk<<<num_sms, kBulkWarps * kWarp, kBulkBytes, stream>>>(domain, plan, args);
  return cudaGetLastError();
}

cudaError_t load_fold() {
  return load_all(fold<float, float>, fold<uint16_t, float>, fold<uint16_t, uint16_t>, fold_bulk);
}

}  // namespace uccl_ep::cuda
