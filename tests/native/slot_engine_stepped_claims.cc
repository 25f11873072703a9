// Low latency whose ranks may be masked, stepped by one thread under simulated time: any order of passes, ranks that
// stand still for ever or come back.
#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "claims.h"
#include "simulated_time.h"
#include "slot_try.h"

using namespace uccl_ep;

namespace {

constexpr double kMaskSeconds = 0.2;
constexpr uint64_t kTickNsec = 2'000, kLongestTickNsec = 2'000'000;
constexpr int kRounds = 12;

class SteppedSlots {
 public:
  SteppedSlots(const std::vector<int>& domain_of, uint64_t seed) : domain_of_(domain_of), random_(seed) {
    LoopOptions loop;
    loop.seed = seed;
    loop.loss_rate = 0.1;
    loop.latency_usec = 50;
    std::vector<std::string> handles;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      EngineConfig config = config_of(rank, domain_of, loop);
      with_slots(config);
      config.mask_timeout_s = kMaskSeconds;
      members_.push_back({std::make_unique<HostEngine>(config), {}, 0, 0, 0, {}});
      handles.push_back(members_.back().engine->export_handle());
    }
    for (auto& member : members_) member.engine->connect(handles);
    for (auto& member : members_) member.engine->start(Drive::kSteps);
  }
  ~SteppedSlots() {
    for (auto& member : members_) member.engine->close(true);
  }

  // The rank makes no pass from now on, until `until_s`.
  void freeze(int rank, double until_s) { at(rank).frozen_until_s = until_s; }
  void run(const std::function<bool()>& until) {
    std::vector<int> order(members_.size());
    std::iota(order.begin(), order.end(), 0);
    uint64_t tick = kTickNsec;
    while (!until()) {
      if (seconds() > 30) throw std::logic_error("they hang");
      std::shuffle(order.begin(), order.end(), random_);
      bool moved = false;
      for (const int rank : order) {
        Member& member = at(rank);
        if (seconds() < member.frozen_until_s) continue;
        moved |= member.engine->step();
        if (member.error.empty()) go_on(member);
      }
      tick = moved ? kTickNsec : std::min(2 * tick, kLongestTickNsec);
      simulated_nsec += tick;
    }
  }
  int rounds_of(int rank) const { return members_[static_cast<size_t>(rank)].rounds; }
  const std::string& error_of(int rank) const { return members_[static_cast<size_t>(rank)].error; }
  bool masks(int by, int rank) { return masks_of(*at(by).engine, members_.size())[static_cast<size_t>(rank)] != 0; }
  int num_ranks() const { return static_cast<int>(domain_of_.size()); }

 private:
  struct Member {
    std::unique_ptr<HostEngine> engine;
    std::optional<SlotTry> slots;
    int phase, rounds;
    double frozen_until_s;
    std::string error;
  };
  Member& at(int rank) { return members_[static_cast<size_t>(rank)]; }

  // A rank makes its calls, one after the other.
  void go_on(Member& member) {
    if (member.rounds == kRounds) return;
    try {
      if (!member.slots) {
        member.slots.emplace(*member.engine, static_cast<uint32_t>(num_ranks()), random_, true);
        member.slots->keep_input();
        member.slots->queue_dispatch(SlotPhase::kBoth);
        member.phase = 1;
      } else if (member.phase == 1 && member.slots->is_over(OpKind::kLowLatencyDispatch)) {
        member.slots->queue_combine(SlotPhase::kBoth);
        member.phase = 2;
      } else if (member.phase == 2 && member.slots->is_over(OpKind::kLowLatencyCombine)) {
        member.slots->check(masks_of(*member.engine, members_.size()));
        member.slots.reset();
        ++member.rounds;
      }
    } catch (const CommunicationFailure& failure) {
      member.error = failure.what();
    }
  }

  const std::vector<int> domain_of_;
  std::mt19937_64 random_;
  std::vector<Member> members_;
};

const std::vector<std::vector<int>> kLayouts = {{0, 0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 1, 1}, {0, 1, 0, 2}};

// One rank stands still for `seconds_still` after some rounds; the others and those of its domain have what they must.
void try_all(double seconds_still) {
  for (size_t layout = 0; layout < kLayouts.size(); ++layout)
    for (uint64_t seed = 0; seed < 8; ++seed) {
      const SimulatedTime time;
      const std::vector<int>& domains = kLayouts[layout];
      SteppedSlots group(domains, seed);
      const int ranks = group.num_ranks(), victim = static_cast<int>(seed % domains.size());
      const bool several = std::count(domains.begin(), domains.end(), domains[0]) < ranks;
      const auto is_lost = [&](int rank) { return rank == victim || (several && domains[rank] == domains[victim]); };
      const auto all = [&](int rounds) {
        for (int rank = 0; rank < ranks; ++rank)
          if (group.error_of(rank).empty() && group.rounds_of(rank) < rounds && !(rounds > 2 && is_lost(rank)))
            return false;
        return true;
      };
      group.run([&] { return all(2); });
      const double from_s = seconds();
      group.freeze(victim, seconds_still > 0 ? from_s + seconds_still : 1e9);
      const auto lost_know = [&] {
        for (int rank = 0; rank < ranks; ++rank)
          if (is_lost(rank) && (rank != victim || seconds_still > 0) && group.error_of(rank).empty()) return false;
        return true;
      };
      group.run([&] { return all(kRounds) && lost_know(); });
      for (int rank = 0; rank < ranks; ++rank) {
        if (is_lost(rank) && rank != victim) EXPECT(group.error_of(rank).find("was masked") != std::string::npos);
        if (is_lost(rank)) continue;
        if (!group.error_of(rank).empty()) throw std::logic_error(group.error_of(rank));
        for (int other = 0; other < ranks; ++other) EXPECT(group.masks(rank, other) == is_lost(other));
      }
      if (seconds_still > 0) EXPECT(group.error_of(victim).find("was masked") != std::string::npos);
    }
}

}  // namespace

CLAIM("the others go on without a rank that stands still for ever, whatever the order of passes") { try_all(0); }
CLAIM("a rank that stood still learns that it was masked, and the others do not mind") { try_all(3); }

int main(int argc, char** argv) { return claims::main(argc, argv); }
