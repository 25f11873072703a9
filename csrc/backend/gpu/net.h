// What a rank's kernels know of the other domains: where the transport's rings lie, and what kernels and the proxy
// tell each other. A buffer of one domain has none of this.
#pragma once

#include "backend/gpu/layout.h"
#include "queue/command.h"

namespace uccl_ep::gpu {

// What the poller follows: rings of events (layout/events.h) of the hosts of our domain, the words of the boards that
// those are about, and the flags here that follow the words. Constant but for `seen`; arrays are in device memory.
struct Followed {
  struct Ring {
    const uint64_t* slots;
    uint32_t capacity_bits;
    uint32_t first, end;  // of the words, in the order of the ring's channels
  };
  struct Word {
    const uint64_t* word;
    uint64_t *flag, *also;  // `also`: nullptr, or one more
  };
  Ring* rings = nullptr;     // [most_rings()]
  uint64_t* seen = nullptr;  // [most_rings()] the position of the next event, between kernels; so replays go on
  Word* words = nullptr;
  uint32_t num_rings = 0;
  uint32_t first_traced = 0;  // of the words' numbers in a trace

  static constexpr uint64_t most_rings(const DeviceMap& map) { return uint64_t{map.num_members} + 1; }
};

// Constant; arrays are in device memory.
struct Net {
  // Another domain: our stream to it, and the sums that come back. Offsets are in our region.
  struct To {
    uint64_t rows, returns;
    uint32_t return_slots = 1;  // of the ring back; there is none in our own domain, but counts are taken modulo it
    uint32_t packet_channel, row_channel;
    uint32_t tail_channel = 0;
    uint64_t head_bytes = 0;  // of a packet: what goes by its channel; the rest is its tail
    uint64_t* returns_consumed;  // on the host: returned chunks that we have consumed
  };
  // The stream of a rank to our domain. Offsets are in the holder's region.
  struct From {
    uint32_t holder;
    uint32_t stream;  // its number at the holder, which merges it
    uint64_t packets, rows, tails;
    // On the holder's host: chunks of rows that we have consumed, and of tails; nullptr in our domain.
    uint64_t *rows_consumed, *tails_consumed;
  };
  // A stream that we merge for another domain, from number 1 on.
  struct Relayed {
    uint32_t source, channel;
    uint64_t returns;  // in our region
  };
  To* to = nullptr;            // [domains]
  From* from = nullptr;        // [ranks]
  Relayed* relayed = nullptr;  // [streams]
  Followed followed;
  uint64_t packets = 0;  // offset in our region of what other domains get: two halves
  uint64_t packets_half_bytes = 0;
  uint32_t domain = 0, num_relayed = 0;  // relayed[1] .. relayed[num_relayed]
  CommandQueue commands;
  uint64_t* ended = nullptr;  // on the host: kernels that have ended

  static constexpr uint64_t most_words(const DeviceMap& map) {
    return 3 * uint64_t{map.num_ranks} + 4 * uint64_t{map.num_domains} + map.num_streams;
  }
};

// Chunks since creation, by channel. Kernels advance the counts, so replays of a graph do, too.
struct NetState {
  uint64_t* sent = nullptr;      // by domain
  uint64_t* received = nullptr;  // by source
  uint64_t* returned = nullptr;  // by domain
  uint64_t* relayed = nullptr;   // by stream
  uint64_t* tails_sent = nullptr;  // by domain
  uint64_t* tails_read = nullptr;  // by source
  uint64_t* ended = nullptr;     // [1]
  ProducerState* producer = nullptr;                // [1]
  uint32_t* packet_unit = nullptr;  // by domain: where our packet begins in the half, in units of kPacketUnit bytes
  DeviceFlag<RowsThere>* rows_there = nullptr;        // by source
  DeviceFlag<ReturnsThere>* returns_there = nullptr;  // by domain
  DeviceFlag<PacketsGone>* packets_gone = nullptr;    // by domain
  DeviceFlag<TailsThere>* tails_there = nullptr;      // by source
  DeviceFlag<TailsGone>* tails_gone = nullptr;        // by domain
  DeviceFlag<RowsGone>* rows_gone = nullptr;          // by domain
  DeviceFlag<ReturnsGone>* returns_gone = nullptr;    // by stream
};
// Points the arrays into `memory`; their bytes. Null: only those.
uint64_t lay_out_net(Net& net, NetState& state, uint8_t* memory, const DeviceMap& map);

}  // namespace uccl_ep::gpu
