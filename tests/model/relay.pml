// Two combines in flight over one-slot rings: fold at the experts, merge on the relays, ship, merge into the output.
//
//   Rank0 to Rank3  the workers       csrc/engine/combine.cc, csrc/backend/host/fold.cc, merge.cc
//   Ship            the proxies       csrc/proxy, from the relay's output to the source
//
// Domain A is ranks 0 and 1, domain B ranks 2 and 3, domain C ranks 4 and 5. Streams:
//   0: of rank 0, merged by its rail 2 from pieces of 2 and 3    1: of rank 1, likewise by rail 3
//   2: of rank 2, merged by its rail 0 from pieces of 0 and 1    3: of rank 0 in its own domain, pieces of 0 and 1
//   4: of rank 0, merged by its rail 4 from pieces of 4 and 5
//
// Reductions, and why they lose nothing:
// * A chunk's way is one step, and a chunk has no contents: channel.pml shows that it arrives once, whole, in a free slot.
// * Five streams of eighteen. A stream touches others only by the worker that serves both, so a further one is like one
//   of these: 0 and 1 share members, 0, 3 and 4 a source, 0 and 2 go opposite ways, 2 and 3 share members and relay.
// * Operations are counted, and a rank is in the next one only when all have entered this one, as headers.pml shows.

#define kOps 2
#define kChunks 2  // of a stream in one operation

// By stream, since creation; every ring has one slot.
byte folded[10];  // [2 * stream + member]
byte merged[5], arrived[5], taken[5];
byte op[6] = 1;
byte token;  // the next one of rank 0's output

#define PIECES(x) (folded[2 * (x)] > merged[x] && folded[2 * (x) + 1] > merged[x])
#ifdef ABSENT_PIECE
#define ABSENT(x, member) ((x) == 0 && (member) == 1 && folded[1] == 1)
#else
#define ABSENT(x, member) false
#endif
// One ring of three slots for two pieces and the output, whoever comes first.
#ifdef RELAY_ONE_WINDOW
#define USED(x) (folded[2 * (x)] + folded[2 * (x) + 1] - 2 * merged[x] + (x != 3 -> merged[x] - arrived[x] : 0))
#define PIECE_FREE(x, member) (USED(x) < 3)
#define OUTPUT_FREE(x) (USED(x) < 3)
#else
#ifdef FOLD_NOT_AWAITED
#define PIECE_FREE(x, member) true
#else
#define PIECE_FREE(x, member) (folded[2 * (x) + member] == merged[x])
#endif
#define OUTPUT_FREE(x) (merged[x] == arrived[x])
#endif
#ifdef RELAY_ONE_WINDOW
#define KEPT(x, member) true
#else
#define KEPT(x, member) (folded[2 * (x) + member] == merged[x])
#endif

// Members 0 and 1 of domain B take the streams 0 and 1 one after the other, each from another end.
#ifdef FOLD_OPPOSITE_ORDERS
#define TURN(x, member) ((x != 1 || member != 0 || folded[0] == LAST) && (x != 0 || member != 1 || folded[3] == LAST))
#else
#define TURN(x, member) true
#endif
#define FOLD(x, member) \
  :: atomic { RUNS && TURN(x, member) && folded[2 * (x) + member] < LAST && !ABSENT(x, member) && PIECE_FREE(x, member) -> \
       assert(KEPT(x, member)); /* no piece is overwritten before it is merged */ \
       folded[2 * (x) + member]++ }
#ifdef FOLD_THEN_MERGE
#define MINE(x, member) (folded[2 * (x) + member] == LAST)
#define ALL_FOLDED \
  (me >= 4 -> MINE(4, me - 4) : (me >= 2 -> MINE(0, me - 2) && MINE(1, me - 2) : MINE(2, me) && MINE(3, me)))
#else
#define ALL_FOLDED true
#endif
#define MERGE(x) \
  :: atomic { RUNS && merged[x] < LAST && PIECES(x) && OUTPUT_FREE(x) && ALL_FOLDED -> merged[x]++ }
#define TAKE(x) :: atomic { RUNS && taken[x] < LAST && arrived[x] > taken[x] -> taken[x]++ }

// The first token's row of stream 4 travels in the second chunk.
#ifdef ROWS_UNORDERED
#define IN_TOKEN_ORDER (arrived[4] > taken[4] + 1)
#else
#define IN_TOKEN_ORDER true
#endif

#define RUNS (op[me] <= kOps)
#define LAST (op[me] * kChunks)
#define ENTERED (op[0] >= op[me] && op[1] >= op[me] && op[2] >= op[me] && op[3] >= op[me] && \
                 op[4] >= op[me] && op[5] >= op[me])
#define NEXT(done) :: atomic { RUNS && ENTERED && done -> op[me]++ } :: !RUNS -> break

#define me 0
// Four tokens, in order, each with a row in some streams; a chunk is done with at its last token.
//   token    0        1        2        3
//   chunk    3:0 0:0  3:0 4:0  0:1 4:0  3:1 0:1 4:1
active proctype Rank0() {
  do
  FOLD(2, 0) FOLD(3, 0) MERGE(2)
  :: atomic { RUNS && token == 0 && ALL_FOLDED && PIECES(3) && arrived[0] > taken[0] && IN_TOKEN_ORDER -> token++; taken[0]++ }
  :: atomic { RUNS && token == 1 && arrived[4] > taken[4] -> token++; merged[3]++ }
  :: atomic { RUNS && token == 2 && arrived[0] > taken[0] -> token++; taken[4]++ }
  :: atomic { RUNS && token == 3 && PIECES(3) && arrived[4] > taken[4] ->
       token++; merged[3]++; taken[0]++; taken[4]++ }
  NEXT((token == 4 && folded[4] == LAST && folded[6] == LAST && merged[2] == LAST) -> token = 0; true)
  od
}
#undef me
#define me 1
active proctype Rank1() {
  do
  FOLD(2, 1) FOLD(3, 1) TAKE(1)
  NEXT((taken[1] == LAST && folded[5] == LAST && folded[7] == LAST))
  od
}
#undef me
#define me 2
active proctype Rank2() {
  do
  FOLD(0, 0) FOLD(1, 0) MERGE(0) TAKE(2)
  NEXT((taken[2] == LAST && merged[0] == LAST && folded[0] == LAST && folded[2] == LAST))
  od
}
#undef me
#define me 3
active proctype Rank3() {
  do
  FOLD(0, 1) FOLD(1, 1) MERGE(1)
  NEXT((merged[1] == LAST && folded[1] == LAST && folded[3] == LAST))
  od
}
#undef me

#define me 4
active proctype Rank4() {
  do
  FOLD(4, 0) MERGE(4)
  NEXT((merged[4] == LAST && folded[8] == LAST))
  od
}
#undef me
#define me 5
active proctype Rank5() {
  do
  FOLD(4, 1)
  NEXT((folded[9] == LAST))
  od
}
#undef me

#define SHIP(x) :: atomic { arrived[x] < merged[x] && arrived[x] == taken[x] -> arrived[x]++ }
active proctype Ship() {
end_idle:
  do
  SHIP(0) SHIP(1) SHIP(2) SHIP(4)
  od
}
