#include "transport/copier.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

#include "common/clock.h"
#include "common/thread.h"

namespace uccl_ep {
namespace {

// A caller of flush() with longer gaps is napping.
constexpr uint64_t kSteadyNsec = 50'000;
// A caller that has been steady for less than this does short work now and then, such as a heartbeat, and has no
// copies.
constexpr uint64_t kAwakeAfterNsec = 200'000;
// The thread stays awake for this long after a steady flush(), a start() or a wake().
constexpr uint64_t kAwakeNsec = 200'000;
constexpr uint64_t kSleepUsec = 1'000'000;
// While the engines are busy, a group that is not full waits for this long. Handing over and reporting cost as much as
// copying, so they are done once for the whole group.
constexpr uint64_t kHoldNsec = 10'000;
// Copies of fewer bytes are over sooner than that, so nothing waits for them.
constexpr uint64_t kShortBytes = 64 << 10;

}  // namespace

Copier::Copier(std::unique_ptr<CopyEngines> engines) : engines_(std::move(engines)) {
  thread_ = start_thread("the copies between GPUs", [this] { run(); });
}

Copier::~Copier() {
  stopping_.publish(1);
  bell_.ring();
  thread_.join();
}

uint64_t Copier::start(void* to, const void* from, uint64_t num_bytes) {
  const uint64_t ticket = started_.own() + 1;
  while (ticket - handed_over_.read() > kCapacity) sched_yield();
  copies_[ticket % kCapacity] = {to, from, num_bytes};
  started_.publish(ticket);
  awake_nsec_.set(now_nsec());  // more copies will come, even from a slow caller
  bell_.ring();
  return ticket;
}

void Copier::flush() {
  const uint64_t now = now_nsec();
  if (now - last_flush_nsec_ >= kSteadyNsec) steady_since_nsec_ = now;
  last_flush_nsec_ = now;
  if (now - steady_since_nsec_ < kAwakeAfterNsec) return;
  awake_nsec_.set(now);
  if (bell_.has_sleeper()) bell_.ring();
}

bool Copier::done(uint64_t ticket) {
  if (handed_over_.read() < ticket) return false;
  if (engines_->done(ticket)) return true;
  if (failed_.read() != 0) std::rethrow_exception(error_);
  return false;
}

void Copier::wake() {
  {
    const std::lock_guard lock(wake_mutex_);
    told_nsec_.set(now_nsec());
  }
  bell_.ring();
}

void Copier::run() {
  pthread_setname_np(pthread_self(), "uccl_ep_copier");
  attempt([&] { engines_->enter_thread(); });
  for (;;) {
    const uint32_t ticket = bell_.ticket();
    const bool stopping = stopping_.read() != 0;
    if (hand_over()) continue;
    if (stopping && handed_over_.own() == started_.read()) return;
    attempt([&] { engines_->look(); });
    rest(ticket);
  }
}

// Keeps the first error. Afterwards nothing more is handed over, and done() throws the error for copies that are not
// over.
template <typename Call>
void Copier::attempt(Call call) {
  if (failed_.own() != 0) return;
  try {
    call();
  } catch (...) {  // also out of memory
    error_ = std::current_exception();
    failed_.publish(1);
  }
}

// Hands over the started copies of the next group, if it is time.
bool Copier::hand_over() {
  const uint64_t before = handed_over_.own(),
                 end = before / CopyEngines::kGroup * CopyEngines::kGroup + CopyEngines::kGroup;
  const uint64_t last = std::min(started_.read(), end);
  if (last == before) return false;
  if (last < end && before != 0 && failed_.own() == 0 && handed_over_bytes_ >= kShortBytes && !engines_->done(before)) {
    const uint64_t now = now_nsec();
    if (held_ != before) held_since_nsec_ = now;
    held_ = before;
    if (now - held_since_nsec_ < kHoldNsec) return false;
  }
  std::array<Copy, CopyEngines::kGroup> copies;
  handed_over_bytes_ = 0;
  for (uint64_t ticket = before + 1; ticket <= last; ++ticket) {
    copies[ticket - before - 1] = copies_[ticket % kCapacity];
    handed_over_bytes_ += copies[ticket - before - 1].num_bytes;
  }
  attempt([&] { engines_->hand_over({copies.data(), last - before}, last); });
  handed_over_.publish(last);
  return true;
}

// `ticket` was taken before the last look for copies, so a later start ends the wait at once.
void Copier::rest(uint32_t ticket) {
  const uint64_t now = now_nsec(), awake = std::max(awake_nsec_.value(), told_nsec_.value());
  if (now < awake + kAwakeNsec || started_.read() > handed_over_.own())
    sched_yield();
  else
    bell_.wait(ticket, kSleepUsec);
}

}  // namespace uccl_ep
