// Two combines in flight over one-slot windows: fold at the experts, merge on the relays, ship, merge into the output.
//
//   Rank0 to Rank3  the workers       csrc/engine/combine.cc, csrc/backend/host/fold.cc, merge.cc
//   Ship            the proxies       csrc/proxy, from the relay's output to the source
//
// Domain A is ranks 0 and 1, domain B ranks 2 and 3. Streams:
//   0: of rank 0, merged by its rail 2 from pieces of 2 and 3    1: of rank 1, likewise by rail 3
//   2: of rank 2, merged by its rail 0 from pieces of 0 and 1    3: of rank 0 in its own domain, pieces of 0 and 1
#define kOps 2
#define kChunks 2  // of a stream in one operation

// By stream, since creation; every window is one slot.
byte folded[8];  // [2 * stream + member]
byte merged[4], arrived[3], taken[3];
byte op[4] = 1;
byte token;  // of rank 0, in its output

#define PIECES(x) (folded[2 * (x)] > merged[x] && folded[2 * (x) + 1] > merged[x])
#ifdef ABSENT_PIECE
#define ABSENT(x, member) ((x) == 0 && (member) == 1 && folded[1] == 1)
#else
#define ABSENT(x, member) false
#endif
// One window of three slots for two pieces and the output, whoever comes first.
#ifdef RELAY_ONE_WINDOW
#define USED(x) (folded[2 * (x)] + folded[2 * (x) + 1] - 2 * merged[x] + (x < 3 -> merged[x] - arrived[x] : 0))
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

#define FOLD(x, member) \
  :: atomic { RUNS && folded[2 * (x) + member] < LAST && !ABSENT(x, member) && PIECE_FREE(x, member) -> \
       assert(KEPT(x, member)); /* no piece is overwritten before it is merged */ folded[2 * (x) + member]++ }
#ifdef FOLD_THEN_MERGE
#define ALL_FOLDED(x) (me > 1 -> folded[me - 2] == LAST && folded[me] == LAST : \
                       folded[4 + me] == LAST && folded[6 + me] == LAST)
#else
#define ALL_FOLDED(x) true
#endif
#define MERGE(x) \
  :: atomic { RUNS && merged[x] < LAST && PIECES(x) && OUTPUT_FREE(x) && ALL_FOLDED(x) -> merged[x]++ }
#define TAKE(x) :: atomic { RUNS && taken[x] < LAST && arrived[x] > taken[x] -> taken[x]++ }

#define RUNS (op[me] <= kOps)
#define LAST (op[me] * kChunks)
#define ENTERED (op[0] >= op[me] && op[1] >= op[me] && op[2] >= op[me] && op[3] >= op[me])
#define NEXT(done) :: atomic { RUNS && ENTERED && done -> op[me]++ } :: !RUNS -> break

#define me 0
// Tokens of an operation, in order: in chunk 0 of both streams; chunk 0 of stream 3; chunk 1 of 0; chunk 1 of both.
// A chunk is done with at its last token.
active proctype Rank0() {
  do
  FOLD(2, 0) FOLD(3, 0) MERGE(2)
  :: atomic { RUNS && token == 0 && PIECES(3) && arrived[0] > taken[0] && ALL_FOLDED(3) -> token = 1; taken[0]++ }
  :: atomic { RUNS && token == 1 -> token = 2; merged[3]++ }
  :: atomic { RUNS && token == 2 && arrived[0] > taken[0] -> token = 3 }
  :: atomic { RUNS && token == 3 && PIECES(3) -> token = 4; taken[0]++; merged[3]++ }
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

#define SHIP(x) :: atomic { arrived[x] < merged[x] && arrived[x] == taken[x] -> arrived[x]++ }
active proctype Ship() {
end_idle:
  do
  SHIP(0) SHIP(1) SHIP(2)
  od
}
