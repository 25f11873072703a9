// The end of an engine: an error of our own, leaving with the others or without, giving everything back.
#include <algorithm>
#include <chrono>

#include "common/patience.h"
#include "engine/engine.h"

namespace uccl_ep {

void Engine::fail(const std::string& text) {
  ErrorRecord record;
  record.kind = ErrorKind::kPeerFailed;
  record.rank = record.peer = config_.rank;
  std::string message = "rank " + std::to_string(config_.rank) + ": " + text;
  {
    const std::lock_guard lock(mutex_);
    if (refused_last_) message += std::string("; its last call was refused: ") + control().refusals[num_refused_ % 2];
  }
  record.set_message(message);
  spread(record);
}

namespace {

// How long a rank that leaves after an error tries to tell the other domains.
constexpr double kTellSeconds = 0.5;

template <typename Condition>
void wait_for(double seconds, Condition condition) {
  Patience patience(static_cast<uint64_t>(seconds * 1e6));
  while (!condition() && !patience.over()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

void Engine::close(bool abort) {
  if (leave(abort)) give_back();
}

bool Engine::leave(bool abort) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    closed_ = true;
    if (!started_) return true;
  }
  if (abort && !failed()) fail("closed its buffer while the others may still use it");
  {
    // Operations that are under way end by themselves, or by the error, or by their deadline.
    std::unique_lock lock(mutex_);
    queue_changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
    stop_ = true;
    queue_changed_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
  proxy_->announce_close();
  wait_for(config_.progress_timeout_s, [this] { return failed() || proxy_->all_closed(); });
  // Who gives up, or found an error, stays until the others have been told.
  if (failed()) wait_for(kTellSeconds, [this] { return proxy_->error_delivered(); });
  proxy_->stop();
  return true;
}

// No thread of ours runs any more. Peers that still write do so into their own maps of the pages, or find their
// connection gone: whatever takes these addresses next is out of their reach.
void Engine::give_back() {
  Stats last = stats();
  const std::lock_guard lock(mutex_);
  const std::unique_lock held(memory_mutex_);
  last_stats_ = std::move(last);
  if (control().error_claim.claimed()) last_error_ = posted_error(control());
  given_back_ = true;
  proxy_.reset();
  context_.reset();
  commands_.reset();
  transport_.reset();
  std::fill(controls_.begin(), controls_.end(), nullptr);
  for (Mapping& region : regions_) region = Mapping();
  if (!traced_) forget_traces();
}

}  // namespace uccl_ep
