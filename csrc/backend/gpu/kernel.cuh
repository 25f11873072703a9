// What a warp of a kernel knows: its crew, the operation, and the arguments of the launch.
#pragma once

#include "backend/gpu/map.cuh"
#include "backend/gpu/steps.h"
#include "backend/gpu/trace.cuh"
#include "device/barrier.cuh"
#include "device/warp.cuh"
#include "sync/device.cuh"

namespace uccl_ep::gpu {

// A block has at most 1,024 threads, so it has fewer warps if these have more lanes.
constexpr uint32_t warps_by_lanes(uint32_t of_32, uint32_t of_64) { return kWarp == 32 ? of_32 : of_64; }

// ---- crews ----------------------------------------------------------------------------------------------------------
// Warps of a block that do the same thing, beside other crews of the block.
struct Crew {
  uint32_t id;      // of its barrier, 1 .. 15
  uint32_t size;    // threads
  uint32_t thread;  // this one

  // Warps `first` to `first + count` of the block.
  static __device__ __forceinline__ Crew of(uint32_t id, uint32_t first, uint32_t count) {
    return {id, count * kWarp, threadIdx.x - first * kWarp};
  }
  __device__ __forceinline__ uint32_t lane() const { return thread % kWarp; }
  __device__ __forceinline__ uint32_t warp() const { return thread / kWarp; }
  __device__ __forceinline__ uint32_t warps() const { return size / kWarp; }
  __device__ __forceinline__ bool is_last_warp() const { return size - thread <= kWarp; }
  __device__ __forceinline__ void sync() const { device::barrier(id, size); }
  __device__ __forceinline__ bool all(bool good) const { return device::barrier_and(id, size, good); }
  __device__ __forceinline__ bool any(bool good) const { return !all(!good); }
};

__device__ __forceinline__ uint32_t warp_prefix(uint32_t value, uint32_t lane) {  // inclusive
#pragma unroll
  for (uint32_t o = 1; o < kWarp; o *= 2) {
    const uint32_t below = __shfl_up_sync(kFullWarp, value, o);
    if (lane >= o) value += below;
  }
  return value;
}
__device__ __forceinline__ uint32_t warp_sum(uint32_t value) {
  return __shfl_sync(kFullWarp, warp_prefix(value, threadIdx.x % kWarp), kWarp - 1);
}
// By a crew: the sum of all threads' values, in thread 0.
__device__ inline uint64_t crew_sum(const Crew& crew, uint64_t value) {
  __shared__ unsigned long long sums[16];
  if (crew.thread == 0) sums[crew.id] = 0;
  for (uint32_t o = kWarp / 2; o > 0; o /= 2) value += __shfl_xor_sync(kFullWarp, value, o);
  crew.sync();
  if (crew.lane() == 0) add_shared(&sums[crew.id], value);
  crew.sync();
  return sums[crew.id];
}

// ---- operations -----------------------------------------------------------------------------------------------------
// Windows of dispatches are numbered since the buffer's creation, and windows of combines. Windows use two halves of
// memory in turn: nothing may be written into a half before all is read that the window before the last left there.
struct KernelOp {
  uint64_t epoch;
  uint64_t first_window;  // its number

  __device__ __forceinline__ uint64_t window(uint32_t w) const { return first_window + w; }
  // The window that had the same half before; 0: none.
  __device__ __forceinline__ uint64_t free_after(uint32_t w) const {
    return window(w) > kHalves ? window(w) - kHalves : 0;
  }
  __device__ __forceinline__ uint32_t half(uint32_t w) const { return static_cast<uint32_t>(window(w) % kHalves); }
};
// By every thread of every block (of `num_threads`) of an operation's first kernel, before anything else. Each block
// works out `op`. It is in shared memory, because no thread has registers to spare for it.
__device__ __forceinline__ void enter(const Group& g, OpKind kind, KernelOp& op, uint32_t num_threads) {
  load_rank_tables(g, num_threads);
  if (threadIdx.x == 0) {
    const Progress& last = local(g).progress;
    op = {last.epoch + 1, 1 + (kind == OpKind::kCombine ? last.combine_windows : last.dispatch_windows)};
    local(g).entered = op.epoch;
  }
  __syncthreads();
}
// As enter(), in a later kernel of a dispatch.
__device__ __forceinline__ void enter_again(const Group& g, KernelOp& op, uint32_t num_threads) {
  load_rank_tables(g, num_threads);
  if (threadIdx.x == 0) {
    const Progress& last = local(g).progress;
    op = {last.epoch, 1 + last.dispatch_windows};
  }
  __syncthreads();
}

// The context of a warp: its kernel's arguments, its operation and the crew that it belongs to. The references are to
// shared memory and to `__grid_constant__` parameters, which are read from constant memory. A function that is not
// inlined takes a context by value: a context whose address another function knows has to lie in memory.
struct Kernel {
  const Group& g;
  const PlanView& plan;
  const KernelOp& op;
  Crew crew;
};
template <typename Args>
struct KernelWith : Kernel {
  const Args& args;

  // The same for another crew.
  __device__ __forceinline__ KernelWith by(const Crew& other) const { return {{g, plan, op, other}, args}; }
};
using DispatchKernel = KernelWith<PlaceArgs>;
using CombineKernel = KernelWith<KernelCombineArgs>;

// By one thread, when all blocks have entered: keeps what the next operation's enter() reads; and when an operation of
// `num_windows` windows is through.
__device__ __forceinline__ void keep_epoch(const Group& g, const KernelOp& op) { local(g).progress.epoch = op.epoch; }
__device__ __forceinline__ void keep_windows(const Group& g, const KernelOp& op, OpKind kind, uint32_t num_windows) {
  Progress& progress = local(g).progress;
  (kind == OpKind::kCombine ? progress.combine_windows : progress.dispatch_windows) = op.window(num_windows) - 1;
}

// By every thread of a crew: the time from here to stop() counts as the step's. Only one block measures it.
struct StepClock {
  const Group& g;
  const Step step;
  const bool counts;
  uint64_t started = 0;

  __device__ StepClock(const Kernel& k, Step s, uint32_t block = 0)
      : g(k.g), step(s), counts(blockIdx.x == block && k.crew.thread == 0) {
    if (counts) started = now_nsec();
  }
  __device__ void stop() const {
    if (!counts) return;
    const uint64_t now = now_nsec();
    const uint32_t what = static_cast<uint32_t>(step);
    local(g).step_nsec[what] += now - started;
    if (g.trace != nullptr)
      note(g, {started, now, local(g).entered, 0, static_cast<uint32_t>(TraceKind::kKernelStep), what});
  }
};

}  // namespace uccl_ep::gpu
