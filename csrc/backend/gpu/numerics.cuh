// Conversions, bit for bit those of the host backend (backend/host/numerics.cc). No contraction, no flush to zero.
#pragma once

#include <cstdint>

#include "device/arch.cuh"
#include "device/convert.cuh"
#include "layout/wire.h"

namespace uccl_ep::gpu {

__device__ __forceinline__ float bf16_to_fp32(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }

// Round to nearest even; every NaN becomes the canonical one.
__device__ __forceinline__ uint16_t fp32_to_bf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > kFp32Inf ? kBf16Nan : rounded);
}
__device__ __forceinline__ float canonical(float value) { return value != value ? __uint_as_float(kFp32Nan) : value; }

__device__ __forceinline__ uint32_t pack_finite_bf16(float low, float high) { return device::to_bf16(low, high); }
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed = pack_finite_bf16(low, high);
  if (low != low) packed = (packed & 0xFFFF0000u) | kBf16Nan;
  if (high != high) packed = (packed & 0xFFFFu) | uint32_t{kBf16Nan} << 16;
  return packed;
}

// Round to nearest even, saturate. Both are finite.
__device__ __forceinline__ uint16_t pack_e4m3(float low, float high) {
  if constexpr (kArch.converts_fp8) {
    return device::to_e4m3(low, high);
  } else {
    auto encode = [](float value) {
      const uint32_t bits = __float_as_uint(value);
      const uint32_t m = min(bits & 0x7FFFFFFF, __float_as_uint(448.0f));
      const uint32_t normal = ((m + 0x7FFFF + (m >> 20 & 1)) >> 20) - (120u << 3);
      const uint32_t subnormal = __float_as_uint(__uint_as_float(m) + 16384.0f) - __float_as_uint(16384.0f);
      return (bits >> 24 & 0x80) | (m < __float_as_uint(0x1p-6f) ? subnormal : normal);
    };
    return static_cast<uint16_t>(encode(low) | encode(high) << 8);
  }
}

__device__ __forceinline__ float e4m3_to_fp32(uint32_t code) {
  const uint32_t magnitude = code & 0x7F;
  const uint32_t sign = (code & 0x80) << 24;
  if (magnitude == kE4m3Nan) return __uint_as_float(kFp32Nan | sign);
  const float value =
      magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f : __uint_as_float((magnitude << 20) + (120u << 23));
  return __uint_as_float(__float_as_uint(value) | sign);
}

// Two codes (the low 16 bits) times a finite scale, as BF16.
__device__ __forceinline__ uint32_t decode_two(uint32_t codes, float scale) {
  if constexpr (kArch.converts_fp8) {
    if ((codes & 0x7F) != kE4m3Nan && (codes & 0x7F00) != uint32_t{kE4m3Nan} << 8) {
      const float2 values = device::from_e4m3(static_cast<uint16_t>(codes));
      const float high = values.y * scale;
      return device::to_bf16(values.x * scale, high);
    }
  }
  return pack_bf16(e4m3_to_fp32(codes & 0xFF) * scale, e4m3_to_fp32(codes >> 8 & 0xFF) * scale);
}

// As decode_two(), for four codes that are not NaN and a scale that is a power of two of at most 2^7. `factor` is the
// scale times 2^120, as BF16 in both halves. A code's bits, moved to their places in BF16, are its value times 2^-120:
// exact.
__device__ __forceinline__ uint2 decode_four(uint32_t codes, uint32_t factor) {
  const auto decode = [&](uint32_t halves) {  // a code in the upper byte of each half
    const uint32_t moved = (halves & 0x80008000u) | (halves >> 4 & 0x07F007F0u);
    return device::multiply_bf16(moved, factor);
  };
  return make_uint2(decode(__byte_perm(codes, 0, 0x1404)), decode(__byte_perm(codes, 0, 0x3424)));
}
__device__ __forceinline__ bool has_nan_code(uint32_t codes) {
  return (((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) != 0;
}

}  // namespace uccl_ep::gpu
