// Calls that this rank refused, and what is known of those of others.
#include <cstring>

#include "engine/engine.h"

namespace uccl_ep {

void Engine::note_queued() {
  const std::lock_guard lock(mutex_);
  refused_last_ = false;
  ++num_queued_;
}

uint64_t Engine::num_queued() const {
  const std::lock_guard lock(mutex_);
  return num_queued_;
}

void Engine::refused(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (closed_ || !started_ || failed()) return;
  ++num_refused_;
  refused_last_ = true;
  copy_text(control().refusals[num_refused_ % 2], why);
  control().num_refused.publish(num_refused_);
}

uint64_t Engine::num_calls() const {
  const std::lock_guard lock(mutex_);
  return num_queued_ + num_refused_;
}

std::string Engine::refusal(uint64_t nth) const {
  const std::lock_guard lock(mutex_);
  const bool known = nth > 0 && nth <= num_refused_ && nth + 2 > num_refused_;
  return known ? control().refusals[nth % 2] : "";
}

std::string Engine::refused_since(int rank, uint64_t call, uint64_t num_refused) const {
  const uint64_t more = (proxy_->num_refused(rank) - num_refused) % kHeartbeatRefusals;
  if (more == 0 || more >= kHeartbeatRefusals / 2) return "";
  char why[kRefusalBytes] = {};
  if (const ControlBlock* const control = controls_[rank]; control != nullptr) {
    std::memcpy(why, control->refusals[(num_refused + more) % 2], sizeof(why));
    make_printable(why);
  }
  return "; " + describe_refusals(rank, call, more, why);
}

}  // namespace uccl_ep
