// Dispatches on GPUs, one kernel each for any number of tokens: do windows ever overwrite, miss or await each other?
//
//   Rank   a rank's kernel      csrc/backend/gpu: dispatch.cu, stage.cuh, place.cuh, roles/stage.cuh, roles/place.cuh
//          its network block    roles/streams.cuh, net.cuh
//          its host             csrc/engine/gpu/ops.cc: a second kernel where the guess of memory was too small
//   Ship   the proxies          csrc/proxy: a chunk goes where a credit is
//
// Domain A is ranks 0 and 1, domain B rank 2. Two searches: domain A alone, with two blocks in each kernel; and (NET)
// both domains, with one block each and rings of two slots. Rank 2's ring to A has two readers.
// Three operations: one that fits one window, one of three windows, and that again with its plan, which is known.
// Rank 0 has tokens in all windows, ranks 1 and 2 in fewer or none. Rows come to rank 1 in the second window only.
// Any rank's guess of its memory may be too small in any operation: that of one rank or, as in a first call, of all.
//
// Reductions, and why they lose nothing:
// * A block's part of a window is one row group, written together with its flag: channel.pml separates them.
// * A flag is at all its readers at once: that it is late only delays a reader, and every delay is searched.
// * A block takes row groups in one order, and chunks after them: others do not see that one is taken, so it may as
//   well be late. It stages chunks in order, and then rows for its own domain. Both wait for more, not for less.
// * A chunk's way is one step, as in dispatch.pml. The first window has two, the others one, so that slots take turns.
// * The headers of an operation are one number for each rank. Whose packet lies where is in headers.pml.

#ifdef NET
#define kRanks 3
#define BLOCKS 1
#else
#define kRanks 2
#define BLOCKS 2
#endif
#define kOps 3
#define kSlots 2

// Windows of tokens of a rank; op 2 has the plan of op 1.
#define TOKENS(o, r) ((o) == 0 -> (r) != 1 : 3 - ((r) > 0) - ((r) == 1))
#define WINDOWS(o) ((o) == 0 -> 1 : 3)
#define BEFORE(o) ((o) == 0 -> 0 : 3 * (o) - 2)  // windows of earlier operations
#define KNOWN(o) ((o) == 2)
#define WANTS(w) (me != 1 || (w) == 1)
#define COMES(q, w) ((w) < TOKENS(op[me], q) && WANTS(w))
#define CHUNKS(o, r, w) ((w) < TOKENS(o, r) -> 1 + ((w) == 0) : 0)

byte op[kRanks], entered[kRanks];
byte first[kRanks];               // Progress::dispatch_windows
byte kernel[kRanks];              // of a new plan: 0: first one, 1: it places, 2: it only counts, 3: second one
byte staged[kRanks * BLOCKS];     // windows of the operation, by block
byte placed[kRanks * BLOCKS];
byte got[kRanks * BLOCKS];        // row groups of the window
byte rows_full[kRanks * BLOCKS], read[kRanks];
byte half[2 * kRanks * BLOCKS];   // the window that lies there, counted by nobody but this model
#ifdef NET
// By source, since creation. Contents of slots are 2 * window + chunk.
byte begun[kRanks];               // chunks of the window that are staged
byte complete[kRanks], shipped[kRanks];
byte send[kSlots * kRanks], landing[kSlots * kRanks];
byte seen[kRanks * kRanks], consumed[kRanks * kRanks];  // [3 * source + reader]
#endif

#ifdef WINDOWS_RESTART
#define NUMBER(w) (1 + (w))
#else
#define NUMBER(w) (first[me] + 1 + (w))
#endif
#define TRUE(w) (BEFORE(op[me]) + 1 + (w))
#define FREE_AFTER(number) ((number) > 2 -> (number) - 2 : 0)
#define MEMBERS_READ(number) (me == 2 -> read[me] >= number : read[0] >= number && read[1] >= number)
#ifdef WINDOWS_OF_OWN
#define ALL_WINDOWS OWN_WINDOWS
#else
#define ALL_WINDOWS WINDOWS(op[me])
#endif
#define OWN_WINDOWS (TOKENS(op[me], me) > 1 -> TOKENS(op[me], me) : 1)
#define RUNS (op[me] < kOps)
#ifdef NET
#define ALL_ENTERED (entered[0] > op[me] && entered[1] > op[me] && entered[2] > op[me])
#else
#define ALL_ENTERED (entered[0] > op[me] && entered[1] > op[me])
#endif
#define PLACES (KNOWN(op[me]) || kernel[me] % 2 == 1)
#ifdef FLAG_BY_OPERATION
#define FULL(w) (op[me] + 1)
#else
#define FULL(w) NUMBER(w)
#endif

// ---- stage
#define AT(b) (me * BLOCKS + b)
#define HALF(r, number, b) half[(2 * (r) + (number) % 2) * BLOCKS + b]
#ifdef COUNTING_STAGES_ALL
#define MAY_STAGE(w) ((w) == 0 || PLACES || kernel[me] == 2)
#define ALL_OF_FIRST(w) ((w) == OWN_WINDOWS)
#else
#define MAY_STAGE(w) ((w) == 0 || PLACES)
#define ALL_OF_FIRST(w) ((w) > 0)
#endif
#ifdef HALF_NOT_AWAITED
#define HALF_FREE(w) true
#else
#define HALF_FREE(w) MEMBERS_READ(FREE_AFTER(NUMBER(w)))
#endif
#define STAGE_NEAR(b, w) HALF(me, NUMBER(w), b) = TRUE(w); rows_full[AT(b)] = FULL(w)
#define MAY_BEGIN(b) (RUNS && staged[AT(b)] < OWN_WINDOWS && MAY_STAGE(staged[AT(b)]) && HALF_FREE(staged[AT(b)]))
#ifdef NET
#define SENT CHUNKS(op[me], me, staged[me])
#ifdef SLOT_BY_CHUNK
byte of_kernel[kRanks];
#define SLOT(serial) (of_kernel[me] % kSlots)
#define NEXT_SLOT of_kernel[me]++
#define NEW_KERNEL of_kernel[me] = 0
#else
#define SLOT(serial) ((serial) % kSlots)
#define NEXT_SLOT skip
#define NEW_KERNEL skip
#endif
#ifdef SLOT_NOT_AWAITED
#define SLOT_FREE true
#else
#define SLOT_FREE (complete[me] < shipped[me] + kSlots)
#endif
#define ROUTED (KNOWN(op[me]) || entered[me] > op[me])
#define STAGE(b) \
  :: atomic { MAY_BEGIN(b) && ROUTED && begun[me] < SENT && SLOT_FREE -> \
       send[kSlots * me + SLOT(complete[me])] = 2 * TRUE(staged[me]) + begun[me]; \
       NEXT_SLOT; complete[me]++; begun[me]++ } \
  :: atomic { MAY_BEGIN(b) && ROUTED && begun[me] == SENT -> STAGE_NEAR(b, staged[me]); begun[me] = 0; staged[me]++ }
#else
#define NEW_KERNEL skip
#define STAGE(b) :: atomic { MAY_BEGIN(b) -> STAGE_NEAR(b, staged[AT(b)]); staged[AT(b)]++ }
#endif

// ---- place
// The row group that comes next: of source got / BLOCKS, as far as it has rows for us.
#define SOURCE(p) (FIRST_MEMBER + got[AT(p)] / BLOCKS)
#define GROUP(p) (got[AT(p)] % BLOCKS)
#define FIRST_MEMBER (me == 2 -> 2 : 0)
#define NUM_NEAR ((me == 2 -> 1 : 2) * BLOCKS)
#define IN_WINDOW(p) (RUNS && PLACES && placed[AT(p)] < ALL_WINDOWS)
#define TAKE(p) \
  :: atomic { IN_WINDOW(p) && got[AT(p)] < NUM_NEAR && !COMES(SOURCE(p), placed[AT(p)]) -> \
       got[AT(p)] = got[AT(p)] + BLOCKS } \
  :: atomic { IN_WINDOW(p) && got[AT(p)] < NUM_NEAR && COMES(SOURCE(p), placed[AT(p)]) && \
       rows_full[SOURCE(p) * BLOCKS + GROUP(p)] >= FULL(placed[AT(p)]) -> \
       assert(HALF(SOURCE(p), NUMBER(placed[AT(p)]), GROUP(p)) >= TRUE(placed[AT(p)])); /* no stale row is accepted */ \
       assert(HALF(SOURCE(p), NUMBER(placed[AT(p)]), GROUP(p)) <= TRUE(placed[AT(p)])); /* none is overwritten */ \
       got[AT(p)]++ }
#ifdef NOTHING_NOT_READ
#define TELL_READ(w) if :: WANTS(w) -> read[me] = NUMBER(w) :: else fi
#else
#define TELL_READ(w) read[me] = NUMBER(w)
#endif
#ifdef NET
#define TAKEN(s) (seen[3 * (s) + me] - consumed[3 * (s) + me])
#define HAS_CHUNKS(s) (TAKEN(s) == CHUNKS(op[me], s, placed[me]))
#define TAKES(s, EARLIER) (IN_WINDOW(0) && got[me] == NUM_NEAR && EARLIER && !HAS_CHUNKS(s))
#define TAKE_CHUNK(s, EARLIER) \
  :: atomic { TAKES(s, EARLIER) && WANTS(placed[me]) && shipped[s] > seen[3 * (s) + me] -> \
       assert(landing[kSlots * (s) + seen[3 * (s) + me] % kSlots] == 2 * TRUE(placed[me]) + TAKEN(s)); \
       seen[3 * (s) + me]++ } \
  :: atomic { TAKES(s, EARLIER) && !WANTS(placed[me]) -> /* without rows in it, it need not even have come */ \
       seen[3 * (s) + me] = consumed[3 * (s) + me] + CHUNKS(op[me], s, placed[me]) }
#define LEND(s) consumed[3 * (s) + me] = seen[3 * (s) + me]
// The kernel's end tells of the last window.
#define END_WINDOW(HAVE_CHUNKS, LEND_ALL) \
  :: atomic { IN_WINDOW(0) && got[me] == NUM_NEAR && HAVE_CHUNKS && \
       (placed[me] + 1 < ALL_WINDOWS || staged[me] == OWN_WINDOWS) -> \
       TELL_READ(placed[me]); LEND_ALL; got[me] = 0; placed[me]++ }
#define ALL_STAGED staged[me] == OWN_WINDOWS
#define ALL_PLACED placed[me] == ALL_WINDOWS
#define CLEAR staged[me] = 0; placed[me] = 0
#define FIRST_STAGED ALL_OF_FIRST(staged[me])
#else
// A block may be a window ahead of the other. The last one tells.
#ifdef READ_BY_FIRST_BLOCK
#define TELLS(p) placed[AT(1 - p)] <= placed[AT(p)]
#else
#define TELLS(p) placed[AT(1 - p)] > placed[AT(p)]
#endif
#define END_WINDOW(p) \
  :: atomic { IN_WINDOW(p) && got[AT(p)] == NUM_NEAR && \
       (placed[AT(p)] == 0 || read[me] >= FREE_AFTER(NUMBER(placed[AT(p)] + 1))) -> \
       if :: TELLS(p) -> TELL_READ(placed[AT(p)]) :: else fi; got[AT(p)] = 0; placed[AT(p)]++ }
#define ALL_STAGED staged[AT(0)] == OWN_WINDOWS && staged[AT(1)] == OWN_WINDOWS
#define ALL_PLACED placed[AT(0)] == ALL_WINDOWS && placed[AT(1)] == ALL_WINDOWS
#define CLEAR staged[AT(0)] = 0; staged[AT(1)] = 0; placed[AT(0)] = 0; placed[AT(1)] = 0
#define FIRST_STAGED ALL_OF_FIRST(staged[AT(0)]) && ALL_OF_FIRST(staged[AT(1)])
#endif
#ifdef FIRST_WINDOW_AGAIN
#define SECOND staged[me] = 0
#else
#define SECOND skip
#endif

// ---- the kernel's beginning and end
#define OPERATION \
  :: atomic { RUNS && entered[me] == op[me] && (KNOWN(op[me]) || MEMBERS_READ(FREE_AFTER(NUMBER(0)))) -> \
       entered[me]++ } \
  :: atomic { RUNS && !KNOWN(op[me]) && kernel[me] == 0 && ALL_ENTERED -> if :: kernel[me] = 1 :: kernel[me] = 2 fi } \
  :: atomic { RUNS && kernel[me] == 2 && FIRST_STAGED -> SECOND; NEW_KERNEL; kernel[me] = 3 } \
  :: atomic { RUNS && ALL_STAGED && ALL_PLACED && ALL_ENTERED -> \
       first[me] = first[me] + ALL_WINDOWS; CLEAR; NEW_KERNEL; kernel[me] = 0; op[me]++ } \
  :: !RUNS -> assert(first[me] == BEFORE(kOps)); /* what fits takes one window */ break

#ifdef NET
#define me 0
active proctype Rank0() {
  do
  OPERATION STAGE(0) TAKE(0) TAKE_CHUNK(2, true) END_WINDOW(HAS_CHUNKS(2), LEND(2))
  od
}
#undef me
#define me 1
active proctype Rank1() {
  do
  OPERATION STAGE(0) TAKE(0) TAKE_CHUNK(2, true) END_WINDOW(HAS_CHUNKS(2), LEND(2))
  od
}
#undef me
#define me 2
active proctype Rank2() {
  do
  OPERATION STAGE(0) TAKE(0) TAKE_CHUNK(0, true) TAKE_CHUNK(1, HAS_CHUNKS(0))
  END_WINDOW((HAS_CHUNKS(0) && HAS_CHUNKS(1)), LEND(0); LEND(1))
  od
}
#undef me
#define SHIP(s, LEAST) \
  :: atomic { shipped[s] < complete[s] && shipped[s] < LEAST + kSlots -> \
       landing[kSlots * s + shipped[s] % kSlots] = send[kSlots * s + shipped[s] % kSlots]; shipped[s]++ }
active proctype Ship() {
end_idle:
  do
  SHIP(0, consumed[2]) SHIP(1, consumed[5]) SHIP(2, (consumed[6] < consumed[7] -> consumed[6] : consumed[7]))
  od
}
#else
#define WORK \
  do \
  OPERATION STAGE(0) STAGE(1) TAKE(0) TAKE(1) END_WINDOW(0) END_WINDOW(1) \
  od
#define me 0
active proctype Rank0() { WORK }
#undef me
#define me 1
active proctype Rank1() { WORK }
#undef me
#endif
