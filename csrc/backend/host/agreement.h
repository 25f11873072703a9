// Ranks agree on who is masked, as kernels do: backend/gpu/masks.cuh says how and why. Here a worker looks again and
// again instead of waiting, and reads the votes of its domain where they were cast.
#pragma once

#include <bitset>
#include <cstdint>
#include <optional>
#include <vector>

#include "backend/host/context.h"
#include "backend/op.h"

namespace uccl_ep::host {

using RankBits = std::bitset<kMaxMaskedRanks>;  // ranks, a bit each
inline RankBits bit_of(int rank) { return RankBits().set(static_cast<size_t>(rank)); }

// One settlement, from the first wait for others to the decision. Numbers are from 1 on, the same on all ranks.
class Agreement {
 public:
  // `named`: by the decisions before. `now_usec`, here and below: by the clock of deadlines.
  Agreement(const HostContext& context, uint64_t settlement, const RankBits& named, uint64_t mask_usec,
            uint64_t now_usec);

  // ---- before the vote
  const RankBits& gone() const { return gone_; }  // between domains with their domains
  // This has not come yet. True when it is time to vote: gone() has who should have sent it.
  bool wait_for(const std::vector<WaitingOn>& missing, uint64_t now_usec);

  // ---- the vote
  enum class State { kVotes, kDecided, kMaskedItself };
  State vote(uint64_t now_usec);
  // kDecided: gone() is who is masked, because of these.
  const RankBits& named() const { return mine_; }
  // kMaskedItself: the rank of our domain that is missing, or our own.
  int missed_neighbour() const { return missed_neighbour_; }

 private:
  static constexpr uint64_t kQuietPart = 8;  // of the time that a rank may take, before this one says that it waits

  const SharedVote& heard_vote(int of, uint64_t round) const {
    return context_.slots->votes_of[static_cast<size_t>(of)]->votes[settlement_ % 2 * 2 + round % 2];
  }
  const SharedVote& heard_decision(int of, uint64_t settlement) const {
    return context_.slots->votes_of[static_cast<size_t>(of)]->votes[kFirstDecision + settlement % 2];
  }
  uint64_t waiting() const { return settlement_ << 8; }
  uint64_t tag() const { return settlement_ << 8 | (round_ + 1); }
  bool is_waiting(int of) const { return heard_vote(of, 0).cast.read() >= waiting(); }
  void tell(uint32_t vote, const RankBits& ranks, uint64_t number);
  void tell_waiting();
  RankBits whole_domains(const RankBits& ranks) const;
  RankBits masks_us(int of) const;
  bool is_masked_itself(const RankBits& ranks);
  void begin_round(uint64_t now_usec);
  std::optional<RankBits> heard_decision() const;
  bool hear_votes(uint64_t now_usec);

  const HostContext& context_;
  const uint64_t settlement_, mask_usec_;
  const RankBits domain_;  // of our own domain, where there are several; else none
  RankBits mine_, gone_;  // whom this rank names; these, with their domains
  uint64_t began_usec_;
  bool told_waiting_ = false;
  int missed_neighbour_ = -1;

  // Of the round that is under way: whom votes name, these and ours with their domains, and whose vote is missing.
  bool votes_ = false;
  uint64_t round_ = 0, round_usec_ = 0;
  RankBits named_, missed_, pending_;
  bool differs_ = false;
};

}  // namespace uccl_ep::host
