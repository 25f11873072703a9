#include "backend/host/numerics.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "common/multiversion.h"

namespace uccl_ep::host {
namespace {

// Vectors that the compiler maps to what the instruction set has. A cast between them keeps the bits.
typedef float FloatV __attribute__((vector_size(32)));
typedef uint32_t UintV __attribute__((vector_size(32)));
typedef int16_t ShortV __attribute__((vector_size(32)));
typedef uint16_t HalfV __attribute__((vector_size(16)));
typedef uint8_t ByteV __attribute__((vector_size(16)));
constexpr uint32_t kLanes = 8;

// Two neighbours of 16 bits lie in each 32-bit lane, the even one in its low half. Taken as BF16, a shift makes the
// even one an fp32 and a mask the odd one, and nothing has to move between lanes.
static_assert(std::endian::native == std::endian::little);
constexpr uint32_t kOddHalf = 0xFFFF0000;
constexpr uint32_t kPairLanes = 2 * kLanes;
constexpr uint32_t kPairVectors = 4;
constexpr uint32_t kPairBlock = kPairLanes * kPairVectors;

template <typename V>
UCCL_EP_INLINE bool any(const V& mask) {
  uint64_t words[sizeof(mask) / sizeof(uint64_t)];
  std::memcpy(words, &mask, sizeof(mask));
  return (words[0] | words[1] | words[2] | words[3]) != 0;
}

UCCL_EP_INLINE float bf16_to_fp32(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// All bits of `a` where `condition`, else of `b`. Integer selects: a float comparison keeps GCC from vectorising the
// loop.
UCCL_EP_INLINE uint32_t select(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

// Round to nearest even; every NaN becomes the canonical one.
UCCL_EP_INLINE uint16_t fp32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(select((bits & 0x7FFFFFFF) > kFp32Inf, kBf16Nan, rounded));
}

UCCL_EP_INLINE float canonical(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>(select((bits & 0x7FFFFFFF) > kFp32Inf, kFp32Nan, bits));
}

// Round to nearest even, saturate. `value` is finite. Magnitudes of floats order like their bits.
UCCL_EP_INLINE uint8_t fp32_to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 24 & 0x80;
  const uint32_t m = std::min<uint32_t>(bits & 0x7FFFFFFF, std::bit_cast<uint32_t>(kE4m3Max));
  // Normal codes keep 3 bits of the mantissa; the exponent bias goes from 127 to 7.
  const uint32_t normal = ((m + 0x7FFFF + (m >> 20 & 1)) >> 20) - (120u << 3);
  // Below 2^-6 codes are multiples of 2^-9, the unit in the last place of 2^14: the addition rounds for us.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(m) + 16384.0f) - std::bit_cast<uint32_t>(16384.0f);
  return static_cast<uint8_t>(sign | select(m < std::bit_cast<uint32_t>(0x1p-6f), subnormal, normal));
}

UCCL_EP_INLINE float e4m3_to_fp32(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t subnormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
  const uint32_t finite = select(magnitude < 8, subnormal, normal) | (code & 0x80u) << 24;
  return std::bit_cast<float>(select(magnitude == kE4m3Nan, kFp32Nan, finite));
}

// Whether a scale is 2^exponent.
UCCL_EP_INLINE bool is_pow2(float scale, int32_t& exponent) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  exponent = static_cast<int32_t>(bits >> 23) - 127;
  return (bits & 0x7FFFFF) == 0 && exponent >= kLeastScaleExponent && exponent <= kLargestScaleExponent;
}
UCCL_EP_INLINE float pow2(int32_t exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// Codes of magnitudes up to 464 (all that round to at most 448), in each 32-bit lane, rounded to nearest even. Adding
// 2^20 times a value's own power of two (2^-6 for subnormal codes) leaves whole steps of its code in the sum, rounded
// by the addition. Their number and the exponent make the code; a carry into the next exponent comes out right.
UCCL_EP_INLINE void encode_lanes(const FloatV& magnitude, UintV& codes) {
  const FloatV least_normal = FloatV{} + 0x1p-6f;
  const UintV power = (UintV)(magnitude > least_normal ? magnitude : least_normal) & kFp32Inf;  // the exponent's bits
  const UintV shifter = power + (20u << 23);
  const UintV sum = (UintV)(magnitude + (FloatV)shifter);
  codes = sum - shifter + (power >> 20) - (121u << 3);
}

// Codes of one block. `by` is the scale, or its inverse where that is exact: scales that are powers of two.
template <bool kMultiply>
UCCL_EP_INLINE void encode_block(const uint16_t* x, float by, uint8_t* codes) {
  for (uint32_t i = 0; i < kFp8Block; i += kPairLanes) {
    UintV bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    const UintV magnitudes = bits & 0x7FFF7FFF;
    const FloatV even = (FloatV)(magnitudes << 16);
    const FloatV odd = (FloatV)(magnitudes & kOddHalf);
    UintV low, high;
    encode_lanes(kMultiply ? even * by : even / by, low);
    encode_lanes(kMultiply ? odd * by : odd / by, high);
    const UintV signs = (bits >> 8 & 0x80) | (bits >> 16 & 0x8000);
    const HalfV pairs = __builtin_convertvector(low | high << 8 | signs, HalfV);
    std::memcpy(codes + i, &pairs, sizeof(pairs));
  }
}

// The same for a scale of 2^exponent and a block whose values are 0 or give normal codes, as nearly all blocks are:
// such a code is the BF16 value's bits, rounded to 3 bits of mantissa and counted from another exponent.
UCCL_EP_INLINE void encode_block_normal(const uint16_t* x, int32_t exponent, uint8_t* codes) {
  const int16_t shift = static_cast<int16_t>(exponent * (1 << 7));
  for (uint32_t i = 0; i < kFp8Block; i += kPairLanes) {
    ShortV bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    const ShortV magnitude = bits & 0x7FFF;
    const ShortV scaled = magnitude - shift;
    const ShortV rounded = ((scaled + 7 + (scaled >> 4 & 1)) >> 4) - (120 << 3);
    const ShortV values = (rounded & (magnitude > 0)) | (bits >> 8 & 0x80);
    const ByteV bytes = __builtin_convertvector(values, ByteV);
    std::memcpy(codes + i, &bytes, sizeof(bytes));
  }
}

UCCL_EP_INLINE void encode_block_saturating(const uint16_t* x, float scale, uint8_t* codes) {
  for (uint32_t i = 0; i < kFp8Block; ++i) codes[i] = fp32_to_e4m3(bf16_to_fp32(x[i]) / scale);
}

// `least_bits`: of the least magnitude that is not 0. A power of two has an exact inverse, so that all ways give the
// same codes.
UCCL_EP_INLINE void encode_by(float scale, const uint16_t* x, int32_t least_bits, uint8_t* codes) {
  int32_t exponent = 0;
  if (!is_pow2(scale, exponent))
    encode_block<false>(x, scale, codes);
  else if (exponent == kLargestScaleExponent)  // only below a clamped scale a value may be larger than 448
    encode_block_saturating(x, scale, codes);
  else if (least_bits >= (exponent - 6 + 127) << 7)  // no code is subnormal
    encode_block_normal(x, exponent, codes);
  else
    encode_block<true>(x, pow2(-exponent), codes);
}

// Values of finite codes, whose bits lie shifted to where an fp32 has exponent and mantissa. Exact. Read as a normal
// number, a subnormal code gives too much; twice that minus 2^-6 is its value, and not less than that of a normal code.
UCCL_EP_INLINE void decode_lanes(const UintV& shifted, FloatV& values) {
  const FloatV normal = (FloatV)(shifted + (120u << 23));
  const FloatV subnormal = normal + normal - 0x1p-6f;
  values = normal < subnormal ? normal : subnormal;
}

// Dequantises one block by a finite scale >= 0. True if there was a NaN code: what it became is wrong.
UCCL_EP_INLINE bool decode_block(const uint8_t* codes, float scale, uint16_t* out) {
  ShortV nan = {};
  for (uint32_t i = 0; i < kFp8Block; i += kPairLanes) {
    ByteV bytes;
    std::memcpy(&bytes, codes + i, sizeof(bytes));
    const UintV pairs = (UintV) __builtin_convertvector(bytes, ShortV);
    const UintV magnitudes = pairs & 0x007F007F;
    nan |= (ShortV)magnitudes == kE4m3Nan;
    FloatV even, odd;
    decode_lanes((magnitudes & 0x7F) << 20, even);
    decode_lanes((magnitudes & kOddHalf) << 4, odd);
    const UintV low = (UintV)(even * scale);
    const UintV high = (UintV)(odd * scale);
    const UintV values = (low + 0x7FFF + (low >> 16 & 1)) >> 16 | ((high + 0x7FFF + (high >> 16 & 1)) & kOddHalf);
    const UintV result = values | (pairs & 0x00800080) << 8;
    std::memcpy(out + i, &result, sizeof(result));
  }
  return any(nan);
}

// The same for a scale of 2^exponent, if all codes are 0 or normal. True if one was not.
UCCL_EP_INLINE bool decode_block_normal(const uint8_t* codes, int32_t exponent, uint16_t* out) {
  const int16_t shift = static_cast<int16_t>((exponent + 120) * (1 << 7));
  ShortV other = {};
  for (uint32_t i = 0; i < kFp8Block; i += kPairLanes) {
    ByteV bytes;
    std::memcpy(&bytes, codes + i, sizeof(bytes));
    const ShortV code = __builtin_convertvector(bytes, ShortV);
    const ShortV magnitude = code & 0x7F;
    const ShortV nonzero = magnitude > 0;
    other |= (nonzero & (magnitude < 8)) | (magnitude == kE4m3Nan);
    const ShortV values = (((magnitude << 4) + shift) & nonzero) | (code & 0x80) << 8;
    std::memcpy(out + i, &values, sizeof(values));
  }
  return any(other);
}

UCCL_EP_INLINE void decode_any(const uint8_t* codes, float scale, uint16_t* out) {
  int32_t exponent = 0;
  if (is_pow2(scale, exponent) && !decode_block_normal(codes, exponent, out)) return;
  if (std::bit_cast<uint32_t>(scale) < kFp32Inf && !decode_block(codes, scale, out)) return;
  for (uint32_t i = 0; i < kFp8Block; ++i) out[i] = fp32_to_bf16(e4m3_to_fp32(codes[i]) * scale);
}

UCCL_EP_INLINE void encode_any(const uint16_t* x, Dtype wire, uint8_t* codes, float& scale) {
  uint16_t amax_bits = 0;  // magnitudes of floats order like their bits
  uint16_t least_bits = UINT16_MAX;  // of those that are not 0, minus 1
  for (uint32_t i = 0; i < kFp8Block; ++i) {
    const uint16_t magnitude = x[i] & 0x7FFF;
    amax_bits = std::max(amax_bits, magnitude);
    least_bits = std::min<uint16_t>(least_bits, magnitude - 1);
  }
  scale = 1.0f;
  if (amax_bits >= kBf16Inf) {
    std::memset(codes, kE4m3Nan, kFp8Block);
  } else if (amax_bits == 0) {
    for (uint32_t i = 0; i < kFp8Block; ++i) codes[i] = static_cast<uint8_t>(x[i] >> 8);  // the sign of a zero
  } else {
    scale = AllScaleRules::scale_of(wire, bf16_to_fp32(amax_bits));
    encode_by(scale, x, least_bits + 1, codes);
  }
}

}  // namespace

// The last block of a row may be shorter. Zeros behind it change neither its scale nor its other codes.
UCCL_EP_MULTIVERSION void fp8_quantize_row(const uint16_t* x_bf16, uint32_t hidden, Dtype wire, uint8_t* codes,
                                           float* scales) {
  const uint32_t whole = hidden / kFp8Block * kFp8Block, rest = hidden - whole;
  for (uint32_t i = 0; i < whole; i += kFp8Block) encode_any(x_bf16 + i, wire, codes + i, scales[i / kFp8Block]);
  if (rest == 0) return;
  uint16_t x[kFp8Block] = {};
  uint8_t out[kFp8Block];
  std::memcpy(x, x_bf16 + whole, rest * sizeof(uint16_t));
  encode_any(x, wire, out, scales[whole / kFp8Block]);
  std::memcpy(codes + whole, out, rest);
}

UCCL_EP_MULTIVERSION void fp8_dequantize_row(const uint8_t* codes, const float* scales, uint32_t hidden,
                                             uint16_t* out_bf16) {
  const uint32_t whole = hidden / kFp8Block * kFp8Block, rest = hidden - whole;
  for (uint32_t i = 0; i < whole; i += kFp8Block) decode_any(codes + i, scales[i / kFp8Block], out_bf16 + i);
  if (rest == 0) return;
  uint8_t in[kFp8Block] = {};
  uint16_t out[kFp8Block];
  std::memcpy(in, codes + whole, rest);
  decode_any(in, scales[whole / kFp8Block], out);
  std::memcpy(out_bf16 + whole, out, rest * sizeof(uint16_t));
}

namespace {

// A block of accumulators stays in registers while all rows are added to it. Behind the last whole block of a row,
// blocks have as few elements as a row's unit.
constexpr uint32_t kSumVectors = 8;
constexpr uint32_t kSumBlock = kLanes * kSumVectors;
static_assert(kHiddenUnit % kPairLanes == 0);
constexpr uint32_t whole_blocks(uint32_t hidden, uint32_t block) { return hidden / block * block; }

UCCL_EP_INLINE void add_vector(FloatV& acc, const uint16_t* in) {
  HalfV bits;
  std::memcpy(&bits, in, sizeof(bits));
  acc += (FloatV)(__builtin_convertvector(bits, UintV) << 16);
}
UCCL_EP_INLINE void add_vector(FloatV& acc, const float* in) {
  FloatV value;
  std::memcpy(&value, in, sizeof(value));
  acc += value;
}
// A lane of a comparison is all ones where it holds.
UCCL_EP_INLINE void store_vector(const FloatV& acc, uint16_t* out) {
  const UintV bits = (UintV)acc;
  const UintV nan = (UintV)((bits & 0x7FFFFFFF) > kFp32Inf);
  const UintV rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const HalfV result = __builtin_convertvector((nan & kBf16Nan) | (~nan & rounded), HalfV);
  std::memcpy(out, &result, sizeof(result));
}
UCCL_EP_INLINE void store_vector(const FloatV& acc, float* out) {
  const UintV bits = (UintV)acc;
  const UintV nan = (UintV)((bits & 0x7FFFFFFF) > kFp32Inf);
  const UintV result = (nan & kFp32Nan) | (~nan & bits);
  std::memcpy(out, &result, sizeof(result));
}

template <uint32_t kVectors, typename In, typename Out>
UCCL_EP_INLINE void sum_block(const void* const* rows, uint32_t num_rows, uint32_t begin, Out* out) {
  FloatV acc[kVectors] = {};  // +0.0, also for a single row
  for (uint32_t r = 0; r < num_rows; ++r) {
    const In* in = static_cast<const In*>(rows[r]) + begin;
#pragma GCC unroll 8
    for (uint32_t v = 0; v < kVectors; ++v) add_vector(acc[v], in + v * kLanes);
  }
#pragma GCC unroll 8
  for (uint32_t v = 0; v < kVectors; ++v) store_vector(acc[v], out + begin + v * kLanes);
}
template <typename In, typename Out>
UCCL_EP_INLINE void sum_as(const void* const* rows, uint32_t num_rows, uint32_t hidden, Out* out) {
  const uint32_t whole = whole_blocks(hidden, kSumBlock);
  for (uint32_t i = 0; i < whole; i += kSumBlock) sum_block<kSumVectors, In>(rows, num_rows, i, out);
  for (uint32_t i = whole; i < hidden; i += kHiddenUnit) sum_block<kHiddenUnit / kLanes, In>(rows, num_rows, i, out);
}

template <uint32_t kVectors>
UCCL_EP_INLINE void sum_pairs_block(const void* const* rows, uint32_t num_rows, uint32_t begin, uint16_t* out,
                                    UintV& nan) {
  FloatV even[kVectors] = {};  // +0.0
  FloatV odd[kVectors] = {};
  for (uint32_t r = 0; r < num_rows; ++r) {
    const uint16_t* in = static_cast<const uint16_t*>(rows[r]) + begin;
#pragma GCC unroll 4
    for (uint32_t v = 0; v < kVectors; ++v) {
      UintV bits;
      std::memcpy(&bits, in + v * kPairLanes, sizeof(bits));
      even[v] += (FloatV)(bits << 16);
      odd[v] += (FloatV)(bits & kOddHalf);
    }
  }
#pragma GCC unroll 4
  for (uint32_t v = 0; v < kVectors; ++v) {
    nan |= (UintV)(even[v] != even[v]) | (UintV)(odd[v] != odd[v]);
    const UintV low = (UintV)even[v];
    const UintV high = (UintV)odd[v];
    const UintV result = (low + 0x7FFF + (low >> 16 & 1)) >> 16 | ((high + 0x7FFF + (high >> 16 & 1)) & kOddHalf);
    std::memcpy(out + begin + v * kPairLanes, &result, sizeof(result));
  }
}
// As sum_as, but a NaN is only noticed: true is returned then, and the row has to be summed by sum_as. It is rare, and
// making it canonical costs as much as everything else.
UCCL_EP_INLINE bool sum_pairs(const void* const* rows, uint32_t num_rows, uint32_t hidden, uint16_t* out) {
  UintV nan = {};
  const uint32_t whole = whole_blocks(hidden, kPairBlock);
  for (uint32_t i = 0; i < whole; i += kPairBlock) sum_pairs_block<kPairVectors>(rows, num_rows, i, out, nan);
  for (uint32_t i = whole; i < hidden; i += kHiddenUnit)
    sum_pairs_block<kHiddenUnit / kPairLanes>(rows, num_rows, i, out, nan);
  return any(nan);
}

// +0.0 plus one row: a copy, but for -0.0, and for NaN as above.
UCCL_EP_INLINE bool add_to_zero(const uint16_t* in, uint32_t hidden, uint16_t* out) {
  ShortV nan = {};
#pragma GCC unroll 4
  for (uint32_t i = 0; i < hidden; i += kPairLanes) {
    ShortV bits;
    std::memcpy(&bits, in + i, sizeof(bits));
    nan |= (bits & 0x7FFF) > static_cast<int16_t>(kBf16Inf);
    bits &= bits != INT16_MIN;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
  return any(nan);
}

}  // namespace

UCCL_EP_MULTIVERSION static void sum_bf16_bf16(const void* const* rows, uint32_t n, uint32_t hidden, void* out) {
  uint16_t* const sums = static_cast<uint16_t*>(out);
  const bool nan =
      n == 1 ? add_to_zero(static_cast<const uint16_t*>(rows[0]), hidden, sums) : sum_pairs(rows, n, hidden, sums);
  if (nan) sum_as<uint16_t>(rows, n, hidden, sums);
}
UCCL_EP_MULTIVERSION static void sum_bf16_fp32(const void* const* rows, uint32_t n, uint32_t hidden, void* out) {
  sum_as<uint16_t>(rows, n, hidden, static_cast<float*>(out));
}
UCCL_EP_MULTIVERSION static void sum_fp32_bf16(const void* const* rows, uint32_t n, uint32_t hidden, void* out) {
  sum_as<float>(rows, n, hidden, static_cast<uint16_t*>(out));
}
UCCL_EP_MULTIVERSION static void sum_fp32_fp32(const void* const* rows, uint32_t n, uint32_t hidden, void* out) {
  sum_as<float>(rows, n, hidden, static_cast<float*>(out));
}

UCCL_EP_MULTIVERSION void add_weighted(const uint16_t* row_bf16, float weight, uint32_t hidden, float* sums) {
  for (uint32_t i = 0; i < hidden; ++i) sums[i] += weight * bf16_to_fp32(row_bf16[i]);
}

void sum_rows(const void* const* rows, uint32_t num_rows, Dtype in, uint32_t hidden, Dtype out, void* out_row) {
  if (in == Dtype::kBf16 && out == Dtype::kBf16) return sum_bf16_bf16(rows, num_rows, hidden, out_row);
  if (in == Dtype::kBf16) return sum_bf16_fp32(rows, num_rows, hidden, out_row);
  if (out == Dtype::kBf16) return sum_fp32_bf16(rows, num_rows, hidden, out_row);
  return sum_fp32_fp32(rows, num_rows, hidden, out_row);
}

}  // namespace uccl_ep::host
