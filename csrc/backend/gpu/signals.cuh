// Signals on the GPU: publishing and reading them as their declarations say.
#pragma once

#include "backend/gpu/signals.h"
#include "sync/device.cuh"

namespace uccl_ep::gpu {

// ---- flags ----------------------------------------------------------------------------------------------------------
// By one thread: releases what it has written, and what it has seen of other threads' writes.
template <typename Of>
__device__ __forceinline__ void publish(DeviceFlag<Of>* flag, uint64_t value) {
  if constexpr (Of::kIs.scope == Scope::kSystem)
    publish_flag(&flag->value, value);
  else
    publish_in_gpu(&flag->value, value);
}
// For one of several flags, after one fence of their scope.
template <typename Of>
__device__ __forceinline__ void publish_after_fence(DeviceFlag<Of>* flag, uint64_t value) {
  static_assert(Of::kIs.scope == Scope::kSystem);
  store_flag(&flag->value, value);
}
// Acquires.
template <typename Of>
__device__ __forceinline__ uint64_t read(const DeviceFlag<Of>* flag) {
  return read_flag(&flag->value);
}
// Without order, for polling.
template <typename Of>
__device__ __forceinline__ uint64_t peek(const DeviceFlag<Of>* flag) {
  return peek_flag(&flag->value);
}

// ---- counters -------------------------------------------------------------------------------------------------------
template <typename Of>
__device__ __forceinline__ bool arrive_last(DeviceCounter<Of>* counter, uint32_t num_blocks) {
  return arrive_last(&counter->value, num_blocks);
}
template <typename Of>
__device__ __forceinline__ uint32_t count_some(DeviceCounter<Of>* counter, uint32_t count) {
  return count_some(&counter->value, count);
}
template <typename Of>
__device__ __forceinline__ uint32_t count_one(DeviceCounter<Of>* counter) {
  return count_some(counter, 1);
}
template <typename Of>
__device__ __forceinline__ uint32_t take_numbers(DeviceCounter<Of>* counter, uint32_t count) {
  return take_numbers(&counter->value, count);
}
template <typename Of>
__device__ __forceinline__ uint32_t peek(const DeviceCounter<Of>* counter) {
  return peek_counter(&counter->value);
}
template <typename Of>
__device__ __forceinline__ void end_count(DeviceCounter<Of>* counter) {
  end_count(&counter->value);
}

}  // namespace uccl_ep::gpu
