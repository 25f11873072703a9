// Where the parts of a packet of routing begin.
#include <utility>
#include <vector>

#include "backend/gpu/packet.h"
#include "claims.h"
#include "common/units.h"

using namespace uccl_ep;

namespace {

// Begin and end of the parts of a packet, in the order in which they must lie.
std::vector<std::pair<uint64_t, uint64_t>> parts_of(const gpu::PacketSizes& s) {
  const gpu::PacketParts p = gpu::packet_parts(s);
  const uint64_t group_bytes =
      sizeof(gpu::BlockRows) * gpu::BlockRows::groups((s.num_tokens + gpu::kTokenBlock - 1) / gpu::kTokenBlock);
  return {{0, sizeof(gpu::DeviceHeader)},
          {p.counts, p.counts + uint64_t{4} * s.members * s.experts_per_rank},
          {p.token_block_rows, p.token_block_rows + s.members * group_bytes},
          {p.token_block_streams, p.token_block_streams + group_bytes},
          {p.lists, p.lists + sizeof(gpu::ListEntry) * uint64_t{s.rows}},
          {p.pairs, p.pairs + sizeof(gpu::PairEntry) * uint64_t{s.pairs}},
          {p.stream_pieces, p.stream_pieces + 4 * (uint64_t{s.stream_rows} + 1)},
          {p.weights, p.weights + (s.with_weights ? uint64_t{4} * s.pairs : 0)},
          {p.end, p.end}};
}

bool well_laid_out(const gpu::PacketSizes& sizes) {
  const auto parts = parts_of(sizes);
  for (size_t i = 0; i < parts.size(); ++i)
    if (parts[i].first % 16 != 0 || (i > 0 && parts[i].first < parts[i - 1].second)) return false;
  return true;
}

CLAIM("the parts of a packet are aligned and do not overlap") {
  for (uint32_t members : {1u, 3u, 64u})
    for (uint32_t tokens : {0u, 1u, 31u, 32u, 33u, gpu::kMaxTokens})
      for (uint32_t pairs : {0u, 1u, 5u, gpu::kMaxTokens * gpu::kPairsPerToken})
        for (uint32_t rows : {0u, 1u, members * tokens})
          for (bool with_weights : {false, true}) {
            EXPECT(well_laid_out({members, 3, tokens, rows, pairs, tokens, with_weights}));
            EXPECT(well_laid_out({members, 256, tokens, rows, pairs, 0, with_weights}));
          }
  // Control: by 32 bits the pairs of the largest would begin before the lists end.
  EXPECT(gpu::packet_parts({64, 4, gpu::kMaxTokens, 64 * gpu::kMaxTokens, 1u << 31, 0, true}).end >= 1ull << 32);
}

CLAIM("with a known plan a packet is its header and the weights") {
  const uint64_t header = round_up(sizeof(gpu::DeviceHeader), 16);
  for (uint32_t pairs : {0u, 1u, 4u, 1000u, 1u << 21}) {
    gpu::PacketSizes sizes;
    sizes.pairs = pairs;
    sizes.with_weights = true;
    const gpu::PacketParts parts = gpu::packet_parts(sizes);
    EXPECT_EQ(parts.weights, header);
    EXPECT_EQ(parts.end, header + round_up(4 * uint64_t{pairs}, 16));
    sizes.with_weights = false;
    EXPECT_EQ(gpu::packet_parts(sizes).end, header);
  }
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
