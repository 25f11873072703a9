// Events: how the proxy of a rank tells the GPUs of its domain what has come or gone. Per chunk it publishes the word
// of the channel on the board (region.h), and then an event: the same count, in the next slot of a ring. A GPU reads
// the next slots of the rings that it follows, so it polls a few words however many channels there are.
//
// A word says by its lap which event it is. To who expects event p in its slot, it is that event, or the slot still
// holds event p - capacity, or a later one: then the reader has been overtaken. It reads the words of the board that
// the ring is about, and goes on behind the event that it has seen. Nothing is lost: the board had the counts of that
// event and of all before it first. So a proxy never waits for a reader, nor knows of any, and a reader may sleep.
// A ring without the board would need room for whole operations: a rank gives chunks back that it never looked at.
//
// Why a lap is not mistaken: a reader looks in every operation, and before that nobody begins the one after the next.
// A channel has at most 2^16 chunks of rows in an operation, and fewer others. So between two looks there are less than
// 2^18 events a channel, which are 2^17 laps, because a ring has two slots a channel or more.
//
// Why a count is not mistaken: two events of a channel that are both in a ring, or one and the board, differ by less
// than the slots of the ring times those of the channel: 2^15 * 2^15.
#pragma once

#include <bit>
#include <cstdint>

#include "layout/words.h"

namespace uccl_ep {

// Which GPUs follow a ring, in which kernels. A channel's events are all in one.
enum class EventRing : uint32_t {
  kDomain,  // all members': what has come for the domain
  kOwn,  // the rank's own: what has left it, and the sums that have come back
  kSlotDomain,  // the same, of low latency
  kSlotOwn
};
constexpr uint32_t kNumEventRings = 4;

using EventCount = BitField<uint64_t, 0, 32>;  // of the channel's word on the board: the low bits
using EventNumber = BitsAbove<EventCount, 14>;  // of the channel, among those of the ring
using EventLap = BitsAbove<EventNumber, 18>;  // of the ring, from 1 on: what was never written is of lap 0
static_assert(EventLap::kEnd == 64);
static_assert(EventNumber::fits(2 * uint64_t{kMaxChannels} - 1));

// Slots for the events of so many channels: two each, and as many as a warp may look at together.
constexpr uint32_t event_capacity(uint64_t num_channels) {
  constexpr uint64_t kLeast = 64;
  if (num_channels == 0) return 0;
  return static_cast<uint32_t>(std::bit_ceil(2 * num_channels < kLeast ? kLeast : 2 * num_channels));
}
static_assert(uint64_t{event_capacity(2 * kMaxChannels)} * kMaxRingSlots < EventCount::kMost / 2,
              "a count could be mistaken");

// Of event `position`, counted since creation, in a ring of 2^bits slots.
constexpr uint64_t event_slot(uint64_t position, uint32_t bits) { return position & ((uint64_t{1} << bits) - 1); }
constexpr uint64_t event_lap(uint64_t position, uint32_t bits) { return ((position >> bits) + 1) & EventLap::kMost; }
constexpr uint64_t encode_event(uint64_t position, uint32_t bits, uint32_t number, uint64_t count) {
  return EventLap::put(event_lap(position, bits)) | EventNumber::put(number) |
         EventCount::put(count & EventCount::kMost);
}
// Laps by which the event in the slot of `position` is later; kNoEvent: the slot waits for it.
constexpr uint64_t kNoEvent = EventLap::kMost;
constexpr uint64_t event_ahead(uint64_t word, uint64_t position, uint32_t bits) {
  return (EventLap::get(word) - event_lap(position, bits)) & EventLap::kMost;
}
// The full count nearest to `near`.
constexpr uint64_t event_count(uint64_t word, uint64_t near) {
  return near + static_cast<uint64_t>(
                    int64_t{static_cast<int32_t>(static_cast<uint32_t>(word) - static_cast<uint32_t>(near))});
}

}  // namespace uccl_ep
