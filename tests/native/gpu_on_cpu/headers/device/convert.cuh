// In place of device/convert.cuh: by plain arithmetic.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace uccl_ep::gpu::device {

inline uint32_t to_bf16(float low, float high) {
  const auto convert = [](float value) -> uint32_t {
    const uint32_t bits = __float_as_uint(value);
    return value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  };
  return convert(low) | convert(high) << 16;
}
// By arithmetic in double, unlike the product's own for other architectures.
inline uint16_t to_e4m3(float low, float high) {
  const auto convert = [](float value) -> uint32_t {
    const uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude >= 448) return sign | 0x7E;
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // [0.5, 1)
    const int step = std::max(exponent - 1, -6) - 3;
    const double whole = std::nearbyint(std::ldexp(magnitude, -step));  // of 2^step; 8 .. 16 of a normal
    const auto units = static_cast<uint32_t>(whole);
    const uint32_t code = units < 8 ? units : (static_cast<uint32_t>(step + 9) << 3) + units;
    return sign | std::min(code, 0x7Eu);
  };
  return static_cast<uint16_t>(convert(low) | convert(high) << 8);
}
inline float2 from_e4m3(uint16_t codes) {
  const auto convert = [](uint32_t code) {
    const uint32_t exponent = code >> 3 & 15, fraction = code & 7;
    const float magnitude = exponent == 0
                                ? std::ldexp(static_cast<float>(fraction), -9)
                                : std::ldexp(static_cast<float>(8 + fraction), static_cast<int>(exponent) - 10);
    return (code & 0x80) != 0 ? -magnitude : magnitude;
  };
  return {convert(codes & 0xFF), convert(codes >> 8)};
}

// Products of BF16 are exact in FP32.
inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  const auto product = [](uint32_t x, uint32_t y) { return __uint_as_float(x << 16) * __uint_as_float(y << 16); };
  return to_bf16(product(a & 0xFFFF, b & 0xFFFF), product(a >> 16, b >> 16));
}

template <typename Half>
uint32_t largest_halves(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t x, uint32_t y) {
    return static_cast<uint32_t>(static_cast<uint16_t>(std::max(static_cast<Half>(x), static_cast<Half>(y))));
  };
  return half(a & 0xFFFF, b & 0xFFFF) | half(a >> 16, b >> 16) << 16;
}
inline uint32_t max_unsigned_halves(uint32_t a, uint32_t b) { return largest_halves<uint16_t>(a, b); }
inline uint32_t max_signed_halves(uint32_t a, uint32_t b) { return largest_halves<int16_t>(a, b); }

}  // namespace uccl_ep::gpu::device
