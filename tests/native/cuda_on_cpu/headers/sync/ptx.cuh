// In place of csrc/sync/ptx.cuh: a CPU's instructions under the same names.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "lanes.h"

namespace uccl_ep::cuda::ptx {

using cuda_on_cpu::act;
using cuda_on_cpu::look;

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

inline void store_release_system(uint64_t* to, uint64_t value) {
  act();
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
inline void store_relaxed_system(uint64_t* to, uint64_t value) {
  act();
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
}
inline void store_two_relaxed_system(uint64_t* to, uint64_t first, uint64_t second) {
  act();
  const bool swapped = cuda_on_cpu::random_number() % 2 != 0;
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

inline bool elect() {
  __syncwarp();
  return threadIdx.x % cuda_on_cpu::kWarp == 0;
}

inline void barrier(uint32_t id, uint32_t size) { cuda_on_cpu::meet_block(id, size, true); }
inline bool barrier_and(uint32_t id, uint32_t size, bool value) { return cuda_on_cpu::meet_block(id, size, value); }

inline uint32_t to_bf16(float low, float high) {
  const auto convert = [](float value) -> uint32_t {
    const uint32_t bits = __float_as_uint(value);
    return value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  };
  return convert(low) | convert(high) << 16;
}
// By arithmetic in double, unlike the product's own for other architectures.
inline uint16_t to_e4m3(float low, float high) {
  const auto convert = [](float value) -> uint32_t {
    const uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude >= 448) return sign | 0x7E;
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // [0.5, 1)
    const int step = std::max(exponent - 1, -6) - 3;
    const double whole = std::nearbyint(std::ldexp(magnitude, -step));  // of 2^step; 8 .. 16 of a normal
    const auto units = static_cast<uint32_t>(whole);
    const uint32_t code = units < 8 ? units : (static_cast<uint32_t>(step + 9) << 3) + units;
    return sign | std::min(code, 0x7Eu);
  };
  return static_cast<uint16_t>(convert(low) | convert(high) << 8);
}
inline float2 from_e4m3(uint16_t codes) {
  const auto convert = [](uint32_t code) {
    const uint32_t exponent = code >> 3 & 15, fraction = code & 7;
    const float magnitude = exponent == 0
                                ? std::ldexp(static_cast<float>(fraction), -9)
                                : std::ldexp(static_cast<float>(8 + fraction), static_cast<int>(exponent) - 10);
    return (code & 0x80) != 0 ? -magnitude : magnitude;
  };
  return {convert(codes & 0xFF), convert(codes >> 8)};
}

inline uint64_t globaltimer() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace uccl_ep::cuda::ptx
