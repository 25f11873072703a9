#include "proxy/health.h"
#include "layout/words.h"

#include <algorithm>
#include <cstring>

namespace uccl_ep {
namespace {

constexpr uint64_t kRemoteHeartbeatPeriods = 5;

// The record crossed a network: check its fields before using them as indices.
ErrorRecord checked(ErrorRecord record, int finder, int num_ranks) {
  if (record.kind > ErrorKind::kPeerFailed || record.kind == ErrorKind::kNone) record.kind = ErrorKind::kTransport;
  if (record.step > Step::kClose) record.step = Step::kNone;
  if (record.peer < 0 || record.peer >= num_ranks) record.peer = -1;
  record.rank = finder;
  make_printable(record.message);
  return record;
}

}  // namespace

Health::Health(const ProxyContext& context)
    : context_(context),
      created_usec_(now_usec()),
      remote_idx_(static_cast<size_t>(context.topo->num_ranks), -1),
      heard_before_(static_cast<size_t>(context.topo->num_ranks)),
      heard_(static_cast<size_t>(context.topo->num_ranks)),
      heard_patient_(static_cast<size_t>(context.topo->num_ranks)),
      moved_(static_cast<size_t>(context.topo->num_ranks)),
      calls_refused_(static_cast<size_t>(context.topo->num_ranks)),
      closed_(static_cast<size_t>(context.topo->num_ranks)) {
  for (int rank = 0; rank < context.topo->num_ranks; ++rank) {
    if (rank == context.rank) continue;
    const ControlBlock* control = context.domain_controls[static_cast<size_t>(rank)];
    if (control == nullptr) {
      remote_idx_[static_cast<size_t>(rank)] = static_cast<int>(remotes_.size());
      remotes_.push_back({rank});
    }
    watched_.push_back(
        {rank, false, control != nullptr ? ProcessWatch(control->pid, control->pid_namespace) : ProcessWatch()});
  }
}

void Health::housekeeping(uint64_t now_usec, uint64_t moved_bytes) {
  if (now_usec < next_housekeeping_usec_) return;
  next_housekeeping_usec_ = now_usec + kHeartbeatUsec;
  context_.control->heartbeat.publish(now_usec);
  if (moved_bytes != moved_bytes_) context_.control->carried.publish(now_usec);
  moved_bytes_ = moved_bytes;
  listen();
  if (period_++ % kRemoteHeartbeatPeriods == 0) send_heartbeats();
  watch_processes();
}

// After a pause of this process all ranks seem silent: give them time for a heartbeat.
void Health::listen() {
  const uint64_t patient = patience_.now();
  for (size_t rank = 0; rank < heard_before_.size(); ++rank) {
    const uint64_t heard = last_heard_usec(static_cast<int>(rank));
    if (heard != heard_before_[rank]) heard_patient_[rank].publish(patient);
    heard_before_[rank] = heard;
  }
  patient_.publish(patient);
}

void Health::send_heartbeats() {
  const uint64_t progress = last_moved_usec(context_.rank);
  for (Remote& remote : remotes_) {
    // At most one in flight, in case the peer accepts nothing.
    if (remote.heartbeat_in_flight || closed_[static_cast<size_t>(remote.rank)].own() != 0) continue;
    WriteRequest request{};
    request.peer = remote.rank;
    const uint32_t moved = progress != remote.told_progress ? 1 : 0;
    const uint32_t refused = static_cast<uint32_t>(context_.control->num_refused.read() % kHeartbeatRefusals);
    request.immediate = encode_imm(ImmType::kHeartbeat, refused << 1 | moved, static_cast<uint64_t>(context_.rank));
    request.cookie = encode_cookie({PostKind::kHeartbeat, static_cast<uint32_t>(remote.rank)});
    if (context_.transport->post_write(request) == PostResult::kAgain) continue;  // retry in the next period
    remote.heartbeat_in_flight = true;
    remote.told_progress = progress;
    heartbeats_.add(1);
  }
}

void Health::watch_processes() {
  for (Watched& watched : watched_) {
    const size_t rank = static_cast<size_t>(watched.rank);
    if (closed_[rank].own() != 0) continue;
    const bool remote = context_.domain_controls[rank] == nullptr;
    if (remote ? context_.transport->peer_alive(watched.rank) : watched.process.alive()) continue;
    // A rank says that it closes before it ends. The flag of a domain peer is visible by now. The bye of another rank
    // may still wait in the transport, so that rank has until the next period.
    if (domain_closing(watched.rank)) {
      closed_[rank].publish(1);
    } else if (remote && !watched.suspected) {
      watched.suspected = true;
    } else {
      found_dead(watched);
    }
  }
}

void Health::found_dead(const Watched& watched) {
  closed_[static_cast<size_t>(watched.rank)].publish(1);
  if (context_.outlives_ranks) return;
  std::string who = "rank " + std::to_string(watched.rank);
  if (watched.process.pid() != 0) who += " (pid " + std::to_string(watched.process.pid()) + ")";
  ErrorRecord record = make_error(ErrorKind::kPeerDied, context_.rank, watched.rank, who + " died");
  record.step = Step::kNone;
  if (remote_idx_[static_cast<size_t>(watched.rank)] >= 0) {
    Remote& remote = remote_of(watched.rank);
    remote.dead = true;
    settle(remote.bye);
    settle(remote.error);
    publish_settled();
  }
  spread(record);
}

void Health::spread(const ErrorRecord& record) {
  // First, before any local thread can see the error and ask whether it was delivered.
  start_shipping(record);
  for (ControlBlock* control : context_.domain_controls)
    if (control != nullptr) post_error(*control, record);
}

// Only once: the first error is the cause. This rank's error is shipped even if the control block has another rank's.
// That rank may have died before it told the other domains.
void Health::start_shipping(const ErrorRecord& record) {
  if (error_owed_) return;
  error_owed_ = true;
  shipping_error_.publish(1);
  std::memcpy(context_.region + context_.layout->error_send_offset, &record, sizeof(record));
  for (Remote& remote : remotes_) {
    if (closed_[static_cast<size_t>(remote.rank)].own() != 0) continue;
    remote.error = Debt::kDue;
    ++num_due_;
  }
  publish_settled();
}

void Health::owe_what_changed() {
  if (!error_owed_ && context_.control->error_claim.published() && context_.control->error.rank == context_.rank) {
    const ErrorRecord record = context_.control->error;
    spread(record);
  }
  if (!byes_owed_ && bye_requested_.read() != 0) {
    byes_owed_ = true;
    for (Remote& remote : remotes_) {
      if (remote.dead) continue;  // but a peer that said bye still waits for this rank's
      remote.bye = Debt::kDue;
      ++num_due_;
    }
    publish_settled();
  }
}

bool Health::send_due() {
  owe_what_changed();
  refused_ = false;
  if (num_due_ == 0) return false;
  bool any = false;
  for (Remote& remote : remotes_) {
    any |= pay(remote, PostKind::kError, remote.error);
    any |= pay(remote, PostKind::kBye, remote.bye);
  }
  return any;
}

bool Health::pay(Remote& remote, PostKind kind, Debt& debt) {
  if (debt != Debt::kDue) return false;
  const uint64_t own_rank = static_cast<uint64_t>(context_.rank);
  WriteRequest request{};
  request.peer = remote.rank;
  request.cookie = encode_cookie({kind, static_cast<uint32_t>(remote.rank)});
  request.immediate = encode_imm(kind == PostKind::kError ? ImmType::kError : ImmType::kBye, 0, own_rank);
  if (kind == PostKind::kError) {
    request.local_offset = context_.layout->error_send_offset;
    // The control part has the same offsets in every region, so the local layout gives the peer's offset.
    request.remote_offset = context_.layout->error_landing_offset + own_rank * sizeof(ErrorRecord);
    request.num_bytes = sizeof(ErrorRecord);
  }
  if (context_.transport->post_write(request) == PostResult::kAgain) {
    refused_ = true;
    return false;
  }
  debt = Debt::kPosted;
  --num_due_;
  return true;
}

void Health::flushed(const Cookie& cookie) {
  if (cookie.index >= remote_idx_.size() || remote_idx_[cookie.index] < 0) return;
  Remote& remote = remote_of(static_cast<int>(cookie.index));
  if (cookie.kind == PostKind::kHeartbeat) remote.heartbeat_in_flight = false;
  if (cookie.kind == PostKind::kError) settle(remote.error);
  if (cookie.kind == PostKind::kBye) settle(remote.bye);
  publish_settled();
}

void Health::settle(Debt& debt) {
  if (debt == Debt::kDue) --num_due_;
  debt = Debt::kPaid;
}

void Health::publish_settled() {
  auto settled = [&](Debt Remote::* debt) {
    return std::all_of(remotes_.begin(), remotes_.end(),
                       [&](const Remote& r) { return r.*debt == Debt::kPaid || r.*debt == Debt::kNone; });
  };
  if (error_owed_ && settled(&Remote::error)) error_settled_.publish(1);
  if (byes_owed_ && settled(&Remote::bye)) byes_settled_.publish(1);
}

void Health::arrive(const Imm& imm, int peer, uint64_t now_usec) {
  if (remote_idx_[static_cast<size_t>(peer)] < 0 || static_cast<int>(imm.serial) != peer) return;
  if (imm.type == ImmType::kHeartbeat) {
    if ((imm.channel & 1) != 0) moved_[static_cast<size_t>(peer)].publish(now_usec);
    Flag& refused = calls_refused_[static_cast<size_t>(peer)];
    const uint64_t heard = refused.own() / kHeartbeatRefusals + 1;  // makes the flag grow with each heartbeat
    refused.publish(heard * kHeartbeatRefusals + (imm.channel >> 1));
  }
  if (imm.type == ImmType::kBye) closed_[static_cast<size_t>(peer)].publish(1);
  if (imm.type != ImmType::kError) return;
  ErrorRecord record;
  std::memcpy(&record,
              context_.region + context_.layout->error_landing_offset + static_cast<uint64_t>(peer) * sizeof(record),
              sizeof(record));
  record = checked(record, peer, context_.topo->num_ranks);
  for (ControlBlock* control : context_.domain_controls)
    if (control != nullptr) post_error(*control, record);
}

void Health::announce_close() {
  context_.control->closing.publish(1);
  bye_requested_.publish(1);
  context_.control->proxy_bell.ring();
}

bool Health::all_closed() const {
  for (int rank = 0; rank < context_.topo->num_ranks; ++rank)
    if (rank != context_.rank && !closed(rank)) return false;
  return byes_settled_.read() != 0 && error_delivered();
}

bool Health::error_delivered() const {
  const ControlBlock& control = *context_.control;
  if (shipping_error_.read() != 0) return error_settled_.read() != 0;
  if (!control.error_claim.claimed()) return true;
  return control.error_claim.published() && control.error.rank != context_.rank;
}

uint64_t Health::last_heard_usec(int rank) const {
  const ControlBlock* control = context_.domain_controls[static_cast<size_t>(rank)];
  return std::max(created_usec_,
                  control != nullptr ? control->heartbeat.read() : heard_[static_cast<size_t>(rank)].read());
}

uint32_t Health::num_refused(int rank) const {
  const ControlBlock* control = context_.domain_controls[static_cast<size_t>(rank)];
  const uint64_t number =
      control != nullptr ? control->num_refused.read() : calls_refused_[static_cast<size_t>(rank)].read();
  return static_cast<uint32_t>(number % kHeartbeatRefusals);
}

uint64_t Health::last_moved_usec(int rank) const {
  const ControlBlock* control = context_.domain_controls[static_cast<size_t>(rank)];
  if (control == nullptr) return moved_[static_cast<size_t>(rank)].read();
  return std::max(control->progress.read(), control->carried.read());
}

}  // namespace uccl_ep
