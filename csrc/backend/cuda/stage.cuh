// Stage: one pass over the hidden states, copied or quantised into our region, a flag per few rows.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {

// A crew has a warp for every row of a chunk.
constexpr uint32_t kStageWarps = kStageRows;

__device__ inline void copy_row(const uint4* from, uint4* to, uint32_t vectors, uint32_t lane) {
  constexpr uint32_t kBatch = 4;
  for (uint32_t first = lane; first < vectors; first += kBatch * kWarp) {
    uint4 batch[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (first + u * kWarp < vectors) batch[u] = __ldcs(from + first + u * kWarp);
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (first + u * kWarp < vectors) to[first + u * kWarp] = batch[u];
  }
}

// 8 values of a block of 128, which 16 neighbouring lanes hold together. Returns the scale.
template <bool kPow2>
__device__ __forceinline__ float quantise(const uint4& raw, uint2& codes) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t most = 0;  // magnitudes of floats order like their bits
#pragma unroll
  for (uint32_t w : words) most = max(most, max(w & 0x7FFF, w >> 16 & 0x7FFF));
#pragma unroll
  for (uint32_t o = 8; o > 0; o /= 2) most = max(most, __shfl_xor_sync(kFullWarp, most, o));
  if (most >= kBf16Inf) {
    codes = make_uint2(0x01010101u * kE4m3Nan, 0x01010101u * kE4m3Nan);
    return 1.0f;
  }
  if (most == 0) {  // the signs of zeros
    codes = make_uint2(__byte_perm(words[0], words[1], 0x7531), __byte_perm(words[2], words[3], 0x7531));
    return 1.0f;
  }
  const float amax = bf16_to_fp32(static_cast<uint16_t>(most));
  const float scale = kPow2 ? pow2_scale(amax) : fp32_scale(amax);
  // The inverse of a power of two is exact.
  const float inverse = kPow2 ? __uint_as_float((254u << 23) - __float_as_uint(scale)) : 0.0f;
  uint32_t packed[4];
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w) {
    const float low = __uint_as_float(words[w] << 16), high = __uint_as_float(words[w] & 0xFFFF0000u);
    packed[w] =
        kPow2 ? pack_e4m3(low * inverse, high * inverse) : pack_e4m3(__fdiv_rn(low, scale), __fdiv_rn(high, scale));
  }
  codes = make_uint2(packed[0] | packed[1] << 16, packed[2] | packed[3] << 16);
  return scale;
}

// By a warp. The next loads are under way while a batch is converted.
template <bool kPow2>
__device__ inline void quantise_row(const uint4* from, uint8_t* to, uint32_t hidden, uint32_t lane) {
  constexpr uint32_t kBatch = kPow2 ? 4 : 1;  // divisions need registers
  float* const scales = reinterpret_cast<float*>(to + hidden);
  const uint32_t vectors = hidden / 8;
  uint4 next[kBatch];
  const auto load = [&](uint32_t first) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = first + u * kWarp + lane;
      next[u] = i < vectors ? __ldcs(from + i) : make_uint4(0, 0, 0, 0);
    }
  };
  load(0);
  for (uint32_t first = 0; first < vectors; first += kBatch * kWarp) {
    uint4 now[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) now[u] = next[u];
    load(first + kBatch * kWarp);
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      if (first + u * kWarp >= vectors) break;
      const uint32_t i = first + u * kWarp + lane;
      uint2 codes;
      const float scale = quantise<kPow2>(now[u], codes);
      if (i >= vectors) continue;  // the same for all 16 lanes of a block
      *reinterpret_cast<uint2*>(to + i * 8) = codes;
      if (lane % 16 == 0) scales[i / 16] = scale;
    }
  }
}

// Not inlined: a division is a call that would make its caller spill.
__device__ __noinline__ void quantise_row_divided(const uint4* from, uint8_t* to, uint32_t hidden, uint32_t lane) {
  quantise_row<false>(from, to, hidden, lane);
}

// By a crew of kStageWarps, number `crew_number` of `num_crews`: tokens [begin, end) of x, a flag per chunk of them.
__device__ inline void stage_rows(const Crew& crew, const Domain& d, const Op& op, const StageArgs& args,
                                  uint32_t begin, uint32_t end, uint32_t crew_number, uint32_t num_crews) {
  const uint64_t stride = wire_row_bytes(args.wire, args.hidden);
  const uint32_t vectors = args.hidden * dtype_bytes(args.dtype) / 16;
  uint8_t* const staged = rows(d, d.rank, op.half);
  uint32_t turn = 0;
  for (uint32_t chunk = crew_number; begin + chunk * kStageRows < end; chunk += num_crews) {
    const uint32_t row = chunk * kStageRows + crew.warp(), token = begin + row;
    if (token < end) {
      const uint4* const from = reinterpret_cast<const uint4*>(args.x) + uint64_t{token} * vectors;
      uint8_t* const to = staged + row * stride;
      if (args.wire == Dtype::kFp8 && args.fp8_pow2)
        quantise_row<true>(from, to, args.hidden, crew.lane());
      else if (args.wire == Dtype::kFp8)
        quantise_row_divided(from, to, args.hidden, crew.lane());
      else
        copy_row(from, reinterpret_cast<uint4*>(to), vectors, crew.lane());
    }
    proxy_fence();
    crew.sync();
    if (crew.warp() != turn++ % kStageWarps) continue;  // one warp tells the others while the rest goes on
    __threadfence_system();
    for (uint32_t r = crew.lane(); r < d.at.num_ranks; r += kWarp)
      publish_flag(rows_full(d, r, d.rank) + chunk, op.epoch);
  }
}

// By crews of all blocks: fp32 per pair, in the order of the plan.
__device__ inline void stage_values(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                    const float* from) {
  float* const staged = values(d, d.rank, op.half);
  const uint32_t sent = plan.pair_begin[d.at.num_ranks];
  for (uint32_t p = blockIdx.x * crew.size + crew.thread; p < sent; p += gridDim.x * crew.size)
    staged[p] = from[plan.pair_place[p]];
  if (last_block(crew, d, Arrival::kValues) && !stopped(d)) publish_all(crew, d, d.at.values_full, op.epoch);
}

}  // namespace uccl_ep::cuda
