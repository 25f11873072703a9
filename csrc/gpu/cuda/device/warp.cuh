// The lanes of a warp, and sets of them. No other file says how many there are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace uccl_ep::gpu {

constexpr uint32_t kWarp = 32;
using LaneMask = uint32_t;  // a bit each
constexpr LaneMask kFullWarp = ~LaneMask{0};

// By a warp: the lanes that say yes.
__device__ __forceinline__ LaneMask ballot(bool yes) { return __ballot_sync(kFullWarp, yes); }
// The lowest of some lanes; there is at least one.
__device__ __forceinline__ uint32_t lowest_lane(LaneMask lanes) { return __ffs(static_cast<int>(lanes)) - 1; }
// By a whole warp.
__device__ __forceinline__ uint32_t warp_max(uint32_t value) { return __reduce_max_sync(kFullWarp, value); }
__device__ __forceinline__ uint32_t warp_min(uint32_t value) { return __reduce_min_sync(kFullWarp, value); }

// threadIdx.x where it is needed next after long: it takes no register until then.
__device__ __forceinline__ uint32_t thread_again() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
// By a whole warp: true in one lane, always the same one. The compiler does not know that `lane == 0` is true in one
// lane only.
__device__ __forceinline__ bool elect() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred is;\n"
      "elect.sync _|is, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, is;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace uccl_ep::gpu
