// The operations of a GPU engine: launches, and what the host learns of them.

#include <algorithm>
#include <bit>
#include <deque>
#include <tuple>

#include "backend/gpu/windows.h"
#include "common/units.h"
#include "engine/gpu/engine.h"

namespace uccl_ep {
namespace {

using gpu::must;

void refuse(UsageKind kind, const std::string& text) { throw UsageFailure(kind, text); }

// Dispatches of one form need about the same memory per token. Between two powers of two, numbers of tokens are of one
// form.
auto form_of(const GpuPlan& plan) {
  return std::tuple(plan.routing_kind, plan.routing_width, plan.expert_alignment, plan.view.compact_width,
                    std::bit_width(plan.view.num_tokens));
}

}  // namespace

void GpuEngine::follow(gpu::StreamHandle stream, gpu::StreamHandle other) {
  gpu::record(inputs_ready_, other);
  gpu::follow(stream, inputs_ready_);
}

std::shared_ptr<GpuOp> GpuEngine::begin(std::shared_ptr<GpuPlan> plan, gpu::StreamHandle stream, bool aside) {
  auto op = std::make_shared<GpuOp>(*this);
  op->plan_ = std::move(plan);
  op->call_ = ++num_begun_;
  op->stream_ = aside ? stream_ : stream;
  if (aside) {
    op->done_ = gpu::make_event();
    follow(stream_, stream);
  }
  // The operations of a buffer are one sequence. The operations in a graph are ordered by whoever replays it.
  op->captured_by_ = gpu::captured_graph(op->stream_, &op->capture_);
  has_captured_ |= op->captured_by_ != nullptr;
  if (last_stream_ != op->stream_ && op->captured_by_ == nullptr) gpu::follow(op->stream_, last_done_);
  return op;
}

std::shared_ptr<GpuPlan> GpuEngine::new_plan(const DispatchArgs& args) const {
  auto plan = std::make_shared<GpuPlan>();
  plan->engine_generation = config_.generation;
  plan->routing_kind = args.routing.kind;
  plan->routing_width = args.routing.width;
  plan->expert_alignment = args.expert_alignment;
  plan->has_capacity = args.capacity >= 0;
  plan->view.compact_width = compact_width_of(args, group_.experts_per_rank);
  plan->view.num_tokens = static_cast<uint32_t>(args.num_tokens);
  if (args.capacity < 0) return plan;
  const uint32_t ranks = group_.map.num_ranks;
  const uint32_t tokens = tokens_of_capacity(args);
  const uint32_t most_pairs = std::min(args.routing.width, group_.experts_per_rank);
  GpuPlan::Sizes sizes;
  sizes.num_rows = static_cast<uint32_t>(args.capacity);
  sizes.received_rows = ranks * tokens;
  sizes.received_pairs = static_cast<uint32_t>(std::min<uint64_t>(
      {uint64_t{sizes.received_rows} * most_pairs, uint64_t{ranks} * layout_.max_pairs, UINT32_MAX}));
  sizes.sent_pairs = std::min(plan->view.num_tokens * args.routing.width, layout_.max_pairs);
  sizes.most_tokens = tokens;
  sizes.most_pieces = most_pieces(args.routing.width);
  sizes.most_pairs =
      static_cast<uint32_t>(std::min<uint64_t>(uint64_t{tokens} * args.routing.width, layout_.max_pairs));
  if (layout_.num_domains > 1) {
    sizes.most_rows = gpu::kTokenBlock;
    sizes.span_rows = gpu::SpanRows::all();
    sizes.relayed_rows = (layout_.num_streams - 1) * tokens;
    sizes.sent_addends = sizes.sent_pairs;
  }
  size_plan(*plan, sizes);
  return plan;
}

void GpuEngine::size_plan(GpuPlan& plan, const GpuPlan::Sizes& sizes) const {
  plan.sizes = sizes;
  plan.view.num_out_rows = sizes.num_rows;
  plan.view.num_token_blocks = (sizes.most_tokens + gpu::kTokenBlock - 1) / gpu::kTokenBlock;
  plan.counts_begin = sizeof(*plan.view.routing_hash);
  plan.counts_end = plan.counts_begin + sizeof(*plan.view.tokens_per_expert) * group_.experts_per_rank;
  plan.storage_bytes = gpu::lay_out_plan(plan.view, sizes, nullptr, layout_);
}

std::shared_ptr<Operation> GpuEngine::dispatch(const DispatchArgs& args) {
  const std::lock_guard lock(mutex_);
  const gpu::OnDevice guard(device_);
  check_dispatch(args);
  const auto known = own_plan<GpuPlan>(args.plan);
  const bool fresh = known == nullptr;
  if (!fresh && args.has_routing) check_form(args, *known);
  auto op = begin(fresh ? new_plan(args) : known, stream_of(args.stream), args.aside);
  GpuPlan& plan = *op->plan_;
  if (fresh) plan.plan_id = plane_.num_queued() + 1;
  num_dispatches_ += 1;
  op->counts_known_ = !fresh || plan.has_capacity;
  op->pads_ = plan.has_capacity && args.pad_to_capacity;

  gpu::PlaceArgs& place = op->place_;
  place.signature = make_signature(args, plan.facts(), fresh ? PlanUse::kNew : PlanUse::kCached);
  place.routing = {args.routing.data, args.weights, args.routing.kind == RoutingKind::kMap, args.routing.width};
  place.stage = {args.x,
                 args.scales,
                 args.metadata,
                 static_cast<uint32_t>(args.num_tokens),
                 args.hidden,
                 args.dtype,
                 args.wire,
                 row_shape(args.wire, args.hidden, args.num_metadata),
                 static_cast<uint32_t>(gpu::staged_row_bytes(args.wire, args.hidden, args.num_metadata))};
  place.routing_compared = !fresh && args.has_routing;
  const uint32_t at_once = window_tokens(layout_, place.stage.stride);
  place.windows = {at_once, at_once};
  place.call = op->call_;
  if (!fresh) {
    const uint32_t each = later_window_tokens(layout_, place.stage.stride, plan.sizes.most_rows, plan.sizes.span_rows);
    place.windows = {each, each};
    return op;
  }
  place.tells_spans = place.stage.num_tokens > window_tokens(layout_, layout_.row_bytes);
  place.state = gpu::PlanState::kNew;
  if (plan.has_capacity) return op;
  GpuPlan::Sizes guess;
  if (guesses_[form_of(plan)].make(args.num_tokens, guess)) {
    size_plan(plan, guess);
    num_guesses_ += 1;
    place.fit = gpu::Fit::kIfLargeEnough;
    return op;
  }
  exchange(*op);
  return op;
}

void GpuEngine::give_up_guess(GpuOp& op) {
  const std::lock_guard lock(mutex_);
  const gpu::OnDevice guard(device_);
  exchange(op);
}

void GpuEngine::exchange(GpuOp& op) {
  op.place_.fit = gpu::Fit::kNever;
  launch(op);
  note_last(op);  // it may be all that is launched
}

void GpuEngine::launch(GpuOp& op) {
  if (given_back_) refuse(UsageKind::kClosed, "the buffer was closed in the middle of an operation");
  note_launch(op);
  must(launch_dispatch(group_, op.plan_->view, op.place_, num_sms_, stage_sms_, op.stream_), "dispatch");
  note_queued(op);
}

void GpuEngine::note_queued(GpuOp& op) {
  if (op.queued_) return;
  op.queued_ = true;
  plane_.note_queued();
}

// Keeps the proxy awake for the operation. In a graph one host node does so for all its operations, whenever a replay
// begins. Threads then wake up during whatever comes before the kernels, and nothing waits for the host.
void GpuEngine::note_launch(const GpuOp& op) {
  if (network_ == nullptr) return;
  if (op.captured_by_ == nullptr) {
    plane_.note_launched();
    return;
  }
  CapturedLaunches*& launches = captured_launches_[op.capture_];
  if (launches == nullptr) {
    launches = new_captured_launches();
    const auto note = [](void* of) {
      auto& its = *static_cast<CapturedLaunches*>(of);
      const std::lock_guard lock(its.mutex);
      if (its.engine != nullptr) its.engine->note_replay(its.count.read());
    };
    gpu::add_host_node(op.captured_by_, note, launches);
  }
  launches->count.publish(launches->count.own() + 1);
}
GpuEngine::CapturedLaunches* GpuEngine::new_captured_launches() {
  static std::mutex mutex;
  static auto& all = *new std::deque<CapturedLaunches>;
  const std::lock_guard lock(mutex);
  return &all.emplace_back(*this);
}
// By a thread of the GPU's runtime, which must not call the runtime. Proxy and copier wake up at the same time, not one
// after the other.
void GpuEngine::note_replay(uint64_t operations) {
  plane_.note_launched(operations, true);
  network_->wake();
}

bool GpuEngine::poll_counts(GpuOp& op) {
  if (op.counts_known_) return true;
  gpu::HostCounts& counts = *group_.counts;
  if (read_device_flag(&counts.call.value) != op.call_) {
    check();
    return false;
  }
  const std::lock_guard lock(mutex_);
  const gpu::OnDevice guard(device_);
  GpuPlan& plan = *op.plan_;
  const GpuPlan::Sizes sizes = counts.sizes;
  op.placed_ = op.placed_ && sizes.fits(plan.sizes);
  if (op.placed_) {
    plan.sizes = sizes;
    plan.view.num_out_rows = sizes.num_rows;
    end_dispatch(op);
  } else {
    num_misses_ += op.place_.fit == gpu::Fit::kIfLargeEnough;
    op.launched_ = false;
    op.place_.state = gpu::PlanState::kExchanged;
    op.place_.fit = gpu::Fit::kAlways;
    size_plan(plan, sizes);
  }
  if (plan.view.num_tokens > 0) guesses_[form_of(plan)].learn(plan.view.num_tokens, sizes);
  const uint32_t experts = group_.experts_per_rank;
  const uint32_t* exact = reinterpret_cast<const uint32_t*>(&counts + 1);
  plan.exact_counts.assign(exact, exact + experts);
  plan.padded_counts.assign(exact + experts, exact + 2 * experts);
  op.counts_known_ = true;
  return true;
}

void GpuEngine::give_output(GpuOp& op, const DispatchOutput& output) {
  const std::lock_guard lock(mutex_);
  const gpu::OnDevice guard(device_);
  GpuPlan& plan = *op.plan_;
  if (op.done_ != nullptr) follow(op.stream_, stream_of(output.stream));  // the memory may still be in use there
  gpu::PlaceArgs& place = op.place_;
  if (place.state != gpu::PlanState::kKnown) gpu::lay_out_plan(plan.view, plan.sizes, output.plan, layout_);
  place.memory = plan.sizes;
  place.rows = output.rows;
  place.scales = output.scales;
  place.metadata = output.metadata;
  place.row_weights = output.weights;
  place.row_experts = output.row_experts;
  launch(op);
  if (op.pads_) must(launch_pad(group_, plan.view, place, num_sms_, op.stream_), "pad");
  op.placed_ = true;
  if (op.counts_known_) end_dispatch(op);
  if (!op.launched_) finish(op);
}

// When all is launched and the counts are known, if they will be.
void GpuEngine::end_dispatch(GpuOp& op) {
  const GpuPlan& plan = *op.plan_;
  gpu::DispatchWindows windows = op.place_.windows;
  if (op.place_.state != gpu::PlanState::kKnown)
    windows.each = later_window_tokens(layout_, op.place_.stage.stride, plan.sizes.most_rows, plan.sizes.span_rows);
  num_windows_ += windows.count(plan.sizes.most_tokens);
  if (plan.has_capacity) return;
  rows_shipped_ += plan.sizes.shipped_rows;
  rows_placed_ += plan.view.compact_width > 0 ? plan.sizes.received_rows : plan.sizes.received_pairs;
}

std::shared_ptr<Operation> GpuEngine::combine(const CombineArgs& args) {
  const std::lock_guard lock(mutex_);
  const gpu::OnDevice guard(device_);
  check_combine(args);
  const auto known = own_plan<GpuPlan>(args.plan);
  const GpuPlan& plan = *known;
  const uint64_t piece_bytes = uint64_t{args.hidden} * dtype_bytes(args.wire);
  auto op = begin(known, stream_of(args.stream), args.aside);
  op->counts_known_ = true;
  num_combines_ += 1;
  if (!plan.has_capacity) {
    rows_folded_ += plan.sizes.received_rows;
    rows_relayed_ += plan.sizes.relayed_rows;
  }
  gpu::KernelCombineArgs combine;
  combine.signature = make_signature(args, plan.facts());
  const GpuPlan::Sizes& sizes = plan.sizes;
  combine.window_tokens = combine_window_tokens(layout_, piece_bytes, sizes.most_pieces, false, sizes.most_rows);
  if (sizes.most_tokens > combine.window_tokens) {
    combine.window_tokens = combine_window_tokens(layout_, piece_bytes, sizes.most_pieces, true, sizes.most_rows);
    combine.num_windows = (sizes.most_tokens + combine.window_tokens - 1) / combine.window_tokens;
  }
  combine.num_windows *= layout_.stream_batches;
  combine.piece_slots = piece_slots(layout_, piece_bytes, combine.num_windows > 1);
  const uint32_t for_weights = combine.signature.with_weights != 0 ? weight_windows(layout_, sizes.most_pairs) : 0;
  combine.num_windows += for_weights;
  combine.first_weight_window = combine.num_windows - std::max(for_weights, 1u);
  combine.may_drop = plan.has_capacity;
  combine.hidden = args.hidden;
  combine.dtype = args.dtype;
  combine.wire = args.wire;
  combine.rows = args.rows;
  combine.row_weights = args.weights;
  std::copy(args.bias.begin(), args.bias.end(), combine.bias);
  combine.out = args.out;
  combine.weights = args.weights_out;
  combine.weight_bytes = uint64_t{4} * plan.view.num_tokens * plan.routing_width;
  note_launch(*op);
  must(launch_combine(group_, plan.view, combine, num_sms_, op->stream_), "combine");
  note_queued(*op);
  num_windows_ += combine.num_windows;
  finish(*op);
  return op;
}

void GpuEngine::finish(GpuOp& op) {
  if (op.done_ != nullptr) gpu::record(op.done_, op.stream_);
  note_last(op);
  op.launched_ = true;
}

// The next operation on another stream runs after what has been launched, and close() waits for what has been launched.
void GpuEngine::note_last(const GpuOp& op) {
  if (op.captured_by_ == nullptr) note_last(op.stream_);
}
void GpuEngine::note_last(gpu::StreamHandle stream) {
  gpu::record(last_done_, stream);
  last_stream_ = stream;
}

}  // namespace uccl_ep
