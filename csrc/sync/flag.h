// The only atomics of the project: monotonic flags and bells in memory that several processes map.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include "common/units.h"

namespace uccl_ep {

// A 64-bit number that only grows and is never reset. One writer; any number of readers.
// publish() releases everything that its writer wrote before; a reader that saw the value by read() sees all of it.
class Flag {
 public:
  void publish(uint64_t value) { value_.store(value, std::memory_order_release); }
  uint64_t read() const { return value_.load(std::memory_order_acquire); }
  // Relaxed: only for the writer to look at its own last value, which orders nothing.
  uint64_t own() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};
static_assert(sizeof(Flag) == 8 && std::atomic<uint64_t>::is_always_lock_free, "flags live in shared memory");

// A flag in pinned memory. Writer: a kernel, released at system scope (sync/device.cuh); reader: the host.
inline uint64_t read_device_flag(const uint64_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

struct alignas(kLineBytes) FlagLine {
  Flag flag;
};
static_assert(sizeof(FlagLine) == kLineBytes);

// A one-shot claim: exactly one of many writers (threads or processes) wins it.
class Claim {
 public:
  bool take() {
    uint32_t free = 0;
    return state_.compare_exchange_strong(free, 1, std::memory_order_acq_rel);
  }
  // The winner publishes what it wrote since take().
  void publish() { state_.store(2, std::memory_order_release); }
  bool claimed() const { return state_.load(std::memory_order_acquire) != 0; }
  bool published() const { return state_.load(std::memory_order_acquire) == 2; }

 private:
  std::atomic<uint32_t> state_{0};
};
static_assert(sizeof(Claim) == 4);

// Wakes one thread of this or another process: `ring` after publishing flags, `wait` until rung since `ticket`.
// Writers: anyone; sleeper: the one thread that owns the bell. Wake-ups cannot be lost: the sleeper announces
// itself before it compares the word again, the ringer changes the word before it looks for sleepers, and both
// accesses are sequentially consistent, so at least one of them sees the other.
class Bell {
 public:
  uint32_t ticket() const { return word_.load(std::memory_order_seq_cst); }

  void ring() {
    word_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) futex(FUTEX_WAKE, INT_MAX, nullptr);
  }

  // A hint: the sleeper sleeps, or is about to.
  bool has_sleeper() const { return sleepers_.load(std::memory_order_relaxed) != 0; }

  // Returns after a ring since `ticket` was taken, or after `timeout_usec`. The caller looks at its flags again.
  void wait(uint32_t ticket, uint64_t timeout_usec) {
    timespec timeout{static_cast<time_t>(timeout_usec / 1000000), static_cast<long>(timeout_usec % 1000000) * 1000};
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    if (word_.load(std::memory_order_seq_cst) == ticket) futex(FUTEX_WAIT, ticket, &timeout);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  void futex(int op, uint32_t value, const timespec* timeout) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), op, value, timeout, nullptr, 0);
  }
  std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> sleepers_{0};
};
static_assert(sizeof(Bell) == 8);

}  // namespace uccl_ep
