// How many tokens the windows of an operation have, with the memory that a layout has for them.
#include <algorithm>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "gpu_layouts.h"

using namespace uccl_ep;

namespace {

// Whether the rows of a window of `tokens` fit the ring, the memory for staged rows, and a token block the window.
bool dispatch_window_fits(const gpu::DeviceRegionLayout& layout, uint64_t bytes, uint32_t tokens) {
  const uint64_t per_slot = layout.slot_bytes / bytes;
  return tokens >= gpu::kTokenBlock && tokens % gpu::kTokenBlock == 0 && tokens <= layout.max_tokens &&
         tokens * bytes <= layout.half_bytes && per_slot > 0 && (tokens + per_slot - 1) / per_slot <= layout.row_slots;
}

CLAIM("a window of a dispatch is at least a token block, and the ring to a domain holds it") {
  uint32_t tokens = 0;
  for_layouts(several_domains(), [&](const Topology&, uint64_t row_bytes, const gpu::DeviceRegionLayout& layout) {
    EXPECT(!wire_rows(row_bytes).empty());
    for (uint64_t bytes : wire_rows(row_bytes)) {
      tokens = gpu::window_tokens(layout, bytes);
      EXPECT(dispatch_window_fits(layout, bytes, tokens));
      // Control: it is as large as it can be.
      EXPECT(tokens == layout.max_tokens || !dispatch_window_fits(layout, bytes, tokens + gpu::kTokenBlock));
    }
  });
  EXPECT(tokens > 0);
}

// A stream's rows by token block: of each at most `most`.
std::vector<uint32_t> stream_of(uint64_t seed, uint32_t blocks, uint32_t most) {
  std::mt19937_64 random(seed);
  std::vector<uint32_t> rows(blocks);
  for (uint32_t& of_block : rows) of_block = static_cast<uint32_t>(random() % (most + 1));
  return rows;
}
// The most rows of a window of `blocks` token blocks that begins at a multiple of `blocks`.
uint32_t most_of(const std::vector<uint32_t>& rows, uint64_t blocks) {
  uint32_t most = 0;
  for (uint64_t first = 0; first < rows.size(); first += blocks) {
    const auto begin = rows.begin() + static_cast<int64_t>(first);
    const uint64_t end = std::min<uint64_t>(blocks, rows.size() - first);
    most = std::max(most, std::accumulate(begin, begin + static_cast<int64_t>(end), 0u));
  }
  return most;
}
gpu::SpanRows spans_of(const std::vector<uint32_t>& rows) {
  gpu::SpanRows spans;
  for (uint32_t i = 0; i < gpu::SpanRows::kLengths; ++i)
    spans.most[i] = static_cast<uint16_t>(most_of(rows, gpu::SpanRows::blocks(i)));
  return spans;
}
// Windows of a dispatch have each token once, and none has more rows than the ring, or tokens than are staged at once.
void expect_windows(const gpu::DeviceRegionLayout& layout, uint64_t bytes, const gpu::DispatchWindows& windows,
                    const std::vector<uint32_t>& rows) {
  const uint32_t tokens = static_cast<uint32_t>(rows.size()) * gpu::kTokenBlock;
  const uint64_t ring = layout.row_slots * (layout.slot_bytes / bytes);
  uint32_t count = 0;
  EXPECT_EQ(windows.begin(0), 0u);
  for (; windows.begin(count) < tokens; ++count) {
    const uint32_t begin = windows.begin(count), end = std::min(windows.begin(count + 1), tokens);
    uint64_t its = 0;
    for (uint32_t b = begin / gpu::kTokenBlock; b < end / gpu::kTokenBlock; ++b) its += rows[b];
    EXPECT(begin < end && its <= ring && (end - begin) * bytes <= layout.half_bytes);
  }
  EXPECT_EQ(windows.count(tokens), count);
}

CLAIM("later windows of a dispatch have as many tokens as rows leave room for, and no more rows than a ring") {
  uint32_t longer = 0, by_spans = 0, overflows = 0;
  auto topologies = several_domains();
  for (int domains : {16, 64}) topologies.push_back(Topology::from_labels(several(std::vector<int>(domains, 8))));
  for_layouts(topologies, [&](const Topology&, uint64_t row_bytes, const gpu::DeviceRegionLayout& layout) {
    for (uint64_t bytes : wire_rows(row_bytes))
      for (uint32_t most : {0u, 3u, 31u}) {
        const uint32_t first = gpu::window_tokens(layout, bytes), blocks = layout.max_tokens / gpu::kTokenBlock;
        const std::vector<uint32_t> rows = stream_of(most + bytes, blocks, most);
        const gpu::SpanRows spans = spans_of(rows);
        const uint32_t each = gpu::later_window_tokens(layout, bytes, most_of(rows, 1), spans);
        EXPECT(each >= first && each <= layout.max_tokens && each % gpu::kTokenBlock == 0);
        for (uint32_t begin : {first, each}) expect_windows(layout, bytes, {begin, each}, rows);
        // Of tokens that may all go to one domain windows are as long as the first one.
        EXPECT_EQ(gpu::later_window_tokens(layout, bytes, gpu::kTokenBlock, gpu::SpanRows::all()), first);
        longer += each > first;
        by_spans += each > gpu::later_window_tokens(layout, bytes, most_of(rows, 1), gpu::SpanRows::all());
        // Control: twice as long windows have too many rows, or are not staged at once.
        overflows += most_of(rows, 2 * each / gpu::kTokenBlock) > layout.row_slots * (layout.slot_bytes / bytes);
      }
  });
  EXPECT(longer > 20 && by_spans > 5 && overflows > 20);
}

// Whether a window of `tokens` fits, of so many pieces and rows a token block: its sums beside weights of all pairs.
bool combine_window_fits(const gpu::DeviceRegionLayout& layout, uint64_t bytes, uint32_t pieces, uint32_t rows,
                         uint32_t tokens) {
  const uint64_t per_slot = layout.slot_bytes / bytes;
  if (tokens < gpu::kTokenBlock || tokens % gpu::kTokenBlock != 0 || per_slot == 0) return false;
  const uint64_t weights = layout.return_slots - (layout.weights_apart ? 0 : layout.sum_slots);
  return uint64_t{tokens / gpu::kTokenBlock} * pieces * bytes <= layout.piece_bytes &&
         weights * layout.slot_bytes >= 4 * uint64_t{layout.stream_weights} &&
         (tokens / gpu::kTokenBlock * rows + per_slot - 1) / per_slot <= layout.sum_slots;
}

CLAIM("a window of a combine is at least a token block, and the ring back holds its sums and weights") {
  for_layouts(several_domains(), [](const Topology& topo, uint64_t row_bytes, const gpu::DeviceRegionLayout& layout) {
    for (uint64_t bytes : {row_bytes, row_bytes / 2})
      for (const auto& [pieces, rows] : {std::pair{1u, 1u}, {9u, 7u}, {32u, 32u}, {most_pieces(topo), 32u}}) {
        if (bytes % 256 != 0) continue;
        const uint32_t tokens = gpu::combine_window_tokens(layout, bytes, pieces, false, rows);
        const auto fits = [&](uint32_t t) { return combine_window_fits(layout, bytes, pieces, rows, t); };
        EXPECT(tokens <= layout.max_tokens && fits(tokens));
        EXPECT(gpu::combine_window_tokens(layout, bytes, pieces, true, rows) >= gpu::kTokenBlock);
        EXPECT(tokens == layout.max_tokens || !fits(tokens + gpu::kTokenBlock));
      }
  });
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
