// Small arithmetic, and sizes of memory.
#pragma once

#include <cstdint>

namespace uccl_ep {

constexpr uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr uint64_t kLineBytes = 64;     // a cache line: flags of different writers never share one
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kSharedUnitBytes = 256;  // where rings share memory, chunks begin at multiples

}  // namespace uccl_ep
