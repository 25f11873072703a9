// How long the last chunks took, from their command's being taken until they were flushed.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "sync/word.h"

namespace uccl_ep {

// Writer: the proxy's thread; readers: any, which may see some chunks a little late.
class Latencies {
 public:
  static constexpr uint64_t kKept = 1024;

  void add(uint64_t nsec) {
    nsec_[count_.value() % kKept].set(nsec);
    count_.add(1);
  }
  // The least time that `percent` % of the last kKept chunks do not exceed; 0 if there are none.
  uint64_t percentile_nsec(uint64_t percent) const {
    std::vector<uint64_t> kept(std::min(count_.value(), kKept));
    if (kept.empty()) return 0;
    for (size_t i = 0; i < kept.size(); ++i) kept[i] = nsec_[i].value();
    const auto its = kept.begin() + static_cast<int64_t>((kept.size() * percent + 99) / 100 - 1);
    std::nth_element(kept.begin(), its, kept.end());
    return *its;
  }

 private:
  std::array<Counter, kKept> nsec_;
  Counter count_;
};

}  // namespace uccl_ep
