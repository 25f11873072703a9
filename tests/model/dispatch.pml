// Two dispatches in flight over one-slot rings: do the channels of an operation ever wait for each other in a circle?
//
//   Worker   a rank's worker         csrc/engine/run.cc, dispatch.cc: all steps side by side, one operation at a time
//   Ship     two ranks' proxies      csrc/proxy: a chunk goes where a credit is, a credit when both readers are done
//
// Domain A is ranks 0 and 1, domain B ranks 2 and 3. Streams (a ring of routing chunks and one of rows each):
//   0: rank 0 to B by rail 2    1: rank 1 to B by rail 3    2: rank 2 to A by rail 0    3: rank 0 to its own domain
//
// Reductions, and why they lose nothing:
// * A chunk's way is one step, and a chunk has no contents: channel.pml shows that it arrives once, whole, in a free slot.
// * Two domains and four streams of eight. A stream touches others only by the worker that serves both, so a further
//   one, from a third domain too, is like one of these: 0 and 1 share readers, 0 and 3 a source, 0 and 2 go opposite ways.
// * Headers always get through (headers.pml), so "entered" is that the other worker has started. A header that is
//   late only delays its readers, who may wait here as long as they like.

#define kOps 2
#define kRouting 1  // chunks of a stream in one operation
#define kRows 2
#define ROUTING(s) (2 * (s))
#define ROWS(s) (2 * (s) + 1)
#define kRings 8

// By ring, since creation; one slot at either end.
byte staged[kRings], arrived[kRings], credited[kRings];
byte taken[16];  // [2 * ring + reader]
byte op[4] = 1;

#define READ(r) (taken[2 * (r)] < taken[2 * (r) + 1] -> taken[2 * (r)] : taken[2 * (r) + 1])
#define ENTERED(o) (op[0] >= o && op[1] >= o && op[2] >= o && op[3] >= o)

// Stage: the send slot is free when the chunk before has left it.
#define STAGE(r, count) \
  :: atomic { op[me] <= kOps && staged[r] < op[me] * count && staged[r] == arrived[r] -> staged[r]++ }
// In the own domain the slot is where it is read.
#ifdef OWN_FREE_NOT_AWAITED
#define STAGE_OWN(r, count) :: atomic { op[me] <= kOps && staged[r] < op[me] * count ->
#else
#define STAGE_OWN(r, count) :: atomic { op[me] <= kOps && staged[r] < op[me] * count && READ(r) == staged[r] ->
#endif
#define PUBLISH_OWN(r) assert(READ(r) == staged[r]); /* no slot is overwritten */ staged[r]++; arrived[r]++ }

#define PLAN(s, reader) \
  :: atomic { ENTERED(op[me]) && taken[2 * ROUTING(s) + reader] < op[me] * kRouting && \
              arrived[ROUTING(s)] > taken[2 * ROUTING(s) + reader] -> taken[2 * ROUTING(s) + reader]++ }
#define PLACED(s, reader) (taken[2 * ROWS(s) + reader] == op[me] * kRows)
#define PLACE(s, reader) \
  :: atomic { MAY_PLACE(s, reader) && taken[2 * ROUTING(s) + reader] == op[me] * kRouting && !PLACED(s, reader) && \
              arrived[ROWS(s)] > taken[2 * ROWS(s) + reader] -> taken[2 * ROWS(s) + reader]++ }
#define STAGED(s) (staged[ROUTING(s)] == op[me] * kRouting && staged[ROWS(s)] == op[me] * kRows)
#if defined(STAGE_THEN_PLACE)
#define MAY_PLACE(s, reader) ((me != 0 || (STAGED(0) && STAGED(3))) && (me != 1 || STAGED(1)) && (me != 2 || STAGED(2)))
#elif defined(OPPOSITE_ORDERS)
#define MAY_PLACE(s, reader) ((me != 2 || s != 1 || PLACED(0, 0)) && (me != 3 || s != 0 || PLACED(1, 1)))
#else
#define MAY_PLACE(s, reader) true
#endif

#define NEXT(done) \
  :: atomic { op[me] <= kOps && ENTERED(op[me]) && done -> op[me]++ } \
  :: op[me] > kOps -> break

#define me 0
active proctype Worker0() {
  do
  STAGE(ROUTING(0), kRouting) STAGE(ROWS(0), kRows)
  STAGE_OWN(ROUTING(3), kRouting) PUBLISH_OWN(ROUTING(3)) STAGE_OWN(ROWS(3), kRows) PUBLISH_OWN(ROWS(3))
  PLAN(2, 0) PLAN(3, 0) PLACE(2, 0) PLACE(3, 0)
  NEXT((STAGED(0) && STAGED(3) && PLACED(2, 0) && PLACED(3, 0)))
  od
}
#undef me
#define me 1
active proctype Worker1() {
  do
  STAGE(ROUTING(1), kRouting) STAGE(ROWS(1), kRows)
  PLAN(2, 1) PLAN(3, 1) PLACE(2, 1) PLACE(3, 1)
  NEXT((STAGED(1) && PLACED(2, 1) && PLACED(3, 1)))
  od
}
#undef me
#define me 2
active proctype Worker2() {
  do
  STAGE(ROUTING(2), kRouting) STAGE(ROWS(2), kRows)
  PLAN(0, 0) PLAN(1, 0) PLACE(0, 0) PLACE(1, 0)
  NEXT((STAGED(2) && PLACED(0, 0) && PLACED(1, 0)))
  od
}
#undef me
#define me 3
active proctype Worker3() {
  do
  PLAN(0, 1) PLAN(1, 1) PLACE(0, 1) PLACE(1, 1)
  NEXT((PLACED(0, 1) && PLACED(1, 1)))
  od
}
#undef me

#ifdef CREDIT_COSTS_CREDIT
#define EMPTY(r) (arrived[r] == credited[r])
#else
#define EMPTY(r) (arrived[r] == READ(r))
#endif
#if defined(ROUTING_IN_ROWS_WINDOW)
#define ROOM(r) (EMPTY(2 * ((r) / 2)) && EMPTY(2 * ((r) / 2) + 1))
#elif defined(BORROWED_SLOT)
#define ROOM(r) (EMPTY(r) && ((r) != ROWS(0) || EMPTY(ROWS(1))) && ((r) != ROWS(1) || EMPTY(ROWS(0))))
#else
#define ROOM(r) EMPTY(r)
#endif
// A credit of stream 0 goes the way of stream 2, and the other way round.
#ifdef CREDIT_COSTS_CREDIT
#define WAY_BACK(r) (((r) != ROWS(0) || EMPTY(ROWS(2))) && ((r) != ROWS(2) || EMPTY(ROWS(0))))
#define CREDIT(r) :: atomic { credited[r] < READ(r) && WAY_BACK(r) -> credited[r]++ }
#else
#define CREDIT(r)
#endif
#define SHIP(r) \
  :: atomic { arrived[r] < staged[r] && ROOM(r) -> arrived[r]++ } \
  CREDIT(r)

active proctype Ship() {
end_idle:
  do
  SHIP(0) SHIP(1) SHIP(2) SHIP(3) SHIP(4) SHIP(5)
  od
}
