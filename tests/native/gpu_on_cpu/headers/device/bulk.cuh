// In place of device/bulk.cuh: bulk copies that are over some time later.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace uccl_ep::gpu {

using gpu_on_cpu::commit_stores;
using gpu_on_cpu::load_bulk;
using gpu_on_cpu::shared_address;
using gpu_on_cpu::store_bulk;
using gpu_on_cpu::wait_barrier;

inline void init_barrier(uint64_t* barrier) { gpu_on_cpu::init_barrier(shared_address(barrier), 1); }
inline void fence_barriers() {}
inline void load_bulk(void* to, const void* from, uint32_t num_bytes, uint64_t* barrier) {
  load_bulk(shared_address(to), from, num_bytes, shared_address(barrier));
}
inline void wait_barrier(uint64_t* barrier, uint32_t lap) { wait_barrier(shared_address(barrier), lap & 1); }
inline void store_bulk(void* to, const void* from, uint32_t num_bytes) {
  store_bulk(to, shared_address(from), num_bytes);
}
inline uint4 load_shared(uint32_t from) { return *static_cast<const uint4*>(gpu_on_cpu::shared_pointer(from)); }
inline void store_shared(uint32_t to, const uint4& v) { *static_cast<uint4*>(gpu_on_cpu::shared_pointer(to)) = v; }
template <int kGroups>
void wait_stores_read() {
  gpu_on_cpu::wait_stores(kGroups, true);
}
template <int kGroups>
void wait_stores() {
  gpu_on_cpu::wait_stores(kGroups, false);
}
inline void fence_shared() {}

}  // namespace uccl_ep::gpu
