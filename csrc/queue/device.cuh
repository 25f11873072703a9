// The producer's end of a command ring on a GPU; the ring lies in pinned memory, its consumer is the same as on the
// host.
#pragma once

#include "queue/ring.h"
#include "sync/device.cuh"

namespace uccl_ep::gpu {

// Used by one thread of a kernel at a time.
class CommandProducer {
 public:
  __device__ explicit CommandProducer(const CommandQueue& queue) : queue_(queue), state_(*queue.state) {}
  // False: the ring is full. The consumer of a command sees all writes before the caller's last fence_system().
  __device__ __forceinline__ bool push(const Command& command) {
    if (state_.pushed - state_.known_taken == queue_.capacity) {  // the cached credit is used up: look across
      state_.known_taken = read_flag(queue_.ring);
      if (state_.pushed - state_.known_taken == queue_.capacity) return false;
    }
    const CommandWords words = encode_command(command, (state_.pushed & queue_.capacity) == 0);
    uint64_t* const slots = queue_.ring + sizeof(CommandRingMemory) / sizeof(uint64_t);
    store_words(slots + 2 * (state_.pushed & (queue_.capacity - 1)), words.word[0], words.word[1]);
    ++state_.pushed;
    return true;
  }
  // Call it before the next one is constructed.
  __device__ void keep() { *queue_.state = state_; }

 private:
  const CommandQueue queue_;
  ProducerState state_;
};

}  // namespace uccl_ep::gpu
