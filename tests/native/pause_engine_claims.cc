// Deadlines of kernels: they follow the host that launched them, and bytes that move between domains.
#include <cuda_runtime.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "backend/gpu/device.cuh"
#include "gpu_runs.h"

using namespace uccl_ep;

namespace {

constexpr uint64_t kLimitUsec = 300'000, kSlackUsec = 300'000;

// A kernel of one thread that waits for a flag, and the host that it knows by its pulse.
class Wait {
 public:
  explicit Wait(bool is_arrival) : is_arrival_(is_arrival) {
    group_.own = group_.base[0] = reinterpret_cast<uint8_t*>(&local_);
    group_.arrival_nsec = group_.progress_nsec = 1000 * kLimitUsec;
    group_.error = &error_;
    group_.pulse = &pulse_;
    pulse_.alive_nsec = pulse_.still_nsec = gpu::kMostLivedNsec;
  }
  // `host` is called every 10 ms with the time since the beginning. How long the kernel waited.
  uint64_t run(const std::function<void(uint64_t)>& host) {
    std::atomic<bool> over{false};
    const uint64_t started = now_usec();
    std::thread beating([&] {
      while (!over) {
        host(now_usec() - started);
        usleep(10'000);
      }
    });
    gpu_on_cpu::run_grid({1, 32}, [&] {
      if (threadIdx.x == 0) came = gpu::wait_flag(group_, awaited());
    });
    const uint64_t usec = now_usec() - started;
    over = true;
    beating.join();
    return usec;
  }
  void beat() { store(pulse_.beats, pulse_.beats + 1); }
  void alive(uint64_t usec) {
    store(pulse_.alive_nsec, 1000 * usec);
    still(usec);
  }
  void still(uint64_t usec) { store(pulse_.still_nsec, 1000 * usec); }
  void publish() { store(is_arrival_ ? header_.value : rows_.value, 1); }
  bool reported() const { return error_.published.value != 0; }

  bool came = false;

 private:
  gpu::Awaited awaited() const {
    if (is_arrival_) return {&header_, 1, 0};
    return {&rows_, 1, 0};
  }
  static void store(uint64_t& word, uint64_t value) { reinterpret_cast<Flag*>(&word)->publish(value); }

  const bool is_arrival_;
  gpu::Group group_{};
  gpu::Local local_{};
  gpu::HostError error_{};
  gpu::HostPulse pulse_{};
  gpu::DeviceFlag<gpu::HeaderFull> header_;
  gpu::DeviceFlag<gpu::RowsFull> rows_;
};

// Stops this process again and again, each time for `usec`.
class Pauses {
 public:
  explicit Pauses(useconds_t usec) : child_(fork()) {
    if (child_ != 0) return;
    const pid_t parent = getppid();
    while (getppid() == parent) {
      usleep(500'000);
      kill(parent, SIGSTOP);
      usleep(usec);
      kill(parent, SIGCONT);
    }
    _exit(0);
  }
  ~Pauses() {
    usleep(10'000);
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }

 private:
  const pid_t child_;
};

}  // namespace

CLAIM("a kernel whose host lives waits as long as its deadline says, and reports") {
  for (const bool is_arrival : {false, true}) {
    Wait wait(is_arrival);
    const uint64_t usec = wait.run([&](uint64_t) { wait.beat(); });
    EXPECT(!wait.came && wait.reported());
    EXPECT(usec >= kLimitUsec && usec < kLimitUsec + kSlackUsec);
  }
}

CLAIM("no deadline passes while the host stands still, nor because it has stood still") {
  const uint64_t ends_usec = 4 * kLimitUsec;
  for (const bool is_arrival : {false, true}) {
    Wait wait(is_arrival);
    wait.run([&](uint64_t usec) {
      if (usec < ends_usec) return;
      wait.alive(usec - ends_usec);
      wait.beat();
      if (usec > ends_usec + kLimitUsec / 2) wait.publish();
    });
    EXPECT(wait.came && !wait.reported());
  }
}

CLAIM("after a pause of the host the deadline begins anew") {
  const uint64_t ends_usec = 4 * kLimitUsec, begins_usec = kLimitUsec / 2;
  for (const bool is_arrival : {false, true}) {
    Wait wait(is_arrival);
    const uint64_t usec = wait.run([&](uint64_t at) {
      if (at > begins_usec && at < ends_usec) return;
      if (at > begins_usec) wait.alive(at - ends_usec);
      wait.beat();
    });
    EXPECT(!wait.came && wait.reported());
    EXPECT(usec >= kLimitUsec + ends_usec - 20'000 && usec < kLimitUsec + ends_usec + kSlackUsec);
  }
}

CLAIM("bytes that move between domains put a progress deadline off, and no arrival deadline") {
  const uint64_t moving_usec = 3 * kLimitUsec;
  for (const bool is_arrival : {false, true}) {
    Wait wait(is_arrival);
    const uint64_t usec = wait.run([&](uint64_t at) {
      wait.still(at < moving_usec ? 0 : at - moving_usec);
      wait.beat();
    });
    const uint64_t limit = is_arrival ? kLimitUsec : moving_usec + kLimitUsec;
    EXPECT(!wait.came && wait.reported());
    EXPECT(usec >= limit - 20'000 && usec < limit + kSlackUsec);
  }
}

CLAIM("engines of a process that is paused for longer than the deadline go on, on the host and on GPUs") {
  CudaRun run;
  run.domain_of = {0, 0, 1};
  run.num_tokens = {40, 27, 30};
  run.arrival_timeout_s = 2;
  run.late_usec = 1'000'000;
  run.rounds = 1;
  const Pauses pauses(3'000'000);
  same_as_host(run);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
