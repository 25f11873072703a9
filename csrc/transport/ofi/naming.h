// How an arrival names its sender and length, even if the provider reports neither.
#pragma once

#include <bit>
#include <cstdint>

namespace uccl_ep::ofi {

enum class Naming : uint32_t {
  kTag,      // in the upper half of a write's 64-bit data, see Tags
  kSource,   // the provider reports sender and length; the data is the immediate
  kMessage,  // the write carries no data; a message follows when its bytes are flushed, see Notice
};
constexpr uint32_t kNumNamings = 3;

struct Arrival {
  uint32_t rank = 0;
  uint32_t immediate = 0;
  uint64_t num_bytes = 0;
};

// What a receiver asks its senders to put into a write's data: immediate 32 bits | number of bytes `size_bits` | tag. A
// sender's tag is its rank under a permutation that the receiver draws at random. So data that somebody else made up
// seldom names a peer. Tags guard against mistakes only: the key of the region keeps strangers from writing.
class Tags {
 public:
  Tags() = default;
  // The parameters of the permutation come from `random`, which the senders are told.
  Tags(uint32_t size_bits, uint64_t random)
      : size_bits_(size_bits),
        factor_(static_cast<uint32_t>(random) | 1),
        summand_(static_cast<uint32_t>(random >> 32)),
        inverse_(inverse_of(factor_)) {}

  // Bits for the number of bytes of writes of up to `largest_write_bytes`; 32 or more: they do not fit into the data.
  static constexpr uint32_t size_bits_for(uint64_t largest_write_bytes) {
    return static_cast<uint32_t>(std::bit_width(largest_write_bytes));
  }
  // Whether at least half of the tags name no rank.
  static constexpr bool suffice(uint64_t largest_write_bytes, uint32_t num_ranks) {
    const uint32_t size_bits = size_bits_for(largest_write_bytes);
    return size_bits < 32 && static_cast<uint32_t>(std::bit_width(num_ranks - 1)) + 1 <= 32 - size_bits;
  }

  uint64_t encode(const Arrival& arrival) const {
    const uint64_t tag = (factor_ * arrival.rank + summand_) & tag_mask();
    return arrival.immediate | arrival.num_bytes << 32 | tag << (32 + size_bits_);
  }
  Arrival decode(uint64_t data) const {
    const uint32_t tag = static_cast<uint32_t>(data >> (32 + size_bits_));
    const uint64_t size_mask = (uint64_t{1} << size_bits_) - 1;
    return {(tag - summand_) * inverse_ & tag_mask(), static_cast<uint32_t>(data), data >> 32 & size_mask};
  }

 private:
  uint32_t tag_mask() const { return static_cast<uint32_t>((uint64_t{1} << (32 - size_bits_)) - 1); }
  // The inverse modulo 2^32, by Newton's method. The lowest 3 bits of an odd number are their own inverse; each step
  // doubles the number of correct bits.
  static constexpr uint32_t inverse_of(uint32_t odd) {
    uint32_t inverse = odd;
    for (int i = 0; i < 4; ++i) inverse *= 2 - odd * inverse;
    return inverse;
  }

  uint32_t size_bits_ = 0;
  uint32_t factor_ = 1, summand_ = 0, inverse_ = 1;
};

// The message of Naming::kMessage.
struct Notice {
  uint64_t token;  // the receiver's
  uint64_t num_bytes;
  uint32_t rank;
  uint32_t immediate;
};
static_assert(sizeof(Notice) == 24);

}  // namespace uccl_ep::ofi
