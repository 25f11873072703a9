// In place of csrc/backend/cuda/warp.cuh: as many lanes as the program was compiled for.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

namespace uccl_ep::cuda {

constexpr uint32_t kWarp = cuda_on_cpu::kWarp;
using LaneMask = cuda_on_cpu::LaneMask;
constexpr LaneMask kFullWarp = ~LaneMask{0};

inline LaneMask ballot(bool yes) { return __ballot_sync(kFullWarp, yes); }
inline uint32_t lowest_lane(LaneMask lanes) { return static_cast<uint32_t>(std::countr_zero(lanes)); }

}  // namespace uccl_ep::cuda
