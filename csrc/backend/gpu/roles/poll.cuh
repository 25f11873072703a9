// The poller as a role of the block that sees to the network.
#pragma once

#include "backend/gpu/poll.cuh"
#include "backend/gpu/roles.cuh"

namespace uccl_ep::gpu {

struct PollRole {
  static constexpr uint32_t kWarps = 1;
  struct Shared {
    uint32_t poller_ends;  // 1: no warp of the kernel waits for flags any more
  };
};

}  // namespace uccl_ep::gpu
