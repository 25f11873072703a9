#include "transport/gpu/visibility.h"

#include <string>

#include "device/nic_writes.h"
#include "device/runtime.h"

namespace uccl_ep::gpu {

GpuVisibility::GpuVisibility(int device) : device_(device) {
  const NicWrites writes = nic_writes(device);
  needed_ = writes != NicWrites::kSeenByAll;
  if (writes == NicWrites::kNeither)
    throw UsageFailure(
        UsageKind::kConfig,
        "GPU " + std::to_string(device) + ": what NICs write into its memory cannot be made visible to other GPUs");
}

void GpuVisibility::flush() {
  if (!entered_) enter_device(device_);
  entered_ = true;
  const std::string why = flush_nic_writes();
  if (why.empty()) return;
  ErrorRecord record;
  record.kind = ErrorKind::kTransport;
  record.step = Step::kShip;
  record.set_message("flushing what NICs wrote into GPU memory: " + why);
  throw CommunicationFailure(record);
}

}  // namespace uccl_ep::gpu
