// The clock of engines, proxies and transports. A program that steps them may set it: they then live in simulated time.
#pragma once

#include <ctime>

#include <cstdint>

namespace uccl_ep {

// CLOCK_MONOTONIC is the same clock in every process of a host, so times can be compared between ranks of a domain.
inline uint64_t monotonic_nsec() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * 1000000000u + static_cast<uint64_t>(ts.tv_nsec);
}

using ReadClock = uint64_t (*)();  // nanoseconds since any moment, never less than before
inline constinit ReadClock read_clock = &monotonic_nsec;  // set only while the program has no engine and no thread

inline uint64_t now_nsec() { return read_clock(); }
inline uint64_t now_usec() { return now_nsec() / 1000; }

}  // namespace uccl_ep
