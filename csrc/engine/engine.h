// One rank's end of a buffer, for tensors in any memory: the interface that the Python bindings use.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/low_latency.h"
#include "engine/call.h"
#include "engine/stats.h"
#include "sync/trace.h"

namespace uccl_ep {

// A queued dispatch or combine. Its engine outlives it. All methods may throw the operation's error.
class Operation {
 public:
  virtual ~Operation() = default;
  // Its plan: of a new one, the sizes are known with the counts.
  virtual std::shared_ptr<SavedPlan> plan() const = 0;

  // ---- of a dispatch
  // True when the counts are known, false after `timeout_usec`.
  virtual bool wait_counts(uint64_t timeout_usec) = 0;
  virtual bool counts_known() const = 0;
  // The plan's sizes are a guess: memory for them may be given before the counts are known.
  virtual bool is_guessed() const { return false; }
  // There is no memory for the guess: wait for the counts first.
  virtual void give_up_guess() {}
  // Whether the memory that was given before the counts were known is large enough.
  virtual bool placed() const { return false; }
  // Gives memory for the plan's sizes.
  virtual void give_output(const DispatchOutput& output) = 0;

  // ---- the end
  // Host: true when it is over, false after `timeout_usec`. CUDA: true at once; what the caller queues on `stream` from
  // now on runs after it.
  virtual bool wait(Stream stream, uint64_t timeout_usec) = 0;
  // Whether its memory is no longer in use.
  virtual bool done() const = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // ---- creation, in this order; between two steps all ranks have done the one before
  virtual std::string export_handle() const = 0;
  // `handles`: by rank.
  virtual void connect(const std::vector<std::string>& handles) = 0;
  // Ranks map each other's device memory. Each waits for the others; `look` is called meanwhile, and may throw.
  virtual void share_memory(const std::function<void()>&) {}
  virtual void start() = 0;

  // ---- calls
  // Validate (UsageFailure, nothing was queued), then queue. The memory behind the pointers is used until the operation
  // is over.
  virtual std::shared_ptr<Operation> dispatch(const DispatchArgs& args) = 0;
  virtual std::shared_ptr<Operation> combine(const CombineArgs& args) = 0;
  // Of low latency. A call that sends and receives is queued as if it were two. Whether it also waits for the results
  // depends on the engine: wait_low_latency() does.
  virtual void low_latency(const LowLatencyDispatch& args) = 0;
  virtual void low_latency(const LowLatencyCombine& args) = 0;
  // After such a call. Host: true when its results are there, or at once if it only sends; false after `timeout_usec`.
  // GPU: true at once.
  virtual bool wait_low_latency(OpKind, SlotPhase, uint64_t) { return true; }
  // out [ranks]: 1 for each rank that is masked, else 0.
  virtual void low_latency_masks(int32_t* out, Stream stream) = 0;
  // A call of this rank was refused before it was queued, `why`; it would have come after what is queued on `stream`.
  virtual void refused(const std::string& why, Stream stream) = 0;
  // Number of queued operations plus refused calls. Unchanged: neither has happened.
  virtual uint64_t num_calls() const = 0;
  // Announces the replay of a graph.
  virtual void wake() {}

  // ---- errors and the end
  // This rank cannot go on: every rank raises.
  virtual void fail(const std::string& text) = 0;
  // Throws the error that reached this rank, if any.
  virtual void check() const = 0;
  // Waits, bounded by the progress deadline, until every rank closes; then gives everything back. With `abort` tells
  // the others and does not wait. By any thread, whatever others do here; operations under way end first. If another
  // thread closes, returns when it is through, which it soon is with `abort`. Afterwards all may be called: operations
  // are refused, statistics and the error are those of the end.
  virtual void close(bool abort) = 0;

  // ---- statistics and traces
  // Records what happens from now on: of each thread, and of kernels, at least `max_events`. Throws UsageFailure.
  virtual void start_trace(uint64_t max_events) = 0;
  // What was recorded, when chunks in flight are flushed or after a second.
  virtual Trace stop_trace() = 0;
  // By the names that Buffer.stats() documents.
  virtual Stats stats() const = 0;
};

}  // namespace uccl_ep
