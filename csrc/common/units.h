// Small arithmetic and time helpers.
#pragma once

#include <ctime>

#include <cstdint>

namespace uccl_ep {

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr uint64_t kLineBytes = 64;     // a cache line: flags of different writers never share one
constexpr uint64_t kPageBytes = 4096;

// CLOCK_MONOTONIC is the same clock in every process of a host, so times can be compared between ranks of a domain.
inline uint64_t now_usec() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * 1000000u + static_cast<uint64_t>(ts.tv_nsec) / 1000u;
}
inline uint64_t now_nsec() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * 1000000000u + static_cast<uint64_t>(ts.tv_nsec);
}

}  // namespace uccl_ep
