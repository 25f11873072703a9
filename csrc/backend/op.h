// One dispatch or combine, with its arguments and its state for the steps.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/plan.h"
#include "layout/wire.h"

namespace uccl_ep {

struct Op {
  // Fixed before it is queued.
  uint64_t epoch = 0;
  uint64_t num_refused = 0;  // calls that this rank refused before this one
  std::string refusal;  // why, the last of them
  OpSignature signature{};
  std::shared_ptr<Plan> plan;
  const uint8_t* rows_in = nullptr;   // dispatch: x [T, H]; combine: [num_rows, H]
  // dispatch: of x, if it has codes: [T, ceil(H / 128)]; nullptr = rows are quantised here, or not at all
  const float* scales_in = nullptr;
  const uint32_t* metadata_in = nullptr;  // dispatch: [T, num_metadata]
  const float* weights_in = nullptr;  // dispatch: [T, width]; combine: [num_weights]; nullptr = none travel
  std::array<const uint8_t*, kMostBiases> bias{};  // combine: [T, H]; nullptr = none
  uint64_t row_bytes = 0;             // of a tensor row: H * size of dtype

  // Given by the caller: combine at once, dispatch when the counts are known.
  uint8_t* rows_out = nullptr;   // dispatch: [num_rows, H]; combine: [T, H]
  float* scales_out =
      nullptr;  // dispatch: [num_rows, ceil(H / 128)]: rows_out gets FP8 codes; nullptr = dequantised rows
  float* weights_out = nullptr;  // dispatch: [num_weights]; combine: [T, width]
  uint32_t* metadata_out = nullptr;  // dispatch: [num_rows, num_metadata]
  int64_t* experts_out = nullptr;  // dispatch of compact rows: [num_rows, W]; nullptr = not wanted

  RowShape wire_row() const { return row_shape(signature.wire, signature.hidden, signature.num_metadata); }
  // Of a row of rows_out.
  uint64_t out_row_bytes() const { return scales_out != nullptr ? wire_row().code_bytes : row_bytes; }
  // The number that users see.
  uint64_t call() const { return epoch + num_refused; }
  bool is_dispatch() const { return signature.kind == OpKind::kDispatch; }
  bool makes_plan() const { return is_dispatch() && signature.plan_use == PlanUse::kNew; }

  // ---- shared between the caller and the worker
  std::mutex mutex;
  std::condition_variable changed;
  bool counts_known = false;
  bool output_given = false;
  bool done = false;
  bool failed = false;
  ErrorRecord error;
};

// What a blocked step waits for, for the error that names it.
struct WaitingOn {
  Step step = Step::kNone;
  int peer = -1;  // -1: no particular rank
  int64_t chunk = -1;
  uint64_t expected = 0;
  uint64_t seen = 0;
  const char* what = "";
};

}  // namespace uccl_ep
