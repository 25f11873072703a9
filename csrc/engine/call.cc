#include "engine/call.h"

#include <algorithm>
#include <string>

#include "common/error.h"

namespace uccl_ep {
namespace {

constexpr uint32_t kMostAlignment = 1u << 20;

void require(bool holds, UsageKind kind, const std::string& text) {
  if (!holds) throw UsageFailure(kind, text);
}

void check_row(uint32_t hidden, Dtype dtype, const CallLimits& limits) {
  require(
      hidden > 0 && hidden % kHiddenUnit == 0, UsageKind::kShape,
      "rows of " + std::to_string(hidden) + " elements: a multiple of " + std::to_string(kHiddenUnit) + " is needed");
  require(uint64_t{hidden} * dtype_bytes(dtype) <= limits.widest_row_bytes, UsageKind::kShape,
          "rows of " + std::to_string(hidden) + " " + dtype_name(dtype) +
              " elements: this buffer was made for rows of " + std::to_string(limits.widest_row_bytes) + " bytes");
}

void check_own(const PlanFacts& plan, const CallLimits& limits) {
  if (plan.engine_generation != limits.engine_generation) refuse_plan();
}

void check_rows_of(const DispatchArgs& args, const CallLimits& limits) {
  const std::string alignment = "expert_alignment = " + std::to_string(args.expert_alignment);
  require(wire_row_bytes(args.wire, args.hidden, args.num_metadata) <= limits.widest_row_bytes, UsageKind::kShape,
          "rows of " + std::to_string(args.hidden) + " " + dtype_name(args.wire) + " elements with " +
              std::to_string(args.num_metadata) + " words of metadata: this buffer was made for rows of " +
              std::to_string(limits.widest_row_bytes) + " bytes");
  require(args.num_metadata == 0 || args.metadata != nullptr || args.num_tokens == 0, UsageKind::kInput,
          std::to_string(args.num_metadata) + " words of metadata, and the metadata is missing");
  require(is_quantised(args.dtype) == (args.scales != nullptr), UsageKind::kInput,
          is_quantised(args.dtype) ? "rows of FP8 codes need their scales" : "scales: allowed with rows of FP8 codes");
  require(!is_quantised(args.dtype) || args.dtype == args.wire, UsageKind::kDtype,
          std::string("rows of codes and scales travel as they are, not as ") + dtype_name(args.wire));
  require(!is_quantised(args.wire) || args.dtype == args.wire || args.dtype == Dtype::kBf16, UsageKind::kDtype,
          std::string("FP8 dispatch of ") + dtype_name(args.dtype) + " rows: only bf16 rows are quantised");
  require(!is_quantised(args.wire) || args.dtype == args.wire || AllScaleRules::has(args.wire), UsageKind::kDtype,
          std::string("bf16 rows are not quantised to ") + dtype_name(args.wire) + ": allowed are codes and scales");
  require(args.expert_alignment >= 1 && args.expert_alignment <= kMostAlignment, UsageKind::kInput,
          alignment + ": allowed 1 to 2^20");
  require(!args.compact || args.expert_alignment == 1, UsageKind::kInput,
          alignment + " with compact rows: allowed is 1, they are not padded");
}

}  // namespace

void refuse_plan() { throw UsageFailure(UsageKind::kInput, "the handle belongs to another buffer"); }

void check_call(const DispatchArgs& args, const CallLimits& limits) {
  check_row(args.hidden, args.dtype, limits);
  check_rows_of(args, limits);
  require(args.num_tokens < UINT32_MAX, UsageKind::kShape,
          std::to_string(args.num_tokens) + " tokens: allowed are fewer than 2^32");
  const std::string most = "max_tokens = " + std::to_string(args.max_tokens);
  require(args.max_tokens <= UINT32_MAX, UsageKind::kInput, most + ": allowed is less than 2^32");
  require(args.max_tokens == 0 || args.num_tokens <= args.max_tokens, UsageKind::kShape,
          std::to_string(args.num_tokens) + " tokens with " + most);
  if (args.plan == nullptr) {
    require(args.has_routing, UsageKind::kInput, "dispatch without routing needs the handle of an earlier dispatch");
    return;
  }
  const PlanFacts plan = args.plan->facts();
  check_own(plan, limits);
  require(args.num_tokens == plan.num_tokens || (args.has_routing && limits.takes_other_tokens), UsageKind::kShape,
          "x has " + std::to_string(args.num_tokens) + " tokens, the handle was made for " +
              std::to_string(plan.num_tokens));
}

void check_call(const CombineArgs& args, const CallLimits& limits) {
  check_row(args.hidden, args.dtype, limits);
  check_row(args.hidden, args.wire, limits);
  require(!is_quantised(args.dtype) && !is_quantised(args.wire), UsageKind::kDtype,
          "combine of FP8 rows: allowed are bf16 and fp32, because sums are not quantised");
  require(!args.rounds_sums || args.wire == Dtype::kFp32, UsageKind::kDtype, "only sums in fp32 are rounded");
  require(args.plan != nullptr, UsageKind::kInput, "combine needs the handle of a dispatch");
  check_own(args.plan->facts(), limits);
}

OpSignature make_signature(const DispatchArgs& args, const PlanFacts& plan, PlanUse use) {
  OpSignature s{};
  s.kind = OpKind::kDispatch;
  s.dtype = args.dtype;
  s.wire = args.wire;
  s.plan_use = use;
  s.hidden = args.hidden;
  s.with_weights = args.weights != nullptr;
  s.expert_alignment = plan.expert_alignment;
  s.compact_width = plan.compact_width;
  s.num_metadata = args.num_metadata;
  s.with_capacity = plan.has_capacity;
  s.max_tokens = use == PlanUse::kNew ? args.max_tokens : 0;
  const bool is_sized = use == PlanUse::kNew && plan.has_capacity;
  s.topk = is_sized && args.routing.kind == RoutingKind::kTopk ? args.routing.width : 0;
  s.plan_id = use == PlanUse::kNew ? 0 : plan.plan_id;
  return s;
}

OpSignature make_signature(const CombineArgs& args, const PlanFacts& plan) {
  OpSignature s{};
  s.kind = OpKind::kCombine;
  s.dtype = args.dtype;
  s.wire = args.wire;
  s.rounds_sums = args.rounds_sums;
  s.plan_use = PlanUse::kCached;
  s.hidden = args.hidden;
  s.with_weights = args.weights != nullptr;
  s.expert_alignment = plan.expert_alignment;
  s.compact_width = plan.compact_width;
  s.with_capacity = plan.has_capacity;
  s.plan_id = plan.plan_id;
  return s;
}

uint32_t compact_width_of(const DispatchArgs& args, uint32_t experts_per_rank) {
  return args.compact ? std::min(args.routing.width, experts_per_rank) : 0;
}

OpSignature slot_signature(OpKind kind, Dtype wire, uint32_t hidden, uint32_t topk, bool with_weights) {
  OpSignature signature{};
  signature.kind = kind;
  signature.dtype = Dtype::kBf16;
  signature.wire = wire;
  signature.hidden = hidden;
  signature.topk = topk;
  signature.with_weights = with_weights;
  return signature;
}

}  // namespace uccl_ep
