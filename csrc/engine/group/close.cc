// The end: refusing calls, leaving with the others or without, giving everything back.
#include <algorithm>
#include <chrono>
#include <new>
#include <thread>
#include <utility>

#include "common/clock.h"
#include "common/patience.h"
#include "engine/group/control_plane.h"

namespace uccl_ep {
namespace {

// How long a rank that leaves after an error tries to tell the other domains.
constexpr double kTellSeconds = 0.5;

// Sleeps for a part of the time that it has waited. Each look asks about every rank.
template <typename Condition>
void wait_for(double seconds, Condition condition) {
  constexpr uint64_t kLeastPauseUsec = 200, kMostPauseUsec = 20000;
  Patience patience(static_cast<uint64_t>(seconds * 1e6));
  const uint64_t began = now_usec();
  while (!condition() && !patience.over())
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::clamp((now_usec() - began) / 4, kLeastPauseUsec, kMostPauseUsec)));
}

}  // namespace

void ControlPlane::close(bool abort) {
  close(abort, [this] {
    leave();
    give_back();
  });
}

void ControlPlane::close(bool abort, const std::function<void()>& end) {
  bool tells = abort;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    tells &= started_;
  }
  if (tells && !failed()) {
    const ErrorRecord left = own_failure("closed its buffer while the others may still use it");
    outlives_ranks() ? keep(left) : spread(left);
  }
  const std::lock_guard lock(closing_);
  if (!std::exchange(ended_, true)) end();
}

bool ControlPlane::may_leave() const { return failed() ? proxy_->error_delivered() : proxy_->all_closed(); }

void ControlPlane::leave() {
  {
    std::lock_guard lock(mutex_);
    if (!started_) return;
  }
  announce_close();
  if (drive_ == Drive::kThreads) {
    wait_for(config_.progress_timeout_s, [this] { return failed() || may_leave(); });
    // Who gives up, or found an error, stays until the others have been told.
    if (failed()) wait_for(kTellSeconds, [this] { return may_leave(); });
  } else if (failed()) {
    while (step() == Pass::kMoved) {
    }
  }
  proxy_->stop();
}

// No thread of ours runs any more. Peers that still write do so into their own maps of the pages, or find their
// connection gone: whatever takes these addresses next is out of their reach.
std::vector<Mapping> ControlPlane::give_back() {
  Stats last;
  try {
    last = stats();
  } catch (const std::bad_alloc&) {  // without them
  }
  const std::lock_guard lock(mutex_);
  const std::unique_lock held(memory_mutex_);
  if (given_back_) return {};
  last_stats_ = std::move(last);
  if (control().error_claim.claimed()) last_error_ = posted_error(control());
  given_back_ = true;
  proxy_.reset();
  commands_.reset();
  transport_.reset();
  std::fill(controls_.begin(), controls_.end(), nullptr);
  if (!traced_) forget_traces();
  return std::exchange(regions_, std::vector<Mapping>(regions_.size()));
}

}  // namespace uccl_ep
