// What a proxy tells GPUs: how many chunks of a channel are stamped without a gap, on the board and as events.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "proxy/proxy.h"

namespace uccl_ep {

// By the proxy's thread. Does nothing if the layout has no board.
class Board {
 public:
  explicit Board(const ProxyContext& context);

  // Word `idx` of the board. Its count grows.
  void publish(size_t idx, uint64_t count);

 private:
  struct Events {
    Flag* slots = nullptr;
    uint32_t capacity_bits = 0;
    uint64_t next = 0;  // position
  };
  struct Word {
    uint32_t ring, number;
  };
  Flag* board_ = nullptr;
  std::array<Events, kNumEventRings> events_;
  std::vector<Word> words_;
};

// The count of a channel.
class Prefix {
 public:
  Prefix() = default;
  Prefix(const ProxyContext& context, const RingLayout& ring, Board& board, size_t board_idx)
      : num_slots_(ring.num_slots), board_(&board), board_idx_(board_idx) {
    if (context.layout->board_offset == 0) return;
    stamps_ = reinterpret_cast<const Flag*>(context.region + ring.stamps_offset);
  }

  // Called after a stamp was published. A stamp above count_ is that of the chunk; one of an earlier lap is not above
  // it.
  void advance() {
    if (stamps_ == nullptr) return;
    const uint64_t before = count_;
    while (stamps_[count_ % num_slots_].own() > count_) ++count_;
    if (count_ != before) board_->publish(board_idx_, count_);
  }

 private:
  const Flag* stamps_ = nullptr;
  uint64_t num_slots_ = 0;
  Board* board_ = nullptr;
  size_t board_idx_ = 0;
  uint64_t count_ = 0;
};

}  // namespace uccl_ep
