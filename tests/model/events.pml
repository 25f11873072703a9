// Events: does a GPU that reads a ring when it pleases have every count in the end, and none too early?
//
//   Proxy   Board of csrc/proxy/board.cc
//   Poller  look_at_events() of csrc/backend/gpu/poll.cuh; the words are those of csrc/layout/events.h
//
// Reductions, and why they lose nothing:
// * One reader, one ring: readers write nothing that a proxy or another reader sees, and rings share nothing.
// * Two channels, two slots, two lanes: another channel is one more that an event is not of; another slot delays the
//   overtaking.
// * 4 laps instead of 2^20, which come up again. Between two looks there are as many events as those allow.
// * Kernels end between two looks, and keep the position.

#define kEvents 8
#define kSlots 2
#ifdef ONE_LAP_BIT
#define kLaps 2
#else
#define kLaps 4
#endif
#ifdef IDLE_TOO_LONG
#define kBetween 6
#else
#define kBetween 4
#endif
#define LAP(position) (((position) / kSlots + 1) % kLaps)
#define NONE (kLaps - 1)

byte came[2], board[2], flag[2];  // chunks of a channel: that are there, that the board says, that the GPU knows of
byte lap[kSlots], number[kSlots], count[kSlots];  // the word of a slot
byte next;       // event of the proxy
byte looked;     // `next` at the reader's last look
bool ended;

inline tell_board() { board[c] = came[c] }
inline tell_event() {
#ifdef EVENT_IN_PARTS
  lap[next % kSlots] = LAP(next);
  d_step { number[next % kSlots] = c; count[next % kSlots] = now; next++ }
#else
  d_step { lap[next % kSlots] = LAP(next); number[next % kSlots] = c; count[next % kSlots] = now; next++ }
#endif
}

active proctype Proxy() {
  byte c, now;
  do
  :: next < kEvents && next < looked + kBetween ->
    atomic {
      if
      :: c = 0
      :: c = 1
      fi;
      now = came[c] + 1
    }
#ifdef EVENT_BEFORE_STAMP
    tell_event();
    came[c] = now;
    tell_board()
#else
    came[c] = now;
#ifdef EVENT_BEFORE_BOARD
    tell_event();
    tell_board()
#else
    tell_board();
    tell_event()
#endif
#endif
  :: next == kEvents -> break
  od;
  ended = true
}

byte seen_lap[2], seen_number[2], seen_count[2];  // by lane

#define SLOT(i) ((position + i) % kSlots)
inline load(i) {
  d_step {
    seen_lap[i] = lap[SLOT(i)]; seen_number[i] = number[SLOT(i)]; seen_count[i] = count[SLOT(i)];
    if
    :: i == 0 -> looked = next
    :: else
    fi
  }
}
#define AHEAD(i) ((seen_lap[i] + kLaps - LAP(position + i)) % kLaps)
inline advance(c, value) {
  d_step {
    /* no GPU is told of a chunk that is not there */
    assert(value <= came[c]);
    if
    :: value > flag[c] -> flag[c] = value
    :: else
    fi
  }
}
inline read_board() {
  if
  :: advance(0, board[0]); advance(1, board[1])
  :: advance(1, board[1]); advance(0, board[0])
  fi
}

active proctype Poller() {
  byte position, before;
  bool last;
  do
  :: last = ended;
    before = position;
    if
    :: load(0); load(1)
    :: load(1); load(0)
    fi;
    if
    :: AHEAD(0) == 0 ->
      advance(seen_number[0], seen_count[0]);
      if
      :: AHEAD(1) == 0 -> advance(seen_number[1], seen_count[1]); position = position + 2
      :: else -> position++
      fi
#ifdef GAP_SKIPPED
    :: AHEAD(0) == NONE && AHEAD(1) == 0 -> advance(seen_number[1], seen_count[1]); position = position + 2
    :: AHEAD(0) == NONE && AHEAD(1) != 0 -> skip
#else
    :: AHEAD(0) == NONE -> skip
#endif
    :: else ->
#ifdef OVERTAKEN_WAITS
      skip
#else
#ifdef BOARD_READ_FIRST
      read_board();
      load(0);
#else
      read_board();
#endif
      position = position + AHEAD(0) * kSlots + 1
#endif
    fi;
#ifdef POSITION_KEPT
    position = before;
#endif
    if
    :: last && position == before ->
      /* who finds nothing more knows of everything */
      assert(flag[0] == came[0] && flag[1] == came[1]);
      break
    :: else
    fi;
    d_step {
      seen_lap[0] = 0; seen_number[0] = 0; seen_count[0] = 0;
      seen_lap[1] = 0; seen_number[1] = 0; seen_count[1] = 0
    }
  od
}
