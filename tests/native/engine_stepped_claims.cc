// Groups of engines that one thread steps under simulated time: no thread and no clock of the machine decides anything.
#include <algorithm>
#include <numeric>
#include <random>

#include "claims.h"
#include "engine_runs.h"
#include "simulated_time.h"

using namespace uccl_ep;

namespace {

// Time goes on by this when every rank has been stepped once, and by more when nothing moves.
constexpr uint64_t kTickNsec = 1000;

struct SteppedGroup {
  SteppedGroup(std::vector<int> domain_of, const LoopOptions& loop, uint64_t seed, const Change& change = {})
      : order(domain_of.size()), random(seed) {
    std::iota(order.begin(), order.end(), size_t{0});
    std::vector<std::string> handles;
    for (int rank = 0; rank < static_cast<int>(domain_of.size()); ++rank) {
      EngineConfig config = config_of(rank, domain_of, loop);
      if (change) change(config);
      engines.push_back(std::make_unique<HostEngine>(config));
      handles.push_back(engines.back()->export_handle());
      calls.emplace_back(*engines.back(), rank);
    }
    for (auto& engine : engines) engine->connect(handles);
    for (auto& engine : engines) engine->start(Drive::kSteps);
    frozen.resize(engines.size());
    errors.resize(engines.size());
  }
  ~SteppedGroup() {
    for (size_t rank = 0; rank < engines.size(); ++rank)
      if (!frozen[rank]) engines[rank]->announce_close();
    for (int i = 0; i < 1000 && !all([&](size_t rank) { return engines[rank]->may_close(); }); ++i)
      round([](size_t) {});
    for (auto& engine : engines) engine->close(false);
  }

  bool all(const std::function<bool(size_t)>& holds) const {
    for (size_t rank = 0; rank < engines.size(); ++rank)
      if (!frozen[rank] && !holds(rank)) return false;
    return true;
  }
  // Steps every rank once, in an order of the seed's, and lets the rank go on with its calls.
  void round(const std::function<void(size_t)>& call) {
    std::shuffle(order.begin(), order.end(), random);
    bool moved = false;
    for (const size_t rank : order) {
      if (frozen[rank]) continue;
      moved |= engines[rank]->step();
      if (errors[rank].empty()) call(rank);
    }
    tick = moved ? kTickNsec : std::min(2 * tick, longest_tick);
    simulated_nsec += tick;
    ++rounds;
  }
  // The calls of one rank; its error is kept.
  bool advance(size_t rank) {
    try {
      return calls[rank].advance(true);
    } catch (const CommunicationFailure& failure) {
      errors[rank] = failure.what();
      ended_s = seconds();
      return true;
    }
  }
  // Until every rank has its sums back, or its error.
  void dispatch_and_combine() {
    std::vector<bool> through(engines.size());
    while (!all([&](size_t rank) { return through[rank] || !errors[rank].empty(); }))
      round([&](size_t rank) { through[rank] = through[rank] || advance(rank); });
  }
  void expect_no_error() const {
    for (const std::string& error : errors)
      if (!error.empty()) throw std::logic_error(error);
  }

  std::vector<std::unique_ptr<HostEngine>> engines;
  std::vector<RankRun> calls;
  std::vector<bool> frozen;
  std::vector<std::string> errors;
  std::vector<size_t> order;
  std::mt19937_64 random;
  uint64_t tick = kTickNsec, longest_tick = 10'000'000, rounds = 0;
  double ended_s = 0;  // of the last error
};

LoopOptions faulty(uint64_t seed) {
  LoopOptions loop;
  loop.seed = seed;
  loop.refuse_rate = 0.2;
  loop.duplicate_rate = 0.2;
  loop.loss_rate = 0.2;
  loop.latency_usec = 50;
  return loop;
}

struct History {
  uint64_t rounds, nsec;
  bool operator==(const History&) const = default;
};
History history_of(uint64_t seed) {
  const SimulatedTime time;
  SteppedGroup group({0, 0, 1, 1}, faulty(seed), seed);
  for (int i = 0; i < 2; ++i) group.dispatch_and_combine();
  group.expect_no_error();
  return {group.rounds, simulated_nsec};
}

// Of a dispatch and two combines between two domains.
double seconds_with(double latency_usec) {
  const SimulatedTime time;
  LoopOptions loop;
  loop.latency_usec = latency_usec;
  SteppedGroup group({0, 1}, loop, 1);
  group.longest_tick = 5 * kTickNsec;
  group.dispatch_and_combine();
  group.expect_no_error();
  return seconds();
}

// Rank 1 of four makes no call, or freezes in one. The others' error comes after `deadline_s` and names it.
void expect_named(const std::vector<int>& domain_of, double deadline_s, bool in_operation) {
  const SimulatedTime time;
  SteppedGroup group(domain_of, {}, 3, [&](EngineConfig& config) {
    config.arrival_timeout_s = deadline_s;
    config.progress_timeout_s = in_operation ? deadline_s : 10 * deadline_s;
  });
  group.longest_tick = 50'000'000;
  double since = 0;
  while (!group.all([&](size_t rank) { return rank == 1 || !group.errors[rank].empty(); }))
    group.round([&](size_t rank) {
      if (rank != 1) return void(group.advance(rank));
      if (!in_operation || group.calls[1].has_given_rows()) {
        group.frozen[1] = in_operation;
        if (since == 0) since = seconds();
        return;
      }
      group.advance(1);
    });
  for (size_t rank : {0, 2, 3}) EXPECT(group.errors[rank].find("rank 1") != std::string::npos);
  if (group.ended_s < since + deadline_s || group.ended_s > since + 1.02 * deadline_s + 0.1)
    throw std::logic_error("after " + std::to_string(group.ended_s - since) + " s: " + group.errors[0]);
}

}  // namespace

CLAIM("a group that one thread steps gives every token back, in any order of its ranks and under every fault") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0, 0, 0}, {0, 0, 1, 1}, {0, 1, 2, 3}, {0, 1, 0, 0}})
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      const SimulatedTime time;
      SteppedGroup group(domain_of, faulty(seed), seed);
      for (int i = 0; i < 2; ++i) group.dispatch_and_combine();
      group.expect_no_error();
    }
}
CLAIM("the same seed gives the same history to the nanosecond, another seed another one") {
  EXPECT(history_of(5) == history_of(5));
  EXPECT(!(history_of(5) == history_of(6)));
}
CLAIM("time is the link's: twice its latency takes twice as long, however fast this machine is") {
  const double once = seconds_with(1000), twice = seconds_with(2000);
  EXPECT(once > 0.003 && once < 0.02);
  EXPECT(twice > 1.9 * once && twice < 2.1 * once);
}
CLAIM("a rank that never calls is named by all others after the arrival deadline of 300 s, in one domain and in two") {
  expect_named({0, 0, 0, 0}, 300, false);
  expect_named({0, 0, 1, 1}, 300, false);
}
CLAIM("a rank that freezes in an operation is named by all others after the deadline of 60 s") {
  expect_named({0, 0, 0, 0}, 60, true);
  expect_named({0, 0, 1, 1}, 60, true);
}
CLAIM("a rank that closes in an operation ends it and what is queued behind it with an error, and tells the others") {
  const SimulatedTime time;
  SteppedGroup group({0, 0, 1, 1}, {}, 7);
  DispatchArgs nothing;
  nothing.hidden = kHidden;
  nothing.dtype = nothing.wire = Dtype::kFp32;
  nothing.has_routing = true;
  nothing.routing = {RoutingKind::kTopk, nullptr, kTopk};
  const auto under_way = group.engines[1]->dispatch(nothing), queued = group.engines[1]->dispatch(nothing);
  group.round([](size_t) {});
  group.engines[1]->close(false);
  EXPECT_THROWS(CommunicationFailure, under_way->wait(nullptr, 0));
  EXPECT_THROWS(CommunicationFailure, queued->wait(nullptr, 0));
  EXPECT(under_way->done() && queued->done());
  group.frozen[1] = true;
  while (!group.all([&](size_t rank) { return !group.errors[rank].empty(); }))
    group.round([&](size_t rank) { group.advance(rank); });
  for (size_t rank : {0, 2, 3}) EXPECT(group.errors[rank].find("rank 1: closed its buffer") != std::string::npos);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
