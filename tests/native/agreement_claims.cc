// Ranks agree on who is masked, in made-up groups and made-up time: whatever the order of passes and messages, and
// whenever ranks die or stand still.
#include "backend/host/agreement.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "claims.h"

namespace uccl_ep::host {
namespace {

constexpr uint64_t kMaskUsec = 100'000, kTickUsec = 1'000, kLateUsec = 40'000, kDelayUsec = 5'000;
constexpr uint64_t kMostTicks = 5'000;

struct Loss {
  std::vector<int> ranks;
  bool stands_still = false;  // and comes back; else it is dead
  bool is_cut = false;  // for a time nothing comes to the ranks from other domains
};
struct Case {
  std::vector<int> domain_of;
  Loss loss;
  uint32_t seed = 0;
  uint64_t settlements = 60;
  uint64_t within_usec = 300'000;  // ranks are lost so soon, and others a third of that later
};

class Group {
 public:
  explicit Group(const Case& of)
      : topo_(Topology::from_labels(of.domain_of)), settlements_(of.settlements), random_(of.seed) {
    const uint64_t struck = between(0, of.within_usec);
    if (of.loss.is_cut) {
      cut_from_ = struck;
      cut_until_ = struck + between(5, 8) * kMaskUsec;
    }
    for (int rank = 0; rank < topo_.num_ranks; ++rank) ranks_.push_back(std::make_unique<Member>(topo_, rank));
    for (auto& member : ranks_) connect(*member);
    for (const int rank : of.loss.ranks) {
      Member& member = at(rank);
      member.lost = true;
      member.gone_from = struck + between(0, 1) * between(0, of.within_usec / 3);
      member.gone_until = of.loss.stands_still ? member.gone_from + between(6, 12) * kMaskUsec : UINT64_MAX;
    }
  }

  // Until all have ended: at the last settlement, dead, or masked.
  void run() {
    for (uint64_t tick = 1; tick < kMostTicks; ++tick) {
      now_ = tick * kTickUsec;
      std::vector<int> order(ranks_.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
      std::shuffle(order.begin(), order.end(), random_);
      for (const int rank : order)
        if (runs(at(rank))) pass(at(rank));
      if (std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& member) { return has_ended(*member); })) return;
    }
    for (const auto& member : ranks_)
      if (!has_ended(*member)) throw std::logic_error("rank " + std::to_string(member->context.rank) + " hangs");
  }

  // Ranks that nothing has happened to, nor to their domain.
  bool survives(int rank) const {
    const bool several = topo_.num_domains() > 1;
    return std::none_of(ranks_.begin(), ranks_.end(), [&](const auto& other) {
      const int lost = other->context.rank;
      return other->lost && (lost == rank || (several && topo_.domain_of[lost] == topo_.domain_of[rank]));
    });
  }
  void check() const {
    const Member* first = nullptr;
    bool any_survives = false;
    for (int rank = 0; rank < topo_.num_ranks; ++rank) any_survives |= survives(rank);
    if (!any_survives) return;
    for (const auto& member : ranks_) {
      const int rank = member->context.rank;
      if (!survives(rank)) {
        if (member->gone_until != UINT64_MAX || !member->lost) EXPECT(member->is_masked);
        continue;
      }
      EXPECT(!member->is_masked);
      if (first == nullptr) first = member.get();
      EXPECT(member->decisions == first->decisions);
      for (int other = 0; other < topo_.num_ranks; ++other)
        EXPECT(member->masked.test(static_cast<size_t>(other)) == !survives(other));
    }
  }
  bool is_masked(int rank) const { return at(rank).is_masked; }
  // Of a rank that is masked: who it says is missing.
  int missed_by(int rank) { return at(rank).missed; }

 private:
  struct Votes {
    uint64_t due;
    int from;
    VoteWords words[kVotesOfRank];
  };
  struct Member {
    Member(const Topology& topo, int rank) : votes(1 + static_cast<size_t>(topo.num_ranks)) {
      context.rank = rank;
      context.topo = topo;
      context.domain = topo.domain_of[static_cast<size_t>(rank)];
      context.slots = std::make_unique<SlotPorts>();
      came.resize(static_cast<size_t>(topo.num_ranks));
    }
    HostContext context;
    std::vector<SharedVotes> votes;  // its own, then what has come from each rank
    std::deque<Votes> on_the_way;
    uint64_t told = 0;  // the sum of what it has sent to other domains
    bool lost = false, is_dead = false, is_masked = false;
    uint64_t gone_from = UINT64_MAX, gone_until = 0;
    uint64_t last_usec = 0, patient_usec = 0;
    uint64_t enters_usec = 0;
    std::vector<uint64_t> entered;  // when, by settlement
    // By source of another domain: of how many settlements its rows have come to this rank, and sums of its domain.
    // Its next rows come at `due`, 0 if that is open, or never.
    struct Came {
      uint64_t rows = 0, sums = 0, due = 0;
      bool is_lost = false;
    };
    std::vector<Came> came;
    RankBits named, masked;
    std::optional<Agreement> agreement;
    bool votes_now = false;
    std::vector<RankBits> decisions;
    int missed = -1;
  };

  bool has_ended(const Member& member) const {
    return member.is_masked || member.is_dead || member.decisions.size() == settlements_;
  }
  Member& at(int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  const Member& at(int rank) const { return *ranks_[static_cast<size_t>(rank)]; }
  uint64_t between(uint64_t least, uint64_t most) { return std::uniform_int_distribution(least, most)(random_); }

  void connect(Member& member) {
    SlotPorts& ports = *member.context.slots;
    ports.own_votes = member.votes.data();
    for (int other = 0; other < topo_.num_ranks; ++other) {
      const bool near = topo_.domain_of[other] == member.context.domain;
      ports.votes_of.push_back(near ? at(other).votes.data() : member.votes.data() + 1 + other);
    }
  }

  bool runs(Member& member) {
    if (now_ < member.gone_from || now_ >= member.gone_until) return !member.is_dead;
    member.is_dead = member.gone_until == UINT64_MAX;
    return false;
  }

  void pass(Member& member) {
    serve(member);
    member.patient_usec += std::min<uint64_t>(now_ - member.last_usec, 5 * kTickUsec);  // as PatienceClock
    member.last_usec = now_;
    if (has_ended(member) || now_ < member.enters_usec) return;
    const uint64_t settlement = member.decisions.size() + 1;
    if (member.entered.size() < settlement) {
      member.entered.push_back(now_);
      member.agreement.emplace(member.context, settlement, member.named, kMaskUsec, member.patient_usec);
      member.votes_now = false;
    }
    Agreement& agreement = *member.agreement;
    if (!member.votes_now) {
      const std::vector<WaitingOn> missing = missing_of(member, settlement, agreement.gone());
      if (!missing.empty() && !agreement.wait_for(missing, member.patient_usec)) return;
      member.votes_now = true;
    }
    switch (agreement.vote(member.patient_usec)) {
      case Agreement::State::kVotes:
        return;
      case Agreement::State::kMaskedItself:
        member.is_masked = true;
        member.missed = agreement.missed_neighbour();
        return;
      case Agreement::State::kDecided:
        member.named = agreement.named();
        member.masked = agreement.gone();
        EXPECT(missing_of(member, settlement, member.masked).empty());
        member.decisions.push_back(member.masked);
        member.enters_usec = now_ + between(0, 1) * between(0, kLateUsec);
    }
  }

  // A rank's proxy: votes to and from other domains, rows of sources that it lands, sums for itself.
  void serve(Member& member) {
    tell(member);
    std::erase_if(member.on_the_way, [&](const Votes& votes) {
      if (votes.due > now_ || is_cut()) return false;
      if (is_lost(at(votes.from), votes.due)) return true;
      take_votes(member.votes[1 + static_cast<size_t>(votes.from)], votes.words);
      return true;
    });
    for (int other = 0; other < topo_.num_ranks; ++other) {
      if (topo_.domain_of[other] == member.context.domain || is_cut()) continue;
      Member::Came& came = member.came[static_cast<size_t>(other)];
      if (other == topo_.rail(member.context.rank, topo_.domain_of[other]) && relays(at(other), came.sums)) ++came.sums;
      if (topo_.lands(member.context.rank, other) && at(other).entered.size() > came.rows) {
        if (came.due == 0) came.due = at(other).entered[came.rows] + between(0, kDelayUsec);
        if (came.due >= now_ || came.is_lost) continue;
        came.is_lost = is_lost(at(other), came.due);
        if (came.is_lost) continue;
        ++came.rows;
        came.due = 0;
      }
    }
  }
  bool is_cut() const { return now_ >= cut_from_ && now_ < cut_until_; }
  // What is under way when its sender dies may come, or not.
  bool is_lost(const Member& from, uint64_t due) { return due >= from.gone_from && from.is_dead && between(0, 1) == 0; }
  // A rail sends sums when all of its domain have entered.
  bool relays(Member& rail, uint64_t settlement) {
    if (rail.is_dead || (now_ >= rail.gone_from && now_ < rail.gone_until)) return false;
    for (const int rank : rail.context.members())
      if (at(rank).entered.size() <= settlement || at(rank).entered[settlement] + between(0, kDelayUsec) >= now_)
        return false;
    return true;
  }
  void tell(Member& member) {
    Votes votes{0, member.context.rank, {}};
    uint64_t sum = 0;
    for (uint32_t i = 0; i < kVotesOfRank; ++i) {
      votes.words[i] = read_vote(member.votes[0].votes[i]);
      sum += votes.words[i].cast;
    }
    if (std::exchange(member.told, sum) == sum) return;
    for (auto& other : ranks_) {
      if (other->context.domain == member.context.domain) continue;
      votes.due = now_ + between(0, kDelayUsec);
      other->on_the_way.push_back(votes);
    }
  }

  std::vector<WaitingOn> missing_of(const Member& member, uint64_t settlement, const RankBits& gone) const {
    std::vector<WaitingOn> missing;
    for (int rank = 0; rank < topo_.num_ranks; ++rank) {
      if (gone.test(static_cast<size_t>(rank))) continue;
      const bool near = topo_.domain_of[rank] == member.context.domain;
      const bool came = near ? at(rank).entered.size() >= settlement
                             : at(member.context.holder(rank)).came[static_cast<size_t>(rank)].rows >= settlement;
      if (!came) missing.push_back({Step::kExchange, rank});
    }
    for (int d = 0; d < topo_.num_domains(); ++d) {
      const int rail = topo_.rail(member.context.rank, d);
      if (d == member.context.domain || gone.test(static_cast<size_t>(rail))) continue;
      if (member.came[static_cast<size_t>(rail)].sums < settlement) missing.push_back({Step::kMerge, rail});
    }
    return missing;
  }

  const Topology topo_;
  const uint64_t settlements_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Member>> ranks_;
  uint64_t now_ = 0, cut_from_ = UINT64_MAX, cut_until_ = 0;
};

const std::vector<std::vector<int>> kLayouts = {{0, 0},          {0, 0, 0, 0},
                                                {0, 1},          {0, 1, 2, 3},
                                                {0, 0, 1, 1},    {0, 0, 0, 1},
                                                {0, 1, 0, 1},    {0, 0, 1, 1, 2, 2},
                                                {0, 0, 0, 1, 1}, {0, 0, 0, 0, 1, 1, 1, 1}};

void try_all(uint32_t seeds, const std::function<Loss(int, std::mt19937&)>& lose,
             const std::vector<std::vector<int>>& layouts = kLayouts, bool are_large = false) {
  for (size_t layout = 0; layout < layouts.size(); ++layout)
    for (uint32_t seed = 0; seed < seeds; ++seed) {
      std::mt19937 random(seed * 31 + static_cast<uint32_t>(layout));
      Case of{layouts[layout], lose(static_cast<int>(layouts[layout].size()), random), seed};
      if (are_large) of.settlements = 6, of.within_usec = 30'000;
      try {
        Group group(of);
        group.run();
        group.check();
      } catch (const std::exception& failure) {
        throw std::logic_error("layout " + std::to_string(layout) + ", seed " + std::to_string(seed) + ": " +
                               failure.what());
      }
    }
}
int any_of(int num_ranks, std::mt19937& random) { return std::uniform_int_distribution(0, num_ranks - 1)(random); }

CLAIM("nobody is masked where all come") {
  try_all(60, [](int, std::mt19937&) { return Loss{}; });
}
CLAIM("the others go on without a rank that has died, and agree") {
  try_all(60, [](int num_ranks, std::mt19937& random) { return Loss{{any_of(num_ranks, random)}}; });
}
CLAIM("a rank that stood still is masked when it comes back, and the others agree") {
  try_all(60, [](int num_ranks, std::mt19937& random) { return Loss{{any_of(num_ranks, random)}, true}; });
}
CLAIM("two ranks may be lost, at once or one after the other") {
  try_all(60, [](int num_ranks, std::mt19937& random) {
    const int one = any_of(num_ranks, random), other = any_of(num_ranks, random);
    return Loss{{one, other}, any_of(2, random) == 1};
  });
}
CLAIM("groups of more ranks than a word has bits agree as small ones do") {
  std::vector<int> eights, alone(130, 0);
  for (int rank = 0; rank < 72; ++rank) eights.push_back(rank / 8);
  const auto two = [](int num_ranks, std::mt19937& random) {
    return Loss{{any_of(num_ranks, random), num_ranks - 1}, any_of(2, random) == 1};
  };
  try_all(8, two, {eights, alone}, true);
}
CLAIM("the last rank of the largest group is masked") {
  Group group({std::vector<int>(kMaxMaskedRanks, 0), {{kMaxMaskedRanks - 1}}, 1, 1, 0});
  group.run();
  group.check();
}
CLAIM("domains that nothing joins mask each other, and find that when they are joined again") {
  for (uint32_t seed = 0; seed < 80; ++seed)
    for (const auto& domains : {std::vector{0, 1}, {0, 0, 1, 1}, {0, 0, 0, 1}}) {
      Group group({domains, {.ranks = {}, .is_cut = true}, seed, 200});
      group.run();
      for (int rank = 0; rank < static_cast<int>(domains.size()); ++rank) EXPECT(group.is_masked(rank));
    }
}
CLAIM("a rank whose domain has lost one names that one") {
  for (uint32_t seed = 0; seed < 700; ++seed) {
    Group group({{0, 0, 0, 1}, {{1}}, seed});
    group.run();
    group.check();
    EXPECT_EQ(group.missed_by(0), 1);
    EXPECT_EQ(group.missed_by(2), 1);
  }
}

}  // namespace
}  // namespace uccl_ep::host

int main(int argc, char** argv) { return claims::main(argc, argv); }
