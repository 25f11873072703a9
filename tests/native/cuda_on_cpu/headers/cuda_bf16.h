// In place of CUDA's: what the kernels use of BF16.
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat162 {
  uint32_t bits;
};
// Products of BF16 are exact in FP32; rounded once, to nearest even.
inline __nv_bfloat162 __hmul2(const __nv_bfloat162& a, const __nv_bfloat162& b) {
  const auto product = [](uint32_t x, uint32_t y) -> uint32_t {
    const float value = __uint_as_float(x << 16) * __uint_as_float(y << 16);
    const uint32_t bits = __float_as_uint(value);
    return value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  };
  return {product(a.bits & 0xFFFF, b.bits & 0xFFFF) | product(a.bits >> 16, b.bits >> 16) << 16};
}
