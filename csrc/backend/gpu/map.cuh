// Where things lie, in our region and in those of our domain.
#pragma once

#include <cstdint>

#include "backend/gpu/layout.h"
#include "backend/gpu/net.h"
#include "backend/gpu/packet.h"
#include "device/launch.cuh"
#include "device/warp.cuh"

namespace uccl_ep::gpu {

// In the region of a rank of our domain.
template <typename T>
__device__ __forceinline__ T* at(const Group& g, uint32_t rank, Part<T> part) {
  return part.in(g.base[rank]);
}
__device__ __forceinline__ uint8_t* at(const Group& g, uint32_t rank, uint64_t offset) { return g.base[rank] + offset; }
template <typename T>
__device__ __forceinline__ T* own_part(const Group& g, Part<T> part) {
  return at(g, g.rank, part);
}
__device__ __forceinline__ Local& local(const Group& g) { return *own_part(g, g.map.local); }
__device__ __forceinline__ PlanScratch& scratch(const Group& g) { return *own_part(g, g.map.plan_scratch); }
__device__ __forceinline__ uint32_t* out_row_base(const Group& g) {
  return reinterpret_cast<uint32_t*>(&scratch(g) + 1);
}
__device__ __forceinline__ NetState& net_state(const Group& g) { return *own_part(g, g.map.net_state); }
__device__ __forceinline__ bool in_domain(const Group& g, uint32_t rank) {
  return g.net == nullptr || (rank >= g.first && rank < g.end);
}
__device__ __forceinline__ uint32_t own_domain(const Group& g) { return g.domain_of[g.rank]; }
// A rank's packet for us, and ours for a domain.
__device__ __forceinline__ uint8_t* packet(const Group& g, uint32_t source, uint64_t epoch) {
  const uint64_t half_begin = packet_half(epoch) * g.map.packet_bytes;
  if (in_domain(g, source)) return at(g, source, g.map.packets) + half_begin;
  const Net::From& from = g.net->from[source];
  return at(g, from.holder, from.packets + half_begin);
}
__device__ __forceinline__ uint8_t* own_packet(const Group& g, uint32_t domain, uint64_t epoch) {
  const uint64_t half_begin = packet_half(epoch) * g.map.packet_bytes;
  return at(g, g.rank, (domain == own_domain(g) ? g.map.packets.offset : g.net->to[domain].packets) + half_begin);
}
__device__ __forceinline__ DeviceHeader& header(const Group& g, uint32_t rank, uint64_t epoch) {
  return *reinterpret_cast<DeviceHeader*>(packet(g, rank, epoch));
}
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
  return in_domain(g, source) ? source : g.net->from[source].holder;
}
__device__ __forceinline__ uint32_t stream_of(const Group& g, uint32_t source) {
  return in_domain(g, source) ? 0 : g.net->from[source].stream;
}
// Blocks of this kernel that work; one more sees to the network where there are other domains.
__device__ __forceinline__ uint32_t workers(const Group& g) { return gridDim.x - (g.net != nullptr); }
// The source that comes `i`-th after this rank: ranks start at different peers, so that no link is crowded.
__device__ __forceinline__ uint32_t rotated(const Group& g, uint32_t i) {
  const uint32_t r = g.rank + 1 + i;
  return r < g.map.num_ranks ? r : r - g.map.num_ranks;
}

}  // namespace uccl_ep::gpu
