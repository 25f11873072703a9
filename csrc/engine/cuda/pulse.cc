#include "engine/cuda/pulse.h"

#include <pthread.h>
#include <time.h>

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

Pulse::Pulse(cuda::HostPulse& words, const Engine& life) : words_(words), life_(life) {
  words_.still_nsec = cuda::kNeverMoved;
  thread_ = start_thread("beating for kernels", [this] { run(); });
}

Pulse::~Pulse() {
  stopping_.publish(1);
  bell_.ring();
  thread_.join();
}

void Pulse::run() {
  pthread_setname_np(pthread_self(), "uccl_ep_pulse");
  uint64_t last = boot_nsec(), moves = life_.moves();
  for (uint64_t beats = 1; stopping_.read() == 0; ++beats) {
    const uint32_t ticket = bell_.ticket();
    const uint64_t now = boot_nsec(), gap = now - last;
    last = now;
    if (gap > 1000 * kPatienceStepUsec)
      publish(words_.paused_nsec, words_.paused_nsec + gap);
    else if (words_.still_nsec != cuda::kNeverMoved)
      publish(words_.still_nsec, words_.still_nsec + gap);
    if (const uint64_t so_far = life_.moves(); so_far != moves) {
      moves = so_far;
      publish(words_.still_nsec, 0);
    }
    publish(words_.beats, beats);
    bell_.wait(ticket, kBeatUsec);
  }
}

}  // namespace uccl_ep
