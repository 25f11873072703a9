// Ranks that dispatch and combine with low latency, round after round; every result is checked.
#pragma once

#include "slot_runs.h"

namespace uccl_ep {

inline std::vector<SlotPhase> phases_of(const SlotRun& run, int rank, int round) {
  using enum SlotPhase;
  if (run.mixes && (rank + round) % 4 == 1) return {kSend, kReceive};
  return {kBoth};
}
// A dispatch and a combine.
inline void take_turn(const SlotRun& run, SlotRank& rank, int r, const World& world, int round) {
  const RankInput& in = world.inputs[static_cast<size_t>(r)];
  Slots got(run);
  rank.dispatch(in, got, SlotPhase::kBoth);
  rank.finish();
  world.check(r, got);
  const std::vector<uint16_t> rows = rank.experts(world, got);
  std::vector<uint16_t> out(in.num_tokens * run.hidden + 1, 0xEEEE);
  if (r + 1 == run.num_ranks()) usleep(run.late_usec);
  for (const SlotPhase phase : phases_of(run, r, round)) rank.combine(in, rows, got, out, phase);
  rank.finish();
  world.check_sums(r, out);
}
inline void by_turns(const SlotRun& run, SlotRank& rank, int r) {
  for (int round = 0; round < run.num_rounds; ++round) take_turn(run, rank, r, World(run, round), round);
}
// Two dispatches are sent before the first is received, and so are their combines.
inline void by_twos(const SlotRun& run, SlotRank& rank, int r) {
  using enum SlotPhase;
  for (int round = 0; round < run.num_rounds; ++round) {
    std::vector<World> worlds;
    std::vector<Slots> got;
    std::vector<std::vector<uint16_t>> rows, outs;
    for (int half = 0; half < 2; ++half) {
      worlds.emplace_back(run, 2 * round + half);
      got.emplace_back(run);
      outs.emplace_back(worlds[0].inputs[static_cast<size_t>(r)].num_tokens * run.hidden + 1, 0xEEEE);
    }
    const auto in = [&](int half) -> const RankInput& {
      return worlds[static_cast<size_t>(half)].inputs[static_cast<size_t>(r)];
    };
    const auto both = [&](const auto& call) {
      for (const SlotPhase phase : {kSend, kReceive})
        for (size_t half = 0; half < 2; ++half) call(half, phase);
      rank.finish();
    };
    both([&](size_t half, SlotPhase phase) { rank.dispatch(in(static_cast<int>(half)), got[half], phase); });
    for (size_t half = 0; half < 2; ++half) {
      worlds[half].check(r, got[half]);
      rows.push_back(rank.experts(worlds[half], got[half]));
    }
    both([&](size_t half, SlotPhase phase) {
      rank.combine(in(static_cast<int>(half)), rows[half], got[half], outs[half], phase);
    });
    for (size_t half = 0; half < 2; ++half) worlds[half].check_sums(r, outs[half]);
  }
}

inline void try_run(const SlotRun& run) {
  gpu_on_cpu::disturb(run.seed);
  auto ranks = make_ranks<SlotRank>(run);
  run_to_the_end<SlotRun, SlotRank>(run, ranks, [&](SlotRank& rank, int r) {
    const CloseOnFailure guard{rank.engine()};
    (run.splits ? by_twos : by_turns)(run, rank, r);
  });
}
inline void try_seeds(const SlotRun& run) { each_seed(run, try_run); }

}  // namespace uccl_ep
