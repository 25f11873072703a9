// A word of the board: how many chunks of a channel are stamped without a gap.
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

  // Called after a stamp was published. A stamp above count_ is that of the chunk; one of an earlier lap is not above
  // it.
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
