// The kernels about a caller's top-k routing, beside loops that say the same.
#include <random>
#include <set>

#include "backend/gpu/topk.h"
#include "claims.h"
#include "lanes.h"

namespace uccl_ep {
namespace {

constexpr int64_t kNone = -1;

struct Case {
  uint32_t tokens, width, ranks, experts_per_rank, ranks_of_node = 0;
  bool strange = false;  // some numbers are no expert's
  uint32_t experts() const { return ranks * experts_per_rank; }
  uint32_t nodes() const { return ranks_of_node == 0 ? 0 : ranks / ranks_of_node; }
};
// Experts may come twice in a token.
std::vector<int64_t> drawn_routing(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> topk(uint64_t{c.tokens} * c.width);
  for (int64_t& expert : topk) {
    expert = static_cast<int64_t>(random() % (c.experts() + 1)) - 1;
    if (c.strange && random() % 5 == 0) expert += static_cast<int64_t>(random() << 32);
  }
  return topk;
}
template <typename Args>
void launch(const Args& args) {
  gpu::must(gpu::launch_topk(args, nullptr), "top-k routing");
  gpu::synchronize(gpu::StreamHandle{});
}

void expect_layout(const Case& c, uint64_t seed) {
  const std::vector<int64_t> topk = drawn_routing(c, seed);
  std::vector<uint32_t> counts(c.ranks + c.nodes() + c.experts()), wanted(counts.size());
  std::vector<uint8_t> in_rank(uint64_t{c.tokens} * c.ranks, 7), wanted_in_rank(in_rank.size());
  for (uint32_t token = 0; token < c.tokens; ++token) {
    std::set<size_t> counted;
    for (uint32_t k = 0; k < c.width; ++k) {
      const int64_t given = topk[token * c.width + k];
      if (given < 0 || given >= c.experts()) continue;
      const auto expert = static_cast<uint32_t>(given);
      const uint32_t rank = expert / c.experts_per_rank;
      wanted_in_rank[token * c.ranks + rank] = 1;
      counted.insert({rank, size_t{c.ranks} + c.nodes() + expert});
      if (c.nodes() > 0) counted.insert(c.ranks + rank / c.ranks_of_node);
    }
    for (size_t i : counted) ++wanted[i];
  }
  launch(gpu::TopkLayout{topk.data(), c.tokens, c.width, c.experts(), c.ranks, c.ranks_of_node, counts.data(),
                         reinterpret_cast<bool*>(in_rank.data())});
  EXPECT(counts == wanted && in_rank == wanted_in_rank);
}

CLAIM("a token counts once for each of its ranks, nodes and experts, however often it names them") {
  uint64_t seed = 0;
  for (uint32_t tokens : {0u, 1u, 129u})
    for (uint32_t width : {0u, 1u, 8u, 33u}) {
      expect_layout({tokens, width, 1, 3}, ++seed);
      expect_layout({tokens, width, 8, 5}, ++seed);
      expect_layout({tokens, width, 16, 2, 8}, ++seed);
    }
}
CLAIM("so it does where there are more ranks and experts than a block can count, and more tokens than threads") {
  expect_layout({300, 8, 2048, 6, 8}, 1);
  expect_layout({140'000, 1, 2, 2}, 2);
}
CLAIM("numbers that are no expert's do not count") {
  expect_layout({200, 8, 8, 4, 0, true}, 1);
  expect_layout({200, 8, 16, 300, 8, true}, 2);
}

void expect_there_and_back(const Case& c, bool has_weights, uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::vector<int64_t> topk = drawn_routing(c, seed);
  std::vector<uint32_t> weights(topk.size() + 1);
  for (uint32_t& weight : weights) weight = static_cast<uint32_t>(random());
  const uint32_t row_words = gpu::topk_words(c.width, has_weights), rank = c.ranks - 1;
  EXPECT_EQ(row_words % 2, 0u);
  // The last word is nobody's.
  std::vector<uint32_t> words(uint64_t{c.tokens} * row_words + 1, 77), wanted(words);
  for (uint32_t token = 0; token < c.tokens; ++token) {
    uint32_t* const row = &wanted[uint64_t{token} * row_words];
    std::fill(row, row + row_words, 0);
    row[0] = rank + 1, row[1] = token;
    for (uint32_t k = 0; k < c.width; ++k) {
      const auto expert = static_cast<uint64_t>(topk[token * c.width + k] + 1);
      row[2 + 2 * k] = static_cast<uint32_t>(expert), row[3 + 2 * k] = static_cast<uint32_t>(expert >> 32);
      if (has_weights) row[2 + 2 * c.width + k] = weights[token * c.width + k];
    }
  }
  launch(gpu::TopkPack{topk.data(), has_weights ? weights.data() : nullptr, rank, c.tokens, c.width, words.data()});
  EXPECT(words == wanted);

  std::vector<int64_t> experts(topk.size() + 1, 77), local(experts);
  std::vector<uint32_t> found(topk.size() + 1, 77), kept(found);
  const int64_t first = int64_t{rank} * c.experts_per_rank, end = first + c.experts_per_rank;
  for (size_t i = 0; i < topk.size(); ++i) {
    const bool is_local = topk[i] >= first && topk[i] < end;
    local[i] = is_local ? topk[i] - first : kNone;
    if (has_weights) kept[i] = is_local ? weights[i] : 0;
  }
  const gpu::TopkUnpack all{words.data(),       c.tokens,  c.width,        static_cast<uint32_t>(first),
                            c.experts_per_rank, row_words, experts.data(), has_weights ? found.data() : nullptr};
  launch(all);
  EXPECT(experts == local && found == kept);
  // Experts alone, whether weights travelled or not.
  std::fill(experts.begin(), experts.end(), 77);
  gpu::TopkUnpack alone = all;
  alone.weights = nullptr;
  launch(alone);
  EXPECT(experts == local && found == kept);
}

CLAIM("metadata holds where a row came from, its experts and weights, and gives back what is this rank's") {
  uint64_t seed = 10;
  for (bool has_weights : {false, true})
    for (uint32_t tokens : {0u, 1u, 130u})
      for (uint32_t width : {0u, 1u, 7u, 8u})
        for (bool strange : {false, true})
          expect_there_and_back({tokens, width, 4, 3, 0, strange}, has_weights, ++seed);
}
CLAIM("a row of zeros, which nobody has sent, names no expert") {
  const std::vector<uint32_t> words(gpu::topk_words(2, true));
  int64_t experts[] = {5, 5};
  uint32_t weights[] = {5, 5};
  launch(gpu::TopkUnpack{words.data(), 1, 2, 0, 4, gpu::topk_words(2, true), experts, weights});
  EXPECT(experts[0] == kNone && experts[1] == kNone && weights[0] == 0 && weights[1] == 0);
}

}  // namespace
}  // namespace uccl_ep

int main(int argc, char** argv) { return claims::main(argc, argv); }
