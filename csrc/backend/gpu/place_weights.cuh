// Place: the weights and experts of rows, and padding.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/pad.cuh"
#include "backend/gpu/plan_reader.cuh"
#include "backend/gpu/steps.h"
#include "backend/gpu/unpack.cuh"

namespace uccl_ep::gpu {

__device__ inline void fill_padding(const DispatchKernel& k, const uint32_t* padding) {
  for (uint32_t l = blockIdx.x; l < k.g.experts_per_rank; l += k.args.num_blocks)
    pad_rows(k.args, min(padding[2 * l], k.plan.num_out_rows), min(padding[2 * l + 1], k.plan.num_out_rows), 1,
             k.crew.thread, k.crew.size);
}

// By crews of all blocks that place, when all weights have been staged, but for packets with tails. With a new plan the
// output rows are worked out once more, because other blocks are only now writing them.
template <bool kFresh>
__device__ inline void place_weights(const DispatchKernel& k) {
  const PlanReader<kFresh> plan(k);
  Spread::over(k.crew, k.args.num_blocks).each(k.g.map.num_ranks, [&](uint32_t r, uint32_t first, uint32_t step) {
    const uint32_t source = rotated(k.g, r), end = plan.pair_end(source), offset = plan.weight_begin(source);
    const float* const staged = plan.weights(source, k.op.epoch);
    if (has_net(k.g) && tail_of<kFresh>(k, source, true) > 0) return;
    for (uint32_t p = plan.pair_begin(source) + first; p < end; p += step) {
      const uint32_t out_row = plan.out_row(source, p, p + offset);
      if (out_row < k.plan.num_out_rows) k.args.row_weights[out_row] = staged[p + offset];
    }
  });
}

// The same for compact rows, which also get their experts. Without weights there is nothing to wait for.
template <bool kFresh>
__device__ inline void place_experts(const DispatchKernel& k) {
  const PlanReader<kFresh> plan(k);
  const uint32_t width = k.plan.compact_width;
  Spread::over(k.crew, k.args.num_blocks).each(k.g.map.num_ranks, [&](uint32_t r, uint32_t first, uint32_t step) {
    const uint32_t source = rotated(k.g, r), row_begin = plan.row_begin(source), offset = plan.weight_begin(source);
    const float* const staged = plan.weights(source, k.op.epoch);
    const uint32_t end = min(plan.row_end(source), k.plan.num_out_rows);
    const bool unpacked = has_net(k.g) && tail_of<kFresh>(k, source, k.args.row_weights != nullptr) > 0;
    if (kFresh && unpacked) return;
    for (uint32_t row = row_begin + first; row < end; row += step) {
      const auto [first_pair, count] = plan.pairs_of(source, row - row_begin, row);
      for (uint32_t j = 0; j < width; ++j) {
        const uint64_t to = uint64_t{row} * width + j;
        const uint32_t p = first_pair + j;
        k.args.row_experts[to] = j < count ? static_cast<int64_t>(plan.expert(source, p, p + offset)) : -1;
        if (k.args.row_weights == nullptr || (unpacked && j < count)) continue;
        k.args.row_weights[to] = j < count ? staged[p + offset] : 0.0f;
      }
    }
  });
}

}  // namespace uccl_ep::gpu
