// The lanes of a warp, and sets of them. No other file says how many there are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace uccl_ep::cuda {

constexpr uint32_t kWarp = 32;
using LaneMask = uint32_t;  // a bit each
constexpr LaneMask kFullWarp = ~LaneMask{0};

// By a warp: the lanes that say yes.
__device__ __forceinline__ LaneMask ballot(bool yes) { return __ballot_sync(kFullWarp, yes); }
// Of some lanes, one at least: the lowest.
__device__ __forceinline__ uint32_t lowest_lane(LaneMask lanes) { return __ffs(static_cast<int>(lanes)) - 1; }

}  // namespace uccl_ep::cuda
