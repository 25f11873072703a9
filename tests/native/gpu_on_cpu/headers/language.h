// What CUDA C++ has beside C++ and the kernels use: qualifiers, vectors, functions of bits, collectives of a warp.
#pragma once

// Before the words below become macros, which libstdc++ uses otherwise.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "lanes.h"

#define __host__
#define __device__
#define __global__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_assume(truth) static_cast<void>(0)

#define threadIdx (::gpu_on_cpu::thread_index)
#define blockIdx (::gpu_on_cpu::block_index)
#define gridDim (::gpu_on_cpu::grid_size)

struct uint2 {
  uint32_t x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// As CUDA's: of two types, in their common one.
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __popcll(unsigned long long bits) { return std::popcount(bits); }
inline int __ffs(uint32_t bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }
// Bytes of b:a, numbered from a's lowest, one for each of four digits.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t digits) {
  const uint64_t all = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (uint32_t i = 0; i < 4; ++i) out |= static_cast<uint32_t>(all >> 8 * (digits >> 4 * i & 7) & 0xFF) << 8 * i;
  return out;
}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <typename T>
T atomicAdd(T* to, T value) {
  gpu_on_cpu::act();
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicOr(T* to, T value) {
  gpu_on_cpu::act();
  return __atomic_fetch_or(to, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicAnd(T* to, T value) {
  gpu_on_cpu::act();
  return __atomic_fetch_and(to, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicExch(T* to, T value) {
  gpu_on_cpu::act();
  return __atomic_exchange_n(to, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicCAS_system(T* to, T expected, T value) {
  gpu_on_cpu::act();
  __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

// ---- collectives ----------------------------------------------------------------------------------------------------
inline void __syncthreads() { gpu_on_cpu::meet_whole_block(); }
inline void __syncwarp(gpu_on_cpu::LaneMask mask = ~gpu_on_cpu::LaneMask{0}) {
  gpu_on_cpu::meet(gpu_on_cpu::Meeting::kSync, mask, 0);
}

template <typename T>
T shuffle(gpu_on_cpu::LaneMask mask, T value, uint32_t from) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  const uint64_t* const words = gpu_on_cpu::meet(gpu_on_cpu::Meeting::kShuffle, mask, word);
  if ((mask >> from % gpu_on_cpu::kWarp & 1) != 0) std::memcpy(&value, words + from % gpu_on_cpu::kWarp, sizeof(T));
  return value;
}
template <typename T>
T __shfl_sync(gpu_on_cpu::LaneMask mask, T value, uint32_t lane, uint32_t width = gpu_on_cpu::kWarp) {
  const uint32_t own = threadIdx.x % gpu_on_cpu::kWarp;
  return shuffle(mask, value, own / width * width + lane % width);
}
template <typename T>
T __shfl_up_sync(gpu_on_cpu::LaneMask mask, T value, uint32_t delta) {
  const uint32_t own = threadIdx.x % gpu_on_cpu::kWarp;
  return shuffle(mask, value, own < delta ? own : own - delta);
}
template <typename T>
T __shfl_xor_sync(gpu_on_cpu::LaneMask mask, T value, uint32_t lanes) {
  return shuffle(mask, value, threadIdx.x % gpu_on_cpu::kWarp ^ lanes);
}
inline gpu_on_cpu::LaneMask __ballot_sync(gpu_on_cpu::LaneMask mask, bool yes) {
  const uint64_t* const all = gpu_on_cpu::meet(gpu_on_cpu::Meeting::kVote, mask, yes);
  gpu_on_cpu::LaneMask bits = 0;
  for (uint32_t i = 0; i < gpu_on_cpu::kWarp; ++i)
    if ((mask >> i & 1) != 0) bits |= static_cast<gpu_on_cpu::LaneMask>(all[i]) << i;
  return bits;
}
inline bool __all_sync(gpu_on_cpu::LaneMask mask, bool yes) { return __ballot_sync(mask, yes) == mask; }
inline bool __any_sync(gpu_on_cpu::LaneMask mask, bool yes) { return __ballot_sync(mask, yes) != 0; }
