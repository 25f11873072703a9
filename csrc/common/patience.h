// The clock of deadlines. It stops while this process is paused (a stopped container, a suspended machine), because
// a rank must not blame peers for its own pause.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/clock.h"

namespace uccl_ep {

// The longest time between two looks of a waiting thread. A longer gap is a pause.
constexpr uint64_t kPatienceStepUsec = 500'000;

// One thread calls it repeatedly while it waits.
class PatienceClock {
 public:
  // Microseconds since an arbitrary start.
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

// A deadline that starts now.
class Patience {
 public:
  explicit Patience(uint64_t usec) : until_usec_(clock_.now() + usec) {}
  bool over() { return clock_.now() >= until_usec_; }

 private:
  PatienceClock clock_;
  uint64_t until_usec_;
};

}  // namespace uccl_ep
