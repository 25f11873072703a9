// Groups of GPU engines under simulated time: kernels, proxies and `loop` as they are, whose threads take turns.
#include <sys/wait.h>
#include <unistd.h>

#include "gpu_runs.h"
#include "taking_turns.h"

using namespace uccl_ep;
using taking_turns::History;
using taking_turns::Turns;

namespace {

constexpr uint64_t kLongestNsec = 200'000'000;  // of a yield, where deadlines of minutes are waited for
constexpr useconds_t kPauseUsec = 100'000;
const std::vector<std::vector<int>> kOneDomainAndTwo = {{0, 0, 0}, {0, 1, 0}};

// Lanes work, and threads belong to ranks.
struct RanksTakeTurns : Turns {
  explicit RanksTakeTurns(uint64_t seed, uint64_t longest_nsec = 100'000) : Turns(seed, longest_nsec) {
    gpu_on_cpu::on_work = taking_turns::moved;
    on_rank = Turns::belong_to;
    gpu_on_cpu::disturb(0);
  }
};

CudaRun few_tokens(const std::vector<int>& domain_of) {
  CudaRun run = run_of(domain_of);
  run.num_tokens = {20, 7};
  run.rounds = 1;
  return run;
}

History history_of(uint64_t seed) {
  CudaRun run = few_tokens({0, 0, 1});
  run.loop = everything();
  const RanksTakeTurns turns(seed);
  gpu_on_cpu::disturb(seed);
  auto ranks = make_ranks<CudaRank>(run);
  results_of(run, ranks);
  return turns.so_far();
}

// Of a dispatch and a combine of a new plan, and again of the same one.
double seconds_with(double latency_usec) {
  CudaRun run = few_tokens({0, 1});
  run.loop.latency_usec = latency_usec;
  const RanksTakeTurns turns(1, 10'000);
  auto ranks = make_ranks<CudaRank>(run);
  const double began = turns.seconds();
  double ended = began;
  run_to_the_end<CudaRun, CudaRank>(run, ranks, [&](CudaRank& rank, int r) {
    const RankInput in(run, r, 0);
    for (const bool again : {false, true}) {
      Dispatched got = rank.dispatch(in, again);
      rank.combine(in, got);
    }
    ended = std::max(ended, turns.seconds());
  });
  return ended - began;
}

constexpr uint64_t kNoTurns = UINT64_MAX, kNeverFreezes = kNoTurns - 1;
struct Ended {
  std::string error;
  double after_s = 0;
};
struct Ends {
  std::vector<Ended> of_rank;
  uint64_t turns = 0;
};
// How ranks' second calls ended, a dispatch and a combine each. Rank 1 freezes after so many turns of them, until all
// others are through; with kNoTurns it does not call before that.
Ends ends_with_frozen(const CudaRun& run, uint64_t after_turns) {
  const RanksTakeTurns turns(run.seed, kLongestNsec);
  auto ranks = make_ranks<CudaRank>(run);
  Ends ends{std::vector<Ended>(ranks.size())};
  int num_through = 0;
  History began{};
  std::barrier all(run.num_ranks());
  std::barrier before(run.num_ranks(), [&]() noexcept {
    began = turns.so_far();
    if (after_turns != kNoTurns) Turns::freeze_in(after_turns, 1);
  });
  by_ranks(run.num_ranks(), [&](int r) {
    CudaRank& rank = *ranks[static_cast<size_t>(r)];
    const auto there_and_back = [&] {
      const RankInput in(run, r, 0);
      Dispatched got = rank.dispatch(in, false);
      rank.combine(in, got);
    };
    const auto others_are_through = [&] { return num_through >= run.num_ranks() - 1; };
    there_and_back();
    before.arrive_and_wait();
    while (r == 1 && after_turns == kNoTurns && !others_are_through()) usleep(kPauseUsec);
    Ended& ended = ends.of_rank[static_cast<size_t>(r)];
    try {
      there_and_back();
    } catch (const std::exception& caught) {
      ended.error = told_by(caught);
    }
    ended.after_s = turns.seconds() - static_cast<double>(began.nsec) / 1e9;
    ends.turns = std::max(ends.turns, turns.so_far().turns - began.turns);
    num_through += r != 1;
    while (!others_are_through()) usleep(kPauseUsec);
    Turns::thaw();
    all.arrive_and_wait();
    rank.engine().close(true);
  });
  return ends;
}

}  // namespace

CLAIM("engines under simulated time have the host's bits, in any order of their threads and under every fault") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1}})
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      const RanksTakeTurns turns(seed);
      CudaRun run = few_tokens(domain_of);
      run.seed = seed;
      run.loop = everything();
      same_as_host(run);
    }
}
CLAIM("the same seed gives the same history to the nanosecond, another seed another one") {
  history_of(5);  // after it the process has what it makes once
  const History first = history_of(5), again = history_of(5), other = history_of(6);
  EXPECT(first == again);
  EXPECT(!(first == other));
}
CLAIM("time is the link's: twice its latency takes twice as long, however fast this machine is") {
  const double none = seconds_with(0), once = seconds_with(5000), twice = seconds_with(10000);
  EXPECT(once > 0.015 && once < 0.1);
  EXPECT(twice - none > 1.9 * (once - none) && twice - none < 2.1 * (once - none));
}
CLAIM("a rank that never calls is named by all others after the arrival deadline of 300 s") {
  for (const auto& domain_of : kOneDomainAndTwo) {
    CudaRun run = few_tokens(domain_of);
    run.arrival_timeout_s = 300;
    const Ends ends = ends_with_frozen(run, kNoTurns);
    for (const size_t rank : {0, 2}) {
      EXPECT(ends.of_rank[rank].error.find("rank 1") != std::string::npos);
      EXPECT(ends.of_rank[rank].after_s > 300 && ends.of_rank[rank].after_s < 310);
    }
  }
}
CLAIM("a rank that freezes at any moment of an operation is named by all others after a deadline, or all is done") {
  for (const auto& domain_of : kOneDomainAndTwo) {
    CudaRun run = few_tokens(domain_of);
    run.arrival_timeout_s = 20;
    const Ends whole = ends_with_frozen(run, kNeverFreezes);
    for (const Ended& ended : whole.of_rank) EXPECT(ended.error.empty());
    size_t num_named = 0;
    for (uint64_t part = 0; part < 8; ++part) {
      const Ends ends = ends_with_frozen(run, whole.turns * part / 8);
      for (const size_t rank : {0, 2}) {
        const auto& [error, after_s] = ends.of_rank[rank];
        if (error.empty()) continue;
        EXPECT(error.find("rank 1 shows no sign of life") != std::string::npos);
        EXPECT(after_s > run.arrival_timeout_s && after_s < 60);
        ++num_named;
      }
    }
    EXPECT(num_named >= 8);
  }
}
CLAIM("that no thread can ever run again ends the program, which says what each waits for") {
  const pid_t child = fork();
  if (child == 0) {
    const Turns turns(1);
    std::mutex mutex;
    std::condition_variable never;
    std::unique_lock lock(mutex);
    never.wait(lock, [] { return false; });
    _exit(0);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == taking_turns::kStandsStill);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
