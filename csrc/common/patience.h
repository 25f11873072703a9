// The clock of deadlines. It stands still while this process does (a stopped container, a suspended machine): a pause
// of our own is nobody else's fault.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/units.h"

namespace uccl_ep {

// The most that passes between two looks. Who waits looks more often; a longer gap was a pause.
constexpr uint64_t kPatienceStepUsec = 500'000;

// One thread looks, again and again while it waits.
class PatienceClock {
 public:
  // Microseconds since some time.
  uint64_t at(uint64_t now_usec) {
    if (now_usec <= last_usec_) return patient_usec_;
    patient_usec_ += std::min(now_usec - last_usec_, kPatienceStepUsec);
    last_usec_ = now_usec;
    return patient_usec_;
  }
  uint64_t now() { return at(now_usec()); }

 private:
  uint64_t last_usec_ = 0;
  uint64_t patient_usec_ = 0;
};

// A wait of so long, from now on.
class Patience {
 public:
  explicit Patience(uint64_t usec) : until_usec_(clock_.now() + usec) {}
  bool over() { return clock_.now() >= until_usec_; }

 private:
  PatienceClock clock_;
  uint64_t until_usec_;
};

}  // namespace uccl_ep
