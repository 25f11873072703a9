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
// its ranks lands rows for all others: the ranks of a domain that has lost one have an error. Votes name the ranks
// themselves, so that the error does, too. Votes that name ranks of the same domains are equal.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/low_latency.h"
#include "backend/gpu/patience.cuh"

namespace uccl_ep::gpu {

__device__ __forceinline__ bool masks(const Group& g) { return g.mask_nsec != 0; }

enum class Came : uint32_t { kYes, kNo, kStopped };

// Of sets of ranks, a bit each: words that a group uses, an even number, and the word and bit of a rank.
__device__ __forceinline__ uint32_t rank_words(const Group& g) { return (g.map.num_ranks + 63) / 64 * 2; }
__device__ __forceinline__ uint32_t word_of(uint32_t rank) { return rank / 32; }
__device__ __forceinline__ uint32_t bit_of(uint32_t rank) { return 1u << rank % 32; }
// Of ranks `first` to `end`: what they have of a word, which is one of theirs.
__device__ __forceinline__ uint32_t bits_in(uint32_t word, uint32_t first, uint32_t end) {
  const uint32_t low = first > word * 32 ? first % 32 : 0, high = min(end - word * 32, 32);
  return 0xFFFFFFFF >> (32 - (high - low)) << low;
}
// Whether one of ranks `first` to `end` is there.
__device__ inline bool any_there(const uint32_t* ranks, uint32_t first, uint32_t end) {
#pragma unroll 1
  for (uint32_t i = word_of(first); i <= word_of(end - 1); ++i)
    if ((ranks[i] & bits_in(i, first, end)) != 0) return true;
  return false;
}
// In shared memory.
struct alignas(8) RankSet {
  uint32_t words[kRankWords];
  __device__ __forceinline__ void add(uint32_t rank) { or_shared(&words[word_of(rank)], bit_of(rank)); }
  __device__ __forceinline__ void add_all(uint32_t first, uint32_t end) {
#pragma unroll 1
    for (uint32_t i = word_of(first); i <= word_of(end - 1); ++i) or_shared(&words[i], bits_in(i, first, end));
  }
  __device__ __forceinline__ void add_word(uint32_t i, uint32_t bits) {
    if (bits != 0) or_shared(&words[i], bits);
  }
  __device__ __forceinline__ bool has(uint32_t rank) const { return (words[word_of(rank)] & bit_of(rank)) != 0; }
};
// By threads `first`, `first + step` and so on, where there are several domains: adds all of each domain that is there.
static __device__ __noinline__ void add_domains(const Group& g, RankSet& set, uint32_t first, uint32_t step) {
#pragma unroll 1
  for (uint32_t d = first; g.map.num_domains > 1 && d < g.map.num_domains; d += step)
    if (any_there(set.words, g.first_of[d], g.first_of[d + 1])) set.add_all(g.first_of[d], g.first_of[d + 1]);
}
// Whom a block does without: sending, and receiving.
static __device__ __forceinline__ RankSet& masked_of_block(bool sends) {
  __shared__ RankSet sets[2];
  return sets[sends];
}
// By thread `thread` of `threads`: fills such a set, before anything reads it. A barrier follows.
__device__ __forceinline__ void take_masked(const Group& g, RankSet& masked, uint32_t thread, uint32_t threads) {
  const LowLatencyState& state = local(g).low_latency;
  for (uint32_t i = thread; i < rank_words(g); i += threads) masked.words[i] = device::load_past_l1(&state.masked[i]);
}
// The same: adds those that this rank misses and has not voted on yet.
__device__ __forceinline__ void take_suspected(const Group& g, RankSet& masked, uint32_t thread, uint32_t threads) {
  const LowLatencyState& state = local(g).low_latency;
  for (uint32_t i = thread; i < rank_words(g); i += threads)
    masked.words[i] |= device::load_past_l1(&state.suspected[i]);
}
// Whether this rank is there, or one of its domain where there are several.
__device__ __forceinline__ bool names_us(const Group& g, const uint32_t* ranks) {
  return g.map.num_domains == 1 ? any_there(ranks, g.rank, g.rank + 1) : any_there(ranks, g.first, g.end);
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
    return is_near(of) ? vote(g.rank, of, round) : far(of).votes[settlement % 2 * 2 + round % 2];
  }
  __device__ __forceinline__ const SlotVote& heard_decision(uint32_t of) const {
    return is_near(of) ? decision(g.rank, of) : far(of).votes[kFirstDecision + settlement % 2];
  }
  // By a crew: tells all ranks. Those that are missed, too: who comes after all has to learn of it.
  __device__ __forceinline__ void tell_vote(const Crew& crew, const RankSet& ranks, uint32_t round) const {
    for (uint32_t r = g.first + crew.thread; r < g.end; r += crew.size)
      if (r != g.rank) tell(vote(r, g.rank, round), ranks, tag(round));
    if (crew.thread == 0 && has_far()) tell(own(settlement % 2 * 2 + round % 2), ranks, tag(round));
  }
  __device__ __forceinline__ void tell_decision(const Crew& crew, const RankSet& ranks) const {
    for (uint32_t r = g.first + crew.thread; r < g.end; r += crew.size)
      if (r != g.rank) tell(decision(r, g.rank), ranks, settlement);
    if (crew.thread == 0 && has_far()) tell(own(kFirstDecision + settlement % 2), ranks, settlement);
  }
  // By one thread: that this rank waits; the other domains hear it only before the first vote.
  __device__ __forceinline__ void tell_waiting(bool settles) const {
    for (uint32_t r = g.first; r < g.end; ++r)
      if (r != g.rank) publish(&near_wait(r, g.rank).cast, settlement);
    if (settles && has_far()) publish(&own(settlement % 2 * 2).cast, waiting());
  }
  __device__ __forceinline__ bool has_far() const { return g.map.num_domains > 1; }
  __device__ __forceinline__ bool is_near(uint32_t rank) const { return rank >= g.first && rank < g.end; }
  __device__ __forceinline__ const SlotVotes& far(uint32_t of) const { return g.slot_net.far_votes[g.rank_of[of]]; }
  __device__ __forceinline__ SlotVote& own(uint32_t i) const { return g.slot_net.own_votes->votes[i]; }
  __device__ __forceinline__ uint64_t waiting() const { return settlement << 8; }
  __device__ __forceinline__ uint64_t tag(uint32_t round) const { return settlement << 8 | (round + 1); }
  __device__ __forceinline__ void tell(SlotVote& vote, const RankSet& ranks, uint64_t number) const {
#pragma unroll 1
    for (uint32_t i = 0; i < rank_words(g); ++i) vote.ranks[i] = ranks.words[i];
    publish(&vote.cast, number);
  }
};

// A settlement before the first vote, by the threads of block 0. In shared memory.
struct Settling {
  RankSet gone;  // ranks that this one misses
  RankSet before;  // those of them that it missed before the operation
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
  RankSet ours;  // whom we miss, with their domains
  RankSet named;  // by any vote
  RankSet missed;  // these, with their domains
  RankSet decision;  // of a rank that is through
  RankSet masked_us;  // named by a rank that we miss, and that has gone on without us
  uint32_t differs, decided, stopped;
};
// By one thread: takes the decision of rank `r`, if it is through.
__device__ __forceinline__ bool hear_decision(const Votes& votes, uint32_t r, Round& round) {
  const SlotVote& decision = votes.heard_decision(r);
  if (peek(&decision.cast) < votes.settlement) return false;
  read(&decision.cast);
#pragma unroll 1
  for (uint32_t i = 0; i < rank_words(votes.g); ++i) round.decision.add_word(i, decision.ranks[i]);
  round.decided = 1;
  return true;
}
// By one thread: whether a vote is `ours`, which is rarely not so. It may lie on the host, where every read is slow.
__device__ __forceinline__ bool is_equal(const Group& g, const SlotVote& vote, const RankSet& ours) {
  bool equal = true;
#pragma unroll 1
  for (uint32_t i = 0; i < rank_words(g) / 2; ++i)
    equal &= reinterpret_cast<const uint64_t*>(vote.ranks)[i] == reinterpret_cast<const uint64_t*>(ours.words)[i];
  return equal;
}
// By one thread: takes a vote that is not equal to ours.
__device__ inline void join_vote(const Group& g, const SlotVote& vote, Round& round) {
  bool differs = false;
#pragma unroll 1
  for (uint32_t i = 0; i < rank_words(g); ++i) {
    const uint32_t its = vote.ranks[i];
    round.named.add_word(i, its);
    if (g.map.num_domains > 1) continue;
    round.missed.add_word(i, its);
    differs |= its != round.ours.words[i];
  }
#pragma unroll 1
  for (uint32_t d = 0; g.map.num_domains > 1 && d < g.map.num_domains; ++d) {
    const uint32_t first = g.first_of[d], end = g.first_of[d + 1];
    const bool is_missed = any_there(vote.ranks, first, end);
    if (is_missed) round.missed.add_all(first, end);
    differs |= is_missed != round.ours.has(first);
  }
  if (differs) round.differs = 1;
}
// By one thread: waits for the vote of rank `r`.
__device__ inline void hear_vote(const Votes& votes, uint32_t r, uint32_t number, const RankSet& ours, Round& round) {
  const Group& g = votes.g;
  const KernelPatience patience;
  const SlotVote& vote = votes.heard_vote(r, number);
  for (uint32_t looks = 1;; ++looks) {
    if (hear_decision(votes, r, round)) return;
    if (peek(&vote.cast) >= votes.tag(number)) {
      read(&vote.cast);
      if (!is_equal(g, vote, ours)) join_vote(g, vote, round);
      return;
    }
    if (looks % 64 != 0) continue;
    if (stopped(g)) {
      round.stopped = 1;
      return;
    }
    if (round.missed.has(r)) return;  // by another, whose vote differs from ours
    for (uint32_t other = 0; looks % 4096 == 0 && other < g.map.num_ranks; ++other)
      if (other != g.rank && !round.ours.has(other) && hear_decision(votes, other, round)) return;
    if (patience.over_mask(g, local(g).patient_since, votes.is_waiting(r) ? 2 : 1)) {
      round.named.add(r);
      round.missed.add(r);
      round.differs = 1;
      return;
    }
  }
}

// By one thread: if rank `r`, which we miss, has gone on without us, adds whom it named.
__device__ inline void find_who_masks_us(const Votes& votes, uint32_t r, Round& round) {
#pragma unroll 1
  for (uint32_t ahead = 0; ahead < 2; ++ahead) {
    const SlotVote& decision = Votes{votes.g, votes.settlement + ahead}.heard_decision(r);
    if (read(&decision.cast) == 0 || !names_us(votes.g, decision.ranks)) continue;
#pragma unroll 1
    for (uint32_t i = 0; i < rank_words(votes.g); ++i) round.masked_us.add_word(i, decision.ranks[i]);
    return;
  }
}
// By a block: whether this rank is masked, which is an error. With several domains the reason is a rank of ours. Most
// likely it has not voted and does not wait. Next likely is one that has not voted. Last comes one that others name, if
// they do not name all.
__device__ inline bool is_masked_itself(const Votes& votes, const Crew& crew, const RankSet& ranks) {
  const Group& g = votes.g;
  if (!names_us(g, ranks.words)) return false;
  if (crew.thread != 0) return true;
  uint32_t peer = g.rank, likeliest = 1;
  for (uint32_t r = g.first; r < g.end; ++r)
    if (!ranks.has(r)) likeliest = 0;
  for (uint32_t r = g.first; g.map.num_domains > 1 && r < g.end; ++r) {
    const bool has_voted = peek(&votes.heard_vote(r, 0).cast) > votes.waiting();
    const uint32_t silent = has_voted ? 0 : votes.is_waiting(r) ? 2 : 4, likely = silent + ranks.has(r);
    if (r == g.rank || likely <= likeliest) continue;
    peer = r;
    likeliest = likely;
  }
  report(g, {DeviceFault::kMasked, ErrorKind::kPeerFailed, Step::kExchange, peer});
  return true;
}
// By a block: `gone` becomes what all agree on, but for their domains. False: an error is known.
static __device__ __noinline__ bool agree(const Group& g, const Crew crew, uint64_t settlement, RankSet& gone) {
  __shared__ Round round;
  const Votes votes{g, settlement};
  for (uint32_t number = 0;; ++number) {
    crew.sync();
    if (crew.thread == 0) {
      round = {};
      round.ours = gone;
    }
    crew.sync();
    add_domains(g, round.ours, crew.thread, crew.size);
    crew.sync();
    votes.tell_vote(crew, gone, number);
    if (is_masked_itself(votes, crew, gone)) return false;
    for (uint32_t r = crew.thread; r < g.map.num_ranks; r += crew.size) {
      if (r == g.rank) continue;
      if (!round.ours.has(r))
        hear_vote(votes, r, number, gone, round);
      else
        find_who_masks_us(votes, r, round);
    }
    crew.sync();
    if (round.stopped != 0) return false;
    const bool decided = round.decided != 0, differs = round.differs != 0;
    for (uint32_t i = crew.thread; i < rank_words(g); i += crew.size)
      gone.words[i] =
          (decided ? round.decision.words[i] : gone.words[i] | round.named.words[i]) | round.masked_us.words[i];
    crew.sync();
    if (is_masked_itself(votes, crew, gone)) return false;
    if (decided || !differs) break;
  }
  votes.tell_decision(crew, gone);
  return true;
}

}  // namespace uccl_ep::gpu
