// An operation as its caller sees it.
#include <sched.h>

#include "common/clock.h"
#include "engine/gpu/engine.h"

namespace uccl_ep {
namespace {

constexpr uint64_t kSpinUsec = 5000;  // after that, threads that share the core get a turn

}  // namespace

PlanFacts GpuPlan::facts() const {
  PlanFacts facts;
  facts.plan_id = plan_id;
  facts.engine_generation = engine_generation;
  facts.routing_kind = routing_kind;
  facts.routing_width = routing_width;
  facts.num_tokens = view.num_tokens;
  facts.expert_alignment = expert_alignment;
  facts.compact_width = view.compact_width;
  facts.has_capacity = has_capacity;
  facts.counts_begin = counts_begin;
  facts.counts_end = counts_end;
  return facts;
}

// Does not sleep, because the caller's step goes on only when this thread has seen the counts.
bool GpuOp::wait_counts(uint64_t timeout_usec) {
  const uint64_t began = now_usec();
  if (waited_since_usec_ == 0) waited_since_usec_ = began;
  while (!engine_.poll_counts(*this)) {
    const uint64_t now = now_usec();
    if (now - began > timeout_usec) return false;
    if (now - waited_since_usec_ > kSpinUsec) sched_yield();
  }
  return true;
}

void GpuOp::give_up_guess() { engine_.give_up_guess(*this); }

void GpuOp::give_output(const DispatchOutput& output) { engine_.give_output(*this, output); }

bool GpuOp::wait(Stream stream, uint64_t) {
  engine_.check();
  if (done_ != nullptr) gpu::follow(stream_of(stream), done_);
  return true;
}

// On the caller's own stream there is nothing to wait for: memory is reused in the order of the stream.
bool GpuOp::done() const { return launched_ && (done_ == nullptr || gpu::is_over(done_)); }

}  // namespace uccl_ep
