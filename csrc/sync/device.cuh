// Flags and counters of GPU memory: what sync/flag.h is for threads of the host. Flags only grow and are never reset.
#pragma once

#include <cstdint>

#include "device/arch.cuh"
#include "device/words.cuh"

namespace uccl_ep::gpu {

// ---- flags that other GPUs or the host read or write: acquire and release at system scope ---------------------------
__device__ __forceinline__ uint64_t read_flag(const uint64_t* flag) { return device::load_acquire_system(flag); }
// Without order, for polling: an acquire empties the L1 cache of its SM. read_flag() follows when it has come.
__device__ __forceinline__ uint64_t peek_flag(const uint64_t* flag) { return device::load_relaxed_system(flag); }
__device__ __forceinline__ void publish_flag(uint64_t* flag, uint64_t value) {
  device::store_release_system(flag, value);
}
// Several flags at once: one fence, and then stores without order.
__device__ __forceinline__ void fence_system() { device::fence_acq_rel_system(); }
// Before counters of this GPU that are added to without order: who finds them full fences at system scope.
__device__ __forceinline__ void fence_gpu() { device::fence_acq_rel_gpu(); }
__device__ __forceinline__ void store_flag(uint64_t* flag, uint64_t value) {
  device::store_relaxed_system(flag, value);
}
// Two words that validate themselves, in one transaction over PCIe; either may be seen first.
__device__ __forceinline__ void store_words(uint64_t* to, uint64_t first, uint64_t second) {
  device::store_two_relaxed_system(to, first, second);
}
// Published to other blocks of this GPU.
__device__ __forceinline__ void publish_in_gpu(uint64_t* flag, uint64_t value) {
  device::store_release_gpu(flag, value);
}
// The winner publishes what it wrote since.
__device__ __forceinline__ bool take_claim(uint64_t* claim) {
  return atomicCAS_system(reinterpret_cast<unsigned long long*>(claim), 0ull, 1ull) == 0;
}
// Generic accesses before it are ordered with bulk copies (the async proxy) after it, and the other way round.
__device__ __forceinline__ void proxy_fence() {
  if constexpr (kArch.bulk_copies) device::fence_proxy_async_global();
}

// ---- counters of one GPU --------------------------------------------------------------------------------------------
// By one thread of each of `num_blocks` blocks. True in the last: it sees what all blocks wrote before they arrived,
// publishes it with what it publishes at whatever scope, and the counter is 0 again.
__device__ __forceinline__ bool arrive_last(uint32_t* counter, uint32_t num_blocks) {
  if (device::add_one_acq_rel_gpu(counter) != num_blocks - 1) return false;
  *counter = 0;
  return true;
}
// Without order: the number of earlier arrivals.
__device__ __forceinline__ uint32_t take_numbers(uint32_t* counter, uint32_t count) {
  return atomicAdd(counter, count);
}
__device__ __forceinline__ uint32_t take_number(uint32_t* counter) { return take_numbers(counter, 1); }

// By one thread, which has made its own writes visible to the GPU: counts it; the count before. Nobody waits for that
// until it is used.
__device__ __forceinline__ uint32_t count_one(uint32_t* counter) { return device::add_release_gpu(counter, 1); }
__device__ __forceinline__ uint32_t count_some(uint32_t* counter, uint32_t count) {
  return device::add_release_gpu(counter, count);
}
// By the one that counted last: it may publish what all have written, and the counter is 0 again.
__device__ __forceinline__ void end_count(uint32_t* counter) {
  device::fence_acq_rel_gpu();
  *counter = 0;
}

// How many have been counted: without order, for polling, and with it.
__device__ __forceinline__ uint32_t peek_counter(const uint32_t* counter) { return device::load_relaxed_gpu(counter); }
__device__ __forceinline__ uint32_t read_counter(const uint32_t* counter) { return device::load_acquire_gpu(counter); }

// Without order, and whoever writes last.
__device__ __forceinline__ void put_word(uint32_t* word, uint32_t value) { atomicExch(word, value); }

__device__ __forceinline__ void add_global(uint64_t* sum, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void add_global(uint32_t* sum, uint32_t value) { atomicAdd(sum, value); }

__device__ __forceinline__ void or_global(uint32_t* word, uint32_t bits) { atomicOr(word, bits); }

__device__ __forceinline__ void clear_global(uint32_t* word, uint32_t bits) { atomicAnd(word, ~bits); }

// ---- in shared memory of one block ----------------------------------------------------------------------------------
// By one thread: adds 1 to a word that others wait for.
__device__ __forceinline__ void count_shared(uint32_t* word) { device::add_one_release_block(word); }
__device__ __forceinline__ uint32_t read_shared(uint32_t* word) { return device::load_acquire_block(word); }
// A box for one value that is not 0. False: it is full.
__device__ __forceinline__ bool put_shared(uint32_t* box, uint32_t value) {
  return device::put_release_block(box, value);
}
// 0: it was empty.
__device__ __forceinline__ uint32_t take_shared(uint32_t* box) { return device::take_acquire_block(box); }
// Order comes from the block's own barriers.
__device__ __forceinline__ void add_shared(uint32_t* counter, uint32_t value) { atomicAdd(counter, value); }
__device__ __forceinline__ void add_shared(unsigned long long* sum, unsigned long long value) { atomicAdd(sum, value); }
__device__ __forceinline__ void or_shared(uint32_t* word, uint32_t bits) { atomicOr(word, bits); }

// ---- time -----------------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint64_t now_nsec() { return device::globaltimer(); }

}  // namespace uccl_ep::gpu
