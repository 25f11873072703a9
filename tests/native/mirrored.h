// Dispatches and combines of a domain whose group is its mirror images (mirror.h), against plain loops over the inputs
// of all ranks: rows of small integers, of which every sum is exact, in whatever order.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "slot_runs.h"

namespace uccl_ep {

// What the members of domain 0 have to get. BF16, expert-major.
class MirroredGroup {
 public:
  explicit MirroredGroup(const CudaRun& run) : run_(run) {
    for (int rank = 0; rank < run.num_ranks(); ++rank) {
      RankInput& in = inputs_.emplace_back(run, rank, 0);
      std::mt19937_64 random(static_cast<uint64_t>(run.origin_of(rank)));
      for (uint64_t i = 0; i < in.num_tokens * run.hidden; ++i) set(in.x, i, static_cast<float>(random() % 15) - 7);
    }
  }
  const RankInput& input(int member) const { return inputs_[static_cast<size_t>(member)]; }

  Dispatched dispatched(int member) const {
    Dispatched wanted;
    for (uint32_t local = 0; local < run_.experts_per_rank; ++local) {
      uint64_t count = 0;
      for (const RankInput& in : inputs_)
        for (uint64_t pair = 0; pair < in.num_tokens * run_.topk; ++pair)
          if (expert_at(in, pair) == int64_t{member} * run_.experts_per_rank + local) {
            const auto row = in.x.begin() + static_cast<ptrdiff_t>(pair / run_.topk * run_.hidden * 2);
            wanted.rows.insert(wanted.rows.end(), row, row + run_.hidden * 2);
            wanted.weights.push_back(in.weights[pair]);
            ++count;
          }
      wanted.counts.push_back(count);
    }
    return wanted;
  }
  // Of rows that the experts have scaled.
  Combined combined(int member) const {
    const RankInput& in = input(member);
    Combined wanted;
    wanted.out = in.x;
    for (uint64_t token = 0; token < in.num_tokens; ++token) {
      float sum = static_cast<float>(in.num_tokens % 3);  // biases
      for (uint64_t pair = token * run_.topk; pair < (token + 1) * run_.topk; ++pair) {
        const float scale = scale_of(expert_at(in, pair));
        sum += scale;
        wanted.weights.push_back(scale == 0 ? 0 : in.weights[pair] * scale);
      }
      scale_row(wanted.out, token, sum);
    }
    return wanted;
  }
  // What the experts do to their rows and weights: a sum tells which experts it is of.
  void scale(int member, Dispatched& rows) const {
    uint64_t row = 0;
    for (uint32_t local = 0; local < run_.experts_per_rank; ++local)
      for (uint64_t left = rows.counts[local]; left > 0; --left, ++row) {
        const float scale = scale_of(int64_t{member} * run_.experts_per_rank + local);
        rows.weights[row] *= scale;
        scale_row(rows.rows, row, scale);
      }
  }

 private:
  // Mirror images scale alike.
  float scale_of(int64_t expert) const {
    return expert < 0 ? 0 : 1 + static_cast<float>(expert % (run_.num_running() * run_.experts_per_rank) % 3);
  }
  void scale_row(std::vector<uint8_t>& rows, uint64_t row, float factor) const {
    for (uint64_t i = row * run_.hidden; i < (row + 1) * run_.hidden; ++i) {
      uint16_t bits;
      std::memcpy(&bits, &rows[2 * i], sizeof(bits));
      set(rows, i, factor * value_of(bits));
    }
  }
  static void set(std::vector<uint8_t>& rows, uint64_t i, float value) {
    const uint16_t bits = rounded(value);
    std::memcpy(&rows[2 * i], &bits, sizeof(bits));
  }

  const CudaRun run_;
  std::vector<RankInput> inputs_;  // of all ranks
};

// A new plan, and a known one.
inline void try_mirrored(const CudaRun& run) {
  gpu_on_cpu::disturb(run.seed);
  const MirroredGroup group(run);
  auto ranks = make_ranks<CudaRank>(run);
  run_to_the_end<CudaRun, CudaRank>(run, ranks, [&](CudaRank& rank, int member) {
    const Dispatched wanted = group.dispatched(member);
    const Combined sums = group.combined(member);
    for (const bool cached : {false, true}) {
      Dispatched got = rank.dispatch(group.input(member), cached);
      expect_same(got.counts, wanted.counts, "counts");
      expect_same(got.rows, wanted.rows, "rows");
      expect_same(got.weights, wanted.weights, "weights");
      group.scale(member, got);
      const Combined combined = rank.combine(group.input(member), got);
      expect_same(combined.out, sums.out, "combined rows");
      expect_same(combined.weights, sums.weights, "combined weights");
    }
  });
  double tails = 0;
  for (const auto& rank : ranks) {
    EXPECT(rank->stat("windows") >= static_cast<double>(run.least_windows));
    tails += rank->sum_of_stats("ship.tail.", ".chunks");
  }
  EXPECT(tails >= static_cast<double>(run.least_tails));
}

}  // namespace uccl_ep
