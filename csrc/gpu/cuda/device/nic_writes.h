// What NICs write into GPU memory: when the GPUs see it.
#pragma once

#include <string>

namespace uccl_ep::gpu {

enum class NicWrites {
  kSeenByAll,  // once the host sees a later write of the NIC, all GPUs see the earlier ones
  kFlushed,    // after flush_nic_writes()
  kNeither
};
// Of a NIC into `device`. Throws std::runtime_error.
NicWrites nic_writes(int device);
// What NICs wrote into the current device, for all GPUs. What went wrong, or "".
std::string flush_nic_writes();

}  // namespace uccl_ep::gpu
