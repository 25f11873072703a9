// When GPUs see what NICs write into GPU memory.
#pragma once

#include <string>

namespace uccl_ep::gpu {

enum class NicWrites {
  kSeenByAll,  // once the host sees a later write of the NIC, all GPUs see the earlier ones
  kFlushed,    // after flush_nic_writes()
  kNeither
};
// For writes of a NIC into the memory of `device`. Throws std::runtime_error.
NicWrites nic_writes(int device);
// Makes what NICs wrote into the current device visible to all GPUs. Returns what went wrong, or "".
std::string flush_nic_writes();

}  // namespace uccl_ep::gpu
