#include "taking_turns.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace taking_turns {
namespace {

constexpr uint64_t kNever = UINT64_MAX;
constexpr uint64_t kStartNsec = 1'000'000'000;  // 0 stands for "never" in some places
constexpr uint64_t kTickNsec = 1'000, kLookNsec = 50;
constexpr uint32_t kLooks = 16;      // at a clock in a row: whoever makes more of them waits
constexpr uint64_t kQuietParts = 32;  // of the time in which nothing has moved: how long a yield lasts

template <typename Function>
Function* system_call(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}
#define SYSTEM(name)                                                \
  (*[] {                                                            \
    static auto* const call = system_call<decltype(::name)>(#name); \
    return call;                                                    \
  }())

struct Thread {
  std::atomic<uint32_t> has_turn{0};
  int owner = -1;
  bool is_ready = true, was_woken = false, is_over = false;
  uint64_t wakes_nsec = kNever;
  const void* waits_for = nullptr;
  const char* waits_in = "its first turn";
  uint32_t word = 0, looks = 0;  // of a futex; at a clock
  pthread_t id{};
};

// Read and changed by the thread that has the turn.
struct World {
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Thread*> ready;
  std::mt19937_64 random;
  uint64_t now = kStartNsec, moved_nsec = kStartNsec, longest_nsec = 0, turns = 0;
  uint64_t freezes_at = kNever;  // in turns
  int freezes = -1;              // of which owner
};
World* world = nullptr;  // set once; never destroyed
thread_local Thread* self = nullptr;

// What comes behind main() is no part of it: a sanitizer looks for leaks, while it lets nobody have memory.
struct AtExit {
  ~AtExit() { self = nullptr; }
} at_exit;

bool takes_part() { return world != nullptr && self != nullptr; }

void wait_for_turn(Thread& its) {
  while (its.has_turn.load(std::memory_order_acquire) == 0)
    SYSTEM(syscall)(SYS_futex, &its.has_turn, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
  its.has_turn.store(0, std::memory_order_relaxed);
}
void give_turn(Thread& next) {
  next.has_turn.store(1, std::memory_order_release);
  SYSTEM(syscall)(SYS_futex, &next.has_turn, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

bool is_frozen(const Thread& thread) { return world->turns >= world->freezes_at && thread.owner == world->freezes; }
[[noreturn]] void stand_still() {
  std::map<std::string, int> alike;
  for (const auto& thread : world->threads)
    if (!thread->is_over)
      ++alike["of owner " + std::to_string(thread->owner) + " wait for " + thread->waits_in +
              (is_frozen(*thread) ? ", frozen" : "")];
  std::fprintf(stderr, "no thread can ever run again:\n");
  for (const auto& [what, number] : alike) std::fprintf(stderr, "  %d %s\n", number, what.c_str());
  std::fflush(stderr);
  std::_Exit(kStandsStill);
}
Thread& next_thread() {
  while (true) {
    std::vector<Thread*>& ready = world->ready;
    ready.clear();
    uint64_t soonest = kNever;
    for (const auto& thread : world->threads) {
      if (thread->is_over || is_frozen(*thread)) continue;
      if (!thread->is_ready && thread->wakes_nsec <= world->now) thread->is_ready = true;
      if (thread->is_ready)
        ready.push_back(thread.get());
      else
        soonest = std::min(soonest, thread->wakes_nsec);
    }
    if (!ready.empty()) return *ready[world->random() % ready.size()];
    if (soonest == kNever) stand_still();
    world->now = soonest;
  }
}
void pass_on() {
  ++world->turns;
  Thread& next = next_thread();
  if (&next == self) return;
  give_turn(next);
  if (!self->is_over) wait_for_turn(*self);
}

// The calling thread waits until it is woken, or until `wakes_nsec`. Whether it was woken.
bool wait(const char* in, const void* what, uint64_t wakes_nsec) {
  self->is_ready = self->was_woken = false;
  self->waits_in = in;
  self->waits_for = what;
  self->wakes_nsec = wakes_nsec;
  self->looks = 0;
  pass_on();
  self->waits_for = nullptr;
  self->wakes_nsec = kNever;
  return self->was_woken;
}
void sleep(const char* in, uint64_t nsec) { wait(in, nullptr, world->now + nsec); }
void yield() {
  const uint64_t quiet = (world->now - world->moved_nsec) / kQuietParts;
  sleep("a yield", std::clamp(quiet, kTickNsec, std::max(world->longest_nsec, kTickNsec)));
}
template <typename Which>
void wake(uint32_t most, Which which) {
  for (const auto& thread : world->threads) {
    if (most == 0) return;
    if (thread->is_ready || thread->is_over || !which(*thread)) continue;
    thread->is_ready = thread->was_woken = true;
    --most;
  }
}
void wake_all_of(const void* what) {
  wake(UINT32_MAX, [=](const Thread& thread) { return thread.waits_for == what; });
}

uint64_t nsec_of(const timespec& time) {
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(time.tv_nsec);
}
uint64_t later_by(const timespec* time) { return time == nullptr ? kNever : world->now + nsec_of(*time); }

// ---- mutexes --------------------------------------------------------------------------------------------------------
template <typename Mutex, typename Lock, typename Try>
int lock(Mutex* mutex, Lock system_lock, Try attempt) {
  if (!takes_part()) return system_lock(mutex);
  int status = attempt(mutex);
  for (; status == EBUSY; status = attempt(mutex)) wait("a mutex", mutex, kNever);
  return status;
}
template <typename Mutex, typename Unlock>
int unlock(Mutex* mutex, Unlock system_unlock) {
  const int status = system_unlock(mutex);
  if (takes_part()) wake_all_of(mutex);
  return status;
}

int wait_for_condition(pthread_cond_t* condition, pthread_mutex_t* mutex, uint64_t wakes_nsec) {
  pthread_mutex_unlock(mutex);
  const bool was_woken = wait("a condition", condition, wakes_nsec);
  pthread_mutex_lock(mutex);
  return was_woken ? 0 : ETIMEDOUT;
}

// ---- threads --------------------------------------------------------------------------------------------------------
struct Start {
  Thread* thread;
  void* (*run)(void*);
  void* argument;
};
void* run_thread(void* given) {
  const std::unique_ptr<Start> start(static_cast<Start*>(given));
  self = start->thread;
  wait_for_turn(*self);
  void* const result = start->run(start->argument);
  self->is_over = true;
  moved();
  wake_all_of(self);
  pass_on();
  self = nullptr;
  return result;
}

Thread& add_thread(int owner) {
  world->threads.push_back(std::make_unique<Thread>());
  world->threads.back()->owner = owner;
  return *world->threads.back();
}

int call_futex(uint32_t* word, int operation, uint32_t value, const timespec* time) {
  switch (operation & FUTEX_CMD_MASK) {
    case FUTEX_WAIT:
    case FUTEX_WAIT_BITSET: {
      if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != value) {
        errno = EAGAIN;
        return -1;
      }
      self->word = value;
      const bool is_later = (operation & FUTEX_CMD_MASK) == FUTEX_WAIT;
      if (wait("a futex", word, is_later || time == nullptr ? later_by(time) : nsec_of(*time))) return 0;
      errno = ETIMEDOUT;
      return -1;
    }
    default:  // A word may be mapped in several places, so all look whose word has changed.
      moved();
      wake(UINT32_MAX, [](const Thread& thread) {
        return thread.waits_for != nullptr && thread.waits_in == std::string("a futex") &&
               __atomic_load_n(static_cast<const uint32_t*>(thread.waits_for), __ATOMIC_SEQ_CST) != thread.word;
      });
      return 0;
  }
}

}  // namespace

Turns::Turns(uint64_t seed, uint64_t longest_nsec) {
  if (world == nullptr) {
    world = new World;
    cpu_set_t one;  // only one runs, and a turn is given faster to a neighbour
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    self = &add_thread(-1);
  }
  world->random.seed(seed);
  world->longest_nsec = longest_nsec;
  world->now = world->moved_nsec = kStartNsec;
  world->turns = self->looks = 0;
}
Turns::~Turns() { thaw(); }
History Turns::so_far() const { return {world->turns, world->now - kStartNsec}; }
void Turns::belong_to(int owner) { self->owner = owner; }
void Turns::freeze_in(uint64_t turns, int owner) {
  world->freezes_at = world->turns + std::min(turns, kNever - world->turns);
  world->freezes = owner;
}
void Turns::thaw() { world->freezes_at = kNever; }
void moved() {
  if (takes_part()) world->moved_nsec = world->now;
}

}  // namespace taking_turns

// ---- in place of the system's ---------------------------------------------------------------------------------------
using namespace taking_turns;

extern "C" {

int pthread_create(pthread_t* id, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  if (!takes_part()) return SYSTEM(pthread_create)(id, attributes, run, argument);
  Thread& thread = add_thread(self->owner);
  const int status = SYSTEM(pthread_create)(id, attributes, run_thread, new Start{&thread, run, argument});
  thread.is_over = status != 0;
  thread.id = *id;
  moved();
  return status;
}
int pthread_join(pthread_t id, void** result) {
  if (!takes_part()) return SYSTEM(pthread_join)(id, result);
  const auto is_it = [=](const auto& thread) { return pthread_equal(thread->id, id) != 0; };
  const auto found = std::find_if(world->threads.begin(), world->threads.end(), is_it);
  const Thread* const thread = found == world->threads.end() ? nullptr : found->get();
  while (thread != nullptr && !thread->is_over) wait("a join", thread, kNever);
  const int status = SYSTEM(pthread_join)(id, result);
  std::erase_if(world->threads, [=](const auto& other) { return other.get() == thread; });
  return status;
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  return lock(mutex, SYSTEM(pthread_mutex_lock), SYSTEM(pthread_mutex_trylock));
}
int pthread_mutex_unlock(pthread_mutex_t* mutex) { return unlock(mutex, SYSTEM(pthread_mutex_unlock)); }
int pthread_rwlock_rdlock(pthread_rwlock_t* mutex) {
  return lock(mutex, SYSTEM(pthread_rwlock_rdlock), SYSTEM(pthread_rwlock_tryrdlock));
}
int pthread_rwlock_wrlock(pthread_rwlock_t* mutex) {
  return lock(mutex, SYSTEM(pthread_rwlock_wrlock), SYSTEM(pthread_rwlock_trywrlock));
}
int pthread_rwlock_unlock(pthread_rwlock_t* mutex) { return unlock(mutex, SYSTEM(pthread_rwlock_unlock)); }

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  if (!takes_part()) return SYSTEM(pthread_cond_wait)(condition, mutex);
  return wait_for_condition(condition, mutex, kNever);
}
int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  if (!takes_part()) return SYSTEM(pthread_cond_timedwait)(condition, mutex, until);
  return wait_for_condition(condition, mutex, nsec_of(*until));
}
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  if (!takes_part()) return SYSTEM(pthread_cond_clockwait)(condition, mutex, clock, until);
  return wait_for_condition(condition, mutex, nsec_of(*until));
}
int pthread_cond_signal(pthread_cond_t* condition) {
  if (!takes_part()) return SYSTEM(pthread_cond_signal)(condition);
  wake(1, [=](const Thread& thread) { return thread.waits_for == condition; });
  return 0;
}
int pthread_cond_broadcast(pthread_cond_t* condition) {
  if (!takes_part()) return SYSTEM(pthread_cond_broadcast)(condition);
  wake_all_of(condition);
  return 0;
}

int nanosleep(const timespec* time, timespec* rest) {
  if (!takes_part()) return SYSTEM(nanosleep)(time, rest);
  // Short ones are those of threads that wait for memory.
  if (nsec_of(*time) < 1'000'000)
    yield();
  else
    sleep("a sleep", nsec_of(*time));
  return 0;
}
int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* rest) {
  if (!takes_part()) return SYSTEM(clock_nanosleep)(clock, flags, time, rest);
  const uint64_t until = flags == 0 ? later_by(time) : nsec_of(*time);
  sleep("a sleep", until - std::min(until, world->now));
  return 0;
}
int usleep(useconds_t usec) {
  const timespec time{usec / 1'000'000, static_cast<long>(usec % 1'000'000) * 1000};
  return nanosleep(&time, nullptr);
}
int poll(pollfd* files, nfds_t count, int milliseconds) {
  if (!takes_part()) return SYSTEM(poll)(files, count, milliseconds);
  const uint64_t until = milliseconds < 0 ? kNever : world->now + static_cast<uint64_t>(milliseconds) * 1'000'000;
  while (true) {
    const int found = SYSTEM(poll)(files, count, 0);
    if (found != 0 || world->now >= until) return found;
    sleep("a poll", 1'000'000);
  }
}
int clock_gettime(clockid_t clock, timespec* time) {
  if (!takes_part() || clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID)
    return SYSTEM(clock_gettime)(clock, time);
  if (++self->looks > kLooks) yield();
  world->now += kLookNsec;
  *time = {static_cast<time_t>(world->now / 1'000'000'000), static_cast<long>(world->now % 1'000'000'000)};
  return 0;
}
// Callers give fewer arguments than are read.
__attribute__((no_sanitize_address)) long syscall(long number, ...) {
  long given[6];
  va_list list;
  va_start(list, number);
  for (long& argument : given) argument = va_arg(list, long);
  va_end(list);
  if (takes_part() && number == SYS_sched_yield) {
    yield();
    return 0;
  }
  if (takes_part() && number == SYS_futex)
    return call_futex(reinterpret_cast<uint32_t*>(given[0]), static_cast<int>(given[1]),
                      static_cast<uint32_t>(given[2]), reinterpret_cast<const timespec*>(given[3]));
  return SYSTEM(syscall)(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

}  // extern "C"
