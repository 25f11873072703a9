// The memory that recent dispatches of one form needed. Later dispatches are launched with about as much before their
// counts are known.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "backend/gpu/layout.h"

namespace uccl_ep {

class Guess {
 public:
  // Learns from a dispatch of `num_tokens` tokens of this rank; not 0.
  void learn(uint64_t num_tokens, const gpu::PlanSizes& sizes) {
    seen_.push_back({static_cast<double>(num_tokens), sizes});
    if (seen_.size() > kKept) seen_.pop_front();
  }

  // False: no history. Otherwise guesses, per token of this rank, the most that was seen plus a sixteenth, but at most
  // 5 / 4 of the least. Memory that is not used is a loss, and a guess that is too low costs some 100 us.
  bool make(uint64_t num_tokens, gpu::PlanSizes& sizes) const {
    using gpu::PlanSizes;
    if (num_tokens == 0 || seen_.empty()) return false;
    for (auto number :
         {&PlanSizes::num_rows, &PlanSizes::received_rows, &PlanSizes::received_pairs, &PlanSizes::sent_pairs,
          &PlanSizes::most_tokens, &PlanSizes::relayed_rows, &PlanSizes::sent_addends}) {
      double least = kMost, most = 0.0;
      for (const Seen& seen : seen_) {
        const double needed = seen.sizes.*number * (static_cast<double>(num_tokens) / seen.num_tokens);
        least = std::min(least, needed);
        most = std::max(most, needed);
      }
      sizes.*number = static_cast<uint32_t>(std::min({most * 17 / 16, least * 5 / 4, kMost})) + kMore;
    }
    return true;
  }

 private:
  static constexpr size_t kKept = 4;
  static constexpr double kMost = 4e9;
  static constexpr uint32_t kMore = 64;
  struct Seen {
    double num_tokens;
    gpu::PlanSizes sizes;
  };
  std::deque<Seen> seen_;
};

}  // namespace uccl_ep
