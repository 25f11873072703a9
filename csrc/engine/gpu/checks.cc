// Checks of a GPU engine before anything is launched.

#include <algorithm>

#include "backend/gpu/windows.h"
#include "common/units.h"
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

// The most pieces that a token block can have, if a token has at most `width` experts.
uint32_t GpuEngine::most_pieces(uint32_t width) const {
  return gpu::kTokenBlock * std::min(width, static_cast<uint32_t>(topo_.domains_of_size.rbegin()->first));
}

// With a capacity no rank knows how many tokens the others have. A plan holds max_tokens; if that is not said, what
// goes in one window, or what this rank has itself, in whole token blocks. All ranks come to the same number, or one of
// them reports kTooManyTokens.
uint32_t GpuEngine::tokens_of_capacity(const DispatchArgs& args) const {
  if (args.max_tokens > 0)
    return static_cast<uint32_t>(
        round_up(std::min<uint64_t>(args.max_tokens, layout_.max_tokens), uint64_t{gpu::kTokenBlock}));
  const uint64_t piece_bytes = uint64_t{args.hidden} * dtype_bytes(args.dtype);
  const uint32_t at_once =
      std::min(window_tokens(layout_, gpu::staged_row_bytes(args.wire, args.hidden, args.num_metadata)),
               combine_window_tokens(layout_, piece_bytes, most_pieces(args.routing.width)));
  return std::max(at_once, static_cast<uint32_t>(round_up(args.num_tokens, gpu::kTokenBlock)));
}

// Rows go in windows; routing does not, and there is memory for so much of it.
void GpuEngine::check_room(const DispatchArgs& args) const {
  const uint64_t tokens = args.num_tokens, width = args.routing.width;
  const std::string its = std::to_string(tokens) + " tokens";
  const std::string holds = ": with its budget_bytes and window_tokens this buffer holds the routing of ";
  if (tokens > gpu::kMaxTokens)
    refuse(UsageKind::kShape, its + ": the CUDA backend has at most " + std::to_string(gpu::kMaxTokens));
  if (tokens > layout_.max_tokens) {
    EngineConfig enough = config_;
    enough.window_tokens = static_cast<uint32_t>(tokens);
    refuse(UsageKind::kShape, its + holds + std::to_string(layout_.max_tokens) +
                                  "; window_tokens = " + std::to_string(tokens) + " needs a budget_bytes of at least " +
                                  std::to_string(gpu_least_budget_bytes(enough)));
  }
  if (args.has_routing && args.routing.kind == RoutingKind::kTopk && tokens * width > layout_.max_pairs)
    refuse(UsageKind::kShape, its + " with " + std::to_string(width) + " experts each" + holds +
                                  std::to_string(layout_.max_pairs) +
                                  " experts of tokens; more with more budget_bytes "
                                  "and window_tokens = " +
                                  std::to_string(tokens));
}

void GpuEngine::check_dispatch(const DispatchArgs& args) const {
  check_usable();
  check_call(args, limits());
  check_room(args);
  const std::string tokens = std::to_string(args.num_tokens) + " tokens: ";
  if (args.has_routing && args.num_tokens * args.routing.width >= uint64_t{1} << 32)
    refuse(UsageKind::kShape, tokens + "with " + std::to_string(args.routing.width) +
                                  " columns of routing each, the product has to be below 2^32");
  if (args.plan == nullptr && args.capacity < 0 && gpu::captured_graph(stream_of(args.stream)) != nullptr)
    refuse(UsageKind::kInput,
           "while a graph is captured the counts cannot be read: dispatch needs a capacity or the handle of an "
           "earlier dispatch");
}

// Kernels keep the place of one of the caller's rows in 32 bits, in units of 16 bytes.
void GpuEngine::check_combine(const CombineArgs& args) const {
  check_usable();
  check_call(args, limits());
  if (args.rounds_sums && topo_.num_domains() > 1)
    refuse(UsageKind::kConfig, "sums in fp32 that are rounded between domains: allowed are those of CPUs");
  const uint64_t rows = args.plan->num_rows(), row_bytes = uint64_t{args.hidden} * dtype_bytes(args.dtype);
  if (rows > gpu::kMostRowsBytes / row_bytes)
    refuse(UsageKind::kShape, "a combine of " + std::to_string(rows) + " rows of " + std::to_string(row_bytes) +
                                  " bytes: the CUDA backend takes at most " + std::to_string(gpu::kMostRowsBytes) +
                                  " bytes of rows");
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
