// The poller: the warp that follows the events of our domain's proxies (layout/events.h). It alone polls host memory.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/trace.cuh"
#include "layout/events.h"

namespace uccl_ep::gpu {

// The flags that follow a word get its count, unless they have it. `traced`: the word's number in a trace.
template <typename CountOf>
__device__ __forceinline__ void advance_flags(const Group& g, const Followed::Word& word, uint32_t traced,
                                              CountOf count_of) {
  const uint64_t before = peek_flag(word.flag), count = count_of(before);
  if (count <= before) return;
  publish_in_gpu(word.flag, count);
  if (word.also != nullptr) publish_in_gpu(word.also, count);
  trace_now(g, TraceKind::kSeenArrived, traced, count);
}

// By a warp: whether a later lane of ours, of `lanes` of a ring, has an event of the same channel. That one counts.
__device__ __forceinline__ bool is_outdated(uint32_t number, uint32_t i, uint32_t lanes) {
  const uint32_t lane = threadIdx.x % kWarp;
  bool outdated = false;
  for (uint32_t later = 1; later < lanes; ++later) {
    const uint32_t other = __shfl_sync(kFullWarp, number, lane + later);
    outdated |= i + later < lanes && other == number;
  }
  return outdated;
}

// By a warp: what words `first` to `end` of the board say.
__device__ __forceinline__ void read_board(const Group& g, const Followed& of, uint32_t first, uint32_t end) {
  for (uint32_t i = first + threadIdx.x % kWarp; i < end; i += kWarp) {
    const Followed::Word word = of.words[i];
    advance_flags(g, word, of.first_traced + i, [&](uint64_t) { return read_flag(word.word); });
  }
}

// By a warp, each lane with a ring, or with an empty one: one look from event `next` on, by `lanes` lanes of a ring.
// Returns the position after what has been seen of the ring.
__device__ __noinline__ inline uint64_t look_at_events(const Group& g, const Followed& of, const Followed::Ring& ring,
                                                       uint64_t next, uint32_t lanes) {
  constexpr uint32_t kNone = UINT32_MAX;
  const uint32_t lane = threadIdx.x % kWarp, i = lane % lanes;
  const bool has = ring.slots != nullptr;
  const uint64_t position = next + i;
  // Every load is an acquire, because it takes microseconds across PCIe. A lane's event is whole by itself, so all are
  // looked at together.
  const uint64_t word = has ? read_flag(ring.slots + event_slot(position, ring.capacity_bits)) : 0;
  const uint64_t ahead = has ? event_ahead(word, position, ring.capacity_bits) : kNoEvent;
  const LaneMask come = ballot(ahead == 0), overtaken = ballot(i == 0 && ahead != 0 && ahead != kNoEvent);
  if ((come | overtaken) == 0) return next;
  const uint32_t run = has ? min(lowest_lane(~(come >> (lane - i))), lanes) : 0;  // events without a gap
  const bool mine = i < run;
  const uint32_t number = mine ? static_cast<uint32_t>(EventNumber::get(word)) : kNone;
  const uint32_t its = ring.first + number;
  const Followed::Word follows = mine ? of.words[its] : Followed::Word{};  // comes while the lanes compare
  if (!is_outdated(number, i, lanes) && mine)
    advance_flags(g, follows, of.first_traced + its, [&](uint64_t before) { return event_count(word, before); });
  next += run;
  for (LaneMask left = overtaken; left != 0; left &= left - 1) {
    const uint32_t from = lowest_lane(left);
    __syncwarp();  // what the lane has acquired comes before what all read of the board
    read_board(g, of, __shfl_sync(kFullWarp, ring.first, from), __shfl_sync(kFullWarp, ring.end, from));
    const uint64_t laps = __shfl_sync(kFullWarp, ahead, from);
    if (lane - i == from) next += (laps << ring.capacity_bits) + 1;
  }
  __syncwarp();  // another lane may publish the same flags in the next look
  return next;
}

// By one warp, until no warp of the kernel waits for flags any more: then `end`, a word of shared memory, is 1.
__device__ __noinline__ inline void follow_events(const Group& g, const Followed& of, uint32_t* end) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t lanes = of.num_rings < kWarp ? kWarp / of.num_rings : 1;  // of a ring
  const uint32_t together = kWarp / lanes, place = lane / lanes;
  // The first rings stay in registers: usually these are all.
  const bool has_own = place < min(of.num_rings, together);
  const Followed::Ring own = has_own ? of.rings[place] : Followed::Ring{};
  uint64_t next = has_own ? of.seen[place] : 0;
  while (__any_sync(kFullWarp, read_shared(end) == 0)) {
    next = look_at_events(g, of, own, next, lanes);
    // Others are more than lanes, so each lane has a ring for itself.
    for (uint32_t first = together; first < of.num_rings; first += together) {
      const uint32_t r = first + place;
      const bool has = r < of.num_rings;
      const Followed::Ring ring = has ? of.rings[r] : Followed::Ring{};
      const uint64_t seen = look_at_events(g, of, ring, has ? of.seen[r] : 0, lanes);
      if (has) of.seen[r] = seen;
    }
  }
  if (has_own && lane % lanes == 0) of.seen[place] = next;
}

}  // namespace uccl_ep::gpu
