// How a stream of rows is cut into chunks, and where a row and its weights lie in a chunk's slot. The producer, every
// reader, `fold` and `merge` cut a stream equally, because they call this with the same numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/wire.h"

namespace uccl_ep {

// One wire row, and whether the fp32 weight of each pair travels with it.
struct StreamFormat {
  uint64_t row_bytes = 0;
  bool with_weights = false;
};

// slot = num_rows wire rows, then num_pairs fp32 weights (if they travel). Rows and pairs are numbered in the stream.
struct Chunk {
  uint32_t first_row = 0;
  uint32_t num_rows = 0;
  uint32_t first_pair = 0;
  uint32_t num_pairs = 0;
  uint64_t row_bytes = 0;
  bool with_weights = false;

  uint32_t end_row() const { return first_row + num_rows; }
  uint64_t num_bytes() const { return num_rows * row_bytes + (with_weights ? uint64_t{4} * num_pairs : 0); }
  uint64_t row_offset(uint32_t row) const { return (row - first_row) * row_bytes; }
  uint64_t weight_offset(uint32_t pair) const { return num_rows * row_bytes + uint64_t{4} * (pair - first_pair); }
};

// The chunk that starts at `first_row`: as many whole rows as the slot holds. Empty at the end of the stream.
// `row_pair_begin`: [rows + 1] number of the first pair of each row. A slot holds at least one row (choose_rings).
inline Chunk cut_chunk(const std::vector<uint32_t>& row_pair_begin, uint32_t first_row, const StreamFormat& format,
                       uint64_t slot_bytes) {
  const uint32_t num_rows = static_cast<uint32_t>(row_pair_begin.size()) - 1;
  uint32_t end = first_row;
  uint64_t bytes = 0;
  while (end < num_rows) {
    const uint64_t pairs = row_pair_begin[end + 1] - row_pair_begin[end];
    bytes += format.row_bytes + (format.with_weights ? 4 * pairs : 0);
    if (bytes > slot_bytes) break;
    ++end;
  }
  return {
      first_row,        end - first_row,    row_pair_begin[first_row], row_pair_begin[end] - row_pair_begin[first_row],
      format.row_bytes, format.with_weights};
}

}  // namespace uccl_ep
