// Headers have no credits: may a slot be written again two operations later without asking?
//
//   Rank0 to Rank3  a rank's worker, and the proxies on the way of its header: csrc/backend/host/exchange.cc,
//                   plan.cc (read_header), csrc/proxy; kHeaderSlots of csrc/layout/region.h
//
// Domain A is ranks 0 and 1, domain B ranks 2 and 3. All eight headers of an operation, read in any order.
//
// Reductions, and why they lose nothing:
// * An operation is its headers: what else it does only delays its end, and every delay is searched.
// * A rank reads its own header as it writes it: nobody but itself waits for that.
// * Three operations: the third is the first that writes a slot again; later ones repeat it.
// * Two domains: a further one adds readers of the same kind.

#define kOps 3
#ifdef ONE_HEADER_SLOT
#define kSlots 1
#else
#define kSlots 2
#endif
byte op[4] = 1;
byte own[4], sent[4];  // headers of a rank: in its domain; for the other domain
byte landed[8];        // [kSlots * source + slot] the last one that landed there, + 1
byte taken[16];        // [4 * source + reader]

#define TAKEN(s, a, b) (taken[4 * s + a] < taken[4 * s + b] -> taken[4 * s + a] : taken[4 * s + b])
#define OWN(s) (own[s] > taken[4 * s + me])
#define LANDED(s) (landed[kSlots * s + taken[4 * s + me] % kSlots] == taken[4 * s + me] + 1)
#define READ_HEADER(s, READY) \
  :: atomic { op[me] <= kOps && taken[4 * s + me] < op[me] && READY(s) -> taken[4 * s + me]++ }
#define DONE(s) (taken[4 * s + me] == op[me])

// The last of `count` headers in `slot`, + 1: 0 if there is none. Two may be on their way, and overtake each other.
#define LAST_IN(count, slot) (count > slot -> count - (count - 1 - slot) % kSlots : 0)
#define FLUSHED(rank) (landed[kSlots * rank + sent[rank] % kSlots] > sent[rank] - kSlots)
#define LAND(rank, slot, far, far2) \
  :: atomic { landed[kSlots * rank + slot] < LAST_IN(sent[rank], slot) -> \
       /* no header is overwritten before both readers have it */ \
       assert(TAKEN(rank, far, far2) >= landed[kSlots * rank + slot]); \
       landed[kSlots * rank + slot] = LAST_IN(sent[rank], slot) }
#ifdef ONE_HEADER_SLOT
#define LAND_ALL(rank, far, far2) LAND(rank, 0, far, far2)
#else
#define LAND_ALL(rank, far, far2) LAND(rank, 0, far, far2) LAND(rank, 1, far, far2)
#endif

#define WORKER(rank, peer, far, far2, HERE0, HERE1, HERE2, HERE3) \
  do \
  :: atomic { op[rank] <= kOps && own[rank] < op[rank] && \
       (own[rank] < kSlots || TAKEN(rank, rank, peer) > own[rank] - kSlots) -> \
       own[rank]++; taken[4 * rank + rank]++ } \
  :: atomic { op[rank] <= kOps && sent[rank] < op[rank] && (sent[rank] < kSlots || FLUSHED(rank)) -> sent[rank]++ } \
  LAND_ALL(rank, far, far2) \
  READ_HEADER(0, HERE0) READ_HEADER(1, HERE1) READ_HEADER(2, HERE2) READ_HEADER(3, HERE3) \
  :: atomic { op[rank] <= kOps && own[rank] == op[rank] && sent[rank] == op[rank] && \
       DONE(0) && DONE(1) && DONE(2) && DONE(3) -> op[rank]++ } \
  :: op[rank] > kOps && TAKEN(rank, far, far2) == kOps -> break \
  od

#define me 0
active proctype Rank0() { WORKER(0, 1, 2, 3, OWN, OWN, LANDED, LANDED) }
#undef me
#define me 1
active proctype Rank1() { WORKER(1, 0, 2, 3, OWN, OWN, LANDED, LANDED) }
#undef me
#define me 2
active proctype Rank2() { WORKER(2, 3, 0, 1, LANDED, LANDED, OWN, OWN) }
#undef me
#define me 3
active proctype Rank3() { WORKER(3, 2, 0, 1, LANDED, LANDED, OWN, OWN) }
