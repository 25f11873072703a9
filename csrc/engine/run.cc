// The worker: runs the steps of one operation side by side, sleeps when none can move, and never longer than a
// deadline.
#include <algorithm>
#include <cstring>

#include "common/units.h"
#include "engine/engine.h"

namespace uccl_ep {

void Engine::work() {
  while (true) {
    std::shared_ptr<Op> op;
    {
      std::unique_lock lock(mutex_);
      queue_changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      op = queue_.front();
      queue_.pop_front();
      busy_ = true;
    }
    run(*op);
    op.reset();
    std::lock_guard lock(mutex_);
    busy_ = false;
    queue_changed_.notify_all();
  }
}

void Engine::run(Op& op) {
  const uint64_t started = now_nsec();
  Steps steps;
  try {
    check();
    host::PlanStep* plan = nullptr;
    steps = op.is_dispatch() ? dispatch_steps(op, plan) : combine_steps(op, plan);
    run_steps(op, steps, *plan);
    count(op, started);
    finish(op, nullptr);
  } catch (const CommunicationFailure& failure) {
    ErrorRecord record = failure.record();
    if (record.rank < 0) record.rank = config_.rank;
    if (record.epoch == 0) record.epoch = op.epoch;
    spread(record);
    // The first error that reached this rank is the one that everybody raises.
    record = posted_error(control());
    if (record.step == Step::kNone) locate(op, steps, record);
    count(op, started);
    finish(op, &record);
  } catch (const std::exception& failure) {  // out of memory, for example
    ErrorRecord record;
    record.kind = ErrorKind::kPeerFailed;
    record.rank = record.peer = config_.rank;
    record.epoch = op.epoch;
    record.set_message("rank " + std::to_string(config_.rank) + " failed: " + failure.what());
    spread(record);
    count(op, started);
    finish(op, &record);
  }
}

// Before the caller can see that the operation is over: statistics that it reads then include it.
void Engine::count(const Op& op, uint64_t started_nsec) {
  trace(TraceKind::kOperation, op, {}, started_nsec);
  const uint64_t usec = (now_nsec() - started_nsec) / 1000;
  std::lock_guard lock(mutex_);
  (op.is_dispatch() ? counters_.dispatches : counters_.combines) += 1;
  (op.is_dispatch() ? counters_.dispatch_usec : counters_.combine_usec) += usec;
}

void Engine::run_steps(Op& op, Steps& steps, const host::PlanStep& plan) {
  Waiting waiting;
  waiting.started_usec = patience_.now();
  control().progress.publish(now_usec());
  while (true) {
    patience_.now();
    const uint32_t ticket = control().worker_bell.ticket();  // before the look that may find nothing
    bool moved = false;
    bool done = true;
    for (auto& step : steps) {
      if (step->done()) continue;
      const uint64_t began = now_nsec();
      if (step->advance()) {
        moved = true;
        busy_nsec_[static_cast<size_t>(step->step())].add(now_nsec() - began);
        trace(TraceKind::kStep, op, {step->step()}, began);
      }
      done &= step->done();
    }
    if (done) return;
    if (control().error_claim.claimed()) throw CommunicationFailure(posted_error(control()));
    if (moved) {
      control().progress.publish(now_usec());
      continue;
    }
    check_deadlines(op, steps, plan, waiting);
    sleep(ticket, op, steps, waiting_for(steps, plan));
  }
}

// The first rank that has not entered; else what the first step waits for that waits for another rank.
WaitingOn Engine::waiting_for(const Steps& steps, const host::PlanStep& plan) const {
  for (int src = 0; src < topo_.num_ranks; ++src)
    if (src != config_.rank && !plan.entered(src)) return {Step::kExchange, src};
  WaitingOn own;
  for (auto& step : steps) {
    if (step->done()) continue;
    const WaitingOn waiting = step->waiting_on();
    if (waiting.peer >= 0 && waiting.peer != config_.rank) return waiting;
    if (own.peer < 0) own = waiting;
  }
  return own;
}

void Engine::sleep(uint32_t ticket, const Op& op, const Steps& steps, const WaitingOn& waiting) {
  constexpr uint64_t kLookUsec = 20000;  // how often an otherwise silent wait looks at the deadlines
  const uint64_t slept = now_nsec();
  control().worker_bell.wait(ticket, kLookUsec);
  trace(TraceKind::kWait, op, waiting, slept);
  const uint64_t usec = (now_nsec() - slept) / 1000;
  if (waiting.peer >= 0) waited_usec_[static_cast<size_t>(waiting.peer)].add(usec);
  for (auto& step : steps)
    if (!step->done()) blocked_usec_[static_cast<size_t>(step->step())].add(usec);
}

bool Engine::peer_closed(int rank) const {
  return controls_[rank] != nullptr ? controls_[rank]->closing.read() != 0 : proxy_->remote_closed(rank);
}

// What a closed rank sent before, an error that explains it above all, may still be on its way.
bool Engine::long_closed(int rank, uint64_t patient_usec) {
  constexpr uint64_t kGraceUsec = 1000000;
  if (!peer_closed(rank)) return false;
  uint64_t& seen = closed_seen_usec_[rank];
  if (seen == 0) seen = patient_usec;
  return patient_usec - seen > kGraceUsec;
}

// Contract 7: while somebody has not entered the operation, the arrival deadline; then, the progress deadline.
void Engine::check_deadlines(const Op& op, const Steps& steps, const host::PlanStep& plan, Waiting& waits) {
  const uint64_t now = patience_.now();
  if (const uint64_t so_far = moves(); so_far != waits.moves) {
    waits.moves = so_far;
    waits.moved_usec = now;
  }
  int missing = -1;
  for (int src = 0; src < topo_.num_ranks; ++src) {
    if (plan.entered(src)) continue;
    if (missing < 0) missing = src;
    if (long_closed(src, now)) {
      ErrorRecord record = timeout_record(op, {Step::kExchange, src, -1, op.epoch, op.epoch - 1, ""}, true, 0);
      record.kind = ErrorKind::kPeerFailed;
      record.peer = src;
      record.set_message("rank " + std::to_string(src) + " closed its buffer before call " + std::to_string(op.call()) +
                         refused_since(src, op.call(), op.num_refused));
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

uint64_t Engine::moves() const {
  const std::shared_lock held(memory_mutex_);
  uint64_t sum = 0;
  for (int rank = 0; rank < topo_.num_ranks && !given_back_; ++rank) sum += proxy_->last_moved_usec(rank);
  return sum;
}

// -1: no rank's heart stopped.
int Engine::stale_rank() const {
  int stalest = -1;
  uint64_t oldest = kStaleHeartbeatUsec;
  for (int rank = 0; rank < topo_.num_ranks; ++rank) {
    if (rank == config_.rank) continue;
    // Ranks of other domains are heard less often.
    const uint64_t allowed = controls_[rank] != nullptr ? 0 : kStaleHeartbeatUsec;
    if (const uint64_t silent = proxy_->silent_usec(rank); silent > oldest + allowed) {
      oldest = silent - allowed;
      stalest = rank;
    }
  }
  return stalest;
}

void Engine::blame(ErrorRecord& record, std::string text) const {
  const std::shared_lock held(memory_mutex_);
  if (given_back_) return record.set_message(text);
  if (const int stale = stale_rank(); stale >= 0) {
    record.peer = stale;
    text += "; rank " + std::to_string(stale) + " shows no sign of life";
  }
  if (const std::string trouble = proxy_->trouble(); !trouble.empty()) text += "; " + trouble;
  record.set_message(text);
}

ErrorRecord Engine::timeout_record(const Op& op, const WaitingOn& waiting, bool arrival, uint64_t waited_usec) const {
  ErrorRecord record;
  record.kind = arrival ? ErrorKind::kArrivalTimeout : ErrorKind::kProgressTimeout;
  record.step = waiting.step;
  record.rank = config_.rank;
  record.peer = waiting.peer;
  record.epoch = op.epoch;
  record.chunk = waiting.chunk;
  record.expected = waiting.expected;
  record.seen = waiting.seen;
  const std::string refused = arrival ? refused_since(waiting.peer, op.call(), op.num_refused) : "";
  blame(record, "call " + std::to_string(op.call()) + " on the buffer: rank " + std::to_string(config_.rank) +
                    " waited " + std::to_string(waited_usec / 1000) + " ms in " + step_name(waiting.step) +
                    " for rank " + std::to_string(waiting.peer) + " " + waiting.what + refused);
  return record;
}

// Whoever found the error was in no operation (a process is gone, a rank gave up): how far did ours get?
void Engine::locate(const Op& op, const Steps& steps, ErrorRecord& record) const {
  if (record.epoch == 0) record.epoch = op.epoch;
  for (auto& step : steps) {
    const WaitingOn waiting = step->done() ? WaitingOn{} : step->waiting_on();
    if (waiting.peer < 0) continue;
    record.step = waiting.step;
    record.chunk = waiting.chunk;
    return;
  }
}

// To every rank directly: domain peers here, the others by our proxy, which finds the record of our own in our control
// block.
// Ours first: of two ranks that find an error at once, each would otherwise put its own into the other's block, and
// neither proxy would find one to send.
void Engine::spread(const ErrorRecord& record) const {
  const std::shared_lock held(memory_mutex_);
  if (given_back_) return;
  post_error(control(), record);
  for (ControlBlock* peer : controls_)
    if (peer != nullptr && peer != &control()) post_error(*peer, record);
}

void Engine::finish(Op& op, const ErrorRecord* error) {
  std::lock_guard lock(op.mutex);
  if (error != nullptr) {
    // Whoever ignores the exception must not compute with half a result.
    const Plan& plan = *op.plan;
    const uint64_t rows = op.is_dispatch() ? plan.num_rows : plan.num_tokens;
    const uint64_t weights = op.is_dispatch() ? plan.num_weights() : uint64_t{plan.num_tokens} * plan.routing_width;
    const auto fill = [&](void* out, uint64_t num_bytes) {
      if (op.output_given && out != nullptr) std::memset(out, 0xFF, num_bytes);
    };
    fill(op.rows_out, rows * op.out_row_bytes());  // all ones is a NaN in BF16, FP32 and e4m3
    fill(op.scales_out, rows * (op.signature.hidden / kFp8Block) * sizeof(float));
    fill(op.weights_out, weights * sizeof(float));
    fill(op.experts_out, weights * sizeof(int64_t));  // -1: none
    op.error = *error;
    op.failed = true;
  }
  op.done = true;
  op.changed.notify_all();
}

}  // namespace uccl_ep
