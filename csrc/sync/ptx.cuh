// What CUDA C++ has no words for, instruction by instruction: all of the project's PTX but bulk copies
// (backend/cuda/bulk.cuh). Who uses them states the order; a test puts a CPU's in their place.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace uccl_ep::cuda::ptx {

// ---- global memory: named order_scope -------------------------------------------------------------------------------
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t load_relaxed_system(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_relaxed_gpu(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_system(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed_system(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
// One transaction; either word may be seen first.
__device__ __forceinline__ void store_two_relaxed_system(uint64_t* to, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}
__device__ __forceinline__ void store_release_gpu(uint64_t* to, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
// Return what was there before.
__device__ __forceinline__ uint32_t add_one_acq_rel_gpu(uint32_t* to) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(to) : "memory");
  return before;
}
__device__ __forceinline__ uint32_t add_release_gpu(uint32_t* to, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}
__device__ __forceinline__ void fence_acq_rel_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- shared memory of a block ---------------------------------------------------------------------------------------
__device__ __forceinline__ void add_one_release_block(uint32_t* to) {
  asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to)))
               : "memory");
}
// True: the word was 0 and is `value` now.
__device__ __forceinline__ bool put_release_block(uint32_t* to, uint32_t value) {
  uint32_t before;
  asm volatile("atom.release.cta.shared.cas.b32 %0, [%1], 0, %2;"
               : "=r"(before)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "r"(value)
               : "memory");
  return before == 0;
}
// What was there; it is 0 now.
__device__ __forceinline__ uint32_t take_acquire_block(uint32_t* from) {
  uint32_t value;
  asm volatile("atom.acquire.cta.shared.exch.b32 %0, [%1], 0;"
               : "=r"(value)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from)))
               : "memory");
  return value;
}
// An atomic, too, which tells compute-sanitizer that it is meant.
__device__ __forceinline__ uint32_t load_acquire_block(uint32_t* from) {
  uint32_t value;
  asm volatile("atom.acquire.cta.shared.or.b32 %0, [%1], 0;"
               : "=r"(value)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from)))
               : "memory");
  return value;
}

// ---- a warp --------------------------------------------------------------------------------------------------------
// By a whole warp: true in one lane, always the same one. Of `lane == 0` the compiler does not know that it is one.
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

// ---- barriers of some warps of a block, `size` threads
// ----------------------------------------------------------------
__device__ __forceinline__ void barrier(uint32_t id, uint32_t size) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(size) : "memory");
}
// The same; whether all have said so.
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

// ---- conversions of two values, the first in the low half -----------------------------------------------------------
// Round to nearest even. Of a NaN they make another.
__device__ __forceinline__ uint32_t to_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// Saturates.
__device__ __forceinline__ uint16_t to_e4m3(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
// Exact: FP16 has more of everything.
__device__ __forceinline__ float2 from_e4m3(uint16_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return __half22float2(*reinterpret_cast<__half2*>(&halves));
}

// ---- time -----------------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

}  // namespace uccl_ep::cuda::ptx
