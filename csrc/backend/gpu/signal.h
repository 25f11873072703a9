// What a signal's declaration says, and what it is in memory: signals.h.
#pragma once

#include <cstdint>
#include <tuple>

#include "common/error.h"

namespace uccl_ep::gpu {

// How far the release of its writer reaches.
enum class Scope : uint8_t { kGpu, kSystem };
// Which deadline a wait for it has. kBlocks: none, for what it waits for has deadlines. kNobody: there is no wait.
enum class Deadline : uint8_t { kArrival, kProgress, kBlocks, kNobody };

struct Signal {
  const char* name;
  const char* writer;
  const char* readers;
  const char* publishes;
  const char* waits;  // who waits for it
  Scope scope = Scope::kSystem;
  Deadline deadline = Deadline::kProgress;
  Step step = Step::kPlan;  // that an error names, unless a wait says otherwise
  const char* reset = nullptr;  // of a counter
};

// In memory. `Of`: the declaration.
template <typename Of>
struct DeviceFlag {
  uint64_t value = 0;
};
template <typename Of>
struct DeviceCounter {
  uint32_t value = 0;
};

}  // namespace uccl_ep::gpu
