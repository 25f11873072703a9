// Where a test puts the chunks of a rank's send rings. In memory that rings share, each has a part of its own.
#pragma once

#include "common/units.h"
#include "layout/region.h"

namespace uccl_ep {

// What its command says; 0 of a ring that shares nothing.
inline uint32_t chunk_unit(const Channels& channels, uint32_t channel, uint64_t serial) {
  const RingLayout& ring = channels.out[channel].send;
  if (ring.shared_bytes == 0) return 0;
  uint64_t before = serial % ring.num_slots * (ring.shared_bytes / ring.num_slots);
  for (uint32_t c = 0; c < channel; ++c)
    if (channels.out[c].send.shared_bytes != 0) before += round_up(channels.out[c].send.slot_bytes, kSharedUnitBytes);
  return static_cast<uint32_t>(before / kSharedUnitBytes);
}
inline uint64_t chunk_offset(const Channels& channels, uint32_t channel, uint64_t serial) {
  const RingLayout& ring = channels.out[channel].send;
  return ring.shared_bytes == 0 ? ring.slot_offset(serial)
                                : ring.slots_offset + chunk_unit(channels, channel, serial) * kSharedUnitBytes;
}

}  // namespace uccl_ep
