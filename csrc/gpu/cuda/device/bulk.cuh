// Bulk copies between global and shared memory (sm_90). One thread issues them, and the copy engine of the SM moves the
// bytes. An mbarrier in shared memory says when a load is complete. Addresses and sizes are multiples of 16 bytes.
#pragma once

#include <cstdint>

namespace uccl_ep::gpu {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// By one thread, before others use them: fence_barriers() and a barrier of the threads follow.
__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// `to` and `barrier`: addresses in shared memory.
__device__ __forceinline__ void load_bulk(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(num_bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void load_bulk(void* to, const void* from, uint32_t num_bytes, uint64_t* barrier) {
  load_bulk(shared_address(to), from, num_bytes, shared_address(barrier));
}
// Waits until the barrier's use of that parity is complete.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Waits until the barrier's `lap`-th use is complete.
__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t lap) {
  wait_barrier(shared_address(barrier), lap & 1);
}
// `from`: address in shared memory.
__device__ __forceinline__ void store_bulk(void* to, uint32_t from, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ void store_bulk(void* to, const void* from, uint32_t num_bytes) {
  store_bulk(to, shared_address(from), num_bytes);
}
__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kGroups groups of this thread's stores still read shared memory.
template <int kGroups>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
// Waits until all but the last kGroups groups of this thread's stores are complete.
template <int kGroups>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}
// Orders this thread's earlier accesses to shared memory before its later bulk copies.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace uccl_ep::gpu
