// Dispatch, as the protocol reads: exchange and plan while the rows are staged, place as they arrive.
#include "engine/host/engine.h"

namespace uccl_ep {

HostEngine::Steps HostEngine::dispatch_steps(Op& op, host::PlanStep*& plan) {
  Steps steps;
  steps.push_back(host::make_exchange(*context_, op));
  auto plan_step = host::make_plan(*context_, op);
  plan = plan_step.get();
  steps.push_back(std::move(plan_step));
  steps.push_back(host::make_stage(*context_, op));
  steps.push_back(host::make_place(*context_, op, *plan));
  return steps;
}

// What this rank knows of the plan that the routing asks for.
std::shared_ptr<Plan> HostEngine::plan_routing(const DispatchArgs& args) const {
  auto plan = std::make_shared<Plan>();
  plan_source(topo_, config_.num_experts, static_cast<uint32_t>(args.num_tokens), args.routing, *plan);
  plan->expert_alignment = args.expert_alignment;
  plan->engine_generation = config_.generation;
  plan->compact_width = compact_width_of(args, config_.num_experts / static_cast<uint32_t>(config_.num_ranks));
  return plan;
}

std::shared_ptr<Operation> HostEngine::dispatch(const DispatchArgs& args) {
  plane_.check_usable();
  check_call(args, limits());
  std::shared_ptr<Plan> fresh = args.has_routing ? plan_routing(args) : nullptr;
  auto plan = own_plan<HostPlan>(args.plan);
  PlanUse use = PlanUse::kCached;
  if (plan == nullptr) {
    use = PlanUse::kNew;
    plan = std::make_shared<HostPlan>(fresh);
  } else if (fresh != nullptr && (fresh->source != plan->plan->source || fresh->num_tokens != plan->plan->num_tokens)) {
    // Another routing than the plan's is no local error: the others use the plan. They learn it from the header.
    use = PlanUse::kDiffers;
  }
  auto operation = std::make_shared<HostOperation>(*this, plan);
  Op& op = operation->op_;
  op.signature = make_signature(args, plan->facts(), use);
  op.rows_in = args.x;
  op.scales_in = args.scales;
  op.metadata_in = args.metadata;
  op.weights_in = args.weights;
  op.row_bytes = uint64_t{args.hidden} * dtype_bytes(args.dtype);
  op.counts_known = !op.makes_plan();
  return submit(std::move(operation));
}

}  // namespace uccl_ep
