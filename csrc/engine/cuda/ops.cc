// The operations of a CUDA engine: checks, launches, and what the host learns of them.

#include "common/units.h"
#include "engine/cuda/engine.h"

namespace uccl_ep {
namespace {

using cuda::must;

// Pointers of a plan into `memory`; its bytes if that is null. The order is that of PlanView.
uint64_t lay_out(cuda::PlanView& view, uint8_t* memory, uint64_t ranks, uint64_t experts) {
  uint64_t at = 0;
  const auto take = [&](uint32_t*& pointer, uint64_t count) {
    pointer = memory == nullptr ? nullptr : reinterpret_cast<uint32_t*>(memory + at);
    at += 4 * count;
  };
  take(view.row_begin, ranks + 1);
  take(view.piece_base, ranks);
  take(view.sent_begin, ranks + 1);
  take(view.padding, 2 * experts);
  take(view.row_token, view.received_rows);
  take(view.row_pair, view.received_rows);
  take(view.row_slot, uint64_t{view.received_rows} + 1);
  take(view.slots, view.received_pairs);
  take(view.piece_begin, uint64_t{view.num_tokens} + 1);
  take(view.piece_rows, view.sent_rows);
  take(view.pair_place, view.sent_pairs);
  return at;
}

constexpr uint32_t kSideBySideSms = 48;

void refuse(UsageKind kind, const std::string& text) { throw UsageFailure(kind, text); }

}  // namespace

void CudaEngine::check_usable() const {
  if (closed_) refuse(UsageKind::kClosed, "the buffer is closed");
  if (!started_) refuse(UsageKind::kClosed, "the buffer was not started");
  life_.check();
}

void CudaEngine::check_row(uint32_t hidden, Dtype dtype) const {
  if (hidden == 0 || hidden % kFp8Block != 0 || uint64_t{hidden} * dtype_bytes(dtype) > layout_.row_bytes)
    refuse(UsageKind::kShape, "rows of " + std::to_string(hidden) + " " + dtype_name(dtype) +
                                  " elements: a multiple of 128 is needed, and at most " +
                                  std::to_string(layout_.row_bytes) + " bytes");
}

std::shared_ptr<CudaOp> CudaEngine::new_op(const OpSignature& signature, std::shared_ptr<CudaPlan> plan) {
  auto op = std::make_shared<CudaOp>();
  op->signature = signature;
  op->plan = std::move(plan);
  must(cudaEventCreateWithFlags(&op->done, cudaEventDisableTiming), "cudaEventCreate");
  op->epoch = ++epoch_;
  return op;
}

void CudaEngine::follow(cudaStream_t stream) {
  must(cudaEventRecord(inputs_ready_, stream), "cudaEventRecord");
  must(cudaStreamWaitEvent(stream_, inputs_ready_, 0), "cudaStreamWaitEvent");
}

std::shared_ptr<CudaOp> CudaEngine::dispatch(const CudaDispatchArgs& args) {
  const std::lock_guard lock(mutex_);
  const cuda::OnDevice guard(device_);
  check_usable();
  check_row(args.hidden, args.dtype);
  if (args.num_tokens > layout_.max_tokens)
    refuse(UsageKind::kShape, std::to_string(args.num_tokens) + " tokens: with its budget_bytes this buffer holds " +
                                  std::to_string(layout_.max_tokens));
  const bool fresh = args.plan == nullptr;
  if (fresh && !args.has_routing)
    refuse(UsageKind::kInput, "dispatch without routing needs the handle of an earlier dispatch");
  if (!fresh && args.plan->engine_generation != config_.generation)
    refuse(UsageKind::kInput, "the handle belongs to another buffer");
  if (!fresh && args.num_tokens != args.plan->view.num_tokens)
    refuse(UsageKind::kShape, "x has " + std::to_string(args.num_tokens) + " tokens, the handle was made for " +
                                  std::to_string(args.plan->view.num_tokens));
  auto plan = args.plan;
  if (fresh) {
    plan = std::make_shared<CudaPlan>();
    plan->engine_generation = config_.generation;
    plan->routing_kind = args.routing.kind;
    plan->routing_width = args.routing.width;
    plan->expert_alignment = args.expert_alignment;
    plan->view.num_tokens = static_cast<uint32_t>(args.num_tokens);
  }
  OpSignature s{};
  s.kind = OpKind::kDispatch;
  s.dtype = args.dtype;
  s.wire = args.wire;
  s.plan_use = fresh ? PlanUse::kNew : PlanUse::kCached;
  s.hidden = args.hidden;
  s.with_values = args.values != nullptr;
  s.fp8_pow2 = args.wire == Dtype::kFp8 && args.fp8_pow2;
  s.expert_alignment = plan->expert_alignment;
  s.plan_id = fresh ? 0 : plan->plan_id;
  auto op = new_op(s, plan);
  if (fresh) plan->plan_id = op->epoch;
  op->values_in = args.values;
  op->counts_known = !fresh;
  num_dispatches_ += 1;

  const uint32_t num_tokens = static_cast<uint32_t>(args.num_tokens);
  follow(args.stream);
  must(cuda::launch_enter(domain_, s, num_tokens, !fresh, stream_), "enter");
  if (fresh) {
    const cuda::DeviceRouting routing{args.routing.data, args.routing.kind == RoutingKind::kMap, args.routing.width,
                                      num_tokens};
    must(cuda::launch_exchange(domain_, routing, stream_), "exchange");
    must(cuda::launch_counts(domain_, plan->expert_alignment, stream_), "counts");
  }
  const cuda::StageArgs stage{
      args.x, num_tokens, args.hidden, args.dtype, args.wire, args.fp8_pow2, fresh ? nullptr : args.values};
  must(cuda::launch_stage(domain_, stage, plan->view, all_sms_, stream_), "stage");
  if (!fresh) must(cuda::launch_meet(domain_, stream_), "meet");
  return op;
}

bool CudaEngine::poll_counts(CudaOp& op) {
  if (op.counts_known) return true;
  cuda::HostCounts& counts = *domain_.counts;
  if (read_device_flag(&counts.epoch) < op.epoch) {
    check();
    return false;
  }
  CudaPlan& plan = *op.plan;
  plan.view.num_rows = counts.num_rows;
  plan.view.received_rows = counts.received_rows;
  plan.view.received_pairs = counts.received_pairs;
  plan.view.sent_rows = counts.sent_rows;
  plan.view.sent_pairs = counts.sent_pairs;
  const uint32_t experts = domain_.experts_per_rank;
  const uint32_t* exact = reinterpret_cast<const uint32_t*>(&counts + 1);
  plan.tokens_per_expert_exact.assign(exact, exact + experts);
  plan.tokens_per_expert.assign(exact + experts, exact + 2 * experts);
  plan.storage_bytes = lay_out(plan.view, nullptr, domain_.at.num_ranks, experts);
  op.counts_known = true;
  return true;
}

void CudaEngine::give_output(CudaOp& op, const CudaOutput& output) {
  const std::lock_guard lock(mutex_);
  const cuda::OnDevice guard(device_);
  CudaPlan& plan = *op.plan;
  follow(output.stream);  // the memory may still be in use there
  if (op.signature.plan_use == PlanUse::kNew) {
    lay_out(plan.view, output.plan, domain_.at.num_ranks, domain_.experts_per_rank);
    must(cuda::launch_plan(domain_, plan.view, plan.routing_width, stream_), "plan");
    if (op.values_in != nullptr)
      must(cuda::launch_stage_values(domain_, plan.view, op.values_in, num_sms_, stream_), "stage_values");
  }
  const OpSignature& s = op.signature;
  const cuda::PlaceArgs place{s.hidden, s.dtype, s.wire, output.rows, output.scales, output.values};
  must(cuda::launch_place(domain_, plan.view, place, num_sms_, stream_), "place");
  finish(op);
}

std::shared_ptr<CudaOp> CudaEngine::combine(const CudaCombineArgs& args) {
  const std::lock_guard lock(mutex_);
  const cuda::OnDevice guard(device_);
  check_usable();
  check_row(args.hidden, args.wire);
  if (args.plan == nullptr) refuse(UsageKind::kInput, "combine needs the handle of a dispatch");
  if (args.plan->engine_generation != config_.generation)
    refuse(UsageKind::kInput, "the handle belongs to another buffer");
  OpSignature s{};
  s.kind = OpKind::kCombine;
  s.dtype = args.dtype;
  s.wire = args.wire;
  s.plan_use = PlanUse::kCached;
  s.hidden = args.hidden;
  s.with_values = args.values != nullptr;
  s.expert_alignment = args.plan->expert_alignment;
  s.plan_id = args.plan->plan_id;
  auto op = new_op(s, args.plan);
  op->counts_known = true;
  num_combines_ += 1;
  const cuda::PlanView& plan = args.plan->view;
  follow(args.stream);
  must(cuda::launch_enter(domain_, s, plan.num_tokens, true, stream_), "enter");
  must(cuda::launch_meet(domain_, stream_), "meet");
  fold_and_merge({args.hidden, args.dtype, args.wire, args.rows, args.values},
                 {args.hidden, args.dtype, args.wire, args.out, args.values_out,
                  uint64_t{4} * plan.num_tokens * args.plan->routing_width},
                 plan);
  finish(*op);
  return op;
}

// With enough SMs side by side: merge sums what fold's first chunks bring while the rest is under way. With few, one
// after the other, where merge, which only reads local memory and waits for nothing, gets all SMs.
void CudaEngine::fold_and_merge(cuda::FoldArgs fold, cuda::MergeArgs merge, const cuda::PlanView& plan) {
  if (num_sms_ < kSideBySideSms) {
    must(cuda::launch_fold(domain_, plan, fold, num_sms_, stream_), "fold");
    must(cuda::launch_await_pieces(domain_, stream_), "await_pieces");
    must(cuda::launch_merge(domain_, plan, merge, all_sms_, stream_), "merge");
    return;
  }
  fold.by_chunk = merge.by_chunk = true;
  const uint32_t merge_sms = num_sms_ * 2 / 5;
  must(cudaEventRecord(inputs_ready_, stream_), "cudaEventRecord");
  must(cudaStreamWaitEvent(merge_stream_, inputs_ready_, 0), "cudaStreamWaitEvent");
  must(cuda::launch_fold(domain_, plan, fold, num_sms_ - merge_sms, stream_), "fold");
  must(cuda::launch_merge(domain_, plan, merge, merge_sms, merge_stream_), "merge");
  must(cudaEventRecord(merged_, merge_stream_), "cudaEventRecord");
  must(cudaStreamWaitEvent(stream_, merged_, 0), "cudaStreamWaitEvent");
}

void CudaEngine::finish(CudaOp& op) {
  must(cudaEventRecord(op.done, stream_), "cudaEventRecord");
  op.launched = true;
}

void CudaEngine::wait(CudaOp& op, cudaStream_t stream) const {
  check();
  must(cudaStreamWaitEvent(stream, op.done, 0), "cudaStreamWaitEvent");
}

}  // namespace uccl_ep
