// Measures commands from a GPU to a thread of the host through a command ring: for the benchmark and a ring test.
#pragma once

#include <cstdint>
#include <vector>

namespace uccl_ep::gpu {

struct QueueMeasured {
  double commands_per_s = 0;             // taken by one thread that does nothing else
  uint64_t wrong = 0;                    // commands that are not the ones that were expected
  std::vector<double> round_trip_usec;   // from a command to the host's answer, one at a time, by the GPU's clock
};

// On `device`, through a ring of `capacity` commands: pushes `commands` commands as fast as possible, then makes round
// trips. The consumer expects serials from `first` on (the producer begins with 0). It pauses for `pause_usec` after
// each lap of the ring. Throws UsageFailure for a bad capacity, std::runtime_error if commands stop coming.
QueueMeasured measure_queue(int device, uint32_t capacity, uint64_t commands, uint64_t first, uint32_t pause_usec);

}  // namespace uccl_ep::gpu
