// Masks: low-latency operations that go on without ranks that no longer answer, where the configuration allows it.
//
// A rank that does not come within mask_timeout_s is suspected. Before any result is used, all others agree on who is
// masked. They vote in rounds: each tells all whom it misses, and waits for the votes of all that it does not miss.
// Votes that differ are joined for the next round. When all are equal they are the decision, which is told to all, too:
// who has lost another rank meanwhile finds the decision of those that were through, and takes it. Who is masked itself
// has an error.
//
// A rank that waits for another must not be masked for it: it says that it waits, and then has twice the time. It waits
// no longer for a rank that another has missed, or when one of the others has decided. What a rank of another domain
// sends comes by its rail here, which may be dead: so that one alone votes for it, and the others wait for its vote.
//
// Between domains votes go by the hosts: datagrams of the proxies. There a domain is masked as a whole, because each of
// its ranks lands rows for all others: the ranks of a domain that has lost one have an error.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/low_latency.h"
#include "backend/gpu/patience.cuh"

namespace uccl_ep::gpu {

__device__ __forceinline__ bool masks(const Group& g) { return g.mask_nsec != 0; }

enum class Came : uint32_t { kYes, kNo, kStopped };

// In shared memory: ranks, a bit each.
struct RankSet {
  uint32_t words[2];
  __device__ __forceinline__ void add(uint32_t rank) { or_shared(&words[rank / 32], 1u << rank % 32); }
  __device__ __forceinline__ void add_all(uint64_t ranks) {
    or_shared(&words[0], static_cast<uint32_t>(ranks));
    or_shared(&words[1], static_cast<uint32_t>(ranks >> 32));
  }
  __device__ __forceinline__ bool has(uint32_t rank) const { return (words[rank / 32] >> rank % 32 & 1) != 0; }
  __device__ __forceinline__ uint64_t all() const { return uint64_t{words[1]} << 32 | words[0]; }
  __device__ __forceinline__ void set(uint64_t ranks) {
    words[0] = static_cast<uint32_t>(ranks);
    words[1] = static_cast<uint32_t>(ranks >> 32);
  }
};

// Ranks `first` to `end`, a bit each.
__device__ __forceinline__ uint64_t rank_bits(uint32_t first, uint32_t end) {
  return ((uint64_t{2} << (end - first - 1)) - 1) << first;
}
// With each rank all of its domain, where there are several.
static __device__ __noinline__ uint64_t whole_domains(const Group& g, uint64_t ranks) {
  if (g.map.num_domains == 1) return ranks;
  uint64_t all = 0;
#pragma unroll 1
  for (uint32_t d = 0; d < g.map.num_domains; ++d) {
    const uint64_t its = rank_bits(g.first_of[d], g.first_of[d + 1]);
    if ((ranks & its) != 0) all |= its;
  }
  return all;
}

// The votes of one settlement. Two settlements and two rounds of each have memory of their own: a rank that is two
// ahead has had our vote of the one between.
struct Votes {
  const Group& g;
  const uint64_t settlement;

  // Of a member of our domain, at another one.
  __device__ __forceinline__ SlotVote& vote(uint32_t at_rank, uint32_t of, uint32_t round) const {
    return at(g, at_rank, g.map.low_latency.votes)[((of - g.first) * 2 + settlement % 2) * 2 + round % 2];
  }
  __device__ __forceinline__ SlotVote& decision(uint32_t at_rank, uint32_t of) const {
    return at(g, at_rank, g.map.low_latency.decisions)[(of - g.first) * 3 + settlement % 2];
  }
  __device__ __forceinline__ SlotVote& near_wait(uint32_t at_rank, uint32_t of) const {
    return at(g, at_rank, g.map.low_latency.decisions)[(of - g.first) * 3 + 2];
  }
  // Whether a rank that is not through waits, or has waited and voted.
  __device__ __forceinline__ bool is_waiting(uint32_t of) const {
    return peek(&heard_vote(of, 0).cast) >= waiting() ||
           (is_near(of) && peek(&near_wait(g.rank, of).cast) >= settlement);
  }
  // Of any rank, as they come here.
  __device__ __forceinline__ const SlotVote& heard_vote(uint32_t of, uint32_t round) const {
    return is_near(of) ? vote(g.rank, of, round) : far(of)[settlement % 2 * 2 + round % 2];
  }
  __device__ __forceinline__ const SlotVote& heard_decision(uint32_t of) const {
    return is_near(of) ? decision(g.rank, of) : far(of)[kFirstDecision + settlement % 2];
  }
  // By a crew: tells all ranks. Those that are missed, too: who comes after all has to learn of it.
  __device__ __forceinline__ void tell_vote(const Crew& crew, uint64_t ranks, uint32_t round) const {
    for (uint32_t r = g.first + crew.thread; r < g.end; r += crew.size)
      if (r != g.rank) tell(vote(r, g.rank, round), ranks, tag(round));
    if (crew.thread == 0 && has_far()) tell(g.slot_net.own_votes[settlement % 2 * 2 + round % 2], ranks, tag(round));
  }
  __device__ __forceinline__ void tell_decision(const Crew& crew, uint64_t ranks) const {
    for (uint32_t r = g.first + crew.thread; r < g.end; r += crew.size)
      if (r != g.rank) tell(decision(r, g.rank), ranks, settlement);
    if (crew.thread == 0 && has_far()) tell(g.slot_net.own_votes[kFirstDecision + settlement % 2], ranks, settlement);
  }
  // By one thread: that this rank waits; the other domains hear it only before the first vote.
  __device__ __forceinline__ void tell_waiting(bool settles) const {
    for (uint32_t r = g.first; r < g.end; ++r)
      if (r != g.rank) publish(&near_wait(r, g.rank).cast, settlement);
    if (settles && has_far()) publish(&g.slot_net.own_votes[settlement % 2 * 2].cast, waiting());
  }
  __device__ __forceinline__ bool has_far() const { return g.map.num_domains > 1; }
  __device__ __forceinline__ bool is_near(uint32_t rank) const { return rank >= g.first && rank < g.end; }
  __device__ __forceinline__ const SlotVote* far(uint32_t of) const {
    return g.slot_net.far_votes + g.rank_of[of] * kRankVotes;
  }
  __device__ __forceinline__ uint64_t waiting() const { return settlement << 8; }
  __device__ __forceinline__ uint64_t tag(uint32_t round) const { return settlement << 8 | (round + 1); }
  static __device__ __forceinline__ void tell(SlotVote& vote, uint64_t ranks, uint64_t number) {
    vote.ranks = ranks;
    publish(&vote.cast, number);
  }
};

// A settlement before the first vote, by the threads of block 0. In shared memory.
struct Settling {
  RankSet gone;  // ranks that this one misses
  uint64_t settlement;
  uint32_t began;  // as KernelPatience has it
};
// By one thread: waits as long as a rank may take since `began`. settles: for what has to come before this rank votes.
static __device__ __noinline__ Came wait_live(const Group& g, const uint64_t* flag, uint64_t value, uint32_t began,
                                              uint64_t settlement, bool settles) {
  constexpr uint32_t kQuietPart = 8;  // of that time, before this rank says that it waits
  const KernelPatience patience{began};
  bool told = false;
  for (uint32_t looks = 1; peek_flag(flag) < value; ++looks) {
    if (looks % 64 != 0) continue;
    if (stopped(g)) return Came::kStopped;
    if (!told && patience.lasts(g.mask_nsec / kQuietPart)) {
      Votes{g, settlement}.tell_waiting(settles);
      told = true;
    }
    if (patience.over_mask(g, local(g).patient_since)) return Came::kNo;
  }
  read_flag(flag);
  return Came::kYes;
}

// What the votes of a round are. In shared memory.
struct Round {
  RankSet missed;  // by anybody
  RankSet decision;  // of a rank that is through
  uint32_t differs, decided, stopped;
  uint32_t masks_us;  // 1: one that we miss does
};
// By one thread: takes the decision of rank `r`, if it is through.
__device__ __forceinline__ bool hear_decision(const Votes& votes, uint32_t r, Round& round) {
  const SlotVote& decision = votes.heard_decision(r);
  if (peek(&decision.cast) < votes.settlement) return false;
  read(&decision.cast);
  round.decision.add_all(decision.ranks);
  round.decided = 1;
  return true;
}
// By one thread: waits for the vote of rank `r`.
__device__ inline void hear_vote(const Votes& votes, uint32_t r, uint32_t number, uint64_t mine, Round& round) {
  const Group& g = votes.g;
  const KernelPatience patience;
  const SlotVote& vote = votes.heard_vote(r, number);
  for (uint32_t looks = 1;; ++looks) {
    if (hear_decision(votes, r, round)) return;
    if (peek(&vote.cast) >= votes.tag(number)) {
      read(&vote.cast);
      const uint64_t its = vote.ranks;
      round.missed.add_all(its);
      if (its != mine) round.differs = 1;
      return;
    }
    if (looks % 64 != 0) continue;
    if (stopped(g)) {
      round.stopped = 1;
      return;
    }
    if (round.missed.has(r)) return;  // by another, whose vote differs from ours
    for (uint32_t other = 0; looks % 4096 == 0 && other < g.map.num_ranks; ++other)
      if (other != g.rank && (mine >> other & 1) == 0 && hear_decision(votes, other, round)) return;
    if (patience.over_mask(g, local(g).patient_since, votes.is_waiting(r) ? 2 : 1)) {
      round.missed.add(r);
      round.differs = 1;
      return;
    }
  }
}

// By one thread: whether rank `r`, which we miss, has gone on without us.
__device__ inline bool masks_us(const Votes& votes, uint32_t r) {
  bool named = false;
  for (uint32_t back = 0; back < 2; ++back) {
    const SlotVote& decision = Votes{votes.g, votes.settlement + back}.heard_decision(r);
    named |= read(&decision.cast) != 0 && (decision.ranks >> votes.g.rank & 1) != 0;
  }
  return named;
}
// By a block: whether this rank is masked, which is an error. With several domains the reason is a rank of ours that
// has not voted, and most likely does not wait, either; votes name the whole domain.
__device__ __forceinline__ bool is_masked_itself(const Votes& votes, const Crew& crew, uint64_t ranks) {
  const Group& g = votes.g;
  if ((ranks >> g.rank & 1) == 0) return false;
  if (crew.thread != 0) return true;
  uint32_t peer = g.rank;
  bool waits = true;
  for (uint32_t r = g.first; g.map.num_domains > 1 && r < g.end; ++r) {
    if (r == g.rank || (ranks >> r & 1) == 0 || peek(&votes.heard_vote(r, 0).cast) > votes.waiting()) continue;
    const bool its = votes.is_waiting(r);
    if (peer == g.rank || (waits && !its)) {
      peer = r;
      waits = its;
    }
  }
  report(g, {DeviceFault::kMasked, ErrorKind::kPeerFailed, Step::kExchange, peer});
  return true;
}
// By a block: `gone` becomes what all agree on. False: an error is known.
static __device__ __noinline__ bool agree(const Group& g, const Crew crew, uint64_t settlement, RankSet& gone) {
  __shared__ Round round;
  const Votes votes{g, settlement};
  for (uint32_t number = 0;; ++number) {
    crew.sync();
    const uint64_t mine = whole_domains(g, gone.all());
    if (crew.thread == 0) round = {};
    crew.sync();
    votes.tell_vote(crew, mine, number);
    if (is_masked_itself(votes, crew, mine)) return false;
    for (uint32_t r = crew.thread; r < g.map.num_ranks; r += crew.size) {
      if (r == g.rank) continue;
      if ((mine >> r & 1) == 0)
        hear_vote(votes, r, number, mine, round);
      else if (masks_us(votes, r))
        round.masks_us = 1;
    }
    crew.sync();
    if (round.stopped != 0) return false;
    const bool decided = round.decided != 0, differs = round.differs != 0;
    uint64_t next = decided ? round.decision.all() : whole_domains(g, mine | round.missed.all());
    if (round.masks_us != 0) next |= rank_bits(g.rank, g.rank + 1);
    if (is_masked_itself(votes, crew, next)) return false;
    if (crew.thread == 0) gone.set(next);
    if (decided || !differs) break;
  }
  crew.sync();
  votes.tell_decision(crew, gone.all());
  return true;
}

}  // namespace uccl_ep::gpu
