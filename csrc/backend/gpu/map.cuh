// Where things lie, in our region and in those of our domain.
#pragma once

#include <cstdint>

#include "backend/gpu/group.h"
#include "backend/gpu/packet.h"
#include "device/launch.cuh"
#include "device/warp.cuh"

namespace uccl_ep::gpu {

// In the region of a rank of our domain.
template <typename T>
__device__ __forceinline__ T* at(const Group& g, uint32_t rank, Part<T> part) {
  return part.in(g.base[rank - g.first]);
}
__device__ __forceinline__ uint8_t* at(const Group& g, uint32_t rank, uint64_t offset) {
  return g.base[rank - g.first] + offset;
}
template <typename T>
__device__ __forceinline__ T* own_part(const Group& g, Part<T> part) {
  return part.in(g.own);
}
__device__ __forceinline__ Local& local(const Group& g) { return *own_part(g, g.map.local); }
__device__ __forceinline__ PlanScratch& scratch(const Group& g) { return *own_part(g, g.map.plan_scratch); }
__device__ __forceinline__ uint32_t* out_row_base(const Group& g) {
  return reinterpret_cast<uint32_t*>(&scratch(g) + 1);
}
__device__ __forceinline__ SourcePlan& source_plan(const Group& g, uint32_t source) {
  return own_part(g, g.map.source_plans)[source];
}
// Whether there are several domains.
__host__ __device__ __forceinline__ bool has_net(const Group& g) { return g.map.num_domains > 1; }
__device__ __forceinline__ bool in_domain(const Group& g, uint32_t rank) {
  return !has_net(g) || (rank >= g.first && rank < g.end);
}
__device__ __forceinline__ uint32_t own_domain(const Group& g) { return has_net(g) ? g.net.domain : 0; }

// ---- tables in shared memory ----------------------------------------------------------------------------------------
// The dynamic shared memory of a dispatch or combine begins with Group's tables, as reads past acquires of flags would
// otherwise go to L2 every time. In one domain numbers are ranks, and there are none.
__device__ __forceinline__ uint32_t rank_table(uint32_t i) {
  UCCL_EP_DYNAMIC_SHARED(dynamic);
  return reinterpret_cast<const uint16_t*>(dynamic)[i];
}
__device__ __forceinline__ uint32_t number_of(const Group& g, uint32_t rank) {
  return has_net(g) ? rank_table(rank) : rank;
}
// The rank that has a number, with several domains.
__device__ __forceinline__ uint32_t rank_numbered(const Group& g, uint32_t number) {
  return rank_table(g.map.num_ranks + number);
}
__device__ __forceinline__ uint32_t domain_of(const Group& g, uint32_t number) {
  return has_net(g) ? rank_table(2 * g.map.num_ranks + number) : 0;
}
// The number of a domain's first member; behind the last domain the number of ranks.
__device__ __forceinline__ uint32_t first_of(const Group& g, uint32_t domain) {
  return has_net(g) ? rank_table(3 * g.map.num_ranks + domain) : domain * g.map.num_ranks;
}
// By all `num_threads` threads of a block; a barrier follows.
__device__ __forceinline__ void load_rank_tables(const Group& g, uint32_t num_threads) {
  if (!has_net(g)) return;
  UCCL_EP_DYNAMIC_SHARED(dynamic);
  const uint32_t words = (3 * g.map.num_ranks + g.map.num_domains + 2) / 2;
  for (uint32_t i = threadIdx.x; i < words; i += num_threads)
    reinterpret_cast<uint32_t*>(dynamic)[i] = reinterpret_cast<const uint32_t*>(g.number_of.entries)[i];
}
// Behind them: what a kernel knows of each source, domain or stream of a window. Entries have an odd number of words,
// so that neighbours are in different banks.
template <typename Entry>
__device__ __forceinline__ Entry* shared_table(const Group& g, uint32_t offset) {
  static_assert(sizeof(Entry) % 8 == 4 && alignof(Entry) == 4);
  UCCL_EP_DYNAMIC_SHARED(dynamic);
  return reinterpret_cast<Entry*>(dynamic + g.table_bytes + offset);
}

// A rank's packet for us, and ours for a domain.
__device__ __forceinline__ uint8_t* packet(const Group& g, uint32_t source, uint64_t epoch) {
  const uint32_t half = packet_half(epoch);
  if (in_domain(g, source)) return at(g, source, g.map.packets) + half * g.map.packet_bytes;
  const Net::From& from = g.net.from[source];
  return at(g, from.holder, from.packets + half * g.map.head_bytes);
}
__device__ __forceinline__ uint8_t* shipped_packet(const Group& g, uint32_t unit, uint64_t epoch) {
  return g.own + g.net.packets + packet_half(epoch) * g.net.packets_half_bytes + uint64_t{unit} * kPacketUnit;
}
__device__ __forceinline__ uint8_t* own_packet(const Group& g, uint32_t domain, uint64_t epoch) {
  if (domain == own_domain(g)) return g.own + g.map.packets.offset + packet_half(epoch) * g.map.packet_bytes;
  return shipped_packet(g, g.net_state.packet_unit[domain], epoch);
}
__device__ __forceinline__ DeviceHeader& header(const Group& g, uint32_t rank, uint64_t epoch) {
  return *reinterpret_cast<DeviceHeader*>(packet(g, rank, epoch));
}
// A packet's numbers of rows and pairs for lower members: [members + 1] each.
struct MemberBegins {
  uint32_t *row, *pair;
  __device__ __forceinline__ MemberBegins(uint8_t* packet, uint32_t members, uint32_t experts_per_rank) {
    const PacketParts parts = packet_parts({members, experts_per_rank});
    row = reinterpret_cast<uint32_t*>(packet + parts.row_begin);
    pair = reinterpret_cast<uint32_t*>(packet + parts.pair_begin);
  }
};
__device__ __forceinline__ uint8_t* rows(const Group& g, uint32_t rank, uint32_t half) {
  return at(g, rank, g.map.rows) + uint64_t{half} * g.map.half_bytes;
}
__device__ __forceinline__ uint32_t max_token_blocks(const Group& g) { return g.map.max_tokens / kTokenBlock; }
// The flag of rank `rank` in the memory of `owner`, a member of its domain.
template <typename Of>
__device__ __forceinline__ DeviceFlag<Of>* member_flag(const Group& g, uint32_t owner, Part<DeviceFlag<Of>> flags,
                                                       uint32_t rank) {
  return at(g, owner, flags) + (rank - g.first);
}
__device__ __forceinline__ DeviceFlag<Folded>* folded(const Group& g, uint32_t owner, uint32_t stream,
                                                      uint32_t folder) {
  return at(g, owner, g.map.folded) + (uint64_t{stream} * g.map.num_members + (folder - g.first)) * max_token_blocks(g);
}
__device__ __forceinline__ DeviceFlag<RowsFull>* rows_full(const Group& g, uint32_t owner, uint32_t source) {
  return at(g, owner, g.map.rows_full) + uint64_t{source - g.first} * (g.map.max_tokens / kRowGroup);
}
// Which rank holds a source's rows for our domain, and as which stream it merges them.
__device__ __forceinline__ uint32_t holder_of(const Group& g, uint32_t source) {
  return in_domain(g, source) ? source : g.net.from[source].holder;
}
__device__ __forceinline__ uint32_t stream_of(const Group& g, uint32_t source) {
  return in_domain(g, source) ? 0 : g.net.from[source].stream;
}
// Blocks of this kernel that work; one more sees to the network where there are other domains.
__device__ __forceinline__ uint32_t workers(const Group& g) { return gridDim.x - has_net(g); }
// The source that comes `i`-th after this rank: ranks start at different peers, so that no link is crowded.
__device__ __forceinline__ uint32_t rotated(const Group& g, uint32_t i) {
  const uint32_t r = g.rank + 1 + i;
  return r < g.map.num_ranks ? r : r - g.map.num_ranks;
}

}  // namespace uccl_ep::gpu
