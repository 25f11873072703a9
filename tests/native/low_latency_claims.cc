// Low latency: every byte is what plain loops over all ranks' inputs give, whatever order lanes, warps, blocks, streams
// and ranks run in; kernels on the CPU. UCCL_EP_CUDA_SEEDS=first:count tries other orders and other data.
#include "slot_tries.h"

using namespace uccl_ep;

namespace {

void miss_a_rank(SlotRun run) {
  run.arrival_timeout_s = 1;
  auto ranks = make_ranks<SlotRank>(run);
  by_ranks(run.num_ranks(), [&](int r) {
    if (r == 1) return;
    SlotRank& rank = *ranks[0];
    const World world(run, 0);
    Slots got(run);
    try {
      rank.dispatch(world.inputs[0], got, SlotPhase::kBoth);
      rank.finish();
    } catch (const CommunicationFailure& failure) {
      EXPECT(failure.record().kind == ErrorKind::kArrivalTimeout && failure.record().peer == 1);
      EXPECT(got.counts == std::vector<int32_t>(run.experts_per_rank, 0));
      return;
    }
    throw std::logic_error("nobody sent these rows");
  });
}
void miss_sums(SlotRun run) {
  run.arrival_timeout_s = 1;
  auto ranks = make_ranks<SlotRank>(run);
  by_ranks(run.num_ranks(), [&](int r) {
    SlotRank& rank = *ranks[static_cast<size_t>(r)];
    const World world(run, 0);
    const RankInput& in = world.inputs[static_cast<size_t>(r)];
    Slots got(run);
    rank.dispatch(in, got, SlotPhase::kBoth);
    rank.finish();
    if (r == 1) return;
    const std::vector<uint16_t> rows = rank.experts(world, got);
    std::vector<uint16_t> out(in.num_tokens * run.hidden, 0);
    rank.combine(in, rows, got, out, SlotPhase::kBoth);
    EXPECT_THROWS(CommunicationFailure, rank.finish());
    EXPECT(out == std::vector<uint16_t>(out.size(), 0xFFFF));
  });
}

Flag& network_cut() {
  static Flag cut;
  return cut;
}

}  // namespace

CLAIM("one rank sends itself what it has, and gets its sums") { try_seeds(slots_of(1)); }
CLAIM("2 ranks get every row in its slot, and every sum") { try_seeds(slots_of(2)); }
CLAIM("4 ranks get every row in its slot, and every sum, FP8") { try_seeds(slots_of(4, kFp8)); }
CLAIM("sums have the same bits whether a rank adds what its experts give before it sends or not") {
  SlotRun run = slots_of(4);
  run.mixes = true;
  run.num_rounds = 6;
  run.late_usec = 20'000;
  try_seeds(run);
}
CLAIM("more rows of a token than a warp's stages hold are summed, in segments") {
  SlotRun run = slots_of(1);
  run.topk = run.experts_per_rank = 8;
  run.hidden = 1280;
  try_seeds(run);
}
CLAIM("ranks fold by plain loads, or not at all") {
  for (const bool folds : {true, false}) {
    SlotRun run = slots_of(3);
    run.bulk_copies = false;
    run.fold_pairs = folds ? 0 : 1 << 20;
    try_seeds(run);
  }
}
CLAIM("sums that are not rounded on the way are those of plain loops") {
  SlotRun run = slots_of(3);
  run.sum_wire = kFp32;
  try_seeds(run);
}
CLAIM("2 ranks get unrounded scales, and scales as exponents") {
  try_seeds(slots_of(2, Dtype::kFp8Fp32));
  for (const uint32_t hidden : {640, 544}) {  // five scales: two words. The last one may be of a short block
    SlotRun run = slots_of(2, kFp8);
    run.hidden = hidden;
    run.ue8m0 = true;
    try_seeds(run);
  }
}
CLAIM("rows whose last block is short come to their slots and sums, in a domain and between domains") {
  for (const auto& domains : {std::vector{0, 0}, {0, 1}, {0, 0, 1}})
    for (const uint32_t hidden : {32, 160, 1440})
      for (const Dtype wire : {kBf16, kFp8, Dtype::kFp8Fp32}) {
        SlotRun run = slots_of(domains, wire);
        run.hidden = hidden;
        run.bulk_copies = wire != kFp8;
        try_seeds(run);
      }
}
CLAIM("two operations of a kind are under way, sent and received by kernels of their own") {
  for (const Dtype wire : {kBf16, kFp8}) {
    SlotRun run = slots_of(3, wire);
    run.splits = true;
    try_seeds(run);
  }
}
CLAIM("ranks of several domains get every row in its slot, and every sum") {
  for (const auto& domains :
       {std::vector{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 2}, {0, 0, 1, 1, 2, 2, 3, 3}})
    for (const bool wide : {false, true}) {
      SlotRun run = slots_of(domains, wide ? kBf16 : kFp8);
      run.sum_wire = wide ? kFp32 : kBf16;
      run.splits = wide;
      try_seeds(run);
    }
}
CLAIM("between domains chunks come in any order, late, twice, or are refused") {
  for (const bool splits : {false, true}) {
    SlotRun run = slots_of({0, 0, 1, 1}, kFp8);
    run.loop = everything();
    run.num_rounds = 6;  // rings come round, and credits are waited for
    run.splits = splits;
    try_seeds(run);
  }
}
CLAIM("a rank that sums for another domain waits for the others of its own") {
  SlotRun run = slots_of({0, 0, 1, 1});
  run.late_usec = 50'000;
  run.num_rounds = 2;
  try_seeds(run);
}
CLAIM("between domains rows go in more chunks than one, and a rank has none") {
  SlotRun run = slots_of({0, 1, 1});
  run.max_tokens = 150;
  run.num_tokens = {150, 131, 0};
  run.num_rounds = 4;
  run.num_sms = 3;
  try_seeds(run);
}
CLAIM("more tokens than a mask of a tile has bits, of more experts than a warp has lanes") {
  SlotRun run = slots_of(2);
  run.max_tokens = 150;
  run.num_tokens = {150, 131};
  run.experts_per_rank = 70;
  run.num_rounds = 1;
  run.num_sms = 3;
  try_seeds(run);
}
CLAIM("other calls are a mismatch that names both, and calls refused since are none") {
  for (const auto& [differs, domains] :
       {std::pair{false, std::vector{0, 0}}, {true, {0, 0}}, {false, {0, 1}}, {true, {0, 1}}}) {
    SlotRun run = slots_of(domains);
    auto ranks = make_ranks<SlotRank>(run);
    by_ranks(run.num_ranks(), [&](int r) {
      SlotRank& rank = *ranks[static_cast<size_t>(r)];
      const World world(run, 0);
      const RankInput& in = world.inputs[static_cast<size_t>(r)];
      Slots got(run);
      rank.dispatch(in, got, SlotPhase::kSend);
      rank.engine().refused("nothing", rank.stream());
      rank.dispatch(in, got, SlotPhase::kReceive);
      rank.finish();
      world.check(r, got);
      if (!differs) return;
      SlotRun other = run;
      if (r == 1) other.wire = kFp8;
      const auto call = [&] {
        rank.dispatch(in, got, SlotPhase::kBoth, other.wire);
        rank.finish();
      };
      try {
        call();
      } catch (const CommunicationFailure& failure) {
        EXPECT(failure.record().kind == ErrorKind::kRankMismatch);
        const std::string text = failure.what();
        EXPECT(text.find("low-latency dispatch(bf16 as fp8") != std::string::npos);
        EXPECT(text.find("low-latency dispatch(bf16 as bf16") != std::string::npos);
        return;
      }
      throw std::logic_error("rows of different calls met");
    });
  }
}
CLAIM("a rank that never comes is an error within the deadline, and leaves no count") {
  for (const auto& domains : {std::vector{0, 0}, {0, 1}}) miss_a_rank(slots_of(domains));
}
CLAIM("sums that a rank's absence leaves incomplete are NaN, all of them") {
  for (const auto& domains : {std::vector{0, 0}, {0, 1}}) miss_sums(slots_of(domains));
}
CLAIM("between domains a network that delivers nothing is an error of all within the deadline, of either kind") {
  for (const bool combines : {false, true}) {
    SlotRun run = slots_of({0, 0, 1});
    run.arrival_timeout_s = 1.5;
    const Flag* const cut = combines ? &network_cut() : nullptr;
    run.loop.cut = cut;
    if (!combines) run.loop.drop_peer = 2;
    auto ranks = make_ranks<SlotRank>(run);
    std::barrier meeting(run.num_ranks());
    const uint64_t started = now_usec();
    by_ranks(run.num_ranks(), [&](int r) {
      SlotRank& rank = *ranks[static_cast<size_t>(r)];
      const World world(run, 0);
      const RankInput& in = world.inputs[static_cast<size_t>(r)];
      Slots got(run);
      const auto dispatch = [&] {
        rank.dispatch(in, got, SlotPhase::kBoth);
        rank.finish();
      };
      if (!combines) {
        EXPECT_THROWS(CommunicationFailure, dispatch());
        return;
      }
      dispatch();
      const std::vector<uint16_t> rows = rank.experts(world, got);
      std::vector<uint16_t> out(in.num_tokens * run.hidden, 0);
      meeting.arrive_and_wait();
      if (r == 0) network_cut().publish(1);
      meeting.arrive_and_wait();
      rank.combine(in, rows, got, out, SlotPhase::kBoth);
      EXPECT_THROWS(CommunicationFailure, rank.finish());
      EXPECT(out == std::vector<uint16_t>(out.size(), 0xFFFF));
    });
    EXPECT(now_usec() - started < 25'000'000);
  }
}
CLAIM("between domains a rank that leaves is an error of all others at once") {
  const SlotRun run = slots_of({0, 1, 1});
  auto ranks = make_ranks<SlotRank>(run);
  const uint64_t started = now_usec();
  by_ranks(run.num_ranks(), [&](int r) {
    SlotRank& rank = *ranks[static_cast<size_t>(r)];
    const World world(run, 0);
    Slots got(run);
    if (r == 1) return rank.engine().close(true);
    const auto call = [&] {
      rank.dispatch(world.inputs[static_cast<size_t>(r)], got, SlotPhase::kBoth);
      rank.finish();
    };
    try {
      call();
    } catch (const CommunicationFailure& failure) {
      EXPECT(failure.record().kind == ErrorKind::kPeerFailed);
      return;
    }
    throw std::logic_error("did not fail");
  });
  EXPECT(now_usec() - started < 10'000'000);
}
CLAIM("control: a row, a scale, a number or a sum of another bit is seen") {
  const SlotRun run = slots_of(1, kFp8);
  auto ranks = make_ranks<SlotRank>(run);
  const World world(run, 0);
  Slots got(run);
  ranks[0]->dispatch(world.inputs[0], got, SlotPhase::kBoth);
  ranks[0]->finish();
  world.check(0, got);
  const auto spoils = [&](auto member) {
    Slots other = got;
    (other.*member)[0] ^= 1;
    EXPECT_THROWS(std::exception, world.check(0, other));
  };
  spoils(&Slots::rows);
  spoils(&Slots::scales);
  spoils(&Slots::counts);
  spoils(&Slots::ranges);
  spoils(&Slots::source_tokens);
  const std::vector<uint16_t> rows = ranks[0]->experts(world, got);
  std::vector<uint16_t> out(world.inputs[0].num_tokens * run.hidden + 1, 0xEEEE);
  ranks[0]->combine(world.inputs[0], rows, got, out, SlotPhase::kBoth);
  ranks[0]->finish();
  world.check_sums(0, out);
  out[0] ^= 1;
  EXPECT_THROWS(std::exception, world.check_sums(0, out));
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
