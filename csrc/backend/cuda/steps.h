// Launches of the steps. Every one is asynchronous on `stream`, returns what the launch returned, and allocates
// nothing. All kernels run in at most `num_sms` blocks of one wave (contract 12).
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/layout.h"

namespace uccl_ep::cuda {

// Load the kernels on the current device. Before the first launch.
cudaError_t load_dispatch(uint32_t shared_bytes);
cudaError_t load_combine(uint32_t shared_bytes);
// Shared memory that a block needs at least to route tokens.
uint32_t routing_bytes(uint32_t num_experts, uint32_t num_ranks);

// The router's output on the device. topk: int64 [T, width], -1 = dropped. map: bool [T, width = experts].
struct DeviceRouting {
  const void* data = nullptr;
  const float* values = nullptr;  // [T, width], or nullptr: none travel
  bool is_map = false;
  uint32_t width = 0;
};

struct StageArgs {
  const uint8_t* x = nullptr;  // [T, H]
  uint32_t num_tokens = 0, hidden = 0;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;
  bool fp8_pow2 = true;
};

// Begins a dispatch with a new plan: our routing for all peers, the first window of rows into our region, and, when all
// ranks have entered, the counts: to the host, and where each (source, expert) begins.
struct ExchangeArgs {
  OpSignature signature{};
  DeviceRouting routing;
  StageArgs stage;
  uint64_t call = 0;          // that the host knows the counts by
  uint32_t window_tokens = 0;
};
cudaError_t launch_exchange(const Domain& domain, const ExchangeArgs& args, uint32_t num_sms, cudaStream_t stream);

// A window of a dispatch. Of a new plan's first: fills the plan and places the rows that the exchange has staged. Else
// stages rows and places them side by side.
struct PlaceArgs {
  OpSignature signature{};
  DeviceRouting routing;  // of a plan that is known: values to stage, and data to compare with the plan, if given
  StageArgs stage;
  bool fresh = false;
  bool routing_compared = false;
  uint32_t window = 0, window_tokens = 0;
  uint8_t* rows = nullptr;        // [slots, H] of dtype, or codes
  float* scales = nullptr;        // [slots, H / 128]; nullptr: FP8 rows are dequantised
  float* row_values = nullptr;    // [slots] or [slots, W]; nullptr: none travel, or not in this window
  int64_t* row_experts = nullptr;  // [slots, W] of compact rows, in the first window
};
cudaError_t launch_place(const Domain& domain, const PlanView& plan, const PlaceArgs& args, uint32_t num_sms,
                         cudaStream_t stream);

// A window of a combine: folds what came here and, side by side, merges what comes back.
struct CombineArgs {
  OpSignature signature{};
  uint32_t window = 0, window_pieces = 0;
  bool is_last = true;                // of the combine's windows
  bool may_drop = false;              // the plan may have slots that `rows` has not
  uint32_t hidden = 0;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;
  const uint8_t* rows = nullptr;      // [slots, H]
  const float* row_values = nullptr;  // [slots] or [slots, W]; nullptr: none travel
  uint8_t* out = nullptr;             // [T, H]
  float* values = nullptr;            // [T, width], zeroed; nullptr: none travel
  uint64_t value_bytes = 0;
};
cudaError_t launch_combine(const Domain& domain, const PlanView& plan, const CombineArgs& args, uint32_t num_sms,
                           cudaStream_t stream);

}  // namespace uccl_ep::cuda
