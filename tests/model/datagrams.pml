// Errors, byes and heartbeats travel as datagrams: does every live rank learn what it must, before anybody leaves?
//
//   Rank   a rank's proxy              csrc/proxy/health.cc, messages.cc; csrc/layout/datagram.h
//          its program                 csrc/engine/group/close.cc, errors.cc
//   Net    what becomes of a datagram  csrc/transport/transport.h (its contract)
//
// Three ranks, each alone in its domain. Ranks 0 and 1 (ONE_FINDER: rank 0) may find an error at any time, and every
// rank closes at some time. A fault of the network loses a datagram, or an acknowledgement, or keeps a copy that comes
// later, also when its sender is gone; or a datagram of another job comes, or one with a wrong bit. There are FAULTS.
//
// Reductions, and why they lose nothing:
// * Repeats have no clock: a message that is owed can be sent at any time, until it is acknowledged.
// * A message and its acknowledgement are one step. An acknowledgement that is late is one that is lost: the message
//   comes again, and is acknowledged again.
// * An error and a bye have one serial, because they are composed once. Newer ones after older ones are in HEARTBEATS.
// * A rank gives up telling only those that are gone: kMostParting repeats, or those of kTellSeconds, are more than
//   FAULTS. A rank that is stopped for longer, and one that dies, are in faults.pml.
// * Ranks of a domain tell each other without datagrams: faults.pml has them.

#ifndef FAULTS
#define FAULTS 1
#endif
byte left = FAULTS;

#ifndef HEARTBEATS
#define RUNS 0
#define CLOSING 1
#define GONE 2
#define ERROR 0
#define BYE 1
#define OLD 9  // the finder of another job's error

byte life[3], claim[3];  // claim: 1 + the rank that found the error
bool found[3], parts[3];  // parts: it says bye with an error that it found before
// [9 * kind + 3 * from + to]
bool owed[18], taken[18], copy[18];
#define OF(kind, from, to) (9 * (kind) + 3 * (from) + (to))
#define LIVES(r) (life[r] != GONE)
#define NEXT(r) ((r + 1) % 3)
#define LAST(r) ((r + 2) % 3)

// ---- errors and byes that come
#ifdef LAST_CAUSE_STAYS
#define MAY_POST(r) true
#else
#define MAY_POST(r) (claim[r] == 0)
#endif
#define POST(r, finder) \
  if \
  :: MAY_POST(r) -> assert(claim[r] == 0); /* the first cause stays */ claim[r] = 1 + (finder) \
  :: else \
  fi
#ifdef REPEAT_TAKEN
#define IS_NEW(kind, from, to) true
#else
#define IS_NEW(kind, from, to) (!taken[OF(kind, from, to)])
#endif
#ifdef BYE_SETTLES_ERROR
#define PART(from, to) owed[OF(ERROR, to, from)] = false
#else
#define PART(from, to) skip
#endif
#define RECEIVE(kind, from, to, finder) \
  if \
  :: IS_NEW(kind, from, to) -> \
    assert(!taken[OF(kind, from, to)]); /* a message is taken once */ \
    taken[OF(kind, from, to)] = true; \
    if \
    :: kind == ERROR -> POST(to, finder) \
    :: else -> PART(from, to) \
    fi \
  :: else \
  fi

// ---- what the network does
#ifdef BYE_BEFORE_ERROR
#define MAY_SEND(kind, from, to) true
#else
#define MAY_SEND(kind, from, to) (kind == ERROR || !owed[OF(ERROR, from, to)])
#endif
#ifdef NOT_REPEATED
#define AGAIN(kind, from, to) owed[OF(kind, from, to)] = false
#else
#define AGAIN(kind, from, to) skip
#endif
#ifdef KNOWN_NOT_ACKNOWLEDGED
#define ANSWERED(kind, from, to) (!taken[OF(kind, from, to)])
#else
#define ANSWERED(kind, from, to) true
#endif
// A datagram whose nonce or checksum is wrong is dropped, and not acknowledged.
#ifdef NONCE_NOT_COMPARED
#define OF_OLD_JOB(kind, from, to) \
  :: atomic { left > 0 && LIVES(to) -> left--; RECEIVE(kind, from, to, OLD) }
#else
#define OF_OLD_JOB(kind, from, to) :: atomic { left > 0 && LIVES(to) -> left-- }
#endif
#if defined(CHECKSUM_NOT_COMPARED)
// A bit is wrong: the message is read as an acknowledgement of what its receiver says.
#define BROKEN(kind, from, to) owed[OF(kind, to, from)] = false
#elif defined(DROPPED_ACKNOWLEDGED)
#define BROKEN(kind, from, to) owed[OF(kind, from, to)] = false
#else
#define BROKEN(kind, from, to) skip
#endif
#define SENDS(kind, from, to) (LIVES(from) && LIVES(to) && owed[OF(kind, from, to)] && MAY_SEND(kind, from, to))
#define CARRY(kind, from, to) \
  :: atomic { SENDS(kind, from, to) && ANSWERED(kind, from, to) -> \
       RECEIVE(kind, from, to, from); owed[OF(kind, from, to)] = false } \
  :: atomic { left > 0 && SENDS(kind, from, to) -> left--; \
       if \
       :: RECEIVE(kind, from, to, from) /* its acknowledgement is lost */ \
       :: AGAIN(kind, from, to) /* it is lost */ \
       :: BROKEN(kind, from, to) \
       :: copy[OF(kind, from, to)] = true /* it is late */ \
       fi } \
  :: atomic { copy[OF(kind, from, to)] -> copy[OF(kind, from, to)] = false; \
       RECEIVE(kind, from, to, from) } \
  OF_OLD_JOB(kind, from, to)
active proctype Net() {
end_idle:
  do
  CARRY(ERROR, 0, 1) CARRY(ERROR, 0, 2) CARRY(ERROR, 1, 0) CARRY(ERROR, 1, 2)
  CARRY(BYE, 0, 1) CARRY(BYE, 0, 2) CARRY(BYE, 1, 0) CARRY(BYE, 1, 2) CARRY(BYE, 2, 0) CARRY(BYE, 2, 1)
  od
}

// ---- a rank
#ifdef CLOSING_NOT_TOLD
#define OWE_ERROR(r, to) owed[OF(ERROR, r, to)] = !taken[OF(BYE, to, r)]
#else
// Who said bye still waits for this rank's.
#define OWE_ERROR(r, to) owed[OF(ERROR, r, to)] = true
#endif
// After kMostParting repeats a peer that has left needs no more.
#ifdef TOLD_FOR_EVER
#define OWES(kind, r, to) owed[OF(kind, r, to)]
#else
#define OWES(kind, r, to) (owed[OF(kind, r, to)] && !(taken[OF(BYE, to, r)] && !LIVES(to)))
#endif
#define DELIVERED(kind, r) (!OWES(kind, r, NEXT(r)) && !OWES(kind, r, LAST(r)))
#define BYES_CAME(r) (taken[OF(BYE, NEXT(r), r)] && taken[OF(BYE, LAST(r), r)])
// Nobody who lives is still to be told.
#define TELLS(r, to) (owed[OF(ERROR, r, to)] && LIVES(to))
#define GIVES_UP(r) (!TELLS(r, NEXT(r)) && !TELLS(r, LAST(r)))
#define MAY_LEAVE(r) \
  (claim[r] != 0 -> GIVES_UP(r) : BYES_CAME(r) && DELIVERED(BYE, r) && DELIVERED(ERROR, r))
// What nobody looks at any more.
#define FORGET(r, peer) \
  owed[OF(ERROR, r, peer)] = false; owed[OF(BYE, r, peer)] = false; \
  taken[OF(ERROR, peer, r)] = false; taken[OF(BYE, peer, r)] = false; \
  copy[OF(ERROR, peer, r)] = false; copy[OF(BYE, peer, r)] = false
#define TOLD(r) (!LIVES(r) || claim[r] != 0)
#ifdef ONE_FINDER
#define FINDS(r) (r == 0)
#else
#define FINDS(r) (r < 2)
#endif
proctype Rank(byte r) {
  do
  :: atomic { LIVES(r) && FINDS(r) && !found[r] -> found[r] = true; \
       if :: claim[r] == 0 -> claim[r] = 1 + r :: else fi; OWE_ERROR(r, NEXT(r)); OWE_ERROR(r, LAST(r)) }
  :: atomic { life[r] == RUNS -> life[r] = CLOSING; parts[r] = found[r]; \
       owed[OF(BYE, r, NEXT(r))] = true; owed[OF(BYE, r, LAST(r))] = true }
  :: atomic { life[r] == CLOSING && MAY_LEAVE(r) ->
       assert(claim[r] == 0 || (claim[r] <= 2 && found[claim[r] - 1])); // no error without a cause
       assert(claim[r] != 0 || (life[NEXT(r)] != RUNS && life[LAST(r)] != RUNS)); // nobody leaves before the others
       assert(claim[r] != 0 || (!parts[NEXT(r)] && !parts[LAST(r)])); // nobody takes a failed rank for one that is done
       assert(!found[r] || (TOLD(NEXT(r)) && TOLD(LAST(r)))); // an error reaches every live rank
       life[r] = GONE; FORGET(r, NEXT(r)); FORGET(r, LAST(r)); break }
  od
}
init { atomic { run Rank(0); run Rank(1); run Rank(2) } }
#else

// Rank 0 composes kBeats heartbeats for rank 1. An acknowledgement has a way of its own.
#define kBeats 3
byte composed, newest;
bool owes;
bool flies[4], answer[4];  // a copy of the heartbeat with that serial, of its acknowledgement
#ifdef OLDER_TAKEN
#define NEWER(serial) true
#else
#define NEWER(serial) (serial > newest)
#endif
#ifdef OLD_ACKNOWLEDGEMENT_COUNTS
#define SETTLES(serial) true
#else
#define SETTLES(serial) (serial == composed)
#endif
#define BEAT(serial) \
  :: atomic { flies[serial] -> \
       if :: flies[serial] = false :: left > 0 -> left-- /* a copy stays */ fi; \
       if \
       :: NEWER(serial) -> assert(serial > newest); /* what a rank says of itself only grows */ newest = serial \
       :: else \
       fi; \
       answer[serial] = true } \
  :: atomic { flies[serial] && left > 0 -> left--; flies[serial] = false } \
  :: atomic { answer[serial] -> answer[serial] = false; if :: SETTLES(serial) -> owes = false :: else fi } \
  :: atomic { answer[serial] && left > 0 -> left--; answer[serial] = false }
active proctype Ranks() {
  do
  :: atomic { composed < kBeats -> composed++; owes = true }
  :: atomic { owes && !flies[composed] && !answer[composed] -> flies[composed] = true }
  BEAT(1) BEAT(2) BEAT(3)
  :: atomic { composed == kBeats && !owes -> assert(newest == kBeats); /* the newest comes through */ break }
  od
}
#endif
