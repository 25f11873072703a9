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
byte own[4], sent[4], arrived[4];  // headers of a rank: in its domain; for the other domain; landed there
byte taken[16];  // [4 * source + reader]

#define TAKEN(s, a, b) (taken[4 * s + a] < taken[4 * s + b] -> taken[4 * s + a] : taken[4 * s + b])
#define READ_HEADER(s, here) \
  :: atomic { op[me] <= kOps && taken[4 * s + me] < op[me] && here[s] > taken[4 * s + me] -> \
       taken[4 * s + me]++ }
#define DONE(s) (taken[4 * s + me] == op[me])

#define WORKER(rank, peer, far, far2, here0, here1, here2, here3) \
  do \
  :: atomic { op[rank] <= kOps && own[rank] < op[rank] && \
       (own[rank] < kSlots || TAKEN(rank, rank, peer) > own[rank] - kSlots) -> \
       own[rank]++; taken[4 * rank + rank]++ } \
  :: atomic { op[rank] <= kOps && sent[rank] < op[rank] && (sent[rank] < kSlots || arrived[rank] > sent[rank] - kSlots) -> \
       sent[rank]++ } \
  :: atomic { arrived[rank] < sent[rank] -> /* no header is overwritten before both readers have it */ \
       assert(arrived[rank] < kSlots || TAKEN(rank, far, far2) > arrived[rank] - kSlots); arrived[rank]++ } \
  READ_HEADER(0, here0) READ_HEADER(1, here1) READ_HEADER(2, here2) READ_HEADER(3, here3) \
  :: atomic { op[rank] <= kOps && own[rank] == op[rank] && sent[rank] == op[rank] && \
       DONE(0) && DONE(1) && DONE(2) && DONE(3) -> op[rank]++ } \
  :: op[rank] > kOps && arrived[rank] == kOps -> break \
  od

#define me 0
active proctype Rank0() { WORKER(0, 1, 2, 3, own, own, arrived, arrived) }
#undef me
#define me 1
active proctype Rank1() { WORKER(1, 0, 2, 3, own, own, arrived, arrived) }
#undef me
#define me 2
active proctype Rank2() { WORKER(2, 3, 0, 1, arrived, arrived, own, own) }
#undef me
#define me 3
active proctype Rank3() { WORKER(3, 2, 0, 1, arrived, arrived, own, own) }
