// What a GPU engine of a configuration needs, without one. What is refused here an engine refuses, too.
#pragma once

#include <cstdint>

#include "backend/gpu/group.h"
#include "engine/config.h"
#include "engine/group/control_plane.h"

namespace uccl_ep {

constexpr uint64_t kPinnedBytes = kPageBytes;  // of either part of the pinned memory that has a fixed size

// Throw UsageFailure(kConfig): of the group, what neither memory nor a GPU can make right; of shared memory, what a
// block needs more than is `there`.
void check_group(const EngineConfig& config);
void check_shared_bytes(const EngineConfig& config, const gpu::DeviceMap& map, uint32_t there);
// Throws UsageFailure, kBudget with the least budget.
gpu::DeviceRegionLayout gpu_layout_of(const EngineConfig& config);  // equal on all ranks

// Host memory: pinned, and all.
uint64_t gpu_pinned_bytes(const EngineConfig& config);
uint64_t gpu_host_bytes(const EngineConfig& config, const gpu::DeviceRegionLayout& layout);

// What memory_plan() shows for a buffer of tensors on a GPU.
MemoryEntries gpu_memory_entries(const EngineConfig& config);
uint64_t gpu_least_budget_bytes(const EngineConfig& config);
// What a buffer holds at once: see DeviceMap.
struct GpuLimits {
  uint32_t batch_streams, stream_batches;
  uint32_t max_tokens, max_pairs;  // of an operation
  uint32_t window_tokens;  // of a dispatch of the widest rows
};
GpuLimits gpu_limits(const EngineConfig& config);

}  // namespace uccl_ep
