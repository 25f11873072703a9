// Loads, stores and fences of one order and scope, and the GPU's clock, for which CUDA C++ has no functions. Their
// callers state which order they rely on.
#pragma once

#include <cstdint>

namespace uccl_ep::gpu::device {

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

// Past the L1 cache: what other blocks of this GPU have written.
template <typename T>
__device__ __forceinline__ T load_past_l1(const T* from) {
  return __ldcg(from);
}
// For what is read once.
template <typename T>
__device__ __forceinline__ T load_once(const T* from) {
  return __ldcs(from);
}

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
// Also an atomic, which tells compute-sanitizer that the access is meant.
__device__ __forceinline__ uint32_t load_acquire_block(uint32_t* from) {
  uint32_t value;
  asm volatile("atom.acquire.cta.shared.or.b32 %0, [%1], 0;"
               : "=r"(value)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from)))
               : "memory");
  return value;
}

// ---- time -----------------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}
// Pauses for about `nsec`, at most a millisecond. Other warps of the SM run meanwhile.
__device__ __forceinline__ void pause_nsec(uint32_t nsec) { __nanosleep(nsec); }

}  // namespace uccl_ep::gpu::device
