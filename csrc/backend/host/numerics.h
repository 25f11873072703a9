// The arithmetic of contracts 2 and 3 on the host, vectorised. It matches reference.py bit for bit.
#pragma once

#include <cstdint>

#include "layout/wire.h"

namespace uccl_ep::host {

// `codes`: hidden e4m3 bytes, `scales`: ceil(hidden / 128) fp32. `wire`: a format with scales.
void fp8_quantize_row(const uint16_t* x_bf16, uint32_t hidden, Dtype wire, uint8_t* codes, float* scales);
void fp8_dequantize_row(const uint8_t* codes, const float* scales, uint32_t hidden, uint16_t* out_bf16);

// sums += weight * row, for each element; the product is rounded, too.
void add_weighted(const uint16_t* row_bf16, float weight, uint32_t hidden, float* sums);
// out = round(+0.0 + rows[0] + rows[1] + ...) in fp32, in this order, rounded once. All rows have dtype `in`.
// Several inputs of different dtypes are summed by a RowSum.
void sum_rows(const void* const* rows, uint32_t num_rows, Dtype in, uint32_t hidden, Dtype out, void* out_row);

}  // namespace uccl_ep::host
