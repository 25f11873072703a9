// Masks: low-latency operations that go on without ranks that no longer answer, where the configuration allows it.
//
// A rank that does not come within mask_timeout_s is suspected. Before any result is used, all others agree on who is
// masked. They vote in rounds: each tells all whom it misses, and waits for the votes of all that it does not miss.
// Votes that differ are joined for the next round. When all are equal they are the decision, which is told to all, too:
// who has lost another rank meanwhile finds the decision of those that were through, and takes it. Who is masked itself
// has an error.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/low_latency.h"

namespace uccl_ep::gpu {

__device__ __forceinline__ bool masks(const Group& g) { return g.mask_nsec != 0; }

enum class Came : uint32_t { kYes, kNo, kStopped };
// By one thread: waits as long as a rank may take.
static __device__ __noinline__ Came wait_live(const Group& g, const uint64_t* flag, uint64_t value) {
  const uint64_t began = now_nsec();
  for (uint32_t looks = 1; peek_flag(flag) < value; ++looks) {
    if (looks % 64 != 0) continue;
    if (stopped(g)) return Came::kStopped;
    if (now_nsec() - began > g.mask_nsec) return Came::kNo;
  }
  read_flag(flag);
  return Came::kYes;
}

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

// The votes of one settlement. Two settlements and two rounds of each have memory of their own: a rank that is two
// ahead has had our vote of the one between.
struct Votes {
  const Group& g;
  const uint64_t settlement;

  __device__ __forceinline__ SlotVote& vote(uint32_t at_rank, uint32_t of, uint32_t round) const {
    return at(g, at_rank, g.map.low_latency.votes)[(of * 2 + settlement % 2) * 2 + round % 2];
  }
  __device__ __forceinline__ SlotVote& decision(uint32_t at_rank, uint32_t of) const {
    return at(g, at_rank, g.map.low_latency.decisions)[of * 2 + settlement % 2];
  }
  __device__ __forceinline__ uint64_t tag(uint32_t round) const { return settlement << 8 | round; }
  static __device__ __forceinline__ void tell(SlotVote& vote, uint64_t ranks, uint64_t number) {
    vote.ranks = ranks;
    publish(&vote.cast, number);
  }
};

// What the votes of a round are. In shared memory.
struct Round {
  RankSet missed;  // by anybody
  RankSet decision;  // of a rank that is through
  uint32_t differs, decided, stopped;
};
// By one thread: waits for the vote of rank `r`.
__device__ inline void hear_vote(const Votes& votes, uint32_t r, uint32_t number, uint64_t mine, Round& round) {
  const Group& g = votes.g;
  const uint64_t began = now_nsec();
  const SlotVote& vote = votes.vote(g.rank, r, number);
  const SlotVote& decision = votes.decision(g.rank, r);
  for (uint32_t looks = 1;; ++looks) {
    if (peek(&decision.cast) >= votes.settlement) {
      read(&decision.cast);
      round.decision.add_all(decision.ranks);
      round.decided = 1;
      return;
    }
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
    if (now_nsec() - began > g.mask_nsec) {
      round.missed.add(r);
      round.differs = 1;
      return;
    }
  }
}

// By a block: `gone` becomes what all agree on. False: an error is known.
static __device__ __noinline__ bool agree(const Group& g, const Crew crew, uint64_t settlement, RankSet& gone) {
  __shared__ Round round;
  const Votes votes{g, settlement};
  for (uint32_t number = 0;; ++number) {
    crew.sync();
    const uint64_t mine = gone.all();
    if (crew.thread == 0) round = {};
    crew.sync();
    // Those that are missed, too: who comes after all has to learn of it.
    for (uint32_t r = crew.thread; r < g.map.num_ranks; r += crew.size)
      if (r != g.rank) Votes::tell(votes.vote(r, g.rank, number), mine, votes.tag(number));
    for (uint32_t r = crew.thread; r < g.map.num_ranks; r += crew.size)
      if (r != g.rank && (mine >> r & 1) == 0) hear_vote(votes, r, number, mine, round);
    crew.sync();
    if (round.stopped != 0) return false;
    const bool decided = round.decided != 0, differs = round.differs != 0;
    const uint64_t next = decided ? round.decision.all() : mine | round.missed.all();
    if ((next >> g.rank & 1) != 0) {
      if (crew.thread == 0) report(g, {DeviceFault::kMasked, ErrorKind::kPeerFailed, Step::kExchange, g.rank});
      return false;
    }
    if (crew.thread == 0) gone.set(next);
    if (decided || !differs) break;
  }
  crew.sync();
  for (uint32_t r = crew.thread; r < g.map.num_ranks; r += crew.size)
    if (r != g.rank) Votes::tell(votes.decision(r, g.rank), gone.all(), settlement);
  return true;
}

}  // namespace uccl_ep::gpu
