// How many entries the queues of a rank's NICs have, and what they take.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/verbs/nic.h"

namespace uccl_ep::verbs {

// Of one NIC.
struct QueueSizes {
  uint32_t writes = 0;  // in flight to one rail
  uint32_t arrivals = 0;  // that wait for a poll, over all rails
};
struct DatagramSizes {
  uint32_t sends = 0;  // under way
  uint32_t receives = 0;  // that wait for a poll; more are lost
};

// The NICs of a rank share what it needs, so its memory does not depend on their number. Throws UsageFailure(kConfig)
// for a NIC with too few entries.
QueueSizes queue_sizes(const Nic& nic, size_t num_rails, size_t num_nics);
DatagramSizes datagram_sizes(size_t num_peers, size_t num_nics);

// Bytes of queue pairs, completion queues and receive queues of all NICs, of the buffers of datagrams, and of what is
// kept of writes in flight, if no NIC has fewer entries than it may. Drivers do not tell their part: it is what mlx5
// takes, 64 bytes for a write, a completion or a route, 32 for a receive, in whole pages.
uint64_t queue_bytes(size_t num_rails, size_t num_peers);

}  // namespace uccl_ep::verbs
