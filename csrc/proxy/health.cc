#include "proxy/health.h"

#include <algorithm>
#include <cstring>

#include "layout/words.h"

namespace uccl_ep {
namespace {

constexpr uint64_t kRemoteHeartbeatPeriods = 5;
constexpr uint64_t kSilentTellerUsec = 3 * kHeartbeatUsec;
static_assert(kSilentTellerUsec < kStaleHeartbeatUsec);
static_assert(sizeof(RemoteSigns) == kRemoteSignsBytes);

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
      messages_(*context.transport,
                {context.control->generation, static_cast<uint32_t>(context.rank),
                 static_cast<uint32_t>(context.topo->num_ranks)},
                context.topo->others(context.rank)),
      votes_(context),
      heard_before_(static_cast<size_t>(context.topo->num_ranks)),
      heard_patient_(static_cast<size_t>(context.topo->num_ranks)),
      closed_(static_cast<size_t>(context.topo->num_ranks)) {
  find_signs();
  const std::vector<int> rails = context.topo->rails(context.rank);
  for (int rank = 0; rank < context.topo->num_ranks; ++rank) {
    if (rank == context.rank) continue;
    const ControlBlock* control = context.domain_controls[static_cast<size_t>(rank)];
    if (control == nullptr) {
      remote_idx_[static_cast<size_t>(rank)] = static_cast<int>(remotes_.size());
      const bool is_rail = std::binary_search(rails.begin(), rails.end(), rank);
      remotes_.push_back({rank, is_rail, context.topo->lands(rank, context.rank)});
      if (!is_rail) continue;
    }
    watched_.push_back(
        {rank, false, control != nullptr ? ProcessWatch(control->pid, control->pid_namespace) : ProcessWatch()});
  }
}

// Where the signs of each rank are: a rank has those of the ranks that it lands side by side.
void Health::find_signs() {
  const Topology& topo = *context_.topo;
  const size_t ranks = static_cast<size_t>(topo.num_ranks), own = static_cast<size_t>(context_.rank);
  signs_.resize(ranks);
  own_signs_.resize(ranks);
  std::vector<uint32_t> num_landed(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    tellers_.push_back(static_cast<int>(rank));
    if (context_.domain_controls[rank] != nullptr) continue;
    const size_t teller = static_cast<size_t>(topo.rail(static_cast<int>(rank), topo.domain_of[own]));
    tellers_[rank] = static_cast<int>(teller);
    signs_[rank] = remote_signs(context_.domain_controls[teller]) + num_landed[teller]++;
    if (teller == own) own_signs_[rank] = signs_[rank];
  }
}

void Health::housekeeping(uint64_t now_usec, uint64_t moved_bytes) {
  if (now_usec < next_housekeeping_usec_) return;
  next_housekeeping_usec_ = now_usec + kHeartbeatUsec;
  context_.control->heartbeat.publish(now_usec);
  if (moved_bytes != moved_bytes_) context_.control->carried.publish(now_usec);
  moved_bytes_ = moved_bytes;
  listen();
  part_from_ended();
  if (period_++ % kRemoteHeartbeatPeriods == 0) send_heartbeats();
  watch_processes();
}

// After a pause of this process all ranks seem silent: give them time for a heartbeat. Of a rank whose teller shows no
// sign of life nothing is known: the teller is silent, not the rank.
void Health::listen() {
  const uint64_t patient = patience_.now();
  for (size_t rank = 0; rank < heard_before_.size(); ++rank) {
    const uint64_t heard = last_heard_usec(static_cast<int>(rank));
    const uint64_t teller_heard = heard_patient_[static_cast<size_t>(tellers_[rank])].own();
    const bool unknown = signs_[rank] != nullptr && patient - teller_heard > kSilentTellerUsec;
    if (heard != heard_before_[rank] || unknown) heard_patient_[rank].publish(patient);
    heard_before_[rank] = heard;
  }
  patient_.publish(patient);
}

// Of ranks that are no rails this rank learns by its domain that they have left.
void Health::part_from_ended() {
  for (Remote& remote : remotes_) {
    if (remote.is_rail || remote.dead) continue;
    const uint64_t ended = signs_[static_cast<size_t>(remote.rank)]->ended.read();
    if (ended == kDead) {
      remote.dead = true;
      messages_.forget(remote.rank);
      publish_settled();
    } else if (ended == kSaidBye) {
      messages_.part(remote.rank);
    }
  }
}

void Health::send_heartbeats() {
  const Heartbeat ours{last_moved_usec(context_.rank), context_.control->num_refused.read()};
  messages_.compose(MessageKind::kHeartbeat, {reinterpret_cast<const uint8_t*>(&ours), sizeof(ours)});
  for (const Remote& remote : remotes_)
    if (remote.lands_our_rows && closed_[static_cast<size_t>(remote.rank)].own() == 0)
      messages_.owe(remote.rank, MessageKind::kHeartbeat);
  probe_rails();
}

// Without rows under way nothing else shows that a connection is gone: a probe to such a rail fails.
void Health::probe_rails() {
  for (Remote& remote : remotes_) {
    // At most one in flight, in case the rail accepts nothing.
    if (!remote.is_rail || remote.probe_in_flight || closed_[static_cast<size_t>(remote.rank)].own() != 0) continue;
    WriteRequest request{};
    request.peer = remote.rank;
    request.immediate = encode_imm(ImmType::kProbe, 0, static_cast<uint64_t>(context_.rank));
    request.cookie = encode_cookie({PostKind::kProbe, static_cast<uint32_t>(remote.rank)});
    // Refused: retry in the next period.
    remote.probe_in_flight = context_.transport->post_write(request) == PostResult::kPosted;
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
  if (remote_idx_[static_cast<size_t>(watched.rank)] >= 0) {
    if (RemoteSigns* const its = own_signs_[static_cast<size_t>(watched.rank)]) its->ended.publish(kDead);
    remote_of(watched.rank).dead = true;
    messages_.forget(watched.rank);
    publish_settled();
  }
  if (context_.outlives_ranks) return;
  std::string who = "rank " + std::to_string(watched.rank);
  if (watched.process.pid() != 0) who += " (pid " + std::to_string(watched.process.pid()) + ")";
  ErrorRecord record = make_error(ErrorKind::kPeerDied, context_.rank, watched.rank, who + " died");
  record.step = Step::kNone;
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
  messages_.compose(MessageKind::kError, {reinterpret_cast<const uint8_t*>(&record), sizeof(record)});
  for (const Remote& remote : remotes_)  // a peer that said bye still waits for this rank
    if (!remote.dead) messages_.owe(remote.rank, MessageKind::kError);
  publish_settled();
}

void Health::owe_what_changed() {
  const ControlBlock& ours = *context_.control;
  const bool has_error = ours.error_claim.published() && ours.keeps_error.read() == 0;
  if (!error_owed_ && has_error && ours.error.rank == context_.rank) {
    const ErrorRecord record = context_.control->error;
    spread(record);
  }
  if (!byes_owed_ && bye_requested_.read() != 0) {
    byes_owed_ = true;
    messages_.compose(MessageKind::kBye, {});
    for (const Remote& remote : remotes_)  // likewise
      if (remote.is_rail && !remote.dead) messages_.owe(remote.rank, MessageKind::kBye);
    publish_settled();
  }
}

// To all ranks: who is masked has to learn of it when it comes back.
void Health::tell_votes() {
  RankVotes votes;
  if (!votes_.take_own(votes)) return;
  messages_.compose(MessageKind::kVotes, {reinterpret_cast<const uint8_t*>(votes.votes), kVoteBytes});
  for (const Remote& remote : remotes_)
    if (!remote.dead) messages_.owe_now(remote.rank, MessageKind::kVotes);
}

// Takes first: an acknowledgement may be here by now.
bool Health::exchange(uint64_t now_usec) {
  owe_what_changed();
  tell_votes();
  bool any = false;
  for (int left = Messages::kMostReceives; left > 0; --left) {
    const Datagram* const message = messages_.receive([&](int peer) {
      heard(peer, now_usec);
      any = true;
    });
    if (message == nullptr) break;
    take(*message, now_usec);
  }
  any |= messages_.send(now_usec);
  publish_settled();
  return any;
}

void Health::publish_settled() {
  if (error_owed_ && messages_.num_owed(MessageKind::kError) == 0) error_settled_.publish(1);
  if (byes_owed_ && messages_.num_owed(MessageKind::kBye) == 0) byes_settled_.publish(1);
}

void Health::probed(const Cookie& cookie) {
  if (cookie.index < remote_idx_.size() && remote_idx_[cookie.index] >= 0)
    remote_of(static_cast<int>(cookie.index)).probe_in_flight = false;
}

void Health::take(const Datagram& message, uint64_t now_usec) {
  const int peer = static_cast<int>(message.header.sender);
  switch (message.kind()) {
    case MessageKind::kHeartbeat:
      return take_heartbeat(remote_of(peer), message, now_usec);
    case MessageKind::kBye:
      closed_[static_cast<size_t>(peer)].publish(1);
      if (RemoteSigns* const its = own_signs_[static_cast<size_t>(peer)]; its != nullptr && its->ended.own() == 0)
        its->ended.publish(kSaidBye);
      return messages_.part(peer);
    case MessageKind::kError:
      return take_error(peer, message);
    case MessageKind::kVotes: {
      RankVotes votes;
      std::memcpy(votes.votes, message.payload, kVoteBytes);
      votes_.put(peer, votes);
      return context_.control->worker_bell.ring();
    }
  }
}

// Its clock is not ours: only that its number has changed counts.
void Health::take_heartbeat(Remote& remote, const Datagram& message, uint64_t now_usec) {
  RemoteSigns* const its = own_signs_[static_cast<size_t>(remote.rank)];
  if (its == nullptr) return;
  Heartbeat said;
  std::memcpy(&said, message.payload, sizeof(said));
  if (said.moved_usec != remote.told_moved_usec) its->moved.publish(now_usec);
  remote.told_moved_usec = said.moved_usec;
  if (said.num_refused > its->num_refused.own()) its->num_refused.publish(said.num_refused);
}

void Health::take_error(int peer, const Datagram& message) {
  ErrorRecord record;
  std::memcpy(&record, message.payload, sizeof(record));
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
  // The others go on, and are to hear that this rank leaves.
  if (control.keeps_error.read() != 0) return byes_settled_.read() != 0;
  return control.error_claim.published() && control.error.rank != context_.rank;
}

uint64_t Health::last_heard_usec(int rank) const {
  const RemoteSigns* const signs = signs_[static_cast<size_t>(rank)];
  const Flag& heard = signs != nullptr ? signs->heard : context_.domain_controls[static_cast<size_t>(rank)]->heartbeat;
  return std::max(created_usec_, heard.read());
}

uint64_t Health::num_refused(int rank) const {
  const RemoteSigns* const signs = signs_[static_cast<size_t>(rank)];
  return (signs != nullptr ? signs->num_refused : context_.domain_controls[static_cast<size_t>(rank)]->num_refused)
      .read();
}

void Health::add_stats(ProxyStats& stats) const { stats.messages = messages_.stats(); }

uint64_t Health::last_moved_usec(int rank) const {
  if (const RemoteSigns* const signs = signs_[static_cast<size_t>(rank)]) return signs->moved.read();
  const ControlBlock* control = context_.domain_controls[static_cast<size_t>(rank)];
  return std::max(control->progress.read(), control->carried.read());
}

}  // namespace uccl_ep
