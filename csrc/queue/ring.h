// Commands from the one thread that finishes chunks to the one proxy that ships them, over memory of the caller
// (pinned, if the producer is on a GPU).
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "common/error.h"
#include "common/units.h"
#include "layout/wire.h"
#include "queue/command.h"
#include "sync/flag.h"
#include "sync/word.h"

namespace uccl_ep {

// The memory layout, the same for host and device. All zero is an empty ring: the first lap has phase 1.
struct CommandRingMemory {
  // Number of commands taken since creation. Writer: the consumer, in batches; reader: the producer, which may
  // overwrite the slots of taken commands; scope: both ends; never reset.
  FlagLine taken;

  struct Slot {
    Word word[2];
  };
  // `capacity` slots follow. Writer: the producer; reader: the consumer, which trusts a slot only when both words carry
  // the phase of its lap. It has seen the slot's last lap whole and the producer is never a lap ahead, so a word with
  // the wanted phase is of the wanted lap.
  Slot* slots() { return reinterpret_cast<Slot*>(this + 1); }
};
static_assert(sizeof(CommandRingMemory) == kLineBytes && sizeof(CommandRingMemory::Slot) == sizeof(CommandWords));

class CommandRing {
 public:
  static uint64_t bytes_for(uint32_t capacity) {
    return sizeof(CommandRingMemory) + capacity * sizeof(CommandRingMemory::Slot);
  }

  // `memory`: bytes_for(capacity) zeroed bytes at a multiple of 64, mapped longer than this object lives.
  // `capacity`: a power of two, so that a lap's phase is a bit of the index.
  CommandRing(void* memory, uint32_t capacity)
      : memory_(static_cast<CommandRingMemory*>(memory)), capacity_(capacity), batch_(command_batch(capacity)) {
    if (!std::has_single_bit(capacity))
      throw UsageFailure(UsageKind::kConfig,
                         "command ring: capacity = " + std::to_string(capacity) + " is no power of two");
  }
  CommandRing(const CommandRing&) = delete;
  CommandRing& operator=(const CommandRing&) = delete;

  // Throws unless every command of this buffer fits its fields, so push() need not check.
  static void check_limits(uint64_t num_channels, uint64_t largest_chunk_bytes, uint64_t shared_bytes) {
    if (num_channels > uint64_t{kCommandMaxChannel} + 1)
      throw UsageFailure(UsageKind::kConfig, "command: " + std::to_string(num_channels) + " channels, at most " +
                                                 std::to_string(kCommandMaxChannel + 1));
    if (largest_chunk_bytes > kCommandMaxBytes)
      throw UsageFailure(UsageKind::kConfig, "command: chunks of " + std::to_string(largest_chunk_bytes) +
                                                 " bytes, at most " + std::to_string(kCommandMaxBytes));
    if (shared_bytes > uint64_t{kCommandMaxUnit} * kSharedUnitBytes)
      throw UsageFailure(UsageKind::kConfig, "command: " + std::to_string(shared_bytes) +
                                                 " bytes of chunks in shared memory, at most " +
                                                 std::to_string(uint64_t{kCommandMaxUnit} * kSharedUnitBytes));
  }

  // Producer. False: the ring is full. The consumer of the command sees all earlier writes of the caller.
  bool push(const Command& command) {
    if (pushed_ - known_taken_ == capacity_) {  // the cached credit is used up: look across
      known_taken_ = memory_->taken.flag.read();
      if (pushed_ - known_taken_ == capacity_) return false;
    }
    const CommandWords words = encode_command(command, phase_of(pushed_));
    CommandRingMemory::Slot& slot = slot_of(pushed_);
    slot.word[0].store(words.word[0]);
    slot.word[1].store(words.word[1]);
    ++pushed_;
    return true;
  }

  // Consumer. False: no whole command is there.
  bool pop(Command& command) {
    const CommandRingMemory::Slot& slot = slot_of(taken_);
    const CommandWords words{{slot.word[0].load(), slot.word[1].load()}};
    const uint64_t phase = phase_of(taken_) ? kCommandPhase : 0;
    if ((words.word[0] & kCommandPhase) != phase || (words.word[1] & kCommandPhase) != phase) {
      publish_taken();  // empty: the producer may wait for these
      return false;
    }
    command = decode_command(words);
    ++taken_;
    if (taken_ - published_ >= batch_) publish_taken();
    return true;
  }

  uint32_t capacity() const { return capacity_; }

 private:
  bool phase_of(uint64_t index) const { return (index & capacity_) == 0; }
  CommandRingMemory::Slot& slot_of(uint64_t index) const { return memory_->slots()[index & (capacity_ - 1)]; }
  void publish_taken() {
    if (published_ == taken_) return;
    published_ = taken_;
    memory_->taken.flag.publish(taken_);
  }

  CommandRingMemory* memory_;
  uint32_t capacity_;
  uint32_t batch_;
  // Each end has its own line: the other end never touches it.
  alignas(kLineBytes) uint64_t pushed_ = 0;
  uint64_t known_taken_ = 0;
  alignas(kLineBytes) uint64_t taken_ = 0;
  uint64_t published_ = 0;
};

}  // namespace uccl_ep
