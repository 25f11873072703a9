// Counts what a thread allocates by operator new, which this program replaces.
#pragma once

#include <cstdint>

namespace conformance {

// While it lives, allocations of this thread are counted.
class AllocationCount {
 public:
  AllocationCount();
  ~AllocationCount();
  uint64_t value() const;
};

}  // namespace conformance
