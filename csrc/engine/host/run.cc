// The worker: advances the steps of one operation side by side. Its thread sleeps when none can move, and never longer
// than a deadline.
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "common/clock.h"
#include "engine/host/engine.h"

namespace uccl_ep {
namespace {

constexpr uint64_t kLookUsec = 20000;  // how often an otherwise silent wait looks at the deadlines
constexpr int kManyRanks = 16;

}  // namespace

void HostEngine::work() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      queue_changed_.wait(lock, [&] { return stop_ || has_work(); });
      if (!has_work()) return;
    }
    while (true) {
      const uint32_t ticket = plane_.control().worker_bell.ticket();  // before the look that may find nothing
      const Look found = look();
      const Look slots = look_at_slots();
      if (found == Look::kNothing && slots == Look::kNothing) break;
      if (found != Look::kMoved && slots != Look::kMoved) sleep(ticket);
    }
  }
}

// Holding the mutex.
bool HostEngine::has_work() const { return !queue_.empty() || (slots_ != nullptr && slots_->has_work()); }

Look HostEngine::look_at_slots() {
  if (slots_ == nullptr) return Look::kNothing;
  const Look found = slots_->look();
  if (found == Look::kMoved) {  // close() may wait for it
    const std::lock_guard lock(mutex_);
    queue_changed_.notify_all();
  }
  return found;
}

bool HostEngine::step() {
  const bool moved = plane_.step() == Pass::kMoved;
  const bool looked = look() == Look::kMoved;
  return look_at_slots() == Look::kMoved || looked || moved;
}

// A pass of the worker over the operation that is under way, or the next one.
Look HostEngine::look() {
  if (!running_) {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) return Look::kNothing;
    running_.emplace();
    running_->operation = queue_.front();
    running_->started_nsec = now_nsec();
    queue_.pop_front();
    busy_ = true;
  }
  Running& running = *running_;
  Op& op = running.operation->op_;
  try {
    if (running.plan == nullptr) begin(running);
    if (const Progress progress = advance(running); progress != Progress::kDone)
      return progress == Progress::kMoved ? Look::kMoved : Look::kWaits;
    count(op, running.started_nsec);
    finish(op, nullptr);
  } catch (const CommunicationFailure& failure) {
    ErrorRecord record = failure.record();
    if (record.rank < 0) record.rank = config_.rank;
    if (record.epoch == 0) record.epoch = op.epoch;
    plane_.spread(record);
    // All calls raise the first error that reached this rank.
    record = posted_error(plane_.control());
    if (record.step == Step::kNone) locate(op, running.steps, record);
    count(op, running.started_nsec);
    finish(op, &record);
  } catch (const std::exception& failure) {  // out of memory, for example
    ErrorRecord record = failure_of(config_.rank, failure.what());
    record.epoch = op.epoch;
    plane_.spread(record);
    count(op, running.started_nsec);
    finish(op, &record);
  }
  end_running();
  return Look::kMoved;
}

void HostEngine::end_running() {
  running_.reset();
  const std::lock_guard lock(mutex_);
  busy_ = false;
  queue_changed_.notify_all();
}

// Nobody steps this engine any more.
void HostEngine::end_unfinished() {
  {
    const std::lock_guard lock(mutex_);
    if (!running_ && !has_work()) return;
  }
  if (!plane_.failed()) plane_.fail("closed its buffer in an operation");
  while (look() != Look::kNothing || look_at_slots() != Look::kNothing) {
  }
}

void HostEngine::begin(Running& running) {
  check();
  Op& op = running.operation->op_;
  running.steps = op.is_dispatch() ? dispatch_steps(op, running.plan) : combine_steps(op, running.plan);
  running.waiting.started_usec = patience_.now();
  plane_.control().progress.publish(now_usec());
}

// Each step that is not done looks once whether it can go on.
HostEngine::Progress HostEngine::advance(Running& running) {
  const Op& op = running.operation->op_;
  patience_.now();
  bool moved = false;
  bool done = true;
  uint64_t began = now_nsec();
  for (auto& step : running.steps) {
    if (step->done()) continue;
    if (step->advance()) {
      moved = true;
      context_->bells.ring();
      const uint64_t ended = now_nsec();
      busy_nsec_[static_cast<size_t>(step->step())].add(ended - began);
      trace(TraceKind::kStep, op, {step->step()}, began);
      began = ended;
    }
    done &= step->done();
  }
  if (done) return Progress::kDone;
  if (plane_.control().error_claim.claimed()) throw CommunicationFailure(posted_error(plane_.control()));
  if (!moved) check_deadlines(op, running.steps, *running.plan, running.waiting);
  if (moved) plane_.control().progress.publish(now_usec());
  return moved ? Progress::kMoved : Progress::kNone;
}

// Before the caller can see that the operation is over: statistics that it reads then include it.
void HostEngine::count(const Op& op, uint64_t started_nsec) {
  trace(TraceKind::kOperation, op, {}, started_nsec);
  const uint64_t usec = (now_nsec() - started_nsec) / 1000;
  std::lock_guard lock(mutex_);
  (op.is_dispatch() ? counters_.dispatches : counters_.combines) += 1;
  (op.is_dispatch() ? counters_.dispatch_usec : counters_.combine_usec) += usec;
}

// The first rank that has not entered; else what the first step waits for that waits for another rank.
WaitingOn HostEngine::waiting_for(const Steps& steps, const host::PlanStep& plan) const {
  for (const int src : plan.not_entered())
    if (src != config_.rank) return {Step::kExchange, src};
  WaitingOn own;
  for (auto& step : steps) {
    if (step->done()) continue;
    const WaitingOn waiting = step->waiting_on();
    if (waiting.peer >= 0 && waiting.peer != config_.rank) return waiting;
    if (own.peer < 0) own = waiting;
  }
  return own;
}

void HostEngine::sleep(uint32_t ticket) {
  const Running* const running = running_ ? &*running_ : nullptr;
  const WaitingOn waiting = running != nullptr ? waiting_for(running->steps, *running->plan)
                                               : WaitingOn{Step::kExchange, slots_->waiting_for()};
  const uint64_t slept = now_nsec();
  plane_.control().worker_bell.wait(ticket, kLookUsec);
  // What rang is one of many messages: on a busy host others come first, and are looked at together.
  if (topo_.num_ranks > kManyRanks) sched_yield();
  if (running != nullptr) trace(TraceKind::kWait, running->operation->op_, waiting, slept);
  const uint64_t usec = (now_nsec() - slept) / 1000;
  if (waiting.peer >= 0) waited_usec_[static_cast<size_t>(waiting.peer)].add(usec);
  if (running == nullptr) return;
  for (auto& step : running->steps)
    if (!step->done()) blocked_usec_[static_cast<size_t>(step->step())].add(usec);
}

// Contract 7: the arrival deadline until all ranks have entered the operation, then the progress deadline.
void HostEngine::check_deadlines(const Op& op, const Steps& steps, const host::PlanStep& plan, Waiting& waits) {
  const uint64_t now = patience_.now();
  // It asks about every rank.
  if (now < waits.next_look_usec) return;
  waits.next_look_usec = now + kLookUsec / 2;
  if (const uint64_t so_far = plane_.moves(); so_far != waits.moves) {
    waits.moves = so_far;
    waits.moved_usec = now;
  }
  const int missing = plan.not_entered().empty() ? -1 : plan.not_entered().front();
  for (const int src : plan.not_entered()) {
    if (closed_.long_closed(src, now)) {
      ErrorRecord record = timeout_record(op, {Step::kExchange, src, -1, op.epoch, op.epoch - 1, ""}, true, 0);
      record.kind = ErrorKind::kPeerFailed;
      record.peer = src;
      record.set_message("rank " + std::to_string(src) + " closed its buffer before call " + std::to_string(op.call()) +
                         plane_.refused_since(src, op.call(), op.num_refused));
      throw CommunicationFailure(record);
    }
  }
  const uint64_t since = missing >= 0 ? waits.started_usec : waits.moved_usec;
  const double limit_s = missing >= 0 ? config_.arrival_timeout_s : config_.progress_timeout_s;
  if (static_cast<double>(now - since) < limit_s * 1e6) return;
  for (auto& step : steps) {
    if (step->done()) continue;
    WaitingOn waiting = step->waiting_on();
    if (waiting.peer < 0) continue;
    if (missing >= 0) waiting = {Step::kExchange, missing, -1, op.epoch, op.epoch - 1, "to enter the operation"};
    throw CommunicationFailure(timeout_record(op, waiting, missing >= 0, now - since));
  }
}

ErrorRecord HostEngine::timeout_record(const Op& op, const WaitingOn& waiting, bool arrival,
                                       uint64_t waited_usec) const {
  ErrorRecord record;
  record.kind = arrival ? ErrorKind::kArrivalTimeout : ErrorKind::kProgressTimeout;
  record.step = waiting.step;
  record.rank = config_.rank;
  record.peer = waiting.peer;
  record.epoch = op.epoch;
  record.chunk = waiting.chunk;
  record.expected = waiting.expected;
  record.seen = waiting.seen;
  const std::string refused = arrival ? plane_.refused_since(waiting.peer, op.call(), op.num_refused) : "";
  plane_.blame(record, "call " + std::to_string(op.call()) + " on the buffer: rank " + std::to_string(config_.rank) +
                           " waited " + std::to_string(waited_usec / 1000) + " ms in " + step_name(waiting.step) +
                           " for rank " + std::to_string(waiting.peer) + " " + waiting.what + refused);
  return record;
}

// The finder of the error was in no operation (a process is gone, a rank gave up): report this rank's progress.
void HostEngine::locate(const Op& op, const Steps& steps, ErrorRecord& record) const {
  if (record.epoch == 0) record.epoch = op.epoch;
  for (auto& step : steps) {
    const WaitingOn waiting = step->done() ? WaitingOn{} : step->waiting_on();
    if (waiting.peer < 0) continue;
    record.step = waiting.step;
    record.chunk = waiting.chunk;
    return;
  }
}

void HostEngine::trace(TraceKind kind, const Op& op, const WaitingOn& of, uint64_t began_nsec) {
  if (!worker_trace_.on()) return;
  worker_trace_.add({began_nsec, now_nsec(), op.epoch, 0, kind, RingKind::kHeader, of.step, of.peer,
                     static_cast<uint32_t>(op.signature.kind)});
}

void HostEngine::finish(Op& op, const ErrorRecord* error) {
  std::lock_guard lock(op.mutex);
  if (error != nullptr) {
    // A caller that ignores the exception must not compute with partial results.
    const Plan& plan = *op.plan;
    const uint64_t rows = op.is_dispatch() ? plan.num_rows : plan.num_tokens;
    const uint64_t weights = op.is_dispatch() ? plan.num_weights() : uint64_t{plan.num_tokens} * plan.routing_width;
    const auto fill = [&](void* out, uint64_t num_bytes) {
      if (op.output_given && out != nullptr) std::memset(out, 0xFF, num_bytes);
    };
    fill(op.rows_out, rows * op.out_row_bytes());  // all ones is a NaN in BF16, FP32 and e4m3
    fill(op.scales_out, rows * op.wire_row().scale_bytes());
    fill(op.metadata_out, rows * op.wire_row().metadata_bytes());
    fill(op.weights_out, weights * sizeof(float));
    fill(op.experts_out, weights * sizeof(int64_t));  // -1: none
    op.error = *error;
    op.failed = true;
  }
  op.done = true;
  op.changed.notify_all();
}

}  // namespace uccl_ep
