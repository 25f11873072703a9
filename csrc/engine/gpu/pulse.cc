#include "engine/gpu/pulse.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>

#include "common/patience.h"
#include "common/thread.h"

namespace uccl_ep {
namespace {

constexpr uint64_t kBeatUsec = 50'000;

// Runs on while the machine is suspended, as a GPU's clock may.
uint64_t boot_nsec() {
  timespec ts;
  clock_gettime(CLOCK_BOOTTIME, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(ts.tv_nsec);
}

void publish(uint64_t& word, uint64_t value) { reinterpret_cast<Flag*>(&word)->publish(value); }

}  // namespace

Pulse::Pulse(gpu::HostPulse& words, const ControlPlane& plane) : words_(words), plane_(plane) {
  thread_ = start_thread("beating for kernels", [this] { run(); });
}

Pulse::~Pulse() {
  stopping_.publish(1);
  bell_.ring();
  thread_.join();
}

void Pulse::run() {
  pthread_setname_np(pthread_self(), "uccl_ep_pulse");
  uint64_t last = boot_nsec(), moves = plane_.moves();
  uint64_t alive = gpu::kMostLivedNsec, still = alive;  // before the first pause nothing is held back
  for (uint64_t beats = 1; stopping_.read() == 0; ++beats) {
    const uint32_t ticket = bell_.ticket();
    const uint64_t now = boot_nsec(), gap = now - last;
    last = now;
    const bool has_paused = gap > 1000 * kPatienceStepUsec;
    alive = has_paused ? 0 : std::min(alive + gap, gpu::kMostLivedNsec);
    const uint64_t so_far = plane_.moves();
    still = has_paused || so_far != moves ? 0 : std::min(still + gap, gpu::kMostLivedNsec);
    moves = so_far;
    publish(words_.alive_nsec, alive);
    publish(words_.still_nsec, still);
    publish(words_.beats, beats);
    bell_.wait(ticket, kBeatUsec);
  }
}

}  // namespace uccl_ep
