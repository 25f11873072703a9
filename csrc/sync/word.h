// Two more atomics: a word that validates itself, and a counter for statistics.
#pragma once

#include <atomic>
#include <cstdint>

namespace uccl_ep {

// A 64-bit word that its reader polls, and whose value alone says whether it is new. One writer, one reader; a stored
// word never appears half written.
class Word {
 public:
  // Releases what its writer wrote before (the chunk that a command names).
  void store(uint64_t value) { value_.store(value, std::memory_order_release); }
  uint64_t load() const { return value_.load(std::memory_order_acquire); }

 private:
  std::atomic<uint64_t> value_{0};
};
static_assert(sizeof(Word) == 8 && std::atomic<uint64_t>::is_always_lock_free, "words live in shared or pinned memory");

// A statistic. One writer, any number of readers. Relaxed: it publishes nothing, and a reader may see it a little late.
class Counter {
 public:
  void add(uint64_t amount) { set(value() + amount); }  // no read-modify-write: nobody else writes
  void set(uint64_t value) { value_.store(value, std::memory_order_relaxed); }
  void raise_to(uint64_t candidate) {
    if (candidate > value()) set(candidate);
  }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

}  // namespace uccl_ep
