// Conversions and arithmetic of packed values, the first in the low half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace uccl_ep::gpu::device {

// Round to nearest even. A NaN becomes another NaN.
__device__ __forceinline__ uint32_t to_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// Saturates.
__device__ __forceinline__ uint16_t to_e4m3(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
// Exact: FP16 has more exponent and mantissa bits.
__device__ __forceinline__ float2 from_e4m3(uint16_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return __half22float2(*reinterpret_cast<__half2*>(&halves));
}
// Two BF16 products, each rounded once, to nearest even.
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}
// The larger of each half.
__device__ __forceinline__ uint32_t max_unsigned_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
__device__ __forceinline__ uint32_t max_signed_halves(uint32_t a, uint32_t b) { return __vmaxs2(a, b); }

}  // namespace uccl_ep::gpu::device
