// The sequence of calls: which were queued, which this rank refused, and what is known of those of others.
#include <cstring>

#include "backend/plan.h"
#include "engine/group/control_plane.h"

namespace uccl_ep {

void ControlPlane::check_usable() const {
  {
    std::lock_guard lock(mutex_);
    if (closed_) throw UsageFailure(UsageKind::kClosed, "the buffer is closed");
    if (!started_) throw UsageFailure(UsageKind::kClosed, "the buffer was not started");
  }
  check();
}

ControlPlane::Number ControlPlane::number_call() {
  std::lock_guard lock(mutex_);
  if (closed_) throw UsageFailure(UsageKind::kClosed, "the buffer is closed");
  Number number{num_queued_ + 1, num_refused_, num_refused_ > 0 ? control().refusals[num_refused_ % 2] : ""};
  refused_last_ = false;
  ++num_queued_;  // now that nothing can throw any more
  return number;
}

ControlPlane::Number ControlPlane::note_low_latency() {
  const std::lock_guard lock(mutex_);
  if (closed_) throw UsageFailure(UsageKind::kClosed, "the buffer is closed");
  Number number{0, num_refused_, num_refused_ > 0 ? control().refusals[num_refused_ % 2] : ""};
  refused_last_ = false;
  ++num_low_latency_;
  return number;
}

void ControlPlane::note_queued() {
  const std::lock_guard lock(mutex_);
  refused_last_ = false;
  ++num_queued_;
}

uint64_t ControlPlane::num_queued() const {
  const std::lock_guard lock(mutex_);
  return num_queued_;
}

void ControlPlane::refused(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (closed_ || !started_ || failed()) return;
  ++num_refused_;
  refused_last_ = true;
  copy_text(control().refusals[num_refused_ % 2], why);
  control().num_refused.publish(num_refused_);
}

uint64_t ControlPlane::num_calls() const {
  const std::lock_guard lock(mutex_);
  return num_queued_ + num_low_latency_ + num_refused_;
}

std::string ControlPlane::refusal(uint64_t nth) const {
  const std::lock_guard lock(mutex_);
  const std::shared_lock held(memory_mutex_);
  const bool known = !given_back_ && nth > 0 && nth <= num_refused_ && nth + 2 > num_refused_;
  return known ? control().refusals[nth % 2] : "";
}

std::string ControlPlane::refused_since(int rank, uint64_t call, uint64_t num_refused) const {
  const uint64_t known = proxy_->num_refused(rank);
  if (known <= num_refused) return "";
  const uint64_t more = known - num_refused;
  char why[kRefusalBytes] = {};
  if (const ControlBlock* const control = controls_[rank]; control != nullptr) {
    std::memcpy(why, control->refusals[(num_refused + more) % 2], sizeof(why));
    make_printable(why);
  }
  return "; " + describe_refusals(rank, call, more, why);
}

}  // namespace uccl_ep
