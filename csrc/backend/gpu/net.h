// What a rank's kernels know of the other domains: where the transport's rings lie, and what kernels and the proxy
// tell each other. A buffer of one domain has none of this.
#pragma once

#include "backend/gpu/layout.h"
#include "queue/command.h"

namespace uccl_ep::gpu {

// Constant; arrays are in device memory.
struct Net {
  // Another domain: our stream to it, and the sums that come back. Offsets are in our region.
  struct To {
    uint64_t packets, rows, returns;
    uint64_t packet_bytes;  // of a slot
    uint32_t packet_channel, row_channel;
    uint64_t* returns_consumed;  // on the host: returned chunks that we have consumed
  };
  // The stream of a rank to our domain. Offsets are in the holder's region.
  struct From {
    uint32_t holder;
    uint32_t stream;  // its number at the holder, which merges it
    uint64_t packets, rows;
    uint64_t* rows_consumed;  // on the holder's host: chunks of rows that we have consumed; nullptr in our domain
  };
  // A stream that we merge for another domain, from number 1 on.
  struct Relayed {
    uint32_t source, channel;
    uint64_t returns;  // in our region
  };
  // Words of the hosts of our domain, and the flags here that follow them (`also`: nullptr, or one more).
  struct Polled {
    const uint64_t* word;
    uint64_t *flag, *also;
  };
  To* to = nullptr;            // [domains]
  From* from = nullptr;        // [ranks]
  Relayed* relayed = nullptr;  // [streams]
  Polled* polled = nullptr;    // [most_polled()]
  uint32_t domain = 0, num_relayed = 0;  // relayed[1] .. relayed[num_relayed]
  uint32_t num_polled = 0;
  CommandQueue commands;
  uint64_t* ended = nullptr;  // on the host: kernels that have ended

  static constexpr uint64_t most_polled(const DeviceMap& map) {
    return 2 * uint64_t{map.num_ranks} + 3 * uint64_t{map.num_domains} + map.num_streams;
  }
};

// Chunks since creation, by channel. Kernels advance the counts, so replays of a graph do, too.
struct NetState {
  uint64_t* sent = nullptr;      // by domain
  uint64_t* received = nullptr;  // by source
  uint64_t* returned = nullptr;  // by domain
  uint64_t* relayed = nullptr;   // by stream
  uint64_t* ended = nullptr;     // [1]
  ProducerState* producer = nullptr;                // [1]
  DeviceFlag<RowsThere>* rows_there = nullptr;        // by source
  DeviceFlag<ReturnsThere>* returns_there = nullptr;  // by domain
  DeviceFlag<PacketsGone>* packets_gone = nullptr;    // by domain
  DeviceFlag<RowsGone>* rows_gone = nullptr;          // by domain
  DeviceFlag<ReturnsGone>* returns_gone = nullptr;    // by stream
};
// Points the arrays into `memory`; their bytes. Null: only those.
uint64_t lay_out_net(Net& net, NetState& state, uint8_t* memory, const DeviceMap& map);

}  // namespace uccl_ep::gpu
