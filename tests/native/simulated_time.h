// Time that a program lets pass itself.
#pragma once

#include "common/clock.h"

namespace uccl_ep {

constexpr uint64_t kStartNsec = 1'000'000'000;  // 0 stands for "never" in some places
inline uint64_t simulated_nsec = kStartNsec;

struct SimulatedTime {
  SimulatedTime() {
    simulated_nsec = kStartNsec;
    read_clock = [] { return simulated_nsec; };
  }
  ~SimulatedTime() { read_clock = &monotonic_nsec; }
};
inline double seconds() { return static_cast<double>(simulated_nsec - kStartNsec) / 1e9; }

}  // namespace uccl_ep
