// Ranks that have closed their buffers, as a worker sees them.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/group/control_plane.h"

namespace uccl_ep {

class ClosedRanks {
 public:
  ClosedRanks(const ControlPlane& plane, int num_ranks) : plane_(plane), seen_usec_(static_cast<size_t>(num_ranks)) {}

  // Earlier messages of a closed rank, such as the error that explains its end, may still be in flight.
  bool long_closed(int rank, uint64_t patient_usec) {
    constexpr uint64_t kGraceUsec = 1000000;
    if (!plane_.peer_closed(rank)) return false;
    uint64_t& seen = seen_usec_[static_cast<size_t>(rank)];
    if (seen == 0) seen = patient_usec;
    return patient_usec - seen > kGraceUsec;
  }

 private:
  const ControlPlane& plane_;
  std::vector<uint64_t> seen_usec_;  // [rank] by the worker's patience, at first; 0: it has not closed
};

}  // namespace uccl_ep
