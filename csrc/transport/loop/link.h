// The clock of a link that sends one byte after the other at a fixed rate. Pure arithmetic on the caller's time.
#pragma once

#include <algorithm>
#include <cstdint>

namespace uccl_ep::loop {

// Messages up to this size (credits, probes) do not queue behind data, as on a NIC that serves its
// queue pairs in turn; they still use their share of the rate.
constexpr uint64_t kSmallBytes = 512;

class EgressLink {
 public:
  // 10^9 bytes per second; 0: no limit.
  explicit EgressLink(double gbytes_per_s) : nsec_per_byte_(gbytes_per_s > 0 ? 1.0 / gbytes_per_s : 0.0) {}

  // When the last byte of a message posted now has left. An idle link saves no credit: its next message starts now.
  uint64_t send(uint64_t now_nsec, uint64_t num_bytes) {
    const uint64_t started = free_nsec_ > now_nsec ? free_nsec_ : now_nsec;
    const double exact = transmission_nsec(num_bytes) + carry_nsec_;
    const uint64_t whole = static_cast<uint64_t>(exact);
    posted_bytes_ += num_bytes;
    carry_nsec_ = exact - static_cast<double>(whole);  // without it small messages would be sent too fast
    free_nsec_ = started + whole;
    return num_bytes <= kSmallBytes ? std::min(free_nsec_, now_nsec + whole) : free_nsec_;
  }

  // Bytes that have left by now.
  uint64_t left_bytes(uint64_t now_nsec) const {
    if (free_nsec_ <= now_nsec) return posted_bytes_;
    return posted_bytes_ - static_cast<uint64_t>(static_cast<double>(free_nsec_ - now_nsec) / nsec_per_byte_);
  }

  double transmission_nsec(uint64_t num_bytes) const { return static_cast<double>(num_bytes) * nsec_per_byte_; }

 private:
  double nsec_per_byte_;
  double carry_nsec_ = 0;
  uint64_t posted_bytes_ = 0;
  uint64_t free_nsec_ = 0;
};

}  // namespace uccl_ep::loop
