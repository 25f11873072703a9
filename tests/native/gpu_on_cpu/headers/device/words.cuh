// In place of device/words.cuh: a CPU's instructions under the same names.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <ctime>
#include <string>

#include "lanes.h"

namespace uccl_ep::gpu::device {

using gpu_on_cpu::act;
using gpu_on_cpu::look;

// What is read may be waited for, so others run first.
template <typename T>
T load(const T* from, int order) {
  look();
  return order == __ATOMIC_ACQUIRE ? __atomic_load_n(from, __ATOMIC_ACQUIRE) : __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline uint64_t load_acquire_system(const uint64_t* from) { return load(from, __ATOMIC_ACQUIRE); }
inline uint64_t load_relaxed_system(const uint64_t* from) { return load(from, __ATOMIC_RELAXED); }
inline uint32_t load_acquire_gpu(const uint32_t* from) { return load(from, __ATOMIC_ACQUIRE); }
inline uint32_t load_relaxed_gpu(const uint32_t* from) { return load(from, __ATOMIC_RELAXED); }
inline uint32_t load_acquire_block(uint32_t* from) { return load(from, __ATOMIC_ACQUIRE); }

// Such words are flags: contract 6.
inline void only_grows(const uint64_t* flag, uint64_t value) {
  const uint64_t before = __atomic_load_n(flag, __ATOMIC_RELAXED);
  if (value < before)
    gpu_on_cpu::fail("a flag goes back from " + std::to_string(before) + " to " + std::to_string(value));
}
inline void store_release_system(uint64_t* to, uint64_t value) {
  act();
  only_grows(to, value);
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
inline void store_relaxed_system(uint64_t* to, uint64_t value) {
  act();
  only_grows(to, value);
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
}
inline void store_two_relaxed_system(uint64_t* to, uint64_t first, uint64_t second) {
  act();
  const bool swapped = gpu_on_cpu::random_number() % 2 != 0;
  __atomic_store_n(to + swapped, swapped ? second : first, __ATOMIC_RELAXED);
  act();
  __atomic_store_n(to + !swapped, swapped ? first : second, __ATOMIC_RELAXED);
}
inline void store_release_gpu(uint64_t* to, uint64_t value) { store_release_system(to, value); }
inline uint32_t add_one_acq_rel_gpu(uint32_t* to) {
  act();
  return __atomic_fetch_add(to, 1u, __ATOMIC_ACQ_REL);
}
inline uint32_t add_release_gpu(uint32_t* to, uint32_t value) {
  act();
  return __atomic_fetch_add(to, value, __ATOMIC_RELEASE);
}
inline void add_one_release_block(uint32_t* to) { add_release_gpu(to, 1); }
inline bool put_release_block(uint32_t* to, uint32_t value) {
  act();
  uint32_t before = 0;
  return __atomic_compare_exchange_n(to, &before, value, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}
inline uint32_t take_acquire_block(uint32_t* from) {
  act();
  look();
  return __atomic_exchange_n(from, 0u, __ATOMIC_ACQUIRE);
}
inline void fence_acq_rel_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void fence_acq_rel_gpu() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void fence_proxy_async_global() {}

template <typename T>
T load_past_l1(const T* from) {
  return *from;
}
template <typename T>
T load_once(const T* from) {
  return *from;
}

inline uint64_t globaltimer() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}
inline void pause_nsec(uint32_t) { look(); }

}  // namespace uccl_ep::gpu::device
