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
// * An operation is one header to each domain: a rank that waits in a later step waits for a rank that does not move, too.
// * The one that crashes is rank 3: the layout looks alike from every rank.
// * Closing, heartbeats and the grace of a bye are not modelled (tests/fault has them).

#define kOps 2
#define RUNS 0
#define FROZEN 1
#define DEAD 2

byte life[4];
bool numb[4];            // frozen until all others have ended
byte op[4] = 1;
byte own[4], posted[4], arrived[4];
byte claim[4];           // the record in a control block: 1 + the rank that found the error
bool raised[4], found[4], owed[4], told[4];
bool due[16], flying[16];  // [4 * from + to] errors to be posted, and on their way
bool impatient[4];
byte phase;              // 1: the impatient ones' deadlines expired; 2: everyone's
bool renewed[4];         // the buffer was created anew after the error

#define PEER(r) (r ^ 1)
#define RAIL(r) ((r + 2) % 4)
#define COMPLETED(r) (op[r] > kOps)
#define ENDED(r) (COMPLETED(r) || raised[r])
#define SETTLED(r) (life[r] != RUNS || ENDED(r))
#define HERE(r, src) (src / 2 == r / 2 -> own[src] : arrived[src])
#define LATE(r) (phase == 2 || (phase == 1 && impatient[r]))

inline post(r, record) { if :: claim[r] == 0 -> claim[r] = record :: else fi }

proctype Worker(byte r) {
  byte record;
end_frozen:
  do
  :: atomic { life[r] == RUNS && !ENDED(r) && claim[r] == 0 && own[r] < op[r] -> own[r]++ }
  :: atomic { life[r] == RUNS && !ENDED(r) && own[r] == op[r] && HERE(r, 0) >= op[r] && HERE(r, 1) >= op[r] &&
       HERE(r, 2) >= op[r] && HERE(r, 3) >= op[r] -> op[r]++ }
  :: atomic { life[r] == RUNS && !ENDED(r) && claim[r] != 0 -> record = claim[r]; break }
  :: atomic { life[r] == RUNS && !ENDED(r) && claim[r] == 0 && LATE(r) -> found[r] = true; record = r + 1; break }
  :: atomic { life[r] == RUNS && COMPLETED(r) -> goto over }
  od;
#ifdef PEERS_FIRST
  atomic { life[r] == RUNS -> post(PEER(r), record) };
  atomic { life[r] == RUNS -> post(r, record); raised[r] = true; record = 0 };
#else
  atomic { life[r] == RUNS -> post(r, record) };
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
#define SEND(r, to) :: atomic { life[r] == RUNS && due[4 * r + to] -> due[4 * r + to] = false; flying[4 * r + to] = true }
#define GET(r, from) \
  :: atomic { life[r] == RUNS && flying[4 * from + r] -> flying[4 * from + r] = false; post(r, from + 1); post(PEER(r), from + 1) }

proctype Proxy(byte r) {
end_serves:
  do
  :: atomic { life[r] == RUNS && claim[r] == 0 && posted[r] < own[r] -> posted[r]++ }
  // What the rail's domain sends it: published for both of the domain.
  :: atomic { life[r] == RUNS && arrived[RAIL(r)] < posted[RAIL(r)] -> arrived[RAIL(r)]++;
#ifdef MEMORY_REUSED
       assert(!renewed[r]);
#endif
     }
  :: atomic { life[r] == RUNS && claim[r] == r + 1 && !owed[r] -> OWE(r); post(PEER(r), claim[r]) }
  SEND(r, RAIL(r)) SEND(r, PEER(RAIL(r)))
  GET(r, RAIL(r)) GET(r, PEER(RAIL(r)))
  :: atomic { life[r] == RUNS && r != 3 && life[3] == DEAD && !told[r] && (impatient[r] || phase == 2) ->
       told[r] = true; if :: !owed[r] -> found[r] = true; OWE(r) :: else fi };
     atomic { life[r] == RUNS -> post(r, r + 1); post(PEER(r), r + 1) }
  :: atomic { life[r] == RUNS && raised[r] && !renewed[r] && SETTLED(0) && SETTLED(1) && SETTLED(2) && SETTLED(3) ->
       renewed[r] = true }
  od
}

#define OTHERS_ENDED(r) ((r == 0 || SETTLED(0)) && (r == 1 || SETTLED(1)) && (r == 2 || SETTLED(2)) && (r == 3 || SETTLED(3)))

active proctype Faults() {
  byte victim;
  bool crashes, freezes;
end_idle:
  do
  :: atomic { !crashes -> crashes = true; life[3] = DEAD;
       // What was on its way may get lost.
       if :: posted[3] = arrived[3] :: skip fi;
       if :: flying[12] = false :: skip fi; if :: flying[13] = false :: skip fi }
  :: atomic { !freezes -> freezes = true;
       if :: victim = 0 :: victim = 1 :: victim = 2 :: victim = 3 fi;
       if :: life[victim] == RUNS -> life[victim] = FROZEN; if :: numb[victim] = true :: skip fi :: else fi }
  :: atomic { freezes && life[victim] == FROZEN && (!numb[victim] || OTHERS_ENDED(victim)) -> life[victim] = RUNS }
  od
}

#define FINE(r) (life[r] == RUNS || !found[r])
active proctype Clock() {
  do
  :: atomic { timeout && SETTLED(0) && SETTLED(1) && SETTLED(2) && SETTLED(3) -> break }
  :: atomic { timeout && phase == 0 && !(SETTLED(0) && SETTLED(1) && SETTLED(2) && SETTLED(3)) -> phase = 1 }
  :: atomic { timeout && phase == 1 && !(SETTLED(0) && SETTLED(1) && SETTLED(2) && SETTLED(3)) ->
       // Somebody was not told: only if one of those who found the error could not tell.
       assert(!((found[0] || found[1] || found[2] || found[3]) && FINE(0) && FINE(1) && FINE(2) && FINE(3)));
       phase = 2 }
  od;
}

init {
  atomic {
    if :: impatient[0] = true :: impatient[1] = true :: impatient[2] = true :: impatient[3] = true fi;
    if :: impatient[0] = true :: impatient[1] = true :: impatient[2] = true :: impatient[3] = true fi;
    run Worker(0); run Worker(1); run Worker(2); run Worker(3);
    run Proxy(0); run Proxy(1); run Proxy(2); run Proxy(3)
  }
}
