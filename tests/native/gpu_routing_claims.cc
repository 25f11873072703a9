// Claims about routing with either kind of tiles: by tables (few ranks) and by masks (many). Both leave the same bytes,
// which are those of an oracle.
#include "backend/gpu/exchange.cuh"
#include "backend/gpu/shares.cuh"
#include "routing_run.h"

namespace uccl_ep {
namespace {

// Domains of these sizes.
std::vector<int> domains_of(const std::vector<int>& sizes) {
  std::vector<int> labels;
  for (size_t domain = 0; domain < sizes.size(); ++domain)
    labels.insert(labels.end(), static_cast<size_t>(sizes[domain]), static_cast<int>(domain));
  return labels;
}
std::vector<int> eights(size_t count, int rest = 0) {
  std::vector<int> sizes(count, 8);
  if (rest > 0) sizes.push_back(rest);
  return domains_of(sizes);
}
std::vector<int> interleaved(int ranks, int domains) {
  std::vector<int> labels;
  for (int rank = 0; rank < ranks; ++rank) labels.push_back(rank % domains);
  return labels;
}

template <typename Tile>
void like_oracle(const RoutingRun& run, const RoutingInput& in, RoutingMemory& memory) {
  RoutingMemory expected(run, in);
  expected.write_expected();
  gpu_on_cpu::disturb(run.seed);
  memory.route<Tile>();
  gpu_on_cpu::disturb(0);
  memory.expect_like(expected);
}
void by_masks(const RoutingRun& run) {
  const RoutingInput in(run);
  RoutingMemory memory(run, in);
  like_oracle<gpu::MaskTile>(run, in, memory);
}
void by_both(const RoutingRun& run) {
  const RoutingInput in(run);
  RoutingMemory tables(run, in), masks(run, in);
  like_oracle<gpu::TableTile>(run, in, tables);
  like_oracle<gpu::MaskTile>(run, in, masks);
  masks.expect_equal(tables);
}

constexpr uint32_t kTokens[] = {0, 1, 63, 64, 65};

CLAIM("few ranks: tables and masks leave the oracle's bytes for any number of tokens and experts a token") {
  uint64_t seed = 0;
  for (const std::vector<int>& domain_of : {domains_of({3, 4, 1}), interleaved(8, 3), interleaved(8, 8)})
    for (uint32_t tokens : kTokens)
      for (uint32_t topk : {1u, 8u, 32u})
        by_both({.domain_of = domain_of,
                 .rank = static_cast<int>(seed % 8),
                 .experts_per_rank = 5,
                 .num_tokens = tokens,
                 .topk = topk,
                 .seed = ++seed});
}
CLAIM("few ranks: so they do where all pairs of all tokens go to one rank, or none goes anywhere") {
  for (int rank = 0; rank < 8; ++rank)
    for (uint32_t topk : {1u, 8u, 32u}) {
      RoutingRun run{.domain_of = interleaved(8, 3),
                     .rank = 2,
                     .experts_per_rank = 32,
                     .topk = topk,
                     .one_in_dropped = 0,
                     .only_rank = rank,
                     .seed = topk};
      by_both(run);
      run.one_in_dropped = 1;
      if (rank == 0) by_both(run);
    }
}
CLAIM("few ranks: so they do with maps, of few experts a token, of more than 32, and of all") {
  uint64_t seed = 100;
  for (uint32_t tokens : kTokens)
    for (uint32_t one_in : {1u, 2u, 20u})
      by_both({.domain_of = interleaved(8, 3),
               .rank = static_cast<int>(seed % 8),
               .experts_per_rank = 9,
               .num_tokens = tokens,
               .topk = 0,
               .map_one_in = one_in,
               .seed = ++seed});
}
CLAIM("blocks that keep several tiles, or read each twice, leave the oracle's bytes") {
  uint64_t seed = 200;
  for (uint32_t blocks : {1u, 2u, 3u})
    for (uint32_t kept : {1u, 2u, 3u})
      for (uint32_t topk : {0u, 4u})
        by_both({.domain_of = interleaved(10, 4),
                 .rank = 7,
                 .experts_per_rank = 2,
                 .num_tokens = 300,
                 .topk = topk,
                 .map_one_in = 4,
                 .blocks = blocks,
                 .warps = 3,
                 .kept_tiles = kept,
                 .seed = ++seed});
}
CLAIM("65 and 129 ranks: tables and masks leave the oracle's bytes") {
  uint64_t seed = 300;
  for (const std::vector<int>& domain_of : {eights(8, 1), interleaved(65, 13), eights(16, 1), interleaved(129, 43)})
    for (uint32_t topk : {0u, 1u, 8u})
      by_both({.domain_of = domain_of,
               .rank = static_cast<int>(domain_of.size()) - 1,
               .experts_per_rank = 2,
               .num_tokens = 65,
               .topk = topk,
               .map_one_in = 9,
               .seed = ++seed});
}
CLAIM("headers tell the most rows of spans of token blocks, or nothing where nobody asks") {
  uint64_t seed = 400;
  for (uint32_t tokens : {1u, 127u, 129u, 1000u, 2050u})
    for (const std::vector<int>& domain_of : {domains_of({3, 4, 1}), interleaved(80, 40)}) {
      RoutingRun run{.domain_of = domain_of,
                     .rank = 5,
                     .num_tokens = tokens,
                     .topk = 2,
                     .blocks = 3,
                     .kept_tiles = 4,
                     .seed = ++seed};
      by_both(run);
      run.tells_spans = false;
      by_both(run);
    }
}
CLAIM("one domain has tables, and the oracle's bytes") {
  const RoutingRun run{.domain_of = std::vector<int>(72, 0), .rank = 5, .num_tokens = 130, .blocks = 2};
  const RoutingInput in(run);
  RoutingMemory memory(run, in);
  like_oracle<gpu::TableTile>(run, in, memory);
  EXPECT(gpu::tile_kind(memory.map()) == TileKind::kTables);
}
CLAIM("600 ranks have masks, which leave the oracle's bytes") {
  for (uint32_t topk : {0u, 8u, 32u})
    by_masks({.domain_of = eights(75), .rank = 333, .num_tokens = 65, .topk = topk, .map_one_in = 70, .seed = topk});
}
CLAIM("2,048 ranks, of 256 domains or of as many, have masks, which leave the oracle's bytes") {
  for (const auto& [domain_of, experts] : {std::pair{eights(256), 6u}, {interleaved(2048, 2048), 2u}}) {
    const RoutingRun run{.domain_of = domain_of, .rank = 1000, .experts_per_rank = experts, .num_tokens = 65};
    const RoutingInput in(run);
    RoutingMemory memory(run, in);
    EXPECT(gpu::tile_kind(memory.map()) == TileKind::kMasks);
    EXPECT(gpu::least_shared_bytes(memory.map()) <= gpu::kMostSharedBytes - gpu::kStaticSharedBytes);
    like_oracle<gpu::MaskTile>(run, in, memory);
  }
}

// By so many blocks and warps: the i-th of `count` sources has 37 * i % 90 elements.
void spread_sources(uint32_t blocks, uint32_t warps, uint32_t count) {
  std::vector<uint32_t> begin(count + 1, 0);
  for (uint32_t i = 0; i < count; ++i) begin[i + 1] = begin[i] + 37 * i % 90;
  std::vector<std::atomic<uint32_t>> by_one(begin[count]), behind(begin[count]), turns(blocks * warps);
  std::atomic<uint32_t> wrong{0};
  gpu_on_cpu::run_grid({blocks, warps * gpu::kWarp}, [&] {
    const gpu::Crew crew = gpu::Crew::of(1, 0, warps);
    const gpu::Spread spread = gpu::Spread::over(crew, blocks);
    spread.each(count, [&](uint32_t i, uint32_t first, uint32_t step) {
      if (crew.lane() == 0) turns[spread.warp].fetch_add(1);
      for (uint32_t n = first; n < begin[i + 1] - begin[i]; n += step) by_one[begin[i] + n].fetch_add(1);
    });
    const auto size_of = [&](uint32_t i) { return begin[i + 1] - begin[i]; };
    const uint32_t end =
        spread.each_behind(count, size_of, [&](uint32_t i, uint32_t at, uint32_t first, uint32_t step) {
          if (at != begin[i]) wrong.fetch_add(1);
          for (uint32_t n = first; n < size_of(i); n += step) behind[begin[i] + n].fetch_add(1);
        });
    if (end != begin[count]) wrong.fetch_add(1);
  });
  EXPECT_EQ(wrong.load(), 0u);
  const auto once = [](const auto& counts) {
    return std::ranges::all_of(counts, [](const auto& n) { return n == 1; });
  };
  EXPECT(once(by_one) && once(behind));
  for (const auto& n : turns) EXPECT(n <= (count + blocks * warps - 1) / (blocks * warps));
}
CLAIM("warps share sources: each element is one lane's, and no warp has more turns than its share") {
  for (const auto& [blocks, warps] : {std::pair{1u, 1u}, {3u, 2u}, {5u, 7u}})
    for (uint32_t count : {0u, 1u, 2u, 5u, 31u, 32u, 33u, 70u}) spread_sources(blocks, warps, count);
}

}  // namespace
}  // namespace uccl_ep

int main(int argc, char** argv) { return claims::main(argc, argv); }
