// How the elements of a row lie on the wire: codes, then perhaps scales, then perhaps metadata, words of the caller's.
// Declared once, for host, kernels and Python.
// A new format of e4m3 codes is an entry in `kRowFormats`, its rule in `AllScaleRules`, the same in oracle/fp8.py, and
// an enumerator in c_api/uccl_ep.h. Claims of GPU engines run every entry.
#pragma once

#include <bit>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "common/units.h"

namespace uccl_ep {

// The first two are of tensors, too.
enum class Dtype : uint32_t {
  kBf16 = 1,
  kFp32 = 2,
  kFp8 = 3,      // e4m3, scales are powers of two
  kFp8Fp32 = 4,  // e4m3, any scales
  kMxfp8 = 5,    // e4m3, an exponent (UE8M0) for 32 elements, four in a word: only rows that the caller quantised
};
constexpr uint32_t kFp8Block = 128;
constexpr uint32_t kHiddenUnit = 32;  // a row has a multiple of so many elements. Its last block may be shorter
constexpr uint32_t kMetadataBytes = 4;  // of a word

// What an element is on the wire.
enum class CodeKind : uint32_t { kBf16, kFp32, kE4m3 };
struct RowFormat {
  Dtype id;
  const char* name;      // of its codes, as users and errors say it
  const char* scale;     // as users say it; "": there is none
  CodeKind code;
  uint32_t code_bits;    // of an element
  uint32_t block;        // neighbouring elements with one scale
  uint32_t scale_bytes;  // 0: there is none

  constexpr uint64_t code_bytes(uint64_t hidden) const { return hidden * code_bits / 8; }
  constexpr uint64_t num_scales(uint64_t hidden) const { return scale_bytes == 0 ? 0 : (hidden + block - 1) / block; }
  // Filled up to 16 bytes, so that a row is one aligned bulk copy.
  constexpr uint64_t row_bytes(uint64_t hidden, uint64_t num_metadata = 0) const {
    return code_bytes(hidden) + round_up(num_scales(hidden) * scale_bytes + num_metadata * kMetadataBytes, 16);
  }
};
// In the order of their ids.
inline constexpr RowFormat kRowFormats[] = {
    {Dtype::kBf16, "bf16", "", CodeKind::kBf16, 16, 1, 0},
    {Dtype::kFp32, "fp32", "", CodeKind::kFp32, 32, 1, 0},
    {Dtype::kFp8, "fp8", "pow2", CodeKind::kE4m3, 8, kFp8Block, 4},
    {Dtype::kFp8Fp32, "fp8", "fp32", CodeKind::kE4m3, 8, kFp8Block, 4},
    {Dtype::kMxfp8, "mxfp8", "", CodeKind::kE4m3, 8, kFp8Block, 4},  // a word of exponents for each block
};
// Host only. Kernels get a RowShape.
constexpr const RowFormat& row_format(Dtype id) { return kRowFormats[static_cast<uint32_t>(id) - 1]; }
// nullptr: there is none.
constexpr const RowFormat* find_row_format(std::string_view name, std::string_view scale) {
  for (const RowFormat& format : kRowFormats)
    if (name == format.name && scale == format.scale) return &format;
  return nullptr;
}
constexpr bool are_in_order() {
  uint32_t number = 0;
  for (const RowFormat& format : kRowFormats)
    if (static_cast<uint32_t>(format.id) != ++number) return false;
  return true;
}
static_assert(are_in_order());
constexpr bool have_known_codes() {
  for (const RowFormat& format : kRowFormats)
    if (format.scale_bytes > 0 &&
        (format.code != CodeKind::kE4m3 || format.block != kFp8Block || format.scale_bytes != 4))
      return false;
  return true;
}
static_assert(have_known_codes(),
              "other codes, blocks or scales need functions of their own in backend/host/numerics.cc, "
              "backend/gpu/numerics.cuh, write_row.cuh, place.cuh and low_latency_dispatch.cu, and in oracle/fp8.py, "
              "settings/checks.py and core/routing.py: these take e4m3 in such blocks for granted");

// ---- numbers that are not finite ------------------------------------------------------------------------------------
// A NaN that is rounded or encoded has one bit pattern (contracts 2 and 3).
constexpr uint32_t kFp32Inf = 0x7F800000u;
constexpr uint32_t kFp32Nan = 0x7FC00000u;
constexpr uint16_t kBf16Inf = 0x7F80;
constexpr uint16_t kBf16Nan = 0x7FC0;
constexpr uint8_t kE4m3Nan = 0x7F;

// ---- scales ---------------------------------------------------------------------------------------------------------
// A rule gives the scale of a block by its largest magnitude, finite and above 0. Host and kernels have it from here,
// so it consists of operations that IEEE 754 defines to the last bit. Scales lie within 2^-117 .. 2^119: the least code
// times the least scale is still normal, the largest code times the largest scale still finite.
constexpr float kE4m3Max = 448.0f;  // 1.75 * 2^8
constexpr int32_t kLeastScaleExponent = -117, kLargestScaleExponent = 119;

struct Pow2Scales {
  static constexpr Dtype kWire = Dtype::kFp8;
  static constexpr bool kArePow2 = true;  // the inverse is exact
  // 2^ceil(log2(amax / 448)): amax's exponent minus 8, plus one if its mantissa is above 1.75.
  static constexpr float of(float amax) {
    const uint32_t bits = std::bit_cast<uint32_t>(amax);
    const int32_t exponent = static_cast<int32_t>(bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000 ? 1 : 0);
    const int32_t below = exponent < kLargestScaleExponent ? exponent : kLargestScaleExponent;
    const int32_t clamped = below > kLeastScaleExponent ? below : kLeastScaleExponent;
    return std::bit_cast<float>(static_cast<uint32_t>(clamped + 127) << 23);
  }
};
struct Fp32Scales {
  static constexpr Dtype kWire = Dtype::kFp8Fp32;
  static constexpr bool kArePow2 = false;
  static constexpr float of(float amax) {
    const float scale = amax / kE4m3Max;
    return scale > 0x1p-117f ? scale : 0x1p-117f;
  }
};
template <typename... Rules>
struct ScaleRules {
  static constexpr bool has(Dtype wire) { return ((wire == Rules::kWire) || ...); }
  static constexpr bool has_pow2(Dtype wire) { return ((Rules::kArePow2 && wire == Rules::kWire) || ...); }
  static constexpr float scale_of(Dtype wire, float amax) {
    float scale = 1.0f;
    static_cast<void>(((wire == Rules::kWire && (scale = Rules::of(amax), true)) || ...));
    return scale;
  }
};
using AllScaleRules = ScaleRules<Pow2Scales, Fp32Scales>;
constexpr bool have_rules() {
  for (const RowFormat& format : kRowFormats)
    if ((format.scale_bytes > 0 && format.id != Dtype::kMxfp8) != AllScaleRules::has(format.id)) return false;
  return true;
}
static_assert(have_rules(), "a format needs a rule for its scales if rows are quantised here");

constexpr bool is_quantised(Dtype wire) { return row_format(wire).scale_bytes > 0; }
constexpr uint64_t wire_row_bytes(Dtype wire, uint64_t hidden, uint64_t num_metadata = 0) {
  return row_format(wire).row_bytes(hidden, num_metadata);
}
// Of what came from another rank, too.
inline const char* dtype_name(Dtype dtype) {
  const auto id = static_cast<uint32_t>(dtype);
  return id >= 1 && id <= std::size(kRowFormats) ? row_format(dtype).name : "an unknown dtype";
}
// Bytes of a tensor element. Usable in kernels, which cannot read the table.
constexpr uint32_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : dtype == Dtype::kBf16 ? 2 : 1; }
static_assert(dtype_bytes(Dtype::kBf16) * 8 == row_format(Dtype::kBf16).code_bits &&
              dtype_bytes(Dtype::kFp32) * 8 == row_format(Dtype::kFp32).code_bits);

// Of one row.
struct RowShape {
  uint32_t code_bytes = 0;    // scales follow, then metadata
  uint32_t num_scales = 0;    // 0: it is not quantised
  uint32_t num_metadata = 0;  // words
  uint32_t bytes = 0;

  constexpr uint32_t scale_bytes() const { return num_scales * static_cast<uint32_t>(sizeof(float)); }
  constexpr uint32_t metadata_bytes() const { return num_metadata * kMetadataBytes; }
  constexpr uint32_t metadata_begin() const { return code_bytes + scale_bytes(); }
};
constexpr RowShape row_shape(Dtype wire, uint64_t hidden, uint32_t num_metadata = 0) {
  const RowFormat& format = row_format(wire);
  return {static_cast<uint32_t>(format.code_bytes(hidden)), static_cast<uint32_t>(format.num_scales(hidden)),
          num_metadata, static_cast<uint32_t>(format.row_bytes(hidden, num_metadata))};
}

}  // namespace uccl_ep
