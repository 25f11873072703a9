// Launches of the steps. Each is asynchronous on `stream`, returns what the launch returned, and allocates nothing. A
// kernel runs in one wave of at most `num_sms` blocks (contract 12), or of `stage_sms` if it stages.
#pragma once

#include "backend/gpu/group.h"
#include "backend/gpu/windows.h"
#include "device/runtime.h"

namespace uccl_ep::gpu {

// Load the kernels on the current device. Before the first launch.
Status load_dispatch(uint32_t shared_bytes);
Status load_combine(uint32_t shared_bytes);
Status load_refusal(uint32_t shared_bytes);
Status load_pad(uint32_t shared_bytes);

// The router's output on the device. topk: int64 [T, width], -1 = dropped. map: bool [T, width = experts].
struct DeviceRouting {
  const void* data = nullptr;
  const float* weights = nullptr;  // [T, width], or nullptr: none travel
  bool is_map = false;
  uint32_t width = 0;
};

struct StageArgs {
  const uint8_t* x = nullptr;          // [T, H]
  const float* scales = nullptr;       // [T, ceil(H / 128)] of x, if it has codes
  const uint32_t* metadata = nullptr;  // [T, num_metadata]
  uint32_t num_tokens = 0, hidden = 0;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;
  RowShape row;         // of a wire row
  uint32_t stride = 0;  // of wire rows, where they are staged

  constexpr bool quantises() const { return row.num_scales > 0 && dtype != wire; }
};

// What a dispatch kernel does with its plan.
enum class PlanState : uint32_t {
  kKnown,      // it is complete
  kNew,        // tells all peers the routing, learns what they send, and fills the plan if its memory suffices
  kExchanged,  // fills the plan after a kNew kernel that found its memory too small
};
// With a new plan: whether the memory of plan and output may be used when the counts are known.
enum class Fit : uint32_t { kAlways, kIfLargeEnough, kNever };

// A dispatch: stages our rows, as far as no earlier kernel has, and at the same time places the rows that come here.
// Rows go in windows. Blocks beyond `num_sms` only stage, or route.
struct PlaceArgs {
  OpSignature signature{};
  // With a new plan: the routing. Otherwise weights to stage and, if given, data to compare with the plan.
  DeviceRouting routing;
  StageArgs stage;
  PlanState state = PlanState::kKnown;
  Fit fit = Fit::kAlways;
  PlanSizes memory;   // of plan and output
  uint64_t call = 0;  // by which the host recognises the counts
  bool routing_compared = false;
  DispatchWindows windows;         // with a new plan of several domains the kernel finds the length of later ones
  bool tells_spans = false;        // headers of a new plan have SpanRows
  uint32_t num_blocks = 0;         // that place
  uint32_t bulk_warps = 0;         // of a block, that have shared memory for bulk copies
  uint32_t kept_tiles = 1;         // tiles of a new routing for which a block has shared memory
  uint32_t copy_pipeline = 0;      // offset in shared memory of the pipeline that stages; 0: none
  uint8_t* rows = nullptr;         // [rows, H] of dtype, or codes
  float* scales = nullptr;         // [rows, ceil(H / 128)]; nullptr: FP8 rows are dequantised
  uint32_t* metadata = nullptr;    // [rows, num_metadata]
  float* row_weights = nullptr;    // [rows] or [rows, W]; nullptr: none travel
  int64_t* row_experts = nullptr;  // [rows, W] of compact rows
};
Status launch_dispatch(const Group& group, const PlanView& plan, const PlaceArgs& args, uint32_t num_sms,
                       uint32_t stage_sms, StreamHandle stream);
// After a dispatch with a capacity: its output becomes padding from the end of the received rows on.
Status launch_pad(const Group& group, const PlanView& plan, const PlaceArgs& args, uint32_t num_sms,
                  StreamHandle stream);

// A combine: folds what came here and, side by side, merges what comes back, in windows of `window_tokens` tokens of
// each rank. Of several windows each has half of the memory for pieces, in turn. Where streams go in batches, the same
// tokens take a window for each batch.
struct KernelCombineArgs {
  OpSignature signature{};
  uint32_t num_windows = 1, window_tokens = 0;
  uint32_t first_weight_window = 0;  // weights' gradients go from this window on
  uint32_t piece_slots = 0;  // pieces of a stream that the memory of a window holds
  bool may_drop = false;  // the plan may have rows that `rows` has not
  uint32_t hidden = 0;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;
  const uint8_t* rows = nullptr;       // [rows, H]
  const float* row_weights = nullptr;  // [rows] or [rows, W]; nullptr: none travel
  const uint8_t* bias[kMostBiases] = {};  // [T, H] of dtype, the first addends of each sum; nullptr: none
  uint8_t* out = nullptr;              // [T, H]
  float* weights = nullptr;            // [T, width], zeroed; nullptr: none travel
  uint64_t weight_bytes = 0;
};
Status launch_combine(const Group& group, const PlanView& plan, const KernelCombineArgs& args, uint32_t num_sms,
                      StreamHandle stream);

// Counts one more refused call of this rank, for the headers of later operations.
Status launch_refusal(const Group& group, StreamHandle stream);

}  // namespace uccl_ep::gpu
