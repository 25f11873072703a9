// A command names a finished chunk; the proxy computes the addresses. 16 bytes, self-validating: the top bit of each
// stored word is the lap's phase, so a command is taken only when both of its words belong to the same lap.
//   word 0: phase 1 | channel 15 | num_bytes 48     word 1: phase 1 | unit 24 | serial 39
#pragma once

#include <cstdint>

#include "common/units.h"
#include "layout/words.h"

namespace uccl_ep {

struct Command {
  uint32_t channel;    // index of the OutChannel
  uint64_t num_bytes;  // of the chunk's slot that are to be written
  uint64_t serial;     // chunk number on the channel since creation
  uint32_t unit = 0;   // of kSharedUnitBytes: where the chunk begins in the memory that its ring shares with others
};

struct CommandWords {
  uint64_t word[2];
};

using CommandBytes = BitField<uint64_t, 0, 48>;  // of word 0
using CommandChannel = BitsAbove<CommandBytes, 15>;
using CommandSerial = BitField<uint64_t, 0, 39>;  // of word 1
using CommandUnit = BitsAbove<CommandSerial, 24>;
constexpr uint64_t kCommandPhase = BitsAbove<CommandChannel, 1>::kMask;
static_assert(kCommandPhase == BitsAbove<CommandUnit, 1>::kMask);
constexpr uint32_t kCommandMaxChannel = static_cast<uint32_t>(CommandChannel::kMost);
constexpr uint64_t kCommandMaxBytes = CommandBytes::kMost;
constexpr uint64_t kCommandMaxSerial = CommandSerial::kMost;
constexpr uint32_t kCommandMaxUnit = static_cast<uint32_t>(CommandUnit::kMost);

constexpr CommandWords encode_command(const Command& c, bool phase) {
  const uint64_t bit = phase ? kCommandPhase : 0;
  return {{bit | CommandChannel::put(c.channel) | CommandBytes::put(c.num_bytes),
           bit | CommandUnit::put(c.unit) | CommandSerial::put(c.serial)}};
}
constexpr Command decode_command(const CommandWords& w) {
  return {static_cast<uint32_t>(CommandChannel::get(w.word[0])), CommandBytes::get(w.word[0]),
          CommandSerial::get(w.word[1]), static_cast<uint32_t>(CommandUnit::get(w.word[1]))};
}

// A GPU's end of the ring: how far the producer is, in device memory between its kernels; zeroed with the ring.
struct ProducerState {
  uint64_t pushed = 0, known_taken = 0;
};
// The form that kernels get.
struct CommandQueue {
  uint64_t* ring = nullptr;  // a CommandRingMemory as this GPU sees it
  uint32_t capacity = 0;     // commands, a power of two
  ProducerState* state = nullptr;
};

}  // namespace uccl_ep
