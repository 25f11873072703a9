// How the elements of a row lie on the wire: codes, then perhaps scales. Declared once, for host, kernels and Python.
// A new format is an entry here and its numerics: backend/host/numerics.cc, backend/gpu/{stage,place}.cuh,
// oracle/fp8.py.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/units.h"

namespace uccl_ep {

// The first two are of tensors, too.
enum class Dtype : uint32_t {
  kBf16 = 1,
  kFp32 = 2,
  kFp8 = 3,      // e4m3, scales are powers of two
  kFp8Fp32 = 4,  // e4m3, any scales
};
constexpr uint32_t kFp8Block = 128;

struct RowFormat {
  Dtype id;
  const char* name;      // of its codes, as users and errors say it
  const char* scale;     // as users say it; "": there is none
  uint32_t code_bits;    // of an element
  uint32_t block;        // neighbouring elements with one scale
  uint32_t scale_bytes;  // 0: there is none

  constexpr uint64_t code_bytes(uint64_t hidden) const { return hidden * code_bits / 8; }
  constexpr uint64_t num_scales(uint64_t hidden) const { return scale_bytes == 0 ? 0 : hidden / block; }
  // Scales are filled up to 16 bytes, so that a row is one aligned bulk copy.
  constexpr uint64_t row_bytes(uint64_t hidden) const {
    return code_bytes(hidden) + round_up(num_scales(hidden) * scale_bytes, 16);
  }
};
// In the order of their ids.
inline constexpr RowFormat kRowFormats[] = {
    {Dtype::kBf16, "bf16", "", 16, 1, 0},
    {Dtype::kFp32, "fp32", "", 32, 1, 0},
    {Dtype::kFp8, "fp8", "pow2", 8, kFp8Block, 4},
    {Dtype::kFp8Fp32, "fp8", "fp32", 8, kFp8Block, 4},
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

constexpr bool is_quantised(Dtype wire) { return row_format(wire).scale_bytes > 0; }
constexpr uint64_t wire_row_bytes(Dtype wire, uint64_t hidden) { return row_format(wire).row_bytes(hidden); }
inline const char* dtype_name(Dtype dtype) { return row_format(dtype).name; }
// Bytes of a tensor element. Usable in kernels, which cannot read the table.
constexpr uint32_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : dtype == Dtype::kBf16 ? 2 : 1; }
static_assert(dtype_bytes(Dtype::kBf16) * 8 == row_format(Dtype::kBf16).code_bits &&
              dtype_bytes(Dtype::kFp32) * 8 == row_format(Dtype::kFp32).code_bits);

// Of one row.
struct RowShape {
  uint32_t code_bytes = 0;  // its scales follow
  uint32_t num_scales = 0;  // 0: it is not quantised
  uint32_t bytes = 0;

  constexpr uint32_t scale_bytes() const { return num_scales * static_cast<uint32_t>(sizeof(float)); }
};
constexpr RowShape row_shape(Dtype wire, uint64_t hidden) {
  const RowFormat& format = row_format(wire);
  return {static_cast<uint32_t>(format.code_bytes(hidden)), static_cast<uint32_t>(format.num_scales(hidden)),
          static_cast<uint32_t>(format.row_bytes(hidden))};
}

}  // namespace uccl_ep
