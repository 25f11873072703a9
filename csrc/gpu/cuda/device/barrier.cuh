// Barriers of some warps of a block: `size` threads, which name the same `id`, 1 .. 15.
#pragma once

#include <cstdint>

namespace uccl_ep::gpu::device {

__device__ __forceinline__ void barrier(uint32_t id, uint32_t size) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(size) : "memory");
}
// The same. True if `value` is true in all threads.
__device__ __forceinline__ bool barrier_and(uint32_t id, uint32_t size, bool value) {
  uint32_t result;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.u32 in, %3, 0;\n"
      "bar.red.and.pred out, %1, %2, in;\n"
      "selp.u32 %0, 1, 0, out;\n"
      "}"
      : "=r"(result)
      : "r"(id), "r"(size), "r"(static_cast<uint32_t>(value))
      : "memory");
  return result != 0;
}

}  // namespace uccl_ep::gpu::device
