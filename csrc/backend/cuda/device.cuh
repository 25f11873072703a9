// What the kernels share: where things lie, flags between GPUs, waiting with deadlines.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/layout.h"
#include "sync/device.cuh"

namespace uccl_ep::cuda {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

template <typename T>
__device__ __forceinline__ T* at(const Domain& d, uint32_t rank, uint64_t offset) {
  return reinterpret_cast<T*>(d.base[rank] + offset);
}
__device__ __forceinline__ Local& local(const Domain& d) { return *at<Local>(d, d.rank, d.at.local); }
__device__ __forceinline__ PlanScratch& scratch(const Domain& d) {
  return *at<PlanScratch>(d, d.rank, d.at.plan_scratch);
}
__device__ __forceinline__ uint32_t* slot_base(const Domain& d) { return reinterpret_cast<uint32_t*>(&scratch(d) + 1); }
__device__ __forceinline__ DeviceHeader& header(const Domain& d, uint32_t rank, uint64_t epoch) {
  return *at<DeviceHeader>(d, rank, d.at.headers + (epoch % kHalves) * d.at.header_bytes);
}
__device__ __forceinline__ uint32_t* header_counts(const Domain& d, uint32_t rank, uint64_t epoch) {
  return reinterpret_cast<uint32_t*>(&header(d, rank, epoch) + 1);
}
__device__ __forceinline__ ListEntry* list(const Domain& d, uint32_t rank, uint32_t half, uint32_t destination) {
  return at<ListEntry>(d, rank, d.at.lists) + (uint64_t{half} * d.at.num_ranks + destination) * d.at.max_tokens;
}
__device__ __forceinline__ PairEntry* pairs(const Domain& d, uint32_t rank, uint32_t half) {
  return at<PairEntry>(d, rank, d.at.pairs) + uint64_t{half} * d.at.max_pairs;
}
__device__ __forceinline__ float* values(const Domain& d, uint32_t rank, uint32_t half) {
  return at<float>(d, rank, d.at.values) + uint64_t{half} * d.at.max_pairs;
}
__device__ __forceinline__ uint8_t* rows(const Domain& d, uint32_t rank, uint32_t half) {
  return at<uint8_t>(d, rank, d.at.rows) + uint64_t{half} * d.at.max_tokens * d.at.row_bytes;
}
__device__ __forceinline__ uint32_t max_chunks(const Domain& d) { return d.at.max_tokens / kRowsPerChunk; }
__device__ __forceinline__ uint64_t* folded(const Domain& d, uint32_t owner, uint32_t folder) {
  return at<uint64_t>(d, owner, d.at.folded) + uint64_t{folder} * max_chunks(d);
}
__device__ __forceinline__ uint64_t* rows_full(const Domain& d, uint32_t owner, uint32_t source) {
  return at<uint64_t>(d, owner, d.at.rows_full) + uint64_t{source} * max_chunks(d);
}

__device__ __forceinline__ bool stopped(const Domain& d) { return read_flag(&local(d).stop) != 0; }

// The first fault of this rank; the host takes it from pinned memory and tells every rank.
__device__ inline void report(const Domain& d, DeviceFault code, Step step, int peer, int chunk, uint64_t expected,
                              uint64_t seen, ErrorKind kind) {
  if (take_claim(&d.error->claim)) {
    HostError& e = *d.error;
    e.kind = static_cast<uint32_t>(kind);
    e.step = static_cast<uint32_t>(step);
    e.peer = peer;
    e.chunk = chunk;
    e.epoch = local(d).op.epoch;
    e.expected = expected;
    e.seen = seen;
    e.code = static_cast<uint32_t>(code);
    publish_flag(&e.published, 1);
  }
  publish_flag(&local(d).stop, 1);
}

// By one thread. False: an error is known (perhaps this wait's own deadline) and the kernel has to return.
__device__ inline bool wait_flag(const Domain& d, const uint64_t* flag, uint64_t value, Step step, int peer,
                                 int chunk = -1, bool arrival = false) {
  uint64_t seen = read_flag(flag);
  if (seen >= value) return true;
  const uint64_t started = now_nsec();
  const uint64_t limit = arrival ? d.arrival_nsec : d.progress_nsec;
  for (uint32_t looks = 1;; ++looks) {
    seen = read_flag(flag);
    if (seen >= value) return true;
    if (looks % 64 != 0) continue;
    if (stopped(d)) return false;
    if (now_nsec() - started > limit) {
      report(d, DeviceFault::kTimeout, step, peer, chunk, value, seen,
             arrival ? ErrorKind::kArrivalTimeout : ErrorKind::kProgressTimeout);
      return false;
    }
  }
}
// By a whole block: thread s waits for flags[s] of every rank.
__device__ inline bool wait_all(const Domain& d, const uint64_t* flags, uint64_t value, Step step,
                                bool arrival = false) {
  bool good = true;
  for (uint32_t r = threadIdx.x; r < d.at.num_ranks; r += blockDim.x)
    good &= wait_flag(d, flags + r, value, step, static_cast<int>(r), -1, arrival);
  return __syncthreads_and(good);
}

enum class Kernel : uint32_t { kExchange, kStageValues, kPlace, kFold, kMerge };
// By a whole block, at the end of its work: true in the last block, when all blocks' writes are visible everywhere.
__device__ inline bool last_block(const Domain& d, Kernel kernel) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = arrive_last(&local(d).arrived[static_cast<uint32_t>(kernel)], gridDim.x * gridDim.y);
  }
  __syncthreads();
  return last;
}
// By a whole block: publishes flag number `rank` of every peer's `flags`.
__device__ inline void publish_all(const Domain& d, uint64_t flags, uint64_t value) {
  for (uint32_t r = threadIdx.x; r < d.at.num_ranks; r += blockDim.x)
    publish_flag(at<uint64_t>(d, r, flags) + d.rank, value);
}

// By a whole block: after an error, outputs hold nothing but NaN (all ones in every dtype).
__device__ inline void fill_nan(void* to, uint64_t num_bytes) {
  for (uint64_t i = threadIdx.x; i < num_bytes / 4; i += blockDim.x) static_cast<uint32_t*>(to)[i] = 0xFFFFFFFFu;
}

// The source that comes `i`-th after this rank: ranks start at different peers, so that no link is crowded.
__device__ __forceinline__ uint32_t rotated(const Domain& d, uint32_t i) {
  const uint32_t r = d.rank + 1 + i;
  return r < d.at.num_ranks ? r : r - d.at.num_ranks;
}

// Loads kernels on the current device. One that is loaded at its first launch may have to wait for kernels that run,
// and those for it (contract 12).
template <typename... Kernels>
cudaError_t load_all(Kernels... kernels) {
  cudaFuncAttributes attributes{};
  cudaError_t status = cudaSuccess;
  ((status = status == cudaSuccess ? cudaFuncGetAttributes(&attributes, kernels) : status), ...);
  return status;
}

}  // namespace uccl_ep::cuda
