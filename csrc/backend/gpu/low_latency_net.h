// What the low-latency kernels of a rank know of the other domains, and chunks that it has sent and received: as net.h,
// with rings of their own. Numbers of operations are serials of the rings that have one chunk for each.
#pragma once

#include "backend/gpu/net.h"

namespace uccl_ep::gpu {

constexpr uint32_t kMostSlotPolled = 8 * kMaxGpuRanks;

// Constant; in device memory.
struct SlotNet {
  // Another domain: our routing, rows and weights, and the sums that come back. Offsets are in our region.
  struct To {
    uint64_t routing, rows, weights, sums;
    uint32_t routing_channel, row_channel, weights_channel;
    uint64_t* sums_consumed;  // on the host
  } to[kMaxGpuRanks];
  // Of a rank of another domain; Net::From names its holder and its stream. Offsets are in the holder's region, counts
  // of consumed chunks on its host.
  struct From {
    uint64_t routing, rows, weights;
    uint64_t *routing_consumed, *rows_consumed, *weights_consumed;
  } from[kMaxGpuRanks];
  // A stream whose sums we return, from number 1 on.
  struct Relayed {
    uint64_t sums;  // in our region
    uint32_t channel;
  } relayed[kMaxGpuRanks];
  Net::Polled polled[kMostSlotPolled];
  uint32_t num_polled;
};

// Chunks since creation. Kernels advance the counts, so replays of a graph do, too.
struct SlotNetState {
  uint64_t sent[kMaxGpuRanks];  // rows, by domain
  uint64_t received[kMaxGpuRanks];  // rows, by source
  uint64_t returned[kMaxGpuRanks];  // sums that came back, by domain
  uint64_t relayed[kMaxGpuRanks];  // sums, by stream
  DeviceFlag<SlotPacketThere> routing_there[kMaxGpuRanks];  // by source, as the next two
  DeviceFlag<SlotRowsThere> rows_there[kMaxGpuRanks];
  DeviceFlag<SlotPacketThere> weights_there[kMaxGpuRanks];
  DeviceFlag<SlotSumsThere> sums_there[kMaxGpuRanks];  // by domain, as the next three
  DeviceFlag<SlotChunksGone> routing_gone[kMaxGpuRanks];
  DeviceFlag<SlotChunksGone> rows_gone[kMaxGpuRanks];
  DeviceFlag<SlotChunksGone> weights_gone[kMaxGpuRanks];
  DeviceFlag<SlotChunksGone> sums_gone[kMaxGpuRanks];  // by stream
};

}  // namespace uccl_ep::gpu
