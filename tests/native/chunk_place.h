// Where a test puts the chunks of a rank's send rings, and what tells them apart. In memory that rings share, each has
// a part of its own, but for low latency's packets: all domains get the same.
#pragma once

#include "common/units.h"
#include "layout/region.h"

namespace uccl_ep {

inline bool goes_to_all(RingKind kind) { return kind == RingKind::kSlotRouting || kind == RingKind::kSlotWeights; }
// The number of the landing channel, or one for all.
inline uint32_t chunk_key(RingKind kind, uint32_t landing_channel) {
  return goes_to_all(kind) ? 200 + static_cast<uint32_t>(kind) : landing_channel;
}

// What its command says; 0 of a ring that shares nothing.
inline uint32_t chunk_unit(const Channels& channels, uint32_t channel, uint64_t serial) {
  const RingLayout& ring = channels.out[channel].send;
  if (ring.shared_bytes == 0) return 0;
  uint64_t before = serial % ring.num_slots * (ring.shared_bytes / ring.num_slots);
  for (uint32_t c = 0; c < channel && !goes_to_all(ring.kind); ++c)
    if (const RingLayout& other = channels.out[c].send; other.shared_bytes != 0 && !goes_to_all(other.kind))
      before += round_up(other.slot_bytes, kSharedUnitBytes);
  return static_cast<uint32_t>(before / kSharedUnitBytes);
}
inline uint64_t chunk_offset(const Channels& channels, uint32_t channel, uint64_t serial) {
  const RingLayout& ring = channels.out[channel].send;
  return ring.shared_bytes == 0 ? ring.slot_offset(serial)
                                : ring.slots_offset + chunk_unit(channels, channel, serial) * kSharedUnitBytes;
}

}  // namespace uccl_ep
