// What a rank's kernels know of the other domains: where the transport's rings lie, and what kernels and the proxy
// tell each other. A buffer of one domain has none of this.
#pragma once

#include "backend/gpu/layout.h"
#include "queue/command.h"

namespace uccl_ep::gpu {

constexpr uint32_t kMaxPolled = 6 * kMaxGpuRanks;

// Constant; in device memory.
struct Net {
  // Another domain: our stream to it, and the sums that come back. Offsets are in our region.
  struct To {
    uint64_t packets, rows, returns;
    uint32_t packet_channel, row_channel;
    uint64_t* returns_consumed;  // on the host: returned chunks that we have consumed
  } to[kMaxGpuRanks];
  // The stream of a rank to our domain. Offsets are in the holder's region.
  struct From {
    uint32_t holder;
    uint32_t stream;  // its number at the holder, which merges it
    uint64_t packets, rows;
    uint64_t* rows_consumed;  // on the holder's host: chunks of rows that we have consumed; nullptr in our domain
  } from[kMaxGpuRanks];
  // A stream that we merge for another domain, from number 1 on.
  struct Relayed {
    uint32_t source, channel;
    uint64_t returns;  // in our region
  } relayed[kMaxGpuRanks];
  uint32_t domain, num_relayed;  // relayed[1] .. relayed[num_relayed]
  CommandQueue commands;
  uint64_t* ended;  // on the host: kernels that have ended
  // Words of the hosts of our domain, and the flags here that follow them (`also`: nullptr, or one more).
  struct Polled {
    const uint64_t* word;
    uint64_t *flag, *also;
  } polled[kMaxPolled];
  uint32_t num_polled;
};

// Chunks since creation, by channel. Kernels advance the counts, so replays of a graph do, too.
struct NetState {
  uint64_t sent[kMaxGpuRanks];      // by domain
  uint64_t received[kMaxGpuRanks];  // by source
  uint64_t returned[kMaxGpuRanks];  // by domain
  uint64_t relayed[kMaxGpuRanks];   // by stream
  uint64_t ended;
  ProducerState producer;
  DeviceFlag<RowsThere> rows_there[kMaxGpuRanks];        // by source
  DeviceFlag<ReturnsThere> returns_there[kMaxGpuRanks];  // by domain
  DeviceFlag<PacketsGone> packets_gone[kMaxGpuRanks];    // by domain
  DeviceFlag<RowsGone> rows_gone[kMaxGpuRanks];          // by domain
  DeviceFlag<ReturnsGone> returns_gone[kMaxGpuRanks];    // by stream
};

}  // namespace uccl_ep::gpu
