// Combines on GPUs, one kernel each for any number of tokens: do windows ever overwrite, miss or await each other?
//
//   Rank   a rank's kernel      csrc/backend/gpu: combine.cu, fold.cuh, merge.cuh, roles/fold.cuh, roles/merge.cuh
//          its network block    roles/returns.cuh, net.cuh
//   Ship   the proxies          csrc/proxy: from the relay's output to the source
//
// Domain A is ranks 0 and 1, domain B ranks 2 and 3. Streams:
//   0: of rank 0 in its own domain, pieces of 0 and 1    1: of rank 0, merged by its rail 2 from pieces of 2 and 3
//   3: of rank 2 in its own domain, pieces of 2 and 3    2: of rank 2, merged by its rail 0 from pieces of 0 and 1
// Operations of three, one and two windows. Of several, a window has half of the memory for pieces and half of the ring
// of two slots; the only one has all. Ranks 0 and 2 have tokens in different windows, ranks 1 and 3 have none.
// BATCHES: little memory. Of one or two windows of tokens each is two: of the streams of others, then of own tokens. So
// sums that come back in one are merged in the next. The ring has one slot, so a window waits until the one before left.
//
// Reductions, and why they lose nothing:
// * A window is one token block of each source. Token blocks have flags of their own, which carry the epoch, so a flag
//   says which window it is of: `folded` counts them.
// * A block in each kernel, so a block has merged what its kernel has. Another block only delays that.
// * A piece and its flag are one step, a chunk's way is one step: channel.pml separates them.
// * Four streams of eight: see relay.pml. Weights are further chunks of the last window.
// * A rank that is alone in its domain folds into the ring. It is a relay without pieces: it waits for less.

#define kOps 3
#define SOURCE(x) ((x) < 2 -> 0 : 2)
#ifdef BATCHES
#define kSlots 1
#define WINDOWS(o) ((o) == 1 -> 2 : 4)
#define BEFORE(o) ((o) == 0 -> 0 : 2 + 2 * (o))  // windows of earlier operations
#define TOKENS(o, source) ((o) == 1 -> 1 : (source == 0 -> 2 - (o) / 2 : 2))  // windows of them
#define CHUNKS(o) 1  // of a window with tokens
#define OWN(x) ((x) % 3 == 0)
#define HAS(x, w) ((w) % 2 == OWN(x) && (w) / 2 < TOKENS(op[me], SOURCE(x)))
#define CAME_IN(w) ((w) - 1)
#define ALL_MEMORY false
#else
#define kSlots 2
#define WINDOWS(o) ((o) == 0 -> 3 : (o))
#define BEFORE(o) ((o) == 0 -> 0 : 2 + (o))
#define TOKENS(o, source) ((o) == 1 -> 1 : (source == 0 -> 3 - (o) : 2))
#define CHUNKS(o) ((o) == 1 -> 2 : 1)
#define HAS(x, w) ((w) < TOKENS(op[me], SOURCE(x)))
#define CAME_IN(w) (w)
#define ALL_MEMORY (WINDOWS(op[me]) == 1)
#endif

byte op[4];
byte first[4];                    // Progress::combine_windows
byte window[4];                   // that is folded and returned; WINDOWS(op): the last one is merged
byte num_folded[4];               // streams of the window
byte num_returned[4];             // chunks of the window, + 1 when there are no more
byte num_merged[4];               // of the window before: 1: our own pieces, 2: and sums of the other domain
byte merged[4];
byte folded[8];                   // [2 * stream + member] windows
byte piece[16];                   // [4 * stream + 2 * member + half] the window that lies there
// By stream, since creation. Contents of slots are 2 * window + chunk.
byte complete[4], shipped[4], seen[4], consumed[4];
byte send[8], landing[8];

#define RUNS (op[me] < kOps)
#define NUMBER(w) (first[me] + 1 + (w))
#define TRUE(w) (BEFORE(op[me]) + 1 + (w))
#define PEER (me ^ 1)
#define MEMBER (me % 2)
#define IDLE (me % 2 == 1)
#define ALL_ENTERED (op[0] >= op[me] && op[1] >= op[me] && op[2] >= op[me] && op[3] >= op[me])

// ---- fold: streams of the other domain come first
#define FAR_STREAM (me < 2 -> 2 : 1)
#define NEAR_STREAM (me < 2 -> 0 : 3)
#define STREAM (num_folded[me] == 0 -> FAR_STREAM : NEAR_STREAM)
#if defined(HALF_FOLDED_EARLY)
#define FREE(w) ((w) == 0 -> NUMBER(w) - 1 : 0)
#elif defined(FIRST_LIKE_OTHERS)
#define FREE(w) (NUMBER(w) - (NUMBER(w) < 2 -> 1 : 2))
#else
#define FREE(w) (NUMBER(w) - ((w) == 0 -> 1 : 2))
#endif
#define PIECE(x, member, w) piece[4 * (x) + 2 * (member) + (w) % 2]
#define FOLD \
  :: atomic { RUNS && window[me] < WINDOWS(op[me]) && num_folded[me] < 2 && \
       merged[me] >= FREE(window[me]) && merged[PEER] >= FREE(window[me]) -> \
       if \
       :: HAS(STREAM, window[me]) -> \
         PIECE(STREAM, MEMBER, window[me]) = TRUE(window[me]); \
         if \
         :: ALL_MEMORY -> PIECE(STREAM, MEMBER, window[me] + 1) = TRUE(window[me]) \
         :: else \
         fi \
       :: else \
       fi; \
       folded[2 * STREAM + MEMBER]++; num_folded[me]++ }

#define FOLDED(x, w) (folded[2 * (x)] >= TRUE(w) && folded[2 * (x) + 1] >= TRUE(w))
// No piece is overwritten before it is merged, and no stale one is taken. The only window has both halves.
#define KEPT(x, half, w) (PIECE(x, 0, half) == TRUE(w) && PIECE(x, 1, half) == TRUE(w))
#define CHECK(x, w) assert(KEPT(x, w, w) && (!ALL_MEMORY || KEPT(x, w + 1, w)))

// ---- return
#define SENT(x) (HAS(x, RETURNED) -> CHUNKS(op[me]) : 0)
#ifdef RETURNS_NOT_AWAITED
#define RING_FREE(x) true
#else
#define RING_FREE(x) \
  (RETURNED == 0 -> shipped[x] == complete[x] : shipped[x] + kSlots >= complete[x] + SENT(x))
#endif
// All that other domains wait for goes before what waits for them.
#ifdef MERGE_THEN_RETURN
#define RETURNED LAST
#define MAY_RETURN (window[me] > 0 && num_merged[me] == 3)
#define MAY_MERGE true
#define ALL_RETURNED (IDLE || window[me] == 0 || num_returned[me] == 3)
#else
#define RETURNED window[me]
#define MAY_RETURN true
#define MAY_MERGE (IDLE || window[me] == WINDOWS(op[me]) || num_returned[me] == 3)
#define ALL_RETURNED (IDLE || num_returned[me] == 3)
#endif
#define RETURN(x) \
  :: atomic { RUNS && window[me] < WINDOWS(op[me]) && num_returned[me] == 0 && MAY_RETURN && RING_FREE(x) -> \
       if :: SENT(x) == 0 -> num_returned[me] = 3 :: else -> num_returned[me] = 3 - SENT(x) fi } \
  :: atomic { RUNS && num_returned[me] > 0 && num_returned[me] < 3 && FOLDED(x, RETURNED) -> \
       CHECK(x, RETURNED); \
       send[kSlots * x + complete[x] % kSlots] = 2 * TRUE(RETURNED) + (num_returned[me] == 2 && SENT(x) == 2); \
       complete[x]++; num_returned[me]++ }

// ---- merge: window - 1
#define LAST (window[me] - 1)
#define MERGES (RUNS && window[me] > 0 && MAY_MERGE)
#define CAME(x) (seen[x] - consumed[x])
#define MERGE(x, returned) \
  :: atomic { MERGES && num_merged[me] == 0 && HAS(x, LAST) && FOLDED(x, LAST) -> CHECK(x, LAST); num_merged[me] = 1 } \
  :: atomic { MERGES && num_merged[me] == 0 && !HAS(x, LAST) -> num_merged[me] = 2 } \
  :: atomic { MERGES && num_merged[me] == 1 && shipped[returned] > seen[returned] -> \
       assert(landing[kSlots * returned + seen[returned] % kSlots] == 2 * TRUE(CAME_IN(LAST)) + CAME(returned)); \
       seen[returned]++; \
       if :: CAME(returned) == CHUNKS(op[me]) -> num_merged[me] = 2 :: else fi }
// Ranks without tokens and relayed streams return and merge nothing.
#define MERGED (num_merged[me] == (IDLE -> 0 : 2))
#ifdef NOTHING_NOT_MERGED
#define TELL_MERGED if :: !IDLE -> merged[me] = NUMBER(LAST) :: else fi
#else
#define TELL_MERGED merged[me] = NUMBER(LAST)
#endif

// ---- windows
#define FOLDED_ALL(x) (FOLDED(x, LAST))
#define WINDOW(LEND) \
  :: atomic { MERGES && MERGED && window[me] < WINDOWS(op[me]) -> TELL_MERGED; LEND; num_merged[me] = 3 } \
  :: atomic { RUNS && window[me] < WINDOWS(op[me]) && num_folded[me] == 2 && ALL_RETURNED && \
       (window[me] == 0 || num_merged[me] == 3) -> \
       num_folded[me] = 0; num_returned[me] = 0; num_merged[me] = 0; window[me]++ } \
  :: atomic { MERGES && MERGED && window[me] == WINDOWS(op[me]) && \
       FOLDED_ALL(FAR_STREAM) && FOLDED_ALL(NEAR_STREAM) && ALL_ENTERED -> \
       TELL_MERGED; LEND; first[me] = first[me] + RESTART; num_merged[me] = 0; window[me] = 0; op[me]++ } \
  :: !RUNS -> break
#ifdef MERGED_RESTARTS
#define RESTART 0
#else
#define RESTART WINDOWS(op[me])
#endif

#define me 0
active proctype Rank0() {
  do
  FOLD RETURN(2) MERGE(0, 1) WINDOW(consumed[1] = seen[1])
  od
}
#undef me
#define me 1
active proctype Rank1() {
  do
  FOLD WINDOW(skip)
  od
}
#undef me
#define me 2
active proctype Rank2() {
  do
  FOLD RETURN(1) MERGE(3, 2) WINDOW(consumed[2] = seen[2])
  od
}
#undef me
#define me 3
active proctype Rank3() {
  do
  FOLD WINDOW(skip)
  od
}
#undef me

#define SHIP(x) \
  :: atomic { shipped[x] < complete[x] && shipped[x] < consumed[x] + kSlots -> \
       landing[kSlots * x + shipped[x] % kSlots] = send[kSlots * x + shipped[x] % kSlots]; shipped[x]++ }
active proctype Ship() {
end_idle:
  do
  SHIP(1) SHIP(2)
  od
}
