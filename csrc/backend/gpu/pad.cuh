// Padding: rows that nobody has sent.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/steps.h"

namespace uccl_ep::gpu {

// By `threads` threads, this one `thread`: rows `first` to `end` become padding; each has `width` weights.
__device__ __forceinline__ void pad_rows(const PlaceArgs& args, uint64_t first, uint64_t end, uint32_t width,
                                         uint32_t thread, uint32_t threads) {
  const uint32_t blocks = args.stage.row.num_scales;
  const uint64_t out_bytes =
      args.scales != nullptr ? args.stage.hidden : uint64_t{args.stage.hidden} * dtype_bytes(args.stage.dtype);
  uint4* const out = reinterpret_cast<uint4*>(args.rows);
  for (uint64_t i = first * out_bytes / 16 + thread; i < end * out_bytes / 16; i += threads)
    out[i] = make_uint4(0, 0, 0, 0);
  if (args.scales != nullptr)
    for (uint64_t i = first * blocks + thread; i < end * blocks; i += threads) args.scales[i] = 1.0f;
  const uint32_t words = args.stage.row.num_metadata;
  for (uint64_t i = first * words + thread; i < end * words; i += threads) args.metadata[i] = 0;
  if (args.row_weights != nullptr)
    for (uint64_t i = first * width + thread; i < end * width; i += threads) args.row_weights[i] = 0.0f;
}

}  // namespace uccl_ep::gpu
