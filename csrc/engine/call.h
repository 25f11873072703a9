// The arguments of calls, the checks that all engines make before they queue anything, and the signature that ranks
// compare.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/plan.h"
#include "layout/wire.h"

namespace uccl_ep {

// A cudaStream_t (hipStream_t), without its headers; nullptr on the host.
using Stream = void*;

// Options of a plan, fixed by the call that makes it.
struct PlanFacts {
  uint64_t plan_id = 0;
  uint64_t engine_generation = 0;
  RoutingKind routing_kind = RoutingKind::kTopk;
  uint32_t routing_width = 0;
  uint32_t num_tokens = 0;
  uint32_t expert_alignment = 1;
  uint32_t compact_width = 0;  // 0: rows are expert-major
  bool has_capacity = false;
  // With a capacity: bytes of the plan's own memory that hold the padded counts, int64 each; the overflow follows.
  uint64_t counts_begin = 0, counts_end = 0;
};

// The plan that a dispatch returns, for combines and for dispatches with the same routing.
class SavedPlan {
 public:
  virtual ~SavedPlan() = default;
  virtual PlanFacts facts() const = 0;
  // Rows of its dispatch's output, padding included. Before the counts are known: the rows that memory is for.
  virtual uint64_t num_rows() const = 0;
  virtual uint64_t num_bytes() const = 0;  // memory that it takes
  // [E_local], known with the counts; empty with a capacity.
  virtual const std::vector<uint64_t>& tokens_per_expert() const = 0;  // padded to the alignment
  virtual const std::vector<uint64_t>& tokens_per_expert_exact() const = 0;
};

struct DispatchArgs {
  const uint8_t* x = nullptr;  // [T, H]
  const float* scales =
      nullptr;  // [T, ceil(H / 128)] of x, if its dtype is a quantised format, which is the wire's, too
  const uint32_t* metadata = nullptr;  // [T, num_metadata]: travels with the rows, unchanged
  uint64_t num_tokens = 0;
  uint32_t hidden = 0;
  uint32_t num_metadata = 0;
  Dtype dtype = Dtype::kBf16;
  Dtype wire = Dtype::kBf16;
  bool has_routing = false;  // false: `plan` is used unchanged
  Routing routing;
  const float* weights = nullptr;  // [T, width]
  std::shared_ptr<SavedPlan> plan;  // nullptr: a new one is made; with routing: compared with it
  uint32_t expert_alignment = 1;
  bool compact = false;  // a row per received token instead of one per pair
  // Of a GPU engine only.
  int64_t capacity = -1;  // rows of the output; -1: exactly those that arrive
  bool pad_to_capacity = false;  // unused rows of the capacity become padding
  uint64_t max_tokens = 0;  // of any rank, of a new plan with a capacity; 0: not said
  bool aside = false;  // on a stream of the engine, else on the caller's
  Stream stream = nullptr;  // the caller's: its queued work runs first
};

// Memory of a dispatch's results.
struct DispatchOutput {
  uint8_t* rows = nullptr;
  float* scales = nullptr;  // FP8 rows go out as codes and scales; nullptr: they are dequantised
  float* weights = nullptr;
  int64_t* row_experts = nullptr;  // of compact rows: where their experts go; nullptr: not wanted
  uint32_t* metadata = nullptr;  // [num_rows, num_metadata]
  // Of a GPU engine only.
  uint8_t* plan = nullptr;  // memory of a new plan
  Stream stream = nullptr;  // where the memory may still be in use
};

struct CombineArgs {
  const uint8_t* rows = nullptr;  // [num_rows, H]
  uint32_t hidden = 0;
  Dtype dtype = Dtype::kBf16;
  Dtype wire = Dtype::kBf16;
  bool rounds_sums = false;  // what a domain returns to another is rounded to BF16
  std::shared_ptr<SavedPlan> plan;
  const float* weights = nullptr;  // [num_weights]
  std::array<const uint8_t*, kMostBiases> bias{};  // [T, H] of dtype, the first addends of each sum; nullptr: none
  uint8_t* out = nullptr;  // [T, H]
  float* weights_out = nullptr;  // [T, width], zeroed
  bool aside = false;  // as in DispatchArgs, and below
  Stream stream = nullptr;
};

// What an engine takes.
struct CallLimits {
  uint64_t engine_generation = 0;
  uint64_t widest_row_bytes = 0;
  // A routing for another number of tokens than the plan's is a different call and fails on all ranks; others are
  // refused.
  bool takes_other_tokens = false;
};

// A plan of another engine: throws UsageFailure(kInput).
[[noreturn]] void refuse_plan();
// Throw UsageFailure. Engines check the rest, which depends on their memory.
void check_call(const DispatchArgs& args, const CallLimits& limits);
void check_call(const CombineArgs& args, const CallLimits& limits);
// Casts a plan to the type of the engine that made it. Throws UsageFailure(kInput) for a plan of another kind of
// engine.
template <typename Own>
std::shared_ptr<Own> own_plan(const std::shared_ptr<SavedPlan>& plan) {
  auto own = std::dynamic_pointer_cast<Own>(plan);
  if (own == nullptr && plan != nullptr) refuse_plan();
  return own;
}

// The signature that ranks compare (contract 9). `plan`: the call's, or the new one.
OpSignature make_signature(const DispatchArgs& args, const PlanFacts& plan, PlanUse use);
OpSignature make_signature(const CombineArgs& args, const PlanFacts& plan);

// Of low latency. with_weights: they travel with a dispatch's routing, or are known to a combine from it.
OpSignature slot_signature(OpKind kind, Dtype wire, uint32_t hidden, uint32_t topk, bool with_weights);

// Columns of a compact row's weights; 0 for expert-major rows.
uint32_t compact_width_of(const DispatchArgs& args, uint32_t experts_per_rank);

}  // namespace uccl_ep
