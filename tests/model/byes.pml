// A bye goes to the rails of its sender; each tells its domain. Does every rank know who has left, and from what?
//
//   Rank   a rank's proxy and its program   csrc/proxy/health.cc; csrc/engine/group/close.cc
//   Net    carries messages to other domains: datagrams.pml
//
// Domain A is ranks 0 and 1, domain B ranks 2 and 3; the rail of r is r + 2 modulo 4, and it lands the rows of r. Ranks 0
// and 1 may find an error, at any time. Every rank closes at some time, and leaves when it may.
//
// Reductions, and why they lose nothing:
// * Nothing is lost: what is owed is carried at any time, any number of steps later. Losses are in datagrams.pml.
// * Acknowledging and telling the domain are two steps, because a rank may leave in between.
// * The death of a rank is an error that its finders tell all ranks directly: faults.pml.

bool closing[4], gone[4];
bool bye_owed[4];  // to the rail
bool taken[4];     // the rail has the rank's bye, and has acknowledged it
bool told[4];      // the rail has told its domain
bool found[4], parts[4];  // parts: it says bye with an error that it found before
byte claim[4];     // 1 + the rank that found the error
bool owed[16];     // [4 * from + to] errors

#define PEER(r) (r ^ 1)
#define RAIL(r) ((r + 2) % 4)
#define OWED(from, to) owed[4 * (from) + (to)]
#define POST(r, finder) if :: claim[r] == 0 -> claim[r] = 1 + (finder) :: else fi

// A rank that takes an error puts it into the control blocks of its domain.
#ifdef ERROR_KEPT
#define POST_TO_DOMAIN(to, finder) POST(to, finder)
#else
#define POST_TO_DOMAIN(to, finder) POST(to, finder); POST(PEER(to), finder)
#endif
#ifdef BYE_OVERTAKES_ERROR
#define MAY_SEND_BYE(r) true
#else
#define MAY_SEND_BYE(r) (!OWED(r, RAIL(r)))
#endif
#define CARRY_ERROR(from, to) \
  :: atomic { OWED(from, to) && !gone[from] -> OWED(from, to) = false; \
       if :: gone[to] :: else -> POST_TO_DOMAIN(to, from) fi }
#define CARRY_BYE(r) \
  :: atomic { bye_owed[r] && !gone[r] && !gone[RAIL(r)] && MAY_SEND_BYE(r) -> bye_owed[r] = false; taken[r] = true } \
  :: atomic { bye_owed[r] && gone[RAIL(r)] -> bye_owed[r] = false } \
  :: atomic { taken[r] && !told[r] && !gone[RAIL(r)] -> told[r] = true }
active proctype Net() {
end_idle:
  do
  CARRY_ERROR(0, 2) CARRY_ERROR(0, 3) CARRY_ERROR(1, 2) CARRY_ERROR(1, 3)
  CARRY_BYE(0) CARRY_BYE(1) CARRY_BYE(2) CARRY_BYE(3)
  od
}

#define OTHER(r) (RAIL(PEER(r)))  // lands with our peer
#ifdef RAIL_STANDS_FOR_ALL
#define BYES_CAME(r) (closing[PEER(r)] && told[RAIL(r)])
#elif defined(BYE_KEPT)
#define BYES_CAME(r) (closing[PEER(r)] && told[RAIL(r)] && false) // the other one's rail tells nobody
#else
#define BYES_CAME(r) (closing[PEER(r)] && told[RAIL(r)] && told[OTHER(r)])
#endif
#define DELIVERED(r) (!OWED(r, RAIL(r)) && !OWED(r, OTHER(r)))
#define MAY_LEAVE(r) (claim[r] != 0 -> DELIVERED(r) : BYES_CAME(r) && !bye_owed[r])
#define TOLD(r) (gone[r] || claim[r] != 0)
#define NO_PART(r) (!parts[PEER(r)] && !parts[RAIL(r)] && !parts[OTHER(r)])
proctype Rank(byte r) {
  bool finds = false;
  if :: r < 2 -> finds = true :: skip fi;
  do
  :: atomic { finds && !found[r] && !gone[r] -> found[r] = true; POST(r, r); POST(PEER(r), r);
       OWED(r, RAIL(r)) = true; OWED(r, OTHER(r)) = true }
  :: atomic { !closing[r] -> closing[r] = true; parts[r] = found[r]; bye_owed[r] = true }
  :: atomic { closing[r] && MAY_LEAVE(r) ->
       assert(claim[r] != 0 || (closing[PEER(r)] && closing[RAIL(r)] && closing[OTHER(r)])); // nobody leaves before the others
       assert(claim[r] != 0 || NO_PART(r)); // nobody takes a failed rank for one that is done
       assert(!found[r] || (TOLD(PEER(r)) && TOLD(RAIL(r)) && TOLD(OTHER(r)))); // an error reaches every live rank
       gone[r] = true; break }
  od
}
init { atomic { run Rank(0); run Rank(1); run Rank(2); run Rank(3) } }
