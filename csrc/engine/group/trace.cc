// Traces: on and off, of all threads.
#include <algorithm>
#include <chrono>
#include <thread>

#include "common/patience.h"
#include "engine/group/control_plane.h"

namespace uccl_ep {

void ControlPlane::start_trace(uint64_t max_events) {
  if (max_events == 0 || max_events > kMaxTraceEvents)
    throw UsageFailure(UsageKind::kInput, "max_events = " + std::to_string(max_events) + ": allowed 1 to " +
                                              std::to_string(kMaxTraceEvents));
  std::lock_guard lock(mutex_);
  if (closed_) throw UsageFailure(UsageKind::kClosed, "the buffer is closed");
  if (!started_) throw UsageFailure(UsageKind::kClosed, "the buffer was not started");
  if (traced_) throw UsageFailure(UsageKind::kInput, "the buffer is being traced already");
  for (TraceBuffer* of : traces_) of->start(max_events);
  traced_ = true;
}

Trace ControlPlane::stop_trace() {
  settle();
  std::lock_guard lock(mutex_);
  if (!traced_) throw UsageFailure(UsageKind::kInput, "the buffer is not being traced");
  traced_ = false;
  Trace trace;
  for (TraceBuffer* of : traces_) trace.append(of->stop());
  const std::shared_lock held(memory_mutex_);
  if (given_back_) forget_traces();
  return trace;
}

void ControlPlane::forget_traces() {
  for (TraceBuffer* of : traces_) of->forget();
}

// An operation is over when its rows are here: what it has sent may still be on its way.
void ControlPlane::settle() const {
  constexpr uint64_t kPatienceUsec = 1000000;
  const auto usable = [this] {
    std::lock_guard lock(mutex_);
    return started_ && !closed_ && !failed();
  };
  if (!usable()) return;
  Patience patience(kPatienceUsec);
  uint64_t first_pass = UINT64_MAX;
  for (uint64_t taken = UINT64_MAX; usable() && !patience.over();) {
    const std::shared_lock held(memory_mutex_);
    if (given_back_) return;
    const ProxyStats stats = proxy_->stats();
    first_pass = std::min(first_pass, stats.passes);
    uint64_t flushed = 0;
    for (const ShipStats& ship : stats.ships) flushed += ship.chunks;
    // A whole pass has looked at the queue since, and another one.
    if (stats.passes > first_pass + 1 && flushed == stats.commands && stats.commands == taken) return;
    taken = stats.commands;
    control().proxy_bell.ring();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace uccl_ep
