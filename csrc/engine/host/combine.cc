// Combine, as the protocol reads: fold at the experts, merge on the relays, merge into the output, all side by side.
// The headers are exchanged like a cached dispatch's, so that ranks that call differently learn it.
#include "engine/host/engine.h"

namespace uccl_ep {

HostEngine::Steps HostEngine::combine_steps(Op& op, host::PlanStep*& plan) {
  Steps steps;
  steps.push_back(host::make_exchange(*context_, op));
  auto plan_step = host::make_plan(*context_, op);
  plan = plan_step.get();
  steps.push_back(std::move(plan_step));
  steps.push_back(host::make_fold(*context_, op));
  for (size_t i = 1; i < context_->merged.size(); ++i) steps.push_back(host::make_merge_relayed(*context_, op, i));
  steps.push_back(host::make_merge_output(*context_, op));
  return steps;
}

std::shared_ptr<Operation> HostEngine::combine(const CombineArgs& args) {
  plane_.check_usable();
  check_call(args, limits());
  const auto plan = own_plan<HostPlan>(args.plan);
  auto operation = std::make_shared<HostOperation>(*this, plan);
  Op& op = operation->op_;
  op.signature = make_signature(args, plan->facts());
  op.rows_in = args.rows;
  op.weights_in = args.weights;
  op.bias = args.bias;
  op.row_bytes = uint64_t{args.hidden} * dtype_bytes(args.dtype);
  op.rows_out = args.out;
  op.weights_out = args.weights_out;
  op.counts_known = true;
  op.output_given = true;
  return submit(std::move(operation));
}

}  // namespace uccl_ep
