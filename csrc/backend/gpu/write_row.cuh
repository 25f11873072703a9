// A row of the caller's on its way: a warp copies or quantises it, to one place or to several.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/numerics.cuh"
#include "backend/gpu/steps.h"

namespace uccl_ep::gpu {

// Where a warp writes a row: for our own domain, and into the rings to other domains that want it. Its places in the
// rings are in shared memory, because a warp that quantises has no registers to spare.
struct Outs {
  uint8_t* own;
  uint32_t num_places;
  uint8_t* const* places;  // in rings
  template <typename Put>
  __device__ __forceinline__ void each(Put put) const {
    put(own);
#pragma unroll 1
    for (uint32_t i = 0; i < num_places; ++i) put(places[i]);
  }
};

// By a warp: vectors of 16 bytes from `from_vector` to `vectors`.
template <uint32_t kBatch = 4>
__device__ inline void copy_row(const uint4* from, const Outs& outs, uint32_t vectors, uint32_t lane,
                                uint32_t from_vector = 0) {
  for (uint32_t begin = from_vector; begin < vectors; begin += kBatch * kWarp) {
    const uint32_t first = begin + lane;
    uint4 batch[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (first + u * kWarp < vectors) batch[u] = device::load_once(from + first + u * kWarp);
    outs.each([&](uint8_t* to) {
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u)
        if (first + u * kWarp < vectors) reinterpret_cast<uint4*>(to)[first + u * kWarp] = batch[u];
    });
  }
}

// 8 values of a block of 128, which 16 neighbouring lanes hold together.
static_assert(kFp8Block == 8 * 16);
struct Codes {
  uint2 codes;
  float scale;
};
// Several at a time, because each is a chain of latencies and the chains are independent.
template <typename Rule, uint32_t kBatch>
__device__ __forceinline__ void quantise(const uint4 (&raw)[kBatch], Codes (&out)[kBatch]) {
  uint32_t most[kBatch];  // two in a word; magnitudes of floats are ordered like their bits
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u)
    most[u] = device::max_unsigned_halves(device::max_unsigned_halves(raw[u].x & 0x7FFF7FFF, raw[u].y & 0x7FFF7FFF),
                                          device::max_unsigned_halves(raw[u].z & 0x7FFF7FFF, raw[u].w & 0x7FFF7FFF));
#pragma unroll
  for (uint32_t o = 8; o > 0; o /= 2)
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      most[u] = device::max_unsigned_halves(most[u], __shfl_xor_sync(kFullWarp, most[u], o));
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u) {
    const uint32_t bits = max(most[u] & 0xFFFF, most[u] >> 16);
    const uint32_t words[4] = {raw[u].x, raw[u].y, raw[u].z, raw[u].w};
    const float amax = __uint_as_float(bits << 16);
    const float scale = bits == 0 ? 1.0f : Rule::of(amax);
    const float inverse = Rule::kArePow2 ? __uint_as_float((254u << 23) - __float_as_uint(scale)) : 0.0f;
    uint32_t packed[4];
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      const float low = __uint_as_float(words[w] << 16), high = __uint_as_float(words[w] & 0xFFFF0000u);
      packed[w] = Rule::kArePow2 ? pack_e4m3(low * inverse, high * inverse)
                                 : pack_e4m3(__fdiv_rn(low, scale), __fdiv_rn(high, scale));
    }
    constexpr uint32_t kAllNan = 0x01010101u * kE4m3Nan;
    const bool finite = bits < kBf16Inf;
    out[u].codes.x = finite ? packed[0] | packed[1] << 16 : kAllNan;
    out[u].codes.y = finite ? packed[2] | packed[3] << 16 : kAllNan;
    out[u].scale = finite ? scale : 1.0f;
  }
}

// Some of a row's vectors of 16 bytes of the caller's.
struct VectorRange {
  uint32_t first = 0, end = ~0u;
};
// By a warp: whole blocks. If scales are powers of two, the next vectors are
// loaded meanwhile.
template <typename Rule>
__device__ __forceinline__ void quantise_row(const uint4* from, const Outs& outs, uint32_t hidden, uint32_t lane,
                                             const VectorRange& part = {}) {
  constexpr bool kPow2 = Rule::kArePow2;
  constexpr uint32_t kBatch = kPow2 ? kArch.vectors_ahead : 1;
  const uint32_t first = part.first, end = min(part.end, hidden / 8);
  uint4 next[kBatch];
  const auto load_batch = [&](uint32_t begin) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = begin + u * kWarp + lane;
      next[u] = i < end ? device::load_once(from + i) : make_uint4(0, 0, 0, 0);
    }
  };
  if (kPow2) load_batch(first);
  for (uint32_t begin = first; begin < end; begin += kBatch * kWarp) {
    if (!kPow2) load_batch(begin);
    uint4 raw[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) raw[u] = next[u];
    if (kPow2) load_batch(begin + kBatch * kWarp);
    Codes out[kBatch];
    quantise<Rule>(raw, out);
    outs.each([&](uint8_t* to) {
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u) {
        const uint32_t i = begin + u * kWarp + lane;
        if (i >= end) continue;  // the same for all 16 lanes of a block
        *reinterpret_cast<uint2*>(to + i * 8) = out[u].codes;
        if (i % 16 == 0) reinterpret_cast<float*>(to + hidden)[i / 16] = out[u].scale;
      }
    });
  }
}

// Not inlined: a division is a function call, which would make its caller spill registers.
template <typename Rule>
__device__ __noinline__ void quantise_row_divided(const uint4* from, const Outs outs, uint32_t hidden, uint32_t lane,
                                                  const VectorRange& part = {}) {
  quantise_row<Rule>(from, outs, hidden, lane, part);
}
template <typename Rule>
__device__ __forceinline__ void quantise_row_by(const uint4* from, const Outs& outs, uint32_t hidden, uint32_t lane,
                                                const VectorRange& part = {}) {
  if constexpr (Rule::kArePow2)
    quantise_row<Rule>(from, outs, hidden, lane, part);
  else
    quantise_row_divided<Rule>(from, outs, hidden, lane, part);
}
// By the rule of the wire format. False: it has none.
template <typename... Rules>
__device__ __forceinline__ bool quantise_row(ScaleRules<Rules...>, const StageArgs& args, const uint4* from,
                                             const Outs& outs, uint32_t lane, const VectorRange& part = {}) {
  return ((args.wire == Rules::kWire && (quantise_row_by<Rules>(from, outs, args.hidden, lane, part), true)) || ...);
}

// By a warp: the words beside a row's codes that the caller gave.
template <typename Word>
__device__ __forceinline__ void stage_words(const Word* from, uint32_t count, const Outs& outs, uint32_t begin,
                                            uint32_t lane) {
  for (uint32_t i = lane; i < count; i += kWarp) {
    const Word word = from[i];
    outs.each([&](uint8_t* to) { reinterpret_cast<Word*>(to + begin)[i] = word; });
  }
}
__device__ __forceinline__ void stage_words(const StageArgs& args, uint32_t token, const Outs& outs, uint32_t lane) {
  const RowShape& row = args.row;
  if (args.scales != nullptr)
    stage_words(args.scales + uint64_t{token} * row.num_scales, row.num_scales, outs, row.code_bytes, lane);
  if (args.metadata != nullptr)
    stage_words(args.metadata + uint64_t{token} * row.num_metadata, row.num_metadata, outs, row.metadata_begin(), lane);
}

// By a warp: one row, copied or quantised.
__device__ __forceinline__ void stage_row(const StageArgs& args, uint32_t token, const Outs& outs, uint32_t lane) {
  stage_words(args, token, outs, lane);
  const uint32_t vectors = args.hidden * dtype_bytes(args.dtype) / 16;
  const uint4* const from = reinterpret_cast<const uint4*>(args.x) + uint64_t{token} * vectors;
  if (!args.quantises() || !quantise_row(AllScaleRules{}, args, from, outs, lane)) copy_row(from, outs, vectors, lane);
}

}  // namespace uccl_ep::gpu
