// Errors of all ranks: telling them, hearing of them, and who is to blame for a deadline.
#include <algorithm>
#include <new>

#include "engine/group/control_plane.h"

namespace uccl_ep {

void ControlPlane::fail(const std::string& text) { spread(own_failure(text)); }

// Needs no memory, except for why a call was refused.
ErrorRecord ControlPlane::own_failure(std::string_view text) {
  ErrorRecord record;
  record.kind = ErrorKind::kPeerFailed;
  record.rank = record.peer = config_.rank;
  record.set_message_of(config_.rank, ": ", text);
  const std::lock_guard lock(mutex_);
  const std::shared_lock held(memory_mutex_);
  if (!refused_last_ || given_back_) return record;
  try {
    record.set_message(record.message + std::string("; its last call was refused: ") +
                       control().refusals[num_refused_ % 2]);
  } catch (const std::bad_alloc&) {  // without it
  }
  return record;
}

// To every rank directly: domain peers here, the others by our proxy, which finds the record of our own in our control
// block.
// Ours first. Two ranks may find an error at once: each would put its own into the other's block. Then neither proxy
// would find one to send. After keep() nobody else hears of it.
void ControlPlane::spread(const ErrorRecord& record) const {
  const std::shared_lock held(memory_mutex_);
  if (given_back_) return;
  post_error(control(), record);
  if (control().keeps_error.read() != 0) return;
  for (ControlBlock* peer : controls_)
    if (peer != nullptr && peer != &control()) post_error(*peer, record);
}

void ControlPlane::keep(const ErrorRecord& record) const {
  const std::shared_lock held(memory_mutex_);
  if (given_back_) return;
  control().keeps_error.publish(1);
  post_error(control(), record);
}

bool ControlPlane::failed() const {
  const std::shared_lock held(memory_mutex_);
  return given_back_ ? last_error_.has_value() : control().error_claim.claimed();
}

void ControlPlane::check() const {
  const std::shared_lock held(memory_mutex_);
  if (given_back_) {
    if (last_error_) throw CommunicationFailure(*last_error_);
  } else if (control().error_claim.claimed()) {
    throw CommunicationFailure(posted_error(control()));
  }
}

void ControlPlane::wait_for_error(uint64_t timeout_usec) const {
  const std::shared_lock held(memory_mutex_);
  if (given_back_) return;
  const uint32_t ticket = control().worker_bell.ticket();
  if (!control().error_claim.claimed()) control().worker_bell.wait(ticket, timeout_usec);
}

bool ControlPlane::peer_closed(int rank) const {
  return controls_[rank] != nullptr ? controls_[rank]->closing.read() != 0 : proxy_->remote_closed(rank);
}

uint64_t ControlPlane::moves() const {
  const std::shared_lock held(memory_mutex_);
  uint64_t sum = 0;
  for (int rank = 0; rank < topo_.num_ranks && !given_back_; ++rank) sum += proxy_->last_moved_usec(rank);
  return sum;
}

// -1: no rank's heart stopped.
int ControlPlane::stale_rank() const {
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

void ControlPlane::blame(ErrorRecord& record, std::string text) const {
  const std::shared_lock held(memory_mutex_);
  if (given_back_) return record.set_message(text);
  if (const int stale = stale_rank(); stale >= 0) {
    record.peer = stale;
    text += "; rank " + std::to_string(stale) + " shows no sign of life";
  }
  if (const std::string trouble = proxy_->trouble(); !trouble.empty()) text += "; " + trouble;
  record.set_message(text);
}

}  // namespace uccl_ep
