// Pipelines of bulk copies. A warp fills stages in shared memory in advance, and empties them in the same order.
#pragma once

#include "backend/gpu/device.cuh"
#include "device/bulk.cuh"

namespace uccl_ep::gpu {

// By a warp, once, before it makes a pipeline with these barriers.
template <uint32_t kStages>
__device__ __forceinline__ void init_stages(uint64_t* barriers, uint32_t lane) {
  if (lane == 0) {
    for (uint32_t i = 0; i < kStages; ++i) init_barrier(barriers + i);
    fence_barriers();
  }
  __syncwarp();
}

// Where a pipeline is when all its stages are empty.
struct PipelineTurn {
  uint32_t stage, parity;
};

// Every lane has a copy and does the same with it; one lane issues the loads.
template <uint32_t kStages>
struct Pipeline {
  uint32_t memory;           // addresses in shared memory: of the first stage, and of the first of their barriers,
  uint32_t full;             // each of which is complete when its stage is filled
  uint32_t stage_bytes;
  uint32_t stage = 0;        // that is emptied
  uint32_t parity = 0;       // of the uses of its barrier
  uint32_t load_stage = stage;  // that is filled next

  // By one lane: fills the next stage; by all: turns to the one after it.
  __device__ __forceinline__ void load(const void* from, uint32_t num_bytes) const {
    load_bulk(memory + load_stage * stage_bytes, from, num_bytes, full + load_stage * 8);
  }
  __device__ __forceinline__ void loading() { load_stage = after(load_stage); }
  // Waits until the stage is filled.
  __device__ __forceinline__ void wait() const { wait_barrier(full + stage * 8, parity); }
  __device__ __forceinline__ uint32_t offset() const { return stage * stage_bytes; }
  __device__ __forceinline__ uint32_t address() const { return memory + offset(); }
  // The stage has been read, or a store from it is under way: turns to the next one. Whoever fills it again waits for
  // the store.
  __device__ __forceinline__ void release() {
    stage = after(stage);
    parity ^= stage == 0;
  }

 private:
  static __device__ __forceinline__ uint32_t after(uint32_t of) { return of + 1 == kStages ? 0 : of + 1; }
};

}  // namespace uccl_ep::gpu
