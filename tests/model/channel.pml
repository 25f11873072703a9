// One channel, chunk by chunk, down to the immediate: one source, the rail of another domain, two readers.
//
//   Stage    the source's worker     csrc/backend/host/stage.cc, OutPort of csrc/backend/host/ports.h
//   Shipper  the source's proxy      csrc/proxy/shipper.cc
//   Wire     the transport           csrc/transport/transport.h (its contract), csrc/transport/loop/loop.cc
//   Lander   the rail's proxy        csrc/proxy/lander.cc
//   Place    a reader's worker       csrc/backend/host/place.cc, InPort of csrc/backend/host/ports.h
//
// Reductions, and why they lose nothing:
// * One channel. Channels share no slot, flag, credit or number: another one only changes when a process gets its turn,
//   and every order of turns is searched. What operations make of several is in dispatch.pml and relay.pml.
// * No command ring: it is never full (command_capacity of csrc/layout/wire.h) and keeps its order (tests/native), so a
//   command only delays the proxy.
// * A payload and its report come in one step: no reader looks at a slot before its stamp, and the claim that nothing
//   unread lies in the slot is made when the payload comes.
// * 8 serials instead of 2^17, and the limit on credits a quarter of it, as in csrc/layout/words.h. More chunks are sent
//   than there are serials, so that serials come up again. (Ring of two: 12, which are not used up.)
// * A ring of two with all its duplicates takes too long: there (FEW_COPIES) only the first write and credit have one.
// Duplicates: every write, data or credit, may be delivered a second time before it is flushed.
// transport.h promises that a report is polled before half of its channel's serials have gone by (kLateness).

#ifndef WINDOW
#define WINDOW 1
#endif
#if WINDOW == 1
#define kChunks 10
#define ALL(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9)
#else
#define kChunks 4
#define ALL(X) X(0) X(1) X(2) X(3)
#endif
#define kMaxCredits (WINDOW + 1)
#define kLateness (2 * kMaxCredits)
#ifdef NARROW_SERIAL
#define kSerials (2 * kMaxCredits)
#else
#define kSerials (4 * kMaxCredits)
#endif
#define SLOT(serial) ((serial) % WINDOW)

// Source. Contents of a slot, and stamps, are serial + 1; 0 is an empty slot.
byte send_slot[WINDOW], flushed[WINDOW];
byte staged, posted, credited;
// Wire, by serial (data) and by number of chunks (credits); a report is an immediate that no proxy has polled yet.
byte write_state[kChunks], arrivals[kChunks];
byte credit_state[kChunks], credits[kChunks];  // of the credit for index + 1 chunks
// Rail.
byte landing[WINDOW], stamp[WINDOW];
byte end, returned, credit_base, credits_in_flight;
byte taken[2];

#define IDLE 0
#define POSTED 1
#define TWICE 2  // delivered, and will be once more
#define DELIVERED 3
#define FLUSHED 4

// As widen_serial() of csrc/layout/words.h.
inline widen(low, near, serial) {
  diff = (low + kSerials - near % kSerials) % kSerials;
  if
  :: diff >= kSerials / 2 -> diff = diff - kSerials
  :: else
  fi;
  if
  :: diff < 0 && near < -diff -> diff = diff + kSerials
  :: else
  fi;
  serial = near + diff;
  diff = 0
}

active proctype Stage() {
  do
#ifdef REPOST_UNFLUSHED
  :: atomic { staged < kChunks && staged < posted + 1 ->
#else
  :: atomic { staged < kChunks && (staged < WINDOW || flushed[SLOT(staged)] > staged - WINDOW) ->
#endif
       send_slot[SLOT(staged)] = staged + 1; staged++ }
  :: staged == kChunks -> break
  od
}

#ifdef FREE_NOT_AWAITED
#define HAS_CREDIT true
#else
#define HAS_CREDIT (posted < credited + WINDOW)
#endif
#ifdef LATE_REPORT
#define POLLED(reports, n) true
#else
#define POLLED(reports, n) (n < kLateness || reports[n - kLateness] == 0)
#endif
#ifdef ORDERED_CREDITS
#define NEWEST(a, b) b
#else
#define NEWEST(a, b) ((a) > (b) -> (a) : (b))
#endif
#define FLUSH_WRITE(n) \
  :: atomic { write_state[n] == DELIVERED -> write_state[n] = FLUSHED; flushed[SLOT(n)] = n + 1 }
#define POLL_CREDIT(k) \
  :: atomic { credits[k] > 0 -> credits[k]--; \
       widen((k + 1) % kSerials, credited, serial); \
       assert(serial <= posted); /* no credit for what was not posted */ \
       credited = NEWEST(credited, serial); serial = 0 }

active proctype Shipper() {
  int serial, diff;
end_idle:
  do
  :: atomic { posted < staged && HAS_CREDIT && POLLED(arrivals, posted) ->
       write_state[posted] = POSTED; posted++ }
  ALL(FLUSH_WRITE)
  ALL(POLL_CREDIT)
  od
}

#ifdef FEW_COPIES
#define TWO_COPIES(n) (n == 0)
#else
#define TWO_COPIES(n) true
#endif
// The claim "no slot is overwritten before it is consumed". The same bytes may come again.
#define COPY(n) \
  assert(landing[SLOT(n)] == send_slot[SLOT(n)] || \
         (taken[0] >= landing[SLOT(n)] && taken[1] >= landing[SLOT(n)])); \
  landing[SLOT(n)] = send_slot[SLOT(n)]
#ifdef STAMP_BEFORE_DATA
#define DELIVER(n) \
  :: write_state[n] == POSTED -> arrivals[n]++; atomic { COPY(n); write_state[n] = DELIVERED }
#else
#define DELIVER(n) \
  :: atomic { write_state[n] == POSTED -> COPY(n); arrivals[n]++; \
       if :: write_state[n] = DELIVERED :: TWO_COPIES(n) -> write_state[n] = TWICE fi } \
  :: atomic { write_state[n] == TWICE -> COPY(n); arrivals[n]++; write_state[n] = DELIVERED }
#endif
#define DELIVER_CREDIT(k) \
  :: atomic { credit_state[k] == POSTED -> credits[k]++; \
       if :: credit_state[k] = DELIVERED :: TWO_COPIES(k) -> credit_state[k] = TWICE fi } \
  :: atomic { credit_state[k] == TWICE -> credits[k]++; credit_state[k] = DELIVERED }

// What the NIC wrote reaches the GPU of reader 1 later than that of reader 0.
#ifdef VISIBLE_TO_ONE
byte seen[WINDOW];
#define LOADED(slot) (me == 0 -> landing[slot] : seen[slot])
#define REACH :: atomic { seen[0] != landing[0] -> seen[0] = landing[0] }
#else
#define LOADED(slot) landing[slot]
#define REACH
#endif

active proctype Wire() {
end_idle:
  do
  REACH
  ALL(DELIVER)
  ALL(DELIVER_CREDIT)
  od
}

#ifdef OLD_IMMEDIATE_ACCEPTED
#define IS_OLD(serial) false
#else
#define IS_OLD(serial) (stamp[SLOT(serial)] > serial)
#endif
#define STAMP(serial) \
  if \
  :: IS_OLD(serial) \
  :: else -> \
    assert(serial < returned + WINDOW); /* no chunk without a credit */ \
    stamp[SLOT(serial)] = serial + 1; \
    if :: end < serial + 1 -> end = serial + 1 :: else fi \
  fi
// Counted: one's own immediate completes a chunk, nobody else's.
#ifdef UNCOUNTED
#define ARRIVE(serial) i = end; do :: i <= serial -> STAMP(i); i++ :: else -> i = 0; break od
#else
#define ARRIVE(serial) STAMP(serial)
#endif
#define POLL_ARRIVAL(n) \
  :: atomic { arrivals[n] > 0 -> arrivals[n]--; widen(n % kSerials, end, serial); ARRIVE(serial); serial = 0 }

#ifdef CREDIT_BY_FIRST_READER
#define CONSUMED (taken[0] > taken[1] -> taken[0] : taken[1])
#else
#define CONSUMED (taken[0] < taken[1] -> taken[0] : taken[1])
#endif
#ifdef CREDIT_NOT_HELD
#define TELLABLE true
#else
#define TELLABLE (CONSUMED - credit_base < kMaxCredits)
#endif
#define FLUSH_CREDIT(k) \
  :: atomic { credit_state[k] == DELIVERED -> credit_state[k] = FLUSHED; credits_in_flight--; \
       if :: credits_in_flight == 0 -> credit_base = returned :: else fi }

active proctype Lander() {
  int serial, diff, i;
end_idle:
  do
  ALL(POLL_ARRIVAL)
  ALL(FLUSH_CREDIT)
  :: atomic { CONSUMED > returned && TELLABLE && POLLED(credits, CONSUMED - 1) ->
       returned = CONSUMED; credit_state[returned - 1] = POSTED; credits_in_flight++ }
  od
}

#if defined(FLAG_UNSTAMPED)
#define READY(next) (stamp[SLOT(next)] != 0)
#elif defined(EPOCH_RECORDED)
// The number that a reader waits for is the one of the lap in which its kernel was recorded.
#define READY(next) (stamp[SLOT(next)] >= SLOT(next) + 1)
#else
#define READY(next) (stamp[SLOT(next)] == next + 1)
#endif

// Chunk 1 has rows for reader 0 only.
proctype Place(bit me) {
  byte next;
  do
#ifdef ABSENT_NOT_TAKEN
  :: atomic { me == 1 && next == 1 && READY(next) -> next++ }
#endif
#ifdef TAKEN_BEFORE_LOADS
  :: atomic { next < kChunks && READY(next) -> taken[me] = next + 1 };
#else
  :: next < kChunks && READY(next) ->
#endif
     atomic { assert(LOADED(SLOT(next)) == next + 1); /* no stale chunk is accepted */
#ifdef FLAG_RESET
       stamp[SLOT(next)] = 0;
#endif
       next++; taken[me] = next }
  :: next == kChunks -> break
  od
}

init { atomic { run Place(0); run Place(1) } }
