// Checks of a GPU engine before anything is launched.

#include <algorithm>

#include "engine/gpu/engine.h"

namespace uccl_ep {
namespace {

void refuse(UsageKind kind, const std::string& text) { throw UsageFailure(kind, text); }

}  // namespace

void GpuEngine::check_usable() const {
  if (closed_) refuse(UsageKind::kClosed, "the buffer is closed");
  if (!started_) refuse(UsageKind::kClosed, "the buffer was not started");
  check();
}

// With a capacity no rank knows how many windows the others need, so there is only one. A caller passes 1 for
// `wire_bytes` or `piece_bytes` if rows or pieces do not limit the operation.
void GpuEngine::check_at_once(uint64_t num_tokens, uint32_t width, uint64_t wire_bytes, uint64_t piece_bytes) const {
  const uint64_t most = width == 0 ? 0 : uint64_t{gpu::kTokenBlock} * std::min(width, layout_.num_members);
  const uint64_t tokens = std::min(window_tokens(layout_, wire_bytes),
                                   combine_window_tokens(layout_, piece_bytes, static_cast<uint32_t>(most)));
  if (num_tokens <= tokens) return;
  refuse(UsageKind::kShape, std::to_string(num_tokens) +
                                " tokens: with a capacity an operation has to fit the buffer at once, which holds " +
                                std::to_string(tokens) +
                                " of this routing and size; a larger budget_bytes or window_tokens holds more");
}

void GpuEngine::check_dispatch(const DispatchArgs& args) const {
  check_usable();
  check_call(args, limits());
  const std::string tokens = std::to_string(args.num_tokens) + " tokens: ";
  if (args.num_tokens > layout_.max_tokens)
    refuse(UsageKind::kShape, tokens + "with its budget_bytes and window_tokens this buffer holds the routing of " +
                                  std::to_string(layout_.max_tokens));
  if (args.has_routing && args.num_tokens * args.routing.width >= uint64_t{1} << 32)
    refuse(UsageKind::kShape, tokens + "with " + std::to_string(args.routing.width) +
                                  " columns of routing each, the product has to be below 2^32");
  if (args.plan != nullptr) {
    if (args.plan->facts().has_capacity)
      check_at_once(args.num_tokens, 0, gpu::staged_row_bytes(args.wire, args.hidden, args.num_metadata), 1);
    return;
  }
  if (args.capacity < 0) {
    if (gpu::captured_graph(stream_of(args.stream)) != nullptr)
      refuse(UsageKind::kInput,
             "while a graph is captured the counts cannot be read: dispatch needs a capacity or the handle of an "
             "earlier dispatch");
    return;
  }
  check_at_once(args.num_tokens, args.routing.width, gpu::staged_row_bytes(args.wire, args.hidden, args.num_metadata),
                uint64_t{args.hidden} * dtype_bytes(args.dtype));
}

// A routing of another form than the plan's counts as another routing, because kernels compare contents only.
void GpuEngine::check_form(const DispatchArgs& args, const GpuPlan& plan) {
  if (args.routing.kind == plan.routing_kind && args.routing.width == plan.routing_width) return;
  ErrorRecord record;
  record.kind = ErrorKind::kPlanMismatch;
  record.step = Step::kPlan;
  record.rank = record.peer = config_.rank;
  record.set_message("rank " + std::to_string(config_.rank) + " used plan " + std::to_string(plan.plan_id) +
                     " with another routing than it was made for");
  plane_.spread(record);
  plane_.check();
}

}  // namespace uccl_ep
