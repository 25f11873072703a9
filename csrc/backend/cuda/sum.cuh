// Sums of rows in fp32, in the order given, from +0.0; rounded once.
#pragma once

#include "backend/cuda/numerics.cuh"

namespace uccl_ep::cuda {

// 8 values.
__device__ __forceinline__ void add_values(float (&sum)[8], const uint16_t* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w) {
    sum[2 * w] += __uint_as_float(words[w] << 16);
    sum[2 * w + 1] += __uint_as_float(words[w] & 0xFFFF0000u);
  }
}
__device__ __forceinline__ void add_values(float (&sum)[8], const float* from) {
#pragma unroll
  for (uint32_t v = 0; v < 2; ++v) {
    const float4 four = reinterpret_cast<const float4*>(from)[v];
    sum[4 * v] += four.x;
    sum[4 * v + 1] += four.y;
    sum[4 * v + 2] += four.z;
    sum[4 * v + 3] += four.w;
  }
}
__device__ __forceinline__ void put_values(const float (&sum)[8], uint16_t* to) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                             pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
}
__device__ __forceinline__ void put_values(const float (&sum)[8], float* to) {
#pragma unroll
  for (uint32_t v = 0; v < 2; ++v)
    reinterpret_cast<float4*>(to)[v] = make_float4(canonical(sum[4 * v]), canonical(sum[4 * v + 1]),
                                                   canonical(sum[4 * v + 2]), canonical(sum[4 * v + 3]));
}

// By a warp. `row(i)`: the i-th of `num_rows` rows.
template <typename Row, typename Out>
__device__ __forceinline__ void sum_row(uint32_t hidden, uint32_t lane, uint32_t num_rows, Row row, Out* out) {
  for (uint32_t i = lane * 8; i < hidden; i += 32 * 8) {
    float sum[8] = {};
    for (uint32_t r = 0; r < num_rows; ++r) add_values(sum, row(r) + i);
    put_values(sum, out + i);
  }
}

}  // namespace uccl_ep::cuda
