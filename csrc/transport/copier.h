// Copies that a thread of its own hands to copy engines, as a NIC would fetch what it is told of: a call to a driver
// takes 10 us, after a pause 20 to 50, in which a proxy could post nothing and its link would idle.
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

// Used by the copier's thread only, but for made() and done(). Errors are CommunicationFailure(kTransport).
class CopyEngines {
 public:
  // Copies that may be handed over together: those of tickets 1 .. kGroup, and so on.
  static constexpr uint64_t kGroup = 8;

  virtual ~CopyEngines() = default;
  // Once, before all others.
  virtual void enter_thread() = 0;
  // Of one group, tickets in their order up to `last`.
  virtual void hand_over(std::span<const Copy> copies, uint64_t last) = 0;
  // Now and then while there is nothing to hand over: finds errors, moves on what needs it.
  virtual void look() = 0;
  // By the thread that asks, of a copy that has been handed over.
  virtual bool done(uint64_t ticket) const = 0;
};

class Copier final : public DeviceCopies {
 public:
  explicit Copier(std::unique_ptr<CopyEngines> engines);
  // What was started has been handed over then; the engines' destructor waits for it.
  ~Copier() override;
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  uint64_t start(void* to, const void* from, uint64_t num_bytes) override;
  // Keeps the thread awake while it is called every few microseconds.
  void flush() override;
  bool done(uint64_t ticket) override;
  // Any thread: announces copies, so that the thread and the engines are awake for the first.
  void wake();

 private:
  static constexpr uint64_t kCapacity = 1024;  // copies that were started and not handed over; more have to wait

  void run();
  bool hand_over();
  void rest(uint32_t ticket);
  template <typename Call>
  void attempt(Call call);

  const std::unique_ptr<CopyEngines> engines_;
  std::array<Copy, kCapacity> copies_;  // by ticket
  uint64_t last_flush_nsec_ = 0, steady_since_nsec_ = 0;  // of the caller
  uint64_t held_ = 0, held_since_nsec_ = 0;  // of the thread: what follows this ticket is held
  Flag started_;              // last ticket. Writer: who starts; reader: the thread
  Flag handed_over_;          // last ticket, also if that failed. Writer: the thread; reader: who starts
  std::exception_ptr error_;  // the first; before `failed_` is published
  Flag failed_;               // 1: nothing more is handed over
  Flag stopping_;
  Counter awake_nsec_;  // when the caller last was, or started a copy; a hint
  Counter told_nsec_;   // when wake() was last called
  std::mutex wake_mutex_;  // who calls it writes alone
  Bell bell_;
  std::thread thread_;
};

}  // namespace uccl_ep
