// A rank crashes, another freezes and resumes: does every live rank end, and does an error reach all of them directly?
//
//   Worker   csrc/engine/run.cc: run_steps, check_deadlines, spread; an operation is its headers
//   Proxy    csrc/proxy/health.cc, proxy.cc: ships headers and errors, takes those that arrive, notices a death
//   Faults   ends rank 3, stops and continues any rank, once each, anywhere
//   Clock    time passes when nothing can move: then deadlines expire
//
// Domain A is ranks 0 and 1, domain B ranks 2 and 3; rank r's rail is r + 2 modulo 4. Up to two ranks, any two, are
// impatient: theirs are the first deadlines to expire and the first eyes on a dead process. The others' turn comes only
// if an impatient one was hit itself: as long as those who found the error run, everybody has to learn it from them.
//
// Reductions, and why they lose nothing:
// * An operation is one header to each domain: who waits in a later step waits for a rank that does not move, too.
// * A rank that raises by another's record does not put it into its peers' control blocks again, as the code does: less
//   is told.
// * The one that crashes is rank 3: the layout looks alike from every rank.
// * Closing, heartbeats and the grace of a bye are not modelled (tests/fault has them).

#ifndef OPS
#define OPS 2
#endif
#define kOps OPS
#define RUNS 0
#define FROZEN 1
#define DEAD 2
#define NEVER 9
#define DONE 10

byte life[4];
bool numb[4];            // frozen until all others have ended
byte op[4] = 1;
byte arrived[4];         // headers of a rank in the other domain
bool held[4], lost[4];   // its last header leaves when it resumes, never
byte claim[4];           // the record in a control block: 1 + the rank that found the error
bool raised[4], found[4], owed[4];
bool due[16];            // [4 * from + to] errors that are not delivered yet
byte num_finders;
byte phase;              // 1: the impatient ones' deadlines expired; 2: everyone's
bool renewed;            // the buffer was created anew after the error
byte memory = 1;         // the one that the buffer uses; all headers here are of the first buffer
bool unmapped;           // the first buffer's memory is given back

#define PEER(r) (r ^ 1)
#define RAIL(r) ((r + 2) % 4)
#define COMPLETED(r) (op[r] > kOps)
#define ENDED(r) (COMPLETED(r) || raised[r])
#define SETTLED(r) (life[r] != RUNS || ENDED(r))
#define SENT(r) (COMPLETED(r) -> kOps : op[r])
#define ALL_SETTLED (SETTLED(0) && SETTLED(1) && SETTLED(2) && SETTLED(3))
#define HERE(r, src) (src / 2 == r / 2 -> SENT(src) : arrived[src])
#define EARLY (num_finders < 2)
#define LATE (phase == 2 || (phase == 1 && EARLY))

inline find(r) { if :: phase < 2 -> num_finders++ :: else fi; found[r] = true }
// A proxy that sees an error ships nothing else any more.
inline may_lose(r) { if :: arrived[r] < SENT(r) -> if :: lost[r] = true :: skip fi :: else fi }
inline post(r, record) { if :: claim[r] == 0 -> claim[r] = record; may_lose(r) :: else fi }

proctype Worker(byte r) {
  byte record;
end_frozen:
  do
  :: atomic { life[r] == RUNS && !ENDED(r) && HERE(r, 0) >= op[r] && HERE(r, 1) >= op[r] &&
       HERE(r, 2) >= op[r] && HERE(r, 3) >= op[r] -> op[r]++ }
  :: atomic { life[r] == RUNS && !ENDED(r) && claim[r] != 0 -> raised[r] = true; goto over }
  :: atomic { life[r] == RUNS && !ENDED(r) && claim[r] == 0 && LATE -> find(r); record = r + 1; break }
  :: atomic { life[r] == RUNS && COMPLETED(r) -> goto over }
  od;
#ifdef PEERS_FIRST
end_dead:
  atomic { life[r] == RUNS -> post(PEER(r), record) };
end_dead2:
  atomic { life[r] == RUNS -> post(r, record); raised[r] = true; record = 0 };
#else
  // Ours first.
end_dead:
  atomic { life[r] == RUNS -> post(r, record) };
end_dead2:
  atomic { life[r] == RUNS -> post(PEER(r), record); raised[r] = true; record = 0 };
#endif
over:
  skip
}

// Errors go to each rank of other domains; whoever gets one puts it into every control block of its domain.
#ifdef ERROR_BY_RELAY
#define OWE(r) owed[r] = true; due[4 * r + RAIL(r)] = true
#else
#define OWE(r) owed[r] = true; due[4 * r + RAIL(r)] = true; due[4 * r + PEER(RAIL(r))] = true
#endif
#ifdef ERROR_COSTS_CREDIT
#define MAY_SEND(from) (arrived[from] == SENT(from))
#else
#define MAY_SEND(from) true
#endif
#define GET(r, from) \
  :: atomic { life[r] == RUNS && life[from] == RUNS && due[4 * from + r] && MAY_SEND(from) -> \
       due[4 * from + r] = false; post(r, from + 1); post(PEER(r), from + 1) }

proctype Proxy(byte r) {
end_serves:
  do
  // What the rail's domain sends it: published for both of the domain.
  :: atomic { life[r] == RUNS && arrived[RAIL(r)] < SENT(RAIL(r)) && !held[RAIL(r)] && !lost[RAIL(r)] ->
       arrived[RAIL(r)]++;
       assert(!renewed || memory != 1); /* no late write into memory that is used again */
       assert(!unmapped) /* nor into memory that is gone */
     }
  :: atomic { life[r] == RUNS && claim[r] == r + 1 && !owed[r] -> OWE(r); post(PEER(r), claim[r]) }
  GET(r, RAIL(r)) GET(r, PEER(RAIL(r)))
  :: atomic { life[r] == RUNS && life[3] == DEAD && !owed[r] && (EARLY || phase == 2) ->
       find(r); OWE(r); post(r, r + 1); post(PEER(r), r + 1) }
  od
}

// Nothing of the rank's will arrive any more: it has confirmed that, or its process is gone.
#ifdef UNMAPPED_EARLY
#define CONFIRMED(r) true
#else
#define CONFIRMED(r) ((life[r] == DEAD || (life[r] == RUNS && ENDED(r))) && (arrived[r] == SENT(r) || lost[r]))
#endif
#define OTHERS_ENDED(r) \
  ((r == 0 || SETTLED(0)) && (r == 1 || SETTLED(1)) && (r == 2 || SETTLED(2)) && (r == 3 || SETTLED(3)))

active proctype Faults() {
  byte victim, crash = NEVER, freeze = NEVER;
  // Before the first deadline, after it, never.
  atomic {
#ifndef NO_CRASH
    if :: crash = 0 :: crash = 1 :: skip fi;
#endif
#ifndef NO_FREEZE
    if :: freeze = 0 :: freeze = 1 :: skip fi;
    if :: victim = 0 :: victim = 1 :: victim = 2 :: victim = 3 fi
#endif
  };
end_idle:
  do
  :: atomic { crash == phase -> crash = DONE; life[3] = DEAD; may_lose(3) }
  :: atomic { freeze == phase && life[victim] == RUNS -> freeze = DONE; life[victim] = FROZEN;
       if :: arrived[victim] < SENT(victim) -> if :: held[victim] = true :: skip fi :: else fi;
       if :: numb[victim] = true :: skip fi }
  :: atomic { life[victim] == FROZEN && (!numb[victim] || OTHERS_ENDED(victim)) ->
       life[victim] = RUNS; held[victim] = false; numb[victim] = false }
  :: atomic { !renewed && (raised[0] || raised[1] || raised[2] || raised[3]) && ALL_SETTLED ->
       renewed = true;
#ifndef MEMORY_REUSED
       memory = 2
#endif
     }
  :: atomic { renewed && !unmapped && CONFIRMED(0) && CONFIRMED(1) && CONFIRMED(2) && CONFIRMED(3) -> unmapped = true }
  od
}

#define FINE(r) (life[r] == RUNS || !found[r])
active proctype Clock() {
  do
  :: atomic { timeout && ALL_SETTLED ->
       // No error without a cause: a rank that is frozen for less than a deadline is none.
       assert(life[3] == DEAD || phase > 0 || (COMPLETED(0) && COMPLETED(1) && COMPLETED(2) && COMPLETED(3)));
       break }
  :: atomic { timeout && phase == 0 && !ALL_SETTLED -> phase = 1 }
  :: atomic { timeout && phase == 1 && !ALL_SETTLED ->
       // Somebody was not told: only if one of those who found the error could not tell.
       assert(!((found[0] || found[1] || found[2] || found[3]) && FINE(0) && FINE(1) && FINE(2) && FINE(3)));
       phase = 2 }
  od;
}

init {
  atomic {
    run Worker(0); run Worker(1); run Worker(2); run Worker(3);
    run Proxy(0); run Proxy(1); run Proxy(2); run Proxy(3)
  }
}
