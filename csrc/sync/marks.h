// Marks: which queues their reader should look at, in memory that several processes map.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "common/units.h"

namespace uccl_ep {

// Which of many queues may have something new, so that their one reader looks at no others. A mark is a hint, the
// queue's own flag the truth: who has published in a queue then marks it; the reader takes the marks before it looks.
// Queue n has mark n % kMarks. Writers: anyone; reader: one thread.
class alignas(kLineBytes) MarkLine {
 public:
  static constexpr uint32_t kMarks = 8 * kLineBytes;

  void set(uint32_t queue) {
    words_[queue % kMarks / 64].fetch_or(uint64_t{1} << queue % 64, std::memory_order_seq_cst);
  }

  // Calls visit(mark) for each that is set, and none is set any more.
  template <typename Visit>
  void take(Visit visit) {
    for (uint32_t i = 0; i < kMarks / 64; ++i) {
      if (words_[i].load(std::memory_order_acquire) == 0) continue;
      for (uint64_t bits = words_[i].exchange(0, std::memory_order_seq_cst); bits != 0; bits &= bits - 1)
        visit(64 * i + static_cast<uint32_t>(std::countr_zero(bits)));
    }
  }

 private:
  std::atomic<uint64_t> words_[kMarks / 64] = {};
};
static_assert(sizeof(MarkLine) == kLineBytes);

}  // namespace uccl_ep
