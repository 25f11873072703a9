// What every kernel knows of the group: its first argument.
#pragma once

#include "backend/gpu/layout.h"
#include "backend/gpu/low_latency_net.h"
#include "backend/gpu/net.h"
#include "backend/gpu/shared.h"

namespace uccl_ep::gpu {

// Numbers by rank or domain; in device memory, read by kernels only.
struct RankTable {
  const uint16_t* entries = nullptr;
  constexpr uint32_t operator[](uint32_t i) const { return entries[i]; }
};

struct TraceLog;
struct Group {
  DeviceMap map;
  uint8_t* own;                // our region
  uint8_t* base[kMaxMembers];  // regions of our domain, by member, mapped here
  uint32_t rank;               // ours
  uint32_t first, end;         // of our domain
  uint32_t experts_per_rank;
  // In this order in memory: all but the last lie in shared memory, too (map.cuh).
  RankTable number_of;     // [ranks] by rank in the group
  RankTable rank_of;       // [ranks] the rank in the group, by number
  RankTable domain_of;     // [ranks]
  RankTable first_of;      // [domains + 1] number of the first member; the last is the number of ranks
  RankTable source_order;  // [ranks]
  uint64_t arrival_nsec, progress_nsec;  // deadlines
  uint64_t mask_nsec;                    // after which a rank is masked; 0: no rank is
  uint32_t shared_bytes;                 // a block may have
  uint32_t table_bytes;                  // of tables in shared memory
  bool bulk_copies;                      // this GPU has them
  // Where there are several domains; the last two with low latency.
  Net net;
  NetState net_state;
  SlotNet slot_net;
  SlotNetState slot_net_state;
  TraceLog* trace;  // nullptr: it is off
  HostError* error;
  HostCounts* counts;
  const HostPulse* pulse;
};

}  // namespace uccl_ep::gpu
