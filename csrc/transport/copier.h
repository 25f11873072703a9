// A thread of its own hands copies to copy engines, as a NIC fetches the writes posted to it. A driver call takes 10
// us, or 20 to 50 us after a pause. A proxy that made the call could post nothing meanwhile, and its link would idle.
#pragma once

#include <array>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "common/copy.h"
#include "sync/flag.h"
#include "sync/word.h"
#include "transport/transport.h"

namespace uccl_ep {

// Only the copier's thread uses it, except for done(). Errors are CommunicationFailure(kTransport).
class CopyEngines {
 public:
  // At most a group of copies is handed over together: tickets 1 .. kGroup, then the next kGroup, and so on.
  static constexpr uint64_t kGroup = 8;

  virtual ~CopyEngines() = default;
  // Called once, before all other functions.
  virtual void enter_thread() = 0;
  // The copies belong to one group, in the order of their tickets. The last ticket is `last`.
  virtual void hand_over(std::span<const Copy> copies, uint64_t last) = 0;
  // Called now and then while there is nothing to hand over. Finds errors, and advances copies that need a call for it.
  virtual void look() = 0;
  // For a copy that has been handed over. Called by the copier's thread and by the thread that asks.
  virtual bool done(uint64_t ticket) const = 0;
};

class Copier final : public DeviceCopies {
 public:
  explicit Copier(std::unique_ptr<CopyEngines> engines);
  // Hands over all started copies; the engines' destructor waits for them.
  ~Copier() override;
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  uint64_t start(void* to, const void* from, uint64_t num_bytes) override;
  // Keeps the thread awake while it is called every few microseconds.
  void flush() override;
  bool done(uint64_t ticket) override;
  // Announces copies, so that the thread and the engines are awake for the first one. Any thread may call it.
  void wake();

 private:
  static constexpr uint64_t kCapacity = 1024;  // copies that were started and not handed over; more must wait

  void run();
  bool hand_over();
  void rest(uint32_t ticket);
  template <typename Call>
  void attempt(Call call);

  const std::unique_ptr<CopyEngines> engines_;
  std::array<Copy, kCapacity> copies_;  // by ticket
  uint64_t last_flush_nsec_ = 0, steady_since_nsec_ = 0;  // of the caller
  uint64_t held_ = 0, held_since_nsec_ = 0;  // of the thread: copies after this ticket are held back
  uint64_t handed_over_bytes_ = 0;           // of the last group
  Flag started_;              // last ticket. Writer: the caller; reader: the thread
  Flag handed_over_;          // last ticket, even if its hand-over failed. Writer: the thread; reader: the caller
  std::exception_ptr error_;  // the first error; set before `failed_` is published
  Flag failed_;               // 1: nothing more is handed over
  Flag stopping_;
  Counter awake_nsec_;  // when the caller last flushed steadily or started a copy; a hint
  Counter told_nsec_;   // when wake() was last called
  std::mutex wake_mutex_;  // lets one caller of wake() at a time write told_nsec_
  Bell bell_;
  std::thread thread_;
};

}  // namespace uccl_ep
