// A copy of bytes, for whoever makes it.
#pragma once

#include <cstdint>

namespace uccl_ep {

struct Copy {
  void* to = nullptr;
  const void* from = nullptr;
  uint64_t num_bytes = 0;
};

}  // namespace uccl_ep
