// Place: what rows have beside their data, and the output rows that no row fills.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/pad.cuh"
#include "backend/cuda/plan.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {

__device__ inline void fill_padding(const DispatchKernel& k, const uint32_t* padding) {
  for (uint32_t l = blockIdx.x; l < k.g.experts_per_rank; l += k.args.num_blocks)
    pad_rows(k.args, min(padding[2 * l], k.plan.num_out_rows), min(padding[2 * l + 1], k.plan.num_out_rows), 1,
             k.crew.thread, k.crew.size);
}

// In the order of the source's packet.
template <bool kFresh>
__device__ __forceinline__ const float* weights_of(const Kernel& k, uint32_t source) {
  if constexpr (kFresh) return scratch(k.g).weights[source];
  return reinterpret_cast<const float*>(packet(k.g, source, k.op.epoch) + packet_parts({}).weights);
}

// By crews of all blocks that place, when all weights have been staged. The rows of a new plan are worked out once
// more: other blocks write them only now.
template <bool kFresh>
__device__ inline void place_weights(const DispatchKernel& k) {
  const PlanScratch& from = scratch(k.g);
  for (uint32_t r = 0; r < k.g.map.num_ranks; ++r) {
    const uint32_t source = rotated(k.g, r);
    const uint32_t begin = kFresh ? from.pair_begin[source] : k.plan.row_pair_begin[k.plan.row_begin[source]];
    const uint32_t end = kFresh ? from.pair_end[source] : k.plan.row_pair_begin[k.plan.row_end[source]];
    const uint32_t offset = (kFresh ? from.weight_begin : k.plan.weight_begin)[source];
    const float* const staged = weights_of<kFresh>(k, source);
    for (uint32_t p = begin + blockIdx.x * k.crew.size + k.crew.thread; p < end; p += k.args.num_blocks * k.crew.size) {
      uint32_t out_row = 0;
      if constexpr (kFresh) {
        const PairEntry pair = from.pairs[source][p + offset];
        out_row = out_row_base(k.g)[source * k.g.experts_per_rank + pair.expert] + pair.position;
      } else {
        out_row = k.plan.out_rows[p];
      }
      if (out_row < k.plan.num_out_rows) k.args.row_weights[out_row] = staged[p + offset];
    }
  }
}

// The same of compact rows, which get their experts, too; without weights there is nothing to wait for.
template <bool kFresh>
__device__ inline void place_experts(const DispatchKernel& k) {
  const PlanScratch& from = scratch(k.g);
  const uint32_t width = k.plan.compact_width;
  for (uint32_t r = 0; r < k.g.map.num_ranks; ++r) {
    const uint32_t source = rotated(k.g, r);
    const uint32_t row_begin = (kFresh ? from.row_begin : k.plan.row_begin)[source];
    const uint32_t offset = (kFresh ? from.weight_begin : k.plan.weight_begin)[source];
    const float* const staged = weights_of<kFresh>(k, source);
    const uint32_t end = min((kFresh ? from.row_end : k.plan.row_end)[source], k.plan.num_out_rows);
    for (uint32_t row = row_begin + blockIdx.x * k.crew.size + k.crew.thread; row < end;
         row += k.args.num_blocks * k.crew.size) {
      uint32_t first = 0, count = 0;
      if constexpr (kFresh) {
        const ListEntry entry = from.lists[source][row - row_begin];
        first = from.pair_begin[source] + entry.first_pair;
        count = entry.num_pairs;
      } else {
        first = k.plan.row_pair_begin[row];
        count = k.plan.row_pair_begin[row + 1] - first;
      }
      for (uint32_t j = 0; j < width; ++j) {
        const uint64_t to = uint64_t{row} * width + j;
        uint32_t expert = 0;
        if (j < count) expert = kFresh ? from.pairs[source][first + j + offset].expert : k.plan.out_rows[first + j];
        k.args.row_experts[to] = j < count ? static_cast<int64_t>(expert) : -1;
        if (k.args.row_weights != nullptr) k.args.row_weights[to] = j < count ? staged[first + j + offset] : 0.0f;
      }
    }
  }
}

}  // namespace uccl_ep::cuda
