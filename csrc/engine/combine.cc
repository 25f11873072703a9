// Combine, as the protocol reads: fold at the experts, merge on the relays, merge into the output, all side by side.
// The headers are exchanged like a cached dispatch's, so that ranks that call differently learn it.
#include "engine/engine.h"

namespace uccl_ep {

Engine::Steps Engine::combine_steps(Op& op, host::PlanStep*& plan) {
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

std::shared_ptr<Op> Engine::combine(const CombineArgs& args) {
  check_usable();
  check_row(args.hidden, args.dtype);
  if (args.plan == nullptr) throw UsageFailure(UsageKind::kInput, "combine needs the handle of a dispatch");
  check_plan(args.plan);
  auto op = std::make_shared<Op>();
  op->signature.kind = OpKind::kCombine;
  op->signature.dtype = args.dtype;
  op->signature.wire = args.wire;
  op->signature.plan_use = PlanUse::kCached;
  op->signature.hidden = args.hidden;
  op->signature.with_weights = args.weights != nullptr;
  op->signature.expert_alignment = args.plan->expert_alignment;
  op->signature.compact_width = args.plan->compact_width;
  op->signature.plan_id = args.plan->plan_id;
  op->plan = args.plan;
  op->rows_in = args.rows;
  op->weights_in = args.weights;
  op->row_bytes = uint64_t{args.hidden} * dtype_bytes(args.dtype);
  op->rows_out = args.out;
  op->weights_out = args.weights_out;
  op->counts_known = true;
  op->output_given = true;
  return submit(op);
}

}  // namespace uccl_ep
