// Launches of the steps. Every one is asynchronous on `stream`, returns what the launch returned, and allocates
// nothing. A kernel that waits for peers runs in at most `num_sms` blocks (contract 12).
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/layout.h"

namespace uccl_ep::cuda {

// The router's output on the device. topk: int64 [T, width], -1 = dropped. map: bool [T, width = experts].
struct DeviceRouting {
  const void* data = nullptr;
  bool is_map = false;
  uint32_t width = 0;
  uint32_t num_tokens = 0;
};

// Load the kernels of a step on the current device. Before the first launch.
cudaError_t load_exchange();
cudaError_t load_plan();
cudaError_t load_stage();
cudaError_t load_place();
cudaError_t load_fold();
cudaError_t load_merge();

// Starts an operation: its epoch and its header. `publish`: peers may read it now (no routing follows).
cudaError_t launch_enter(const Domain& domain, const OpSignature& signature, uint32_t num_tokens, bool publish,
                         cudaStream_t stream);
// Our routing, for all peers; publishes the header.
cudaError_t launch_exchange(const Domain& domain, const DeviceRouting& routing, cudaStream_t stream);
// Waits until all ranks have entered with the same signature.
cudaError_t launch_meet(const Domain& domain, cudaStream_t stream);
// The same, then the counts: to the host, and where each (source, expert) begins.
cudaError_t launch_counts(const Domain& domain, uint32_t expert_alignment, cudaStream_t stream);
// Fills a plan whose arrays the counts have sized.
cudaError_t launch_plan(const Domain& domain, const PlanView& plan, uint32_t width, cudaStream_t stream);

struct StageArgs {
  const uint8_t* x = nullptr;  // [T, H]
  uint32_t num_tokens = 0, hidden = 0;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;
  bool fp8_pow2 = true;
  const float* values = nullptr;  // [T, width]; of a plan that is known already
};
cudaError_t launch_stage(const Domain& domain, const StageArgs& args, const PlanView& plan, uint32_t num_blocks,
                         cudaStream_t stream);
// The values of a plan that was not known when the rows were staged.
cudaError_t launch_stage_values(const Domain& domain, const PlanView& plan, const float* values, uint32_t num_sms,
                                cudaStream_t stream);

struct PlaceArgs {
  uint32_t hidden = 0;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;
  uint8_t* rows = nullptr;      // [num_rows, H] of dtype, or codes
  float* scales = nullptr;      // [num_rows, H / 128]; nullptr: FP8 rows are dequantised
  float* row_values = nullptr;  // [num_rows]; nullptr: none travel
};
cudaError_t launch_place(const Domain& domain, const PlanView& plan, const PlaceArgs& args, uint32_t num_sms,
                         cudaStream_t stream);

struct FoldArgs {
  uint32_t hidden = 0;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;
  const uint8_t* rows = nullptr;        // [num_rows, H]
  const float* row_values = nullptr;    // [num_rows]; nullptr: none travel
  bool by_chunk = false;                // sources learn of every chunk of pieces, not only of all
};
cudaError_t launch_fold(const Domain& domain, const PlanView& plan, const FoldArgs& args, uint32_t num_sms,
                        cudaStream_t stream);
struct MergeArgs {
  uint32_t hidden = 0;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;
  uint8_t* out = nullptr;    // [T, H]
  float* values = nullptr;   // [T, width], zeroed; nullptr: none travel
  uint64_t value_bytes = 0;
  bool by_chunk = false;     // as the folds of all ranks; false: all pieces have arrived
};
// Waits, in one block, until all pieces have arrived: a merge after it waits for nothing.
cudaError_t launch_await_pieces(const Domain& domain, cudaStream_t stream);
cudaError_t launch_merge(const Domain& domain, const PlanView& plan, const MergeArgs& args, uint32_t num_sms,
                         cudaStream_t stream);

}  // namespace uccl_ep::cuda
