// Threads of a program that take turns under simulated time, so that a seed decides all that happens. One runs until
// it waits: for a mutex, a condition, a futex, another thread, or a time. Then another runs; where none can, time goes
// on at once. taking_turns.cc stands in for the calls of the system by which threads wait, and for its clocks. Linked
// into a program, it begins with the first Turns and stays to the end.
//
// A thread that waits in a loop, for memory that another one writes, must yield, sleep or read a clock in it.
#pragma once

#include <cstdint>

namespace taking_turns {

// How the program ends if no thread can ever run again.
constexpr int kStandsStill = 4;

// What has happened since a Turns began.
struct History {
  uint64_t turns, nsec;
  bool operator==(const History&) const = default;
};

class Turns {
 public:
  // Threads that yield see what others did after `longest_nsec` at most; the shorter, the more turns a long wait takes.
  explicit Turns(uint64_t seed, uint64_t longest_nsec = 100'000);
  ~Turns();
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  History so_far() const;
  double seconds() const { return static_cast<double>(so_far().nsec) / 1e9; }
  // The calling thread and those that it starts from now on are `owner`'s, until it says so again; at first nobody's.
  static void belong_to(int owner);
  // After so many more turns, threads of `owner` have none, until thaw(). One owner at a time.
  static void freeze_in(uint64_t turns, int owner);
  static void thaw();
};

// Something has moved: threads that yield look again soon.
void moved();

}  // namespace taking_turns
