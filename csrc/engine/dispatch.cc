// Dispatch, as the protocol reads: exchange and plan while the rows are staged, place as they arrive.
#include <algorithm>

#include "engine/engine.h"

namespace uccl_ep {

Engine::Steps Engine::dispatch_steps(Op& op, host::PlanStep*& plan) {
  Steps steps;
  steps.push_back(host::make_exchange(*context_, op));
  auto plan_step = host::make_plan(*context_, op);
  plan = plan_step.get();
  steps.push_back(std::move(plan_step));
  steps.push_back(host::make_stage(*context_, op));
  steps.push_back(host::make_place(*context_, op, *plan));
  return steps;
}

std::shared_ptr<Op> Engine::dispatch(const DispatchArgs& args) {
  check_usable();
  check_row(args.hidden, args.dtype);
  if (args.wire == Dtype::kFp8 && args.dtype != Dtype::kBf16)
    throw UsageFailure(UsageKind::kDtype, std::string("FP8 dispatch of ") + dtype_name(args.dtype) +
                                              " rows: only bf16 rows are quantised");
  if (args.expert_alignment == 0 || args.expert_alignment > (1u << 20))
    throw UsageFailure(UsageKind::kInput,
                       "expert_alignment = " + std::to_string(args.expert_alignment) + ": allowed 1 to 2^20");
  if (args.compact && args.expert_alignment != 1)
    throw UsageFailure(UsageKind::kInput, "expert_alignment = " + std::to_string(args.expert_alignment) +
                                              " with compact rows: allowed is 1, they are not padded");
  if (args.num_tokens >= UINT32_MAX)
    throw UsageFailure(UsageKind::kShape, std::to_string(args.num_tokens) + " tokens: allowed are fewer than 2^32");
  auto op = std::make_shared<Op>();
  op->signature.kind = OpKind::kDispatch;
  op->signature.dtype = args.dtype;
  op->signature.wire = args.wire;
  op->signature.hidden = args.hidden;
  op->signature.with_weights = args.weights != nullptr;
  op->signature.fp8_pow2 = args.wire == Dtype::kFp8 && args.fp8_pow2;
  op->rows_in = args.x;
  op->weights_in = args.weights;
  op->row_bytes = uint64_t{args.hidden} * dtype_bytes(args.dtype);

  std::shared_ptr<Plan> fresh;
  if (args.has_routing) {
    fresh = std::make_shared<Plan>();
    plan_source(topo_, config_.num_experts, static_cast<uint32_t>(args.num_tokens), args.routing, *fresh);
    fresh->expert_alignment = args.expert_alignment;
    fresh->engine_generation = config_.generation;
    if (args.compact)
      fresh->compact_width =
          std::min(args.routing.width, config_.num_experts / static_cast<uint32_t>(config_.num_ranks));
  }
  if (args.plan == nullptr) {
    if (fresh == nullptr)
      throw UsageFailure(UsageKind::kInput, "dispatch without routing needs the handle of an earlier dispatch");
    op->signature.plan_use = PlanUse::kNew;
    op->plan = fresh;
  } else {
    check_plan(args.plan);
    if (args.num_tokens != args.plan->num_tokens && fresh == nullptr)
      throw UsageFailure(UsageKind::kShape, "x has " + std::to_string(args.num_tokens) +
                                                " tokens, the handle was made for " +
                                                std::to_string(args.plan->num_tokens));
    // Another routing than the plan's is no local error: the others use the plan. They learn it from the header.
    const bool differs =
        fresh != nullptr && (fresh->source != args.plan->source || fresh->num_tokens != args.plan->num_tokens);
    op->signature.plan_use = differs ? PlanUse::kDiffers : PlanUse::kCached;
    op->signature.plan_id = args.plan->plan_id;
    op->plan = args.plan;
  }
  op->signature.expert_alignment = op->plan->expert_alignment;
  op->signature.compact_width = op->plan->compact_width;
  op->counts_known = !op->makes_plan();
  return submit(op);
}

}  // namespace uccl_ep
