// What the low-latency kernels of a rank know of the other domains, and chunks that it has sent and received: as net.h,
// with rings of their own. Numbers of operations are serials of the rings that have one chunk for each.
#pragma once

#include "backend/gpu/net.h"

namespace uccl_ep::gpu {

// Constant; arrays are in device memory.
struct SlotNet {
  // Another domain: our rows, and the sums that come back. Offsets are in our region.
  struct To {
    uint64_t rows, sums;
    uint32_t routing_channel, row_channel, weights_channel;
    uint64_t* sums_consumed;  // on the host
  };
  // Of a rank of another domain; Net::From names its holder and its stream. Offsets are in the holder's region, counts
  // of consumed chunks on its host.
  struct From {
    uint64_t routing, rows, weights;
    uint64_t *routing_consumed, *rows_consumed, *weights_consumed;
  };
  // A stream whose sums we return, from number 1 on.
  struct Relayed {
    uint64_t sums;  // in our region
    uint32_t channel;
  };
  uint64_t routing = 0, weights = 0;  // what all other domains get; offsets in our region
  To* to = nullptr;  // [domains]
  From* from = nullptr;  // [ranks]
  Relayed* relayed = nullptr;  // [streams]
  // On the host, where ranks may be masked: ours, and by rank of the group those of other domains; layout/votes.h.
  SlotVotes* own_votes = nullptr;
  const SlotVotes* far_votes = nullptr;
  Followed followed;

  static constexpr uint64_t most_words(const DeviceMap& map) {
    return 3 * uint64_t{map.num_ranks} + 4 * uint64_t{map.num_domains} + map.num_streams;
  }
};

// Chunks since creation. Kernels advance the counts, so replays of a graph do, too.
struct SlotNetState {
  uint64_t* sent = nullptr;  // rows, by domain
  uint64_t* received = nullptr;  // rows, by source
  uint64_t* returned = nullptr;  // sums that came back, by domain
  uint64_t* relayed = nullptr;  // sums, by stream
  DeviceFlag<SlotPacketThere>* routing_there = nullptr;  // by source, as the next two
  DeviceFlag<SlotRowsThere>* rows_there = nullptr;
  DeviceFlag<SlotPacketThere>* weights_there = nullptr;
  DeviceFlag<SlotSumsThere>* sums_there = nullptr;  // by domain, as the next three
  DeviceFlag<SlotChunksGone>* routing_gone = nullptr;
  DeviceFlag<SlotChunksGone>* rows_gone = nullptr;
  DeviceFlag<SlotChunksGone>* weights_gone = nullptr;
  DeviceFlag<SlotChunksGone>* sums_gone = nullptr;  // by stream
};
// As lay_out_net().
uint64_t lay_out_slot_net(SlotNet& net, SlotNetState& state, uint8_t* memory, const DeviceMap& map);

}  // namespace uccl_ep::gpu
