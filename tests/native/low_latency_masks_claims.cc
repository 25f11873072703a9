// Low latency that goes on without ranks that no longer come: what others agree on, and results without them. Kernels
// on the CPU.
#include <array>
#include <barrier>
#include <latch>
#include <optional>

#include "slot_tries.h"

using namespace uccl_ep;

namespace {

// A rank that comes to no call from one on.
struct Leaving {
  int rank = 0, round = 0;
  bool before_combine = false;  // else before the round's dispatch
};

// What all others agree on at a call: between domains a domain goes as a whole.
class Lost {
 public:
  Lost(const SlotRun& run, const std::vector<Leaving>& leaving) : topo_(Topology::from_labels(run.domain_of)) {
    leaving_ = leaving;
  }
  bool has_left(int rank, int round, bool combines) const {
    return std::any_of(leaving_.begin(), leaving_.end(), [&](const Leaving& its) {
      const bool now = its.round == round && (combines || !its.before_combine);
      return its.rank == rank && (its.round < round || now);
    });
  }
  Ranks ranks(int round, bool combines) const {
    Ranks all;
    for (const Leaving& its : leaving_) {
      if (!has_left(its.rank, round, combines)) continue;
      if (topo_.num_domains() == 1) all.set(static_cast<size_t>(its.rank));
      for (const int mate : topo_.members[static_cast<size_t>(topo_.domain_of[static_cast<size_t>(its.rank)])])
        if (topo_.num_domains() > 1) all.set(static_cast<size_t>(mate));
    }
    return all;
  }
  // Whom a rank that is masked with its domain misses, as its error names it; none: the rank itself has left.
  std::string missed_by(int rank, int round, bool combines) const {
    for (const int mate : topo_.members[static_cast<size_t>(topo_.domain_of[static_cast<size_t>(rank)])])
      if (has_left(mate, round, combines)) return "rank " + std::to_string(mate) + ", of its domain, did not come";
    return "";
  }

 private:
  const Topology topo_;
  std::vector<Leaving> leaving_;
};

std::vector<SlotPhase> phases(const SlotRun& run) {
  using enum SlotPhase;
  return run.splits ? std::vector{kSend, kReceive} : std::vector{kBoth};
}

// Counts also for a rank that fails.
struct CountAtEnd {
  std::latch& latch;
  ~CountAtEnd() { latch.count_down(); }
};

// False: the rank goes no further, because it leaves, or is masked with its domain.
template <typename Call>
bool goes_on(const Lost& lost, SlotRank& rank, int r, int round, bool combines, Call call) {
  if (lost.has_left(r, round, combines)) return false;
  const bool is_gone = lost.ranks(round, combines).test(static_cast<size_t>(r));
  try {
    call();
    rank.finish();
  } catch (const CommunicationFailure& failure) {
    const std::string text = failure.what();
    if (!is_gone) throw;
    EXPECT(failure.record().kind == ErrorKind::kPeerFailed);
    EXPECT(text.find(lost.missed_by(r, round, combines)) != std::string::npos);
    return false;
  }
  EXPECT(!is_gone);
  return true;
}

// All rounds, or those until the rank leaves or is masked; every result is checked.
void use(const SlotRun& run, const Lost& lost, SlotRank& rank, int r) {
  double dropped = 0;
  World world(run, 0);
  const auto expect_masks = [&] {
    const std::vector<int32_t> masked = rank.masks();
    for (uint64_t s = 0; s < masked.size(); ++s) EXPECT(masked[s] == (world.is_gone(s) ? 1 : 0));
  };
  for (int round = 0; round < run.num_rounds; ++round) {
    world.inputs = World(run, round).inputs;
    const RankInput& in = world.inputs[static_cast<size_t>(r)];
    Slots got(run);
    const auto dispatch = [&] {
      for (const SlotPhase phase : phases(run)) rank.dispatch(in, got, phase);
    };
    if (!goes_on(lost, rank, r, round, false, dispatch)) return;
    world.gone = lost.ranks(round, false);
    world.check(r, got);
    expect_masks();
    const std::vector<uint16_t> rows = rank.experts(world, got);
    std::vector<uint16_t> out(in.num_tokens * run.hidden + 1, 0xEEEE);
    const auto combine = [&] {
      for (const SlotPhase phase : phases(run)) rank.combine(in, rows, got, out, phase);
    };
    if (!goes_on(lost, rank, r, round, true, combine)) return;
    world.gone = lost.ranks(round, true);
    world.check_sums(r, out);
    expect_masks();
    for (uint64_t place = 0; place < in.num_tokens * run.topk; ++place) {
      const int64_t expert = expert_at(in, place);
      dropped += expert >= 0 && world.is_gone(static_cast<uint64_t>(expert) / run.experts_per_rank);
    }
    EXPECT(rank.stat("low_latency.dropped_pairs") == dropped);
  }
  EXPECT(rank.stat("low_latency.masked_ranks") == static_cast<double>(world.gone.count()));
  EXPECT(dropped > 0 || run.tokens_of(r) == 0 || run.num_ranks() > 32);  // of many, a token names few
}

void lose(const SlotRun& run, const std::vector<Leaving>& leaving) {
  constexpr uint64_t kCloseUsec = 5'000'000;  // far less than the progress deadline
  gpu_on_cpu::disturb(run.seed);
  const Lost lost(run, leaving);
  const Ranks gone = lost.ranks(run.num_rounds, true);
  auto ranks = make_ranks<SlotRank>(run);
  const std::jthread watching = watch();
  std::latch through(run.num_ranks() - static_cast<int>(gone.count()));
  by_ranks(run.num_ranks(), [&](int r) {
    SlotRank& rank = *ranks[static_cast<size_t>(r)];
    {
      const bool is_gone = gone.test(static_cast<size_t>(r));
      std::optional<CountAtEnd> counted;
      if (!is_gone) counted.emplace(through);
      const CloseOnFailure guard{rank.engine()};
      use(run, lost, rank, r);
    }
    const bool has_left = lost.has_left(r, run.num_rounds, true);
    if (has_left) through.wait();  // it comes to nothing, not even to say bye
    const uint64_t began = now_usec();
    rank.engine().close(has_left);
    EXPECT(run.num_ranks() > 32 || now_usec() - began < kCloseUsec);  // many wait for a core
  });
}

SlotRun masking(const std::vector<int>& domain_of, double mask_timeout_s = 2) {
  SlotRun run = slots_of(domain_of);
  run.mask_timeout_s = mask_timeout_s;
  run.num_rounds = 4;
  return run;
}

// The last rank is lost, and one more, before a combine.
void lose_of_many(int domains, int members, double mask_timeout_s) {
  SlotRun run = masking({}, mask_timeout_s);
  for (int rank = 0; rank < domains * members; ++rank) run.domain_of.push_back(rank % domains);
  run.max_tokens = 8;
  run.num_tokens = {8, 5, 7};
  run.experts_per_rank = 1;
  run.topk = 4;
  run.num_sms = domains > 1 ? 2 : 1;
  run.num_rounds = 1;
  lose(run, {{domains * members - 1, 0, true}, {2, 0, true}});
}

}  // namespace

CLAIM("ranks that no longer come are masked by all others at once, and results are those without them") {
  lose(masking({0, 0, 0, 0}), {{1, 1, false}, {3, 2, true}});
}
CLAIM("between domains a domain that loses a rank is masked as a whole, and its other ranks have an error") {
  lose(masking({0, 0, 1, 1, 2}), {{4, 1, false}, {3, 2, true}});
}
CLAIM("between domains ranks are masked by their numbers in the group, before a combine and after") {
  lose(masking({0, 1, 2, 0, 1}), {{2, 1, true}, {4, 2, false}});
}
CLAIM("ranks are masked in groups of more ranks than a word has bits") {
  lose_of_many(1, 34, 8);
  lose_of_many(7, 5, 12);  // the last domain has bits of two words
}
CLAIM("ranks are masked in groups of more than 64 ranks") { lose_of_many(1, 66, 22); }
CLAIM("between domains a rank goes on alone") {
  SlotRun run = masking({0, 1});
  run.num_rounds = 8;  // rings would come round
  lose(run, {{0, 2, false}});
  lose(run, {{1, 1, true}});
}
CLAIM("between domains ranks are masked where sending and receiving are calls of their own") {
  SlotRun run = masking({0, 0, 1, 2});
  run.splits = true;
  lose(run, {{3, 1, false}, {2, 2, true}});
}
CLAIM("between domains ranks are masked where weights come with the routing") {
  SlotRun run = masking({0, 0, 1, 2});
  run.knows = true;
  lose(run, {{2, 1, true}, {3, 2, false}});
}
CLAIM("between domains ranks are masked while chunks and votes come late, twice, or are refused") {
  SlotRun run = masking({0, 1, 1, 2}, 3);
  run.loop = everything();
  run.loop.loss_rate = 0.2;
  run.num_rounds = 6;  // rings come round
  lose(run, {{3, 3, true}});
}
CLAIM("a rank that others have masked meanwhile has an error, and they have none") {
  for (const auto& domains : {std::vector{0, 0, 0}, {0, 0, 1}}) {
    SlotRun run = masking(domains, 1);
    auto ranks = make_ranks<SlotRank>(run);
    by_ranks(run.num_ranks(), [&](int r) {
      SlotRank& rank = *ranks[static_cast<size_t>(r)];
      const World world(run, 0);
      Slots got(run);
      if (r == 2) usleep(6'000'000);
      const auto call = [&] {
        rank.dispatch(world.inputs[static_cast<size_t>(r)], got, SlotPhase::kBoth);
        rank.finish();
      };
      if (r != 2) return call();
      EXPECT_THROWS(CommunicationFailure, call());
    });
  }
}
CLAIM("a rank that sends all and dies before it votes is masked, and one that comes late is not") {
  for (const auto& domains : {std::vector{0, 0, 0}, {0, 1, 2}}) {
    SlotRun run = masking(domains, 1);
    auto ranks = make_ranks<SlotRank>(run);
    by_ranks(run.num_ranks(), [&](int r) {
      SlotRank& rank = *ranks[static_cast<size_t>(r)];
      const CloseOnFailure guard{rank.engine()};
      World world(run, 0);
      world.gone = 0b100;
      Slots got(run);
      if (r == 1) usleep(800'000);
      rank.dispatch(world.inputs[static_cast<size_t>(r)], got, SlotPhase::kSend);
      if (r == 2) return rank.finish();
      rank.dispatch(world.inputs[static_cast<size_t>(r)], got, SlotPhase::kReceive);
      rank.finish();
      world.check(r, got);
    });
  }
}
CLAIM("a rank may come at the very moment when others stop waiting for it") {
  for (int64_t late_usec = -4'000; late_usec <= 8'000; late_usec += 1'500) {
    SlotRun run = masking({0, 0, 0, 1}, 0.5);
    gpu_on_cpu::disturb(static_cast<uint32_t>(late_usec + 10'000));
    auto ranks = make_ranks<SlotRank>(run);
    std::barrier meeting(run.num_ranks());
    std::array<std::vector<int32_t>, 4> masked;
    by_ranks(run.num_ranks(), [&](int r) {
      SlotRank& rank = *ranks[static_cast<size_t>(r)];
      const CloseOnFailure guard{rank.engine()};
      World world(run, 0);
      Slots got(run);
      meeting.arrive_and_wait();
      if (r == 3) usleep(static_cast<useconds_t>(run.mask_timeout_s * 1e6 + static_cast<double>(late_usec)));
      try {
        rank.dispatch(world.inputs[static_cast<size_t>(r)], got, SlotPhase::kBoth);
        rank.finish();
      } catch (const CommunicationFailure& failure) {
        EXPECT(failure.record().kind == ErrorKind::kPeerFailed);
        return;
      }
      const std::vector<int32_t>& its = masked[static_cast<size_t>(r)] = rank.masks();
      for (size_t other = 0; other < its.size(); ++other) world.gone.set(other, its[other] != 0);
      world.check(r, got);
    });
    // Others may be masked, too, on a busy machine. Who goes on agrees with the others that do.
    const std::vector<int32_t>* first = nullptr;
    for (const std::vector<int32_t>& its : masked) {
      const bool is_alone = its.size() == masked.size() && its[3] == 0 && its[0] != 0;
      if (its.empty() || is_alone) continue;
      if (first == nullptr) first = &its;
      EXPECT(its == *first);
    }
  }
}
CLAIM("a rank that leaves alone is masked, and an error of its domain only") {
  for (const auto& domains : {std::vector{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 0, 1, 1, 1}}) {
    const SlotRun run = masking(domains, 1);
    const int last = run.num_ranks() - 1;
    const Lost lost(run, {{last, 1, false}});
    auto ranks = make_ranks<SlotRank>(run);
    by_ranks(run.num_ranks(), [&](int r) {
      SlotRank& rank = *ranks[static_cast<size_t>(r)];
      const CloseOnFailure guard{rank.engine()};
      for (int round = 0; round < 3; ++round) {
        if (r == last && round == 1) return rank.engine().close(true);  // it lands nothing any more
        World world(run, round);
        world.gone = lost.ranks(round, false);
        Slots got(run);
        const auto dispatch = [&] { rank.dispatch(world.inputs[static_cast<size_t>(r)], got, SlotPhase::kBoth); };
        if (!goes_on(lost, rank, r, round, false, dispatch)) return;
        world.check(r, got);
      }
    });
  }
}
CLAIM("a domain is masked, and no other, when a rank that has sent all lands nothing any more") {
  const SlotRun run = masking({0, 0, 1, 1}, 1);
  const Lost lost(run, {{3, 0, true}});
  auto ranks = make_ranks<SlotRank>(run);
  by_ranks(run.num_ranks(), [&](int r) {
    SlotRank& rank = *ranks[static_cast<size_t>(r)];
    const CloseOnFailure guard{rank.engine()};
    World world(run, 0);
    world.gone = lost.ranks(0, true);
    Slots got(run);
    const auto dispatch = [&] { rank.dispatch(world.inputs[static_cast<size_t>(r)], got, SlotPhase::kBoth); };
    if (r == 3) {
      rank.dispatch(world.inputs[3], got, SlotPhase::kSend);
      rank.finish();
      usleep(300'000);  // until all have it
      return rank.engine().close(true);
    }
    if (r == 1) usleep(600'000);  // rank 3 is its rail
    if (goes_on(lost, rank, r, 0, true, dispatch)) world.check(r, got);
  });
}
CLAIM("a rank that no network reaches masks the others, and they mask it") {
  SlotRun run = masking({0, 1, 2}, 1);
  run.loop.drop_peer = 2;
  auto ranks = make_ranks<SlotRank>(run);
  by_ranks(run.num_ranks(), [&](int r) {
    SlotRank& rank = *ranks[static_cast<size_t>(r)];
    const CloseOnFailure guard{rank.engine()};
    for (int round = 0; round < run.num_rounds; ++round) {
      World world(run, round);
      world.gone = r == 2 ? 0b011 : 0b100;
      take_turn(run, rank, r, world, round);
    }
  });
}
CLAIM("parts of a group that a network joins again find that they have masked each other") {
  static Flag cut;
  SlotRun run = masking({0, 1}, 1);
  run.loop.cut = &cut;
  auto ranks = make_ranks<SlotRank>(run);
  std::barrier meeting(run.num_ranks());
  by_ranks(run.num_ranks(), [&](int r) {
    SlotRank& rank = *ranks[static_cast<size_t>(r)];
    World world(run, 0);
    Slots got(run);
    const auto call = [&] {
      rank.dispatch(world.inputs[static_cast<size_t>(r)], got, SlotPhase::kBoth);
      rank.finish();
    };
    call();
    world.check(r, got);
    meeting.arrive_and_wait();
    if (r == 0) cut.publish(1);
    meeting.arrive_and_wait();
    got = Slots(run);
    call();
    world.gone = r == 0 ? 0b10 : 0b01;
    world.check(r, got);
    meeting.arrive_and_wait();
    if (r == 0) cut.publish(2);
    usleep(1'000'000);  // votes come again
    EXPECT_THROWS(CommunicationFailure, call());
  });
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
