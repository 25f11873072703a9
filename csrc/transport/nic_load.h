// The limits of one NIC for data in flight.
#pragma once

#include <cstdint>

namespace uccl_ep {

class NicLoad {
 public:
  NicLoad() = default;
  // 0: no limit.
  NicLoad(uint64_t limit_bytes, uint64_t limit_ops) : limit_bytes_(limit_bytes), limit_ops_(limit_ops) {}

  // One write may always be in flight, whatever its size.
  bool has_room(uint64_t num_bytes) const {
    return ops_ == 0 ||
           ((limit_ops_ == 0 || ops_ < limit_ops_) && (limit_bytes_ == 0 || bytes_ + num_bytes <= limit_bytes_));
  }
  void take(uint64_t num_bytes) {
    ++ops_;
    bytes_ += num_bytes;
  }
  void give_back(uint64_t num_bytes) {
    --ops_;
    bytes_ -= num_bytes;
  }
  uint64_t ops() const { return ops_; }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t limit_bytes_ = 0, limit_ops_ = 0;
  uint64_t ops_ = 0, bytes_ = 0;
};

}  // namespace uccl_ep
