// The most rows and pieces of our tokens: of a token block, and of spans of them. Windows are as long as those allow.
#pragma once

#include "backend/gpu/tile.cuh"

namespace uccl_ep::gpu {

// By a warp: the most that a token block has.
__device__ __forceinline__ BlockMost most_of_all(const Group& g, uint32_t num_tiles) {
  BlockMost most;
#pragma unroll 1
  for (uint32_t t = threadIdx.x % kWarp; t < num_tiles; t += kWarp)
    most = most.with({device::load_past_l1(TileCounts(g, t).most_of_block)});
  return warp_most(most);
}

// By a crew: the most rows that spans of our streams to other domains have. A lane takes a domain. Not inlined, because
// few operations need it.
__device__ __noinline__ void find_span_rows(const Crew crew, const Group& g, uint32_t num_tiles, SpanRows* of_warp) {
  constexpr uint32_t kBatch = 8, kBlocks = kTileTokens / kTokenBlock;
  SpanRows most;
#pragma unroll 1
  for (uint32_t to = crew.thread; to < g.map.num_domains; to += crew.size) {
    if (to == own_domain(g)) continue;
    SpanRows rows;  // of the span of each length that is not over
#pragma unroll 1
    for (uint32_t begin = 0; begin < num_tiles; begin += kBatch) {
      uint32_t of_tile[kBatch];
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u)
        of_tile[u] = begin + u < num_tiles ? device::load_past_l1(TileCounts(g, begin + u).stream + to) : 0;
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u) {
#pragma unroll
        for (uint32_t i = 0; i < SpanRows::kLengths; ++i) rows.most[i] += static_cast<uint16_t>(of_tile[u]);
        most = most.with(rows);
#pragma unroll
        for (uint32_t i = 0; i < SpanRows::kLengths; ++i)
          if ((begin + u + 1) * kBlocks % SpanRows::blocks(i) == 0) rows.most[i] = 0;
      }
    }
  }
  most = warp_most(most);
  if (crew.lane() == 0) of_warp[crew.warp()] = most;
}

}  // namespace uccl_ep::gpu
