// The worker's part of low-latency operations: sending, serving others, receiving, deadlines, masks.
#include <algorithm>
#include <array>
#include <utility>

#include "common/clock.h"
#include "engine/host/slots.h"

namespace uccl_ep {

std::vector<std::shared_ptr<SlotLanes::Operation>> SlotLanes::open_of(const Sequence& its) const {
  const std::lock_guard lock(mutex_);
  return {its.open.begin(), its.open.end()};
}

Look SlotLanes::look() {
  if (!has_work()) return Look::kNothing;
  try {
    if (plane_.control().error_claim.claimed()) throw CommunicationFailure(posted_error(plane_.control()));
    const bool moved = pass();
    context_.bells.ring();
    if (moved) plane_.control().progress.publish(now_usec());
    return moved ? Look::kMoved : Look::kWaits;
  } catch (const CommunicationFailure& failure) {
    ErrorRecord record = failure.record();
    if (record.rank < 0) record.rank = config_.rank;
    plane_.spread(record);
  } catch (const std::exception& failure) {  // out of memory, for example
    plane_.spread(failure_of(config_.rank, failure.what()));
  }
  fail_all();
  return Look::kMoved;
}

// True if anything moved.
bool SlotLanes::pass() {
  waiting_for_ = -1;
  patience_.now();
  bool moved = false;
  for (Sequence* of : {&dispatches_, &combines_}) {
    bool may_stage = true;  // one after the other
    for (const auto& operation : open_of(*of)) {
      moved |= advance(*operation, may_stage);
      may_stage &= operation->work->staged();
    }
  }
  std::vector<std::shared_ptr<Operation>> wanted;
  {
    const std::lock_guard lock(mutex_);
    wanted.assign(wanted_.begin(), wanted_.end());
  }
  std::array<bool, 2> waits{};  // by kind
  for (const auto& operation : wanted) {
    const OpKind kind = operation->call.signature.kind;
    bool& its = waits[config_.mask_timeout_s > 0 || kind == OpKind::kLowLatencyDispatch ? 0 : 1];
    if (its) continue;  // one after the other; where ranks may be masked, all: they settle in one sequence
    its = !receive(*operation);
    if (its) continue;
    finish(operation);
    moved = true;
  }
  return moved;
}

// Sends, and serves the others. True if anything moved.
bool SlotLanes::advance(Operation& operation, bool may_stage) {
  const uint64_t now = patience_.now();
  if (operation.began_usec == 0) operation.began_usec = operation.moved_usec = std::max<uint64_t>(now, 1);
  host::SlotWork& work = *operation.work;
  bool moved = may_stage && work.stage();
  const bool staged = work.staged();
  if (staged) moved |= work.serve();
  if (moved) operation.moved_usec = now;
  {
    const std::lock_guard lock(mutex_);
    operation.sent = staged && work.served();
  }
  if (may_stage && !staged && !moved) check_arrival(operation, {work.waiting_on()}, operation.began_usec);
  return moved;
}

// True if the result is there.
bool SlotLanes::receive(Operation& operation) {
  const uint64_t now = patience_.now();
  if (operation.wanted_usec == 0) {
    operation.wanted_usec = operation.moved_usec = std::max<uint64_t>(now, 1);
    operation.wanted_nsec = now_nsec();
  }
  std::vector<bool> gone = context_.slots->masked;
  for (size_t rank = 0; operation.agreement && rank < gone.size(); ++rank)
    gone[rank] = operation.agreement->gone().test(rank);
  std::vector<WaitingOn> missing;
  if (!operation.votes || operation.settled) missing = operation.work->missing(gone);
  note_waits(operation, missing);
  if (config_.mask_timeout_s > 0 && !operation.settled) {
    if (!settle(operation, missing)) return false;
    missing = operation.work->missing(context_.slots->masked);
  }
  if (missing.empty() && !(operation.work->staged() && operation.work->served()))
    missing.push_back(operation.work->waiting_on());
  if (missing.empty()) {
    operation.work->finish();
    return true;
  }
  waiting_for_ = missing.front().peer;
  if (config_.mask_timeout_s > 0) {
    // A rank of our domain has voted, and has ended before it had sent sums that we relay.
    if (static_cast<double>(patience_.now() - operation.moved_usec) > config_.mask_timeout_s * 1e6)
      fail_masked(operation, missing.front().peer);
  } else if (missing.front().step == Step::kExchange) {
    check_arrival(operation, missing, operation.wanted_usec);
  } else {
    check_progress(operation, missing.front());
  }
  return false;
}

// Where ranks may be masked: true when all agree on who is.
bool SlotLanes::settle(Operation& operation, const std::vector<WaitingOn>& missing) {
  const uint64_t now = patience_.now();
  if (!operation.agreement) {
    operation.agreement.emplace(context_, num_settled_ + 1, named_, static_cast<uint64_t>(config_.mask_timeout_s * 1e6),
                                now);
  }
  host::Agreement& agreement = *operation.agreement;
  if (!missing.empty()) {
    waiting_for_ = missing.front().peer;
    if (!agreement.wait_for(missing, now)) return false;
  }
  operation.votes = true;
  switch (agreement.vote(now)) {
    case host::Agreement::State::kVotes:
      return false;
    case host::Agreement::State::kMaskedItself:
      fail_masked(operation, agreement.missed_neighbour());
    case host::Agreement::State::kDecided:
      break;
  }
  ++num_settled_;
  operation.settled = true;
  operation.moved_usec = now;
  named_ = agreement.named();
  mask(agreement.gone());
  return true;
}

void SlotLanes::mask(const host::RankBits& ranks) {
  host::SlotPorts& ports = *context_.slots;
  const std::lock_guard lock(mutex_);
  for (int rank = 0; rank < config_.num_ranks; ++rank) {
    const auto r = static_cast<size_t>(rank);
    if (!ranks.test(r) || ports.masked[r]) continue;
    ports.masked[r] = true;
    masked_[r] = 1;
    if (context_.topo.domain_of[r] != context_.domain) continue;
    const auto reader = static_cast<uint32_t>(context_.topo.local_of[r]);
    const auto own = static_cast<size_t>(context_.domain);
    ports.rows[own].ignore(reader);
    ports.weights[own].ignore(reader);
  }
}

void SlotLanes::note_waits(Operation& operation, const std::vector<WaitingOn>& missing) {
  std::vector<bool> came(operation.came.size(), true);
  for (const WaitingOn& what : missing)
    if (what.step == Step::kExchange) came[static_cast<size_t>(what.peer)] = false;
  const auto waited = static_cast<int64_t>(now_nsec() - operation.wanted_nsec);
  for (size_t rank = 0; operation.waited_nsec != nullptr && rank < came.size(); ++rank)
    if (came[rank] && !operation.came[rank] && static_cast<int>(rank) != config_.rank)
      operation.waited_nsec[rank] += waited;
  operation.came = std::move(came);
}

// ---- deadlines (contract 7) -----------------------------------------------------------------------------------------

void SlotLanes::check_arrival(const Operation& operation, const std::vector<WaitingOn>& missing, uint64_t since_usec) {
  const uint64_t now = patience_.now();
  for (const WaitingOn& what : missing)
    if (what.step == Step::kExchange && closed_.long_closed(what.peer, now)) fail_closed(operation, what);
  if (static_cast<double>(now - since_usec) >= config_.arrival_timeout_s * 1e6)
    fail_late(operation, missing.front(), true, now - since_usec);
}

void SlotLanes::check_progress(Operation& operation, const WaitingOn& waiting) {
  const uint64_t now = patience_.now();
  if (const uint64_t moves = plane_.moves(); moves != operation.moves) {
    operation.moves = moves;
    operation.moved_usec = now;
  }
  if (static_cast<double>(now - operation.moved_usec) >= config_.progress_timeout_s * 1e6)
    fail_late(operation, waiting, false, now - operation.moved_usec);
}

ErrorRecord SlotLanes::record_of(const Operation& operation, ErrorKind kind, const WaitingOn& waiting) const {
  ErrorRecord record;
  record.kind = kind;
  record.step = waiting.step;
  record.rank = config_.rank;
  record.peer = waiting.peer;
  record.epoch = operation.call.number;
  record.chunk = waiting.chunk;
  record.expected = waiting.expected;
  record.seen = waiting.seen;
  return record;
}

std::string SlotLanes::name_of(const Operation& operation) {
  return "low-latency call " + std::to_string(operation.call.call());
}

void SlotLanes::fail_closed(const Operation& operation, const WaitingOn& waiting) const {
  const host::SlotCall& call = operation.call;
  ErrorRecord record = record_of(operation, ErrorKind::kPeerFailed, waiting);
  record.set_message("rank " + std::to_string(waiting.peer) + " closed its buffer before " + name_of(operation) +
                     plane_.refused_since(waiting.peer, call.call(), call.num_refused));
  throw CommunicationFailure(record);
}

void SlotLanes::fail_late(const Operation& operation, const WaitingOn& waiting, bool arrival,
                          uint64_t waited_usec) const {
  const host::SlotCall& call = operation.call;
  ErrorRecord record =
      record_of(operation, arrival ? ErrorKind::kArrivalTimeout : ErrorKind::kProgressTimeout, waiting);
  const std::string refused = arrival ? plane_.refused_since(waiting.peer, call.call(), call.num_refused) : "";
  plane_.blame(record, name_of(operation) + " on the buffer: rank " + std::to_string(config_.rank) + " waited " +
                           std::to_string(waited_usec / 1000) + " ms in " + step_name(waiting.step) + " for rank " +
                           std::to_string(waiting.peer) + " " + waiting.what + refused);
  throw CommunicationFailure(record);
}

// The others go on.
void SlotLanes::fail_masked(const Operation& operation, int peer) const {
  ErrorRecord record = record_of(operation, ErrorKind::kPeerFailed, {Step::kExchange, peer});
  record.set_message(name_of(operation) + " on the buffer: " + describe_masked(config_.rank, peer));
  plane_.keep(record);
  throw CommunicationFailure(record);
}

// ---- the end of operations ------------------------------------------------------------------------------------------

void SlotLanes::finish(const std::shared_ptr<Operation>& operation) {
  const host::SlotCall& call = operation->call;
  if (trace_.on())
    trace_.add({operation->wanted_nsec, now_nsec(), call.number, 0, TraceKind::kOperation, RingKind::kSlotRows,
                Step::kNone, -1, static_cast<uint32_t>(call.signature.kind)});
  const std::lock_guard lock(mutex_);
  std::erase(wanted_, operation);
  std::erase(sequence(call.signature.kind).open, operation);
  operation->done = true;
  changed_.notify_all();
}

void SlotLanes::fail_all() {
  const ErrorRecord error = posted_error(plane_.control());
  const std::lock_guard lock(mutex_);
  for (const auto& operation : wanted_) operation->work->spoil();
  wanted_.clear();
  for (Sequence* of : {&dispatches_, &combines_}) of->open.clear();
  error_ = error;
  changed_.notify_all();
}

}  // namespace uccl_ep
