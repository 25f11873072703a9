// What a rank routes: the caller's tensors, drawn from a seed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace uccl_ep {

// What a rank routes, and how.
struct RoutingRun {
  std::vector<int> domain_of;
  int rank = 0;
  uint32_t experts_per_rank = 1, num_tokens = 65;
  uint32_t topk = 8;  // 0: a map
  uint32_t map_one_in = 2;  // of a map's entries are routed
  uint32_t one_in_dropped = 8;  // of the columns of top-k; 0: none
  int only_rank = -1;  // all pairs go there
  uint32_t blocks = 1, warps = 2, kept_tiles = 1;
  bool tells_spans = true;
  uint64_t seed = 1;

  uint32_t num_ranks() const { return static_cast<uint32_t>(domain_of.size()); }
  uint32_t num_experts() const { return experts_per_rank * num_ranks(); }
  uint32_t width() const { return topk == 0 ? num_experts() : topk; }
};

// The caller's tensors.
struct RoutingInput {
  std::vector<int64_t> topk;
  std::vector<uint8_t> map;
  std::vector<float> weights;

  explicit RoutingInput(const RoutingRun& run) {
    std::mt19937_64 random(run.seed);
    const uint64_t places = uint64_t{run.num_tokens} * run.width();
    const auto chance = [&](uint32_t one_in) { return one_in != 0 && random() % one_in == 0; };
    for (uint64_t i = 0; i < places; ++i) weights.push_back(static_cast<float>(random() % 1000) / 8);
    if (run.topk == 0) {
      for (uint64_t i = 0; i < places; ++i) map.push_back(chance(run.map_one_in) ? 1 + random() % 255 : 0);
    }
    for (uint32_t t = 0; t < run.num_tokens && run.topk != 0; ++t) {
      std::vector<int64_t> experts;
      const uint32_t first = run.only_rank < 0 ? 0 : static_cast<uint32_t>(run.only_rank) * run.experts_per_rank;
      const uint32_t all = run.only_rank < 0 ? run.num_experts() : run.experts_per_rank;
      while (experts.size() < run.topk) {
        const auto expert = static_cast<int64_t>(first + random() % all);
        if (std::find(experts.begin(), experts.end(), expert) == experts.end()) experts.push_back(expert);
      }
      for (int64_t expert : experts) topk.push_back(chance(run.one_in_dropped) ? -1 : expert);
    }
    topk.reserve(1);  // nothing has an address, too
    map.reserve(1);
    weights.reserve(1);
  }
};

}  // namespace uccl_ep
