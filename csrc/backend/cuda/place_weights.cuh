// Place: what rows have beside their data, and the output rows that no row fills.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/pad.cuh"
#include "backend/cuda/plan.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {

__device__ inline void fill_padding(const Crew& crew, const Group& g, const PlanView& plan, const PlaceArgs& args,
                                    const uint32_t* padding) {
  for (uint32_t l = blockIdx.x; l < g.experts_per_rank; l += args.num_blocks)
    pad_rows(args, min(padding[2 * l], plan.num_out_rows), min(padding[2 * l + 1], plan.num_out_rows), 1, crew.thread,
             crew.size);
}

// In the order of the source's packet.
template <bool kFresh>
__device__ __forceinline__ const float* weights_of(const Group& g, const KernelOp& op, uint32_t source) {
  if constexpr (kFresh) return scratch(g).weights[source];
  return reinterpret_cast<const float*>(packet(g, source, op.epoch) + packet_parts({}).weights);
}

// By crews of all blocks that place, when all weights have been staged. The rows of a new plan are worked out once
// more: other blocks write them only now.
template <bool kFresh>
__device__ inline void place_weights(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan,
                                     const PlaceArgs& args) {
  const PlanScratch& from = scratch(g);
  for (uint32_t r = 0; r < g.map.num_ranks; ++r) {
    const uint32_t source = rotated(g, r);
    const uint32_t begin = kFresh ? from.pair_begin[source] : plan.row_pair_begin[plan.row_begin[source]];
    const uint32_t end = kFresh ? from.pair_end[source] : plan.row_pair_begin[plan.row_end[source]];
    const uint32_t offset = (kFresh ? from.weight_begin : plan.weight_begin)[source];
    const float* const staged = weights_of<kFresh>(g, op, source);
    for (uint32_t p = begin + blockIdx.x * crew.size + crew.thread; p < end; p += args.num_blocks * crew.size) {
      uint32_t out_row = 0;
      if constexpr (kFresh) {
        const PairEntry pair = from.pairs[source][p + offset];
        out_row = out_row_base(g)[source * g.experts_per_rank + pair.expert] + pair.position;
      } else {
        out_row = plan.out_rows[p];
      }
      if (out_row < plan.num_out_rows) args.row_weights[out_row] = staged[p + offset];
    }
  }
}

// The same of compact rows, which get their experts, too; without weights there is nothing to wait for.
template <bool kFresh>
__device__ inline void place_experts(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan,
                                     const PlaceArgs& args) {
  const PlanScratch& from = scratch(g);
  const uint32_t width = plan.compact_width;
  for (uint32_t r = 0; r < g.map.num_ranks; ++r) {
    const uint32_t source = rotated(g, r);
    const uint32_t row_begin = (kFresh ? from.row_begin : plan.row_begin)[source];
    const uint32_t offset = (kFresh ? from.weight_begin : plan.weight_begin)[source];
    const float* const staged = weights_of<kFresh>(g, op, source);
    const uint32_t end = min((kFresh ? from.row_end : plan.row_end)[source], plan.num_out_rows);
    for (uint32_t row = row_begin + blockIdx.x * crew.size + crew.thread; row < end;
         row += args.num_blocks * crew.size) {
      uint32_t first = 0, count = 0;
      if constexpr (kFresh) {
        const ListEntry entry = from.lists[source][row - row_begin];
        first = from.pair_begin[source] + entry.first_pair;
        count = entry.num_pairs;
      } else {
        first = plan.row_pair_begin[row];
        count = plan.row_pair_begin[row + 1] - first;
      }
      for (uint32_t j = 0; j < width; ++j) {
        const uint64_t to = uint64_t{row} * width + j;
        uint32_t expert = 0;
        if (j < count) expert = kFresh ? from.pairs[source][first + j + offset].expert : plan.out_rows[first + j];
        args.row_experts[to] = j < count ? static_cast<int64_t>(expert) : -1;
        if (args.row_weights != nullptr) args.row_weights[to] = j < count ? staged[first + j + offset] : 0.0f;
      }
    }
  }
}

}  // namespace uccl_ep::cuda
