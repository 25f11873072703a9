// Low latency where the weights came with the routing: a combine tells and waits for none.
#include "slot_tries.h"

using namespace uccl_ep;

namespace {

SlotRun knowing(SlotRun run) {
  run.knows = true;
  return run;
}

}  // namespace

CLAIM("weights that came with the routing give the same sums, by bulk copies, plain loads, or pairs") {
  for (const auto& [bulk, folds] : {std::pair{true, true}, {false, true}, {true, false}}) {
    SlotRun run = knowing(slots_of(3));
    run.bulk_copies = bulk;
    run.fold_pairs = folds ? 0 : 1 << 20;
    run.num_rounds = 4;
    try_seeds(run);
  }
}
CLAIM("ranks that know the weights fold or not, in one call or two, and the bits are the same") {
  SlotRun run = knowing(slots_of(4));
  run.mixes = true;
  run.num_rounds = 6;
  run.late_usec = 20'000;
  try_seeds(run);
}
CLAIM("with known weights a call that only sends sums, too, and two of them are under way") {
  for (const Dtype sums : {kBf16, kFp32}) {
    SlotRun run = knowing(slots_of(3));
    run.sum_wire = sums;
    run.splits = true;
    try_seeds(run);
  }
}
CLAIM("between domains known weights give the same sums, whatever the network does") {
  for (const auto& domains : {std::vector{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 2}})
    for (const bool splits : {false, true}) {
      SlotRun run = knowing(slots_of(domains, kFp8));
      run.loop = everything();
      run.num_rounds = 5;  // rings come round
      run.splits = splits;
      run.sum_wire = splits ? kFp32 : kBf16;
      try_seeds(run);
    }
}
CLAIM("what only sends, with known weights, is done before another rank begins") {
  for (const auto& domains : {std::vector{0, 0}, {0, 1}}) {
    SlotRun run = knowing(slots_of(domains));
    run.arrival_timeout_s = 10;
    auto ranks = make_ranks<SlotRank>(run);
    Flag sent;
    by_ranks(run.num_ranks(), [&](int r) {
      using enum SlotPhase;
      SlotRank& rank = *ranks[static_cast<size_t>(r)];
      const CloseOnFailure guard{rank.engine()};
      const World world(run, 0);
      const RankInput& in = world.inputs[static_cast<size_t>(r)];
      Slots got(run);
      rank.dispatch(in, got, kBoth);
      rank.finish();
      const std::vector<uint16_t> rows = rank.experts(world, got);
      std::vector<uint16_t> out(in.num_tokens * run.hidden + 1, 0xEEEE);
      for (int left = 100'000; r == 1 && sent.read() == 0 && left > 0; --left) usleep(200);
      EXPECT(r == 0 || sent.read() == 1);
      rank.combine(in, rows, got, out, kSend);
      rank.finish();
      if (r == 0) sent.publish(1);
      rank.combine(in, rows, got, out, kReceive);
      rank.finish();
      world.check_sums(r, out);
    });
  }
}
CLAIM("a rank sums with the weights of the dispatch, not with what its memory for others' weights holds") {
  for (const auto& domains : {std::vector{0, 0}, {0, 1}}) {
    SlotRun run = knowing(slots_of(domains)), tells = slots_of(domains);
    auto ranks = make_ranks<SlotRank>(run);
    by_ranks(run.num_ranks(), [&](int r) {
      SlotRank& rank = *ranks[static_cast<size_t>(r)];
      const CloseOnFailure guard{rank.engine()};
      const World world(run, 0);
      RankInput in = world.inputs[static_cast<size_t>(r)];
      Slots got(run);
      rank.dispatch(in, got, SlotPhase::kBoth);
      rank.finish();
      const std::vector<uint16_t> rows = rank.experts(world, got);
      std::vector<uint16_t> out(in.num_tokens * run.hidden + 1, 0xEEEE);
      const auto combine = [&](const Slots& of) {
        rank.combine(in, rows, of, out, SlotPhase::kBoth);
        rank.finish();
      };
      // Both halves get other weights, by combines that tell them.
      Slots without = got;
      without.routed.clear();
      for (float& weight : in.weights) weight += 1;
      for (int half = 0; half < 2; ++half) combine(without);
      in.weights = world.inputs[static_cast<size_t>(r)].weights;
      combine(got);
      world.check_sums(r, out);
    });
  }
}
CLAIM("ranks of which only one knows the weights do not fit together") {
  for (const auto& domains : {std::vector{0, 0}, {0, 1}})
    for (const bool combines : {false, true}) {
      SlotRun run = knowing(slots_of(domains));
      auto ranks = make_ranks<SlotRank>(run);
      by_ranks(run.num_ranks(), [&](int r) {
        SlotRank& rank = *ranks[static_cast<size_t>(r)];
        const World world(run, 0);
        const RankInput& in = world.inputs[static_cast<size_t>(r)];
        Slots got(run);
        if (r == 1 && !combines) got.routed.clear();
        try {
          rank.dispatch(in, got, SlotPhase::kBoth);
          rank.finish();
          const std::vector<uint16_t> rows = rank.experts(world, got);
          std::vector<uint16_t> out(in.num_tokens * run.hidden + 1, 0xEEEE);
          if (r == 1) got.routed.clear();
          rank.combine(in, rows, got, out, SlotPhase::kBoth);
          rank.finish();
        } catch (const CommunicationFailure& failure) {
          EXPECT(failure.record().kind == ErrorKind::kRankMismatch);
          EXPECT(std::string(failure.what()).find("weights)") != std::string::npos);
          return;
        }
        throw std::logic_error("ranks that differ went on");
      });
    }
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
