// In place of device/barrier.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "lanes.h"

namespace uccl_ep::gpu::device {

inline void barrier(uint32_t id, uint32_t size) { gpu_on_cpu::meet_block(id, size, true); }
inline bool barrier_and(uint32_t id, uint32_t size, bool value) { return gpu_on_cpu::meet_block(id, size, value); }

}  // namespace uccl_ep::gpu::device
