// The end of a GPU engine: leaving with the others or without, giving memory back when no kernel uses it any more.
#include <mutex>
#include <utility>
#include <vector>

#include "engine/gpu/engine.h"

namespace uccl_ep {
namespace {

using gpu::OnDevice;

// What kernels of a graph may still use of an engine that is gone. It lasts as long as the process.
struct Kept {
  gpu::PinnedMemory pinned;
  std::vector<Mapping> pages;
  std::vector<gpu::DeviceMapping> regions, traces;
  std::unique_ptr<Network> network;
};
void keep(Kept kept) {
  static std::mutex mutex;
  static auto& all = *new std::vector<Kept>;
  const std::lock_guard lock(mutex);
  all.push_back(std::move(kept));
}

}  // namespace

void GpuEngine::close(bool abort) {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  // The plane's proxy may run, though we have not started.
  plane_.close(abort || !started_, [this] {
    const OnDevice guard(device_, std::nothrow);
    if (started_) wait_for_kernels();
    plane_.leave();
    if (started_) {
      leaving_.publish(1);
      watcher_.join();
      if (is_idle_)
        gpu::synchronize(control_stream_, std::nothrow);
      else
        tell_kernels_to_stop();  // queued replays find that they have to end
    }
    give_back();
  });
}

// Queued work ends normally, by the error, or by its deadline. CUDA cannot say when a graph's replays are over, but
// when the device is idle. It may not become idle: work of others may wait for a rank that is gone.
void GpuEngine::wait_for_kernels() {
  gpu::synchronize(last_done_, std::nothrow);
  bool has_captured;
  {
    const std::lock_guard lock(mutex_);
    has_captured = has_captured_;
  }
  if (has_captured) is_idle_ = gpu::wait_until_idle(device_, static_cast<uint64_t>(config_.progress_timeout_s * 1e6));
}

// The proxy has stopped. The network has registered host memory with the driver, and the transport our memory with
// NICs, so both go before the memory.
void GpuEngine::give_back() {
  const std::lock_guard lock(mutex_);
  const std::unique_lock held(memory_mutex_);
  given_back_ = true;
  if (started_) gpu::synchronize(last_done_, std::nothrow);  // of a thread that was in the middle of an operation
  for (const auto& [capture, launches] : captured_launches_) {
    const std::lock_guard changing(launches->mutex);
    launches->engine = nullptr;
  }
  pulse_.reset();
  Kept kept;
  if (is_idle_)
    network_.reset();
  else if (network_ != nullptr)
    network_->stop();
  kept.pages = plane_.give_back();
  kept.regions = std::exchange(regions_, std::vector<gpu::DeviceMapping>(regions_.size()));
  if (group_.trace == nullptr || !is_idle_) kept.traces = std::move(trace_memory_);
  if (!is_idle_) {
    kept.pinned = std::move(pinned_);
    kept.network = std::move(network_);
    keep(std::move(kept));
  }
  share_.give_back();
}

}  // namespace uccl_ep
