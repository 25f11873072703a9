// The engine of tensors in CPU memory: a worker runs the operations in their order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend/host/context.h"
#include "backend/host/step.h"
#include "backend/op.h"
#include "engine/engine.h"
#include "engine/group/control_plane.h"
#include "engine/host/closed_ranks.h"
#include "engine/host/slots.h"

namespace uccl_ep {

class HostEngine;

struct HostPlan final : SavedPlan {
  explicit HostPlan(std::shared_ptr<Plan> made) : plan(std::move(made)) {}
  PlanFacts facts() const override;
  uint64_t num_rows() const override { return plan->num_rows; }
  uint64_t num_bytes() const override { return plan->num_bytes(); }
  const std::vector<uint64_t>& tokens_per_expert() const override { return plan->tokens_per_expert; }
  const std::vector<uint64_t>& tokens_per_expert_exact() const override { return plan->tokens_per_expert_exact; }

  const std::shared_ptr<Plan> plan;
};

class HostOperation final : public Operation {
 public:
  HostOperation(HostEngine& engine, std::shared_ptr<HostPlan> plan);

  std::shared_ptr<SavedPlan> plan() const override { return plan_; }
  bool wait_counts(uint64_t timeout_usec) override;
  bool counts_known() const override;
  void give_output(const DispatchOutput& output) override;
  bool wait(Stream stream, uint64_t timeout_usec) override;
  bool done() const override;

 private:
  friend class HostEngine;
  HostEngine& engine_;
  const std::shared_ptr<HostPlan> plan_;
  mutable Op op_;  // as the worker sees it
};

class HostEngine final : public Engine {
 public:
  // Allocates the region. Throws UsageFailure for a configuration that cannot work.
  explicit HostEngine(const EngineConfig& config);
  ~HostEngine() override;

  std::string export_handle() const override { return plane_.export_handle(); }
  void connect(const std::vector<std::string>& handles) override { plane_.connect(handles); }
  void start() override { start(Drive::kThreads); }
  void start(Drive drive);

  std::shared_ptr<Operation> dispatch(const DispatchArgs& args) override;
  std::shared_ptr<Operation> combine(const CombineArgs& args) override;
  void low_latency(const LowLatencyDispatch& args) override { slots().call(args); }
  void low_latency(const LowLatencyCombine& args) override { slots().call(args); }
  bool wait_low_latency(OpKind kind, SlotPhase phase, uint64_t timeout_usec) override {
    // Until that says so, memory is in use.
    return slots_ == nullptr || phase == SlotPhase::kSend || slots_->wait(kind, timeout_usec);
  }
  void low_latency_masks(int32_t* out, Stream) override { slots().masks(out); }
  void refused(const std::string& why, Stream) override { plane_.refused(why); }
  uint64_t num_calls() const override { return plane_.num_calls(); }

  void fail(const std::string& text) override { plane_.fail(text); }
  void check() const override { plane_.check(); }
  void close(bool abort) override;

  // ---- with Drive::kSteps
  // A pass of the proxy and one of the worker; true if anything moved. Throws nothing that threads would not: an error
  // reaches operations and ranks.
  bool step();
  // close() waits for nobody, and operations that it finds unfinished end with an error. Before it, these end without
  // one: announces that this rank closes; all ranks have.
  void announce_close() { plane_.announce_close(); }
  bool may_close() const { return plane_.may_leave(); }

  void start_trace(uint64_t max_events) override { plane_.start_trace(max_events); }
  Trace stop_trace() override { return plane_.stop_trace(); }
  Stats stats() const override;

 private:
  friend class HostOperation;
  using Steps = std::vector<std::unique_ptr<host::HostStep>>;

  // dispatch.cc, combine.cc
  Steps dispatch_steps(Op& op, host::PlanStep*& plan);
  Steps combine_steps(Op& op, host::PlanStep*& plan);
  std::shared_ptr<Operation> submit(std::shared_ptr<HostOperation> operation);
  CallLimits limits() const;
  std::shared_ptr<Plan> plan_routing(const DispatchArgs& args) const;

  SlotLanes& slots() const;

  // run.cc
  void work();
  bool has_work() const;
  bool wants_slots() const { return slots_ != nullptr && slots_->wants(); }
  Look look_at_slots();
  Look look();
  void end_running();
  void end_unfinished();
  void count(const Op& op, uint64_t started_nsec);
  WaitingOn waiting_for(const Steps& steps, const host::PlanStep& plan) const;
  void sleep(uint32_t ticket);
  // By the worker's patience.
  struct Waiting {
    uint64_t started_usec = 0;
    uint64_t moved_usec = 0;  // when moves() was last seen to grow
    uint64_t moves = 0;
    uint64_t next_look_usec = 0;
  };
  // The operation that is under way.
  struct Running {
    std::shared_ptr<HostOperation> operation;
    uint64_t started_nsec = 0;
    Steps steps;
    host::PlanStep* plan = nullptr;  // null: it has not begun
    Waiting waiting;
  };
  void begin(Running& running);
  enum class Progress { kDone, kMoved, kNone };
  Progress advance(Running& running);
  void check_deadlines(const Op& op, const Steps& steps, const host::PlanStep& plan, Waiting& waiting);
  ErrorRecord timeout_record(const Op& op, const WaitingOn& waiting, bool arrival, uint64_t waited_usec) const;
  void locate(const Op& op, const Steps& steps, ErrorRecord& record) const;
  void trace(TraceKind kind, const Op& op, const WaitingOn& of, uint64_t began_nsec);
  void finish(Op& op, const ErrorRecord* error);

  const EngineConfig config_;
  const RingParams rings_;
  TraceBuffer worker_trace_;
  ControlPlane plane_;
  const Topology& topo_;
  // Its memory is the control plane's, its counters are read after the end, too.
  std::unique_ptr<host::HostContext> context_;
  std::unique_ptr<SlotLanes> slots_;  // nullptr: no low latency, or not started

  mutable std::mutex mutex_;  // guards what follows; before the control plane's
  std::condition_variable queue_changed_;
  std::deque<std::shared_ptr<HostOperation>> queue_;
  bool busy_ = false;
  bool stop_ = false;
  Drive drive_ = Drive::kThreads;
  struct OpCounters {
    uint64_t dispatches = 0, combines = 0, dispatch_usec = 0, combine_usec = 0;
  } counters_;

  // Writer: the worker.
  std::optional<Running> running_;
  PatienceClock patience_;
  ClosedRanks closed_;
  Counter busy_nsec_[kNumSteps];  // by step, in advance() that moved something
  Counter blocked_usec_[kNumSteps];  // by step, asleep while it was not done
  std::vector<Counter> waited_usec_;  // [rank] asleep and waiting_for() it
  std::thread worker_;
};

// Everything that an engine allocates, by purpose; and the least budget that would do.
MemoryEntries host_memory_entries(const EngineConfig& config);
uint64_t host_least_budget_bytes(const EngineConfig& config);

}  // namespace uccl_ep
