// What a GPU and a thread of the host can do through a command ring: for the benchmark, and a test of the ring itself.
#pragma once

#include <cstdint>
#include <vector>

namespace uccl_ep::gpu {

struct QueueMeasured {
  double commands_per_s = 0;             // taken by one thread that does nothing else
  uint64_t wrong = 0;                    // commands that are not the ones that were expected
  std::vector<double> round_trip_usec;   // from a command to the host's answer, one at a time, by the GPU's clock
};

// On `device`, through a ring of `capacity` commands: `commands` of them as fast as they go, then round trips. The
// consumer expects the serials from `first` on (the producer begins with 0), and pauses after each lap of the ring.
// Throws UsageFailure for a bad capacity, std::runtime_error if commands stop coming.
QueueMeasured measure_queue(int device, uint32_t capacity, uint64_t commands, uint64_t first, uint32_t pause_usec);

}  // namespace uccl_ep::gpu
