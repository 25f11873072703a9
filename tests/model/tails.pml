// Dispatches on GPUs whose packets are longer than their slots: does the rest of a packet, its tail, arrive in its own
// ring without a wait that has a circle?
//
//   Rank   a rank's kernel      csrc/backend/gpu: device.cuh (wait_some_packets_gone), net.cuh (push_packets), unpack.cuh
//          its host             csrc/engine/gpu/ops.cc: a second kernel where the guess of memory was too small
//   Ship   the proxies          csrc/proxy: a chunk goes where a credit is, others stay with the proxy
//
// Domain A is ranks 0 and 1, domain B ranks 2 and 3. Source s sends its tail to the other domain by a ring of one slot,
// which has both members of that domain as readers. Three operations: a new plan, the same plan again with weights, a
// new plan. No row comes to rank 1 of the second one. Any rank's guess of its memory may be too small for a new plan.
//
// Reductions, and why they lose nothing:
// * One block reads all tails. Several blocks wait for less.
// * A chunk's way is one step, as in dispatch.pml, and heads are one number for each rank, as in windows.pml.
// * A flag is at all its readers at once: that it is late only delays a reader, and every delay is searched.
// * The memory of a packet is in one half: a tail is gone before the next packet is written, whichever half has it.

#define kOps 3
#define kMost 2  // chunks of a tail
#define KNOWN(o) ((o) == 1)
// Chunks of source s in an operation.
#define CHUNKS(o, s) ((o) == 0 -> 2 - ((s) == 1) : ((o) == 1 -> (s) % 2 == 0 : 1 + ((s) == 1) - ((s) == 2)))
#define BEFORE(o, s) (((o) > 0 -> CHUNKS(0, s) : 0) + ((o) > 1 -> CHUNKS(1, s) : 0))

byte op[4], entered[4];
byte kernel[4];          // of a new plan: 0: before the heads, 1: it places, 2: it only counts, 3: second one
// By source, since creation.
byte pushed[4], shipped[4], seen[8];  // seen[2 * source + reader]
byte packet[4];          // the operation that the source's memory has, plus 1
byte landing[4];         // kMost * operation + chunk

#define RUNS (op[me] < kOps)
#define ALL_ENTERED (entered[0] > op[me] && entered[1] > op[me] && entered[2] > op[me] && entered[3] > op[me])
#define PLACES (RUNS && ALL_ENTERED && (KNOWN(op[me]) || kernel[me] % 2 == 1))
#define OWN_PUSHED (pushed[me] == BEFORE(op[me], me) + CHUNKS(op[me], me))
#define LEAST_SEEN(s) (seen[2 * (s)] < seen[2 * (s) + 1] -> seen[2 * (s)] : seen[2 * (s) + 1])

#ifdef PACKET_OVER_TAIL
#define TAIL_GONE true
#else
#define TAIL_GONE (shipped[me] == pushed[me])
#endif
#define ENTER \
  :: atomic { RUNS && entered[me] == op[me] && TAIL_GONE -> entered[me]++; packet[me] = entered[me] }
// A kernel pushes all chunks of its tail, and waits for no slot.
#ifdef PUSH_NEEDS_SLOT
#define MAY_PUSH (pushed[me] == LEAST_SEEN(me))
#else
#define MAY_PUSH true
#endif
#define PUSH \
  :: atomic { RUNS && entered[me] > op[me] && !OWN_PUSHED && MAY_PUSH -> pushed[me]++ }

#define TAKEN(s) (seen[2 * (s) + me % 2] - BEFORE(op[me], s))
#define READ(s) (TAKEN(s) == CHUNKS(op[me], s))
#ifdef TAIL_NOT_READ_WITHOUT_ROWS
#define READS (me != 1 || !KNOWN(op[me]))
#else
#define READS true
#endif
#ifdef TAILS_RESTART
#define NEXT(s) TAKEN(s)
#else
#define NEXT(s) seen[2 * (s) + me % 2]
#endif
#ifdef TAILS_IN_ANY_ORDER
#define FIRST(s, other) (me % 2 == 0 || READ(other) || !READS)
#define LAST(s, other) (me % 2 == 1 || READ(other) || !READS)
#else
#define FIRST(s, other) true
#define LAST(s, other) (READ(other) || !READS)
#endif
#define TAKE(s, MAY) \
  :: atomic { PLACES && READS && MAY && !READ(s) && shipped[s] > NEXT(s) -> \
       assert(landing[s] == kMost * op[me] + TAKEN(s)); /* no stale chunk is accepted */ \
       seen[2 * (s) + me % 2]++ }

#define OPERATION(first, last) \
  ENTER PUSH \
  :: atomic { RUNS && !KNOWN(op[me]) && kernel[me] == 0 && ALL_ENTERED -> if :: kernel[me] = 1 :: kernel[me] = 2 fi } \
  :: atomic { RUNS && kernel[me] == 2 && OWN_PUSHED -> kernel[me] = 3 } \
  TAKE(first, FIRST(first, last)) TAKE(last, LAST(last, first)) \
  :: atomic { PLACES && OWN_PUSHED && (!READS || (READ(first) && READ(last))) -> kernel[me] = 0; op[me]++ } \
  :: !RUNS -> break

#define me 0
active proctype Rank0() { do OPERATION(2, 3) od }
#undef me
#define me 1
active proctype Rank1() { do OPERATION(2, 3) od }
#undef me
#define me 2
active proctype Rank2() { do OPERATION(0, 1) od }
#undef me
#define me 3
active proctype Rank3() { do OPERATION(0, 1) od }
#undef me

#define SHIPS(s) \
  :: atomic { shipped[s] < pushed[s] && shipped[s] == LEAST_SEEN(s) -> \
       if :: shipped[s] < BEFORE(1, s) -> landing[s] = shipped[s] \
          :: shipped[s] >= BEFORE(1, s) && shipped[s] < BEFORE(2, s) -> landing[s] = kMost + shipped[s] - BEFORE(1, s) \
          :: shipped[s] >= BEFORE(2, s) -> landing[s] = 2 * kMost + shipped[s] - BEFORE(2, s) fi; \
       assert(packet[s] == landing[s] / kMost + 1); /* it is not yet overwritten */ \
       shipped[s]++ }
active proctype Ship() {
end_idle:
  do
  SHIPS(0) SHIPS(1) SHIPS(2) SHIPS(3)
  od
}
