// Ranks agree on who is masked, as kernels do: backend/gpu/masks.cuh says how and why. Here a worker looks again and
// again instead of waiting, and reads the votes of its domain where they were cast.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "backend/host/context.h"
#include "backend/op.h"

namespace uccl_ep::host {

// Ranks, a bit each: kMaxMaskedRanks at most.
using RankBits = uint64_t;
inline RankBits bit_of(int rank) { return RankBits{1} << rank; }

// One settlement, from the first wait for others to the decision. Numbers are from 1 on, the same on all ranks.
class Agreement {
 public:
  // `gone`: ranks that are masked. `now_usec`, here and below: by the clock of deadlines.
  Agreement(const HostContext& context, uint64_t settlement, RankBits gone, uint64_t mask_usec, uint64_t now_usec);

  // ---- before the vote
  RankBits gone() const { return gone_; }
  // This has not come yet. True when it is time to vote: gone() has who should have sent it.
  bool wait_for(const std::vector<WaitingOn>& missing, uint64_t now_usec);

  // ---- the vote
  enum class State { kVotes, kDecided, kMaskedItself };
  State vote(uint64_t now_usec);
  // kDecided: gone() is who is masked. kMaskedItself: the rank of our domain that is missing, or our own.
  int missed_neighbour() const { return missed_neighbour_; }

 private:
  static constexpr uint64_t kQuietPart = 8;  // of the time that a rank may take, before this one says that it waits

  const SharedVote& heard_vote(int of, uint64_t round) const {
    return context_.slots->votes_of[static_cast<size_t>(of)][settlement_ % 2 * 2 + round % 2];
  }
  const SharedVote& heard_decision(int of, uint64_t settlement) const {
    return context_.slots->votes_of[static_cast<size_t>(of)][kFirstDecision + settlement % 2];
  }
  uint64_t waiting() const { return settlement_ << 8; }
  uint64_t tag() const { return settlement_ << 8 | (round_ + 1); }
  bool is_waiting(int of) const { return heard_vote(of, 0).cast.read() >= waiting(); }
  void tell(uint32_t vote, RankBits ranks, uint64_t number);
  void tell_waiting();
  RankBits whole_domains(RankBits ranks) const;
  bool masks_us(int of) const;
  bool is_masked_itself(RankBits ranks);
  void begin_round(uint64_t now_usec);
  bool hear_decisions();
  bool hear_votes(uint64_t now_usec);

  const HostContext& context_;
  const uint64_t settlement_, mask_usec_;
  const RankBits domain_;  // of our own domain, where there are several; else none
  RankBits gone_;
  uint64_t began_usec_;
  bool told_waiting_ = false;
  int missed_neighbour_ = -1;

  // Of the round that is under way.
  bool votes_ = false;
  uint64_t round_ = 0, round_usec_ = 0;
  RankBits mine_ = 0, missed_ = 0, pending_ = 0;
  bool differs_ = false;
};

}  // namespace uccl_ep::host
