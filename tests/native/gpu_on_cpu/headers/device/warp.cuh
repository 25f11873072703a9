// In place of device/warp.cuh: as many lanes as the program was compiled for.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>

namespace uccl_ep::gpu {

constexpr uint32_t kWarp = gpu_on_cpu::kWarp;
using LaneMask = gpu_on_cpu::LaneMask;
constexpr LaneMask kFullWarp = ~LaneMask{0};

inline uint32_t thread_again() { return threadIdx.x; }
inline LaneMask ballot(bool yes) { return __ballot_sync(kFullWarp, yes); }
inline uint32_t lowest_lane(LaneMask lanes) { return static_cast<uint32_t>(std::countr_zero(lanes)); }

template <typename Choose>
uint32_t reduce(uint32_t value, Choose choose) {
  const uint64_t* const all = gpu_on_cpu::meet(gpu_on_cpu::Meeting::kReduce, kFullWarp, value);
  for (uint32_t i = 0; i < gpu_on_cpu::kWarp; ++i) value = choose(value, static_cast<uint32_t>(all[i]));
  return value;
}
inline uint32_t warp_min(uint32_t value) {
  return reduce(value, [](uint32_t a, uint32_t b) { return std::min(a, b); });
}
inline uint32_t warp_max(uint32_t value) {
  return reduce(value, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}

inline bool elect() {
  __syncwarp();
  return threadIdx.x % gpu_on_cpu::kWarp == 0;
}

}  // namespace uccl_ep::gpu
