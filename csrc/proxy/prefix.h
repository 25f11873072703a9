// A word of the board: the number of chunks of a channel up to which all are stamped.
#pragma once

#include <cstdint>

#include "proxy/proxy.h"

namespace uccl_ep {

// Does nothing if the layout has no board. Called by the proxy's thread, which also writes the stamps.
class Prefix {
 public:
  Prefix() = default;
  Prefix(const ProxyContext& context, const RingLayout& ring, size_t board_idx) : num_slots_(ring.num_slots) {
    if (context.layout->board_offset == 0) return;
    stamps_ = reinterpret_cast<const Flag*>(context.region + ring.stamps_offset);
    word_ = reinterpret_cast<Flag*>(context.region + context.layout->board_offset) + board_idx;
  }

  // After a stamp was published. A slot's stamp may only be ahead of ours: it is never of an earlier lap.
  void advance() {
    if (word_ == nullptr) return;
    const uint64_t before = count_;
    while (stamps_[count_ % num_slots_].own() > count_) ++count_;
    if (count_ != before) word_->publish(count_);
  }

 private:
  const Flag* stamps_ = nullptr;
  Flag* word_ = nullptr;
  uint64_t num_slots_ = 0;
  uint64_t count_ = 0;
};

}  // namespace uccl_ep
