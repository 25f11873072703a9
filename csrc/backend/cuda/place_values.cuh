// Place: what rows have beside their data, and the slots that no row fills.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/pad.cuh"
#include "backend/cuda/plan.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {

__device__ inline void fill_padding(const Crew& crew, const Domain& d, const PlanView& plan, const PlaceArgs& args,
                                    const uint32_t* padding) {
  for (uint32_t l = blockIdx.x; l < d.experts_per_rank; l += args.num_blocks)
    pad_rows(args, min(padding[2 * l], plan.num_slots), min(padding[2 * l + 1], plan.num_slots), 1, crew.thread,
             crew.size);
}

// In the order of the source's packet.
template <bool kFresh>
__device__ __forceinline__ const float* values_of(const Domain& d, const Op& op, uint32_t source) {
  if constexpr (kFresh) return scratch(d).values[source];
  return reinterpret_cast<const float*>(packet(d, source, op.epoch) + packet_parts({}).values);
}

// By crews of all blocks that place, when all values have been staged. The slots of a new plan are worked out once
// more: other blocks write them only now.
template <bool kFresh>
__device__ inline void place_values(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                    const PlaceArgs& args) {
  const PlanScratch& from = scratch(d);
  for (uint32_t r = 0; r < d.at.num_ranks; ++r) {
    const uint32_t source = rotated(d, r);
    const uint32_t begin = kFresh ? from.slot_begin[source] : plan.row_slot[plan.row_begin[source]];
    const uint32_t end = kFresh ? from.slot_end[source] : plan.row_slot[plan.row_end[source]];
    const uint32_t offset = (kFresh ? from.value_begin : plan.value_begin)[source];
    const float* const staged = values_of<kFresh>(d, op, source);
    for (uint32_t p = begin + blockIdx.x * crew.size + crew.thread; p < end; p += args.num_blocks * crew.size) {
      uint32_t slot = 0;
      if constexpr (kFresh) {
        const PairEntry pair = from.pairs[source][p + offset];
        slot = slot_base(d)[source * d.experts_per_rank + pair.expert] + pair.position;
      } else {
        slot = plan.slots[p];
      }
      if (slot < plan.num_slots) args.row_values[slot] = staged[p + offset];
    }
  }
}

// The same of compact rows, which get their experts, too; without values there is nothing to wait for.
template <bool kFresh>
__device__ inline void place_experts(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                     const PlaceArgs& args) {
  const PlanScratch& from = scratch(d);
  const uint32_t width = plan.compact_width;
  for (uint32_t r = 0; r < d.at.num_ranks; ++r) {
    const uint32_t source = rotated(d, r);
    const uint32_t row_begin = (kFresh ? from.row_begin : plan.row_begin)[source];
    const uint32_t offset = (kFresh ? from.value_begin : plan.value_begin)[source];
    const float* const staged = values_of<kFresh>(d, op, source);
    const uint32_t end = min((kFresh ? from.row_end : plan.row_end)[source], plan.num_slots);
    for (uint32_t row = row_begin + blockIdx.x * crew.size + crew.thread; row < end;
         row += args.num_blocks * crew.size) {
      uint32_t first = 0, count = 0;
      if constexpr (kFresh) {
        const ListEntry entry = from.lists[source][row - row_begin];
        first = from.slot_begin[source] + entry.first_slot;
        count = entry.num_pairs;
      } else {
        first = plan.row_slot[row];
        count = plan.row_slot[row + 1] - first;
      }
      for (uint32_t j = 0; j < width; ++j) {
        const uint64_t to = uint64_t{row} * width + j;
        uint32_t expert = 0;
        if (j < count) expert = kFresh ? from.pairs[source][first + j + offset].expert : plan.slots[first + j];
        args.row_experts[to] = j < count ? static_cast<int64_t>(expert) : -1;
        if (args.row_values != nullptr) args.row_values[to] = j < count ? staged[first + j + offset] : 0.0f;
      }
    }
  }
}

}  // namespace uccl_ep::cuda
