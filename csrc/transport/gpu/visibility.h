// Visibility of a NIC's writes into GPU memory: whether all GPUs of a domain see them once the CPU does, else a flush.
#pragma once

#include "transport/transport.h"

namespace uccl_ep::gpu {

class GpuVisibility final : public DeviceFlush {
 public:
  // Throws UsageFailure(kConfig) for a GPU whose NIC writes can be neither seen nor flushed.
  explicit GpuVisibility(int device);
  // False: the platform keeps the order of a NIC's writes for all devices.
  bool needed() const { return needed_; }
  void flush() override;

 private:
  const int device_;
  bool needed_ = false;
  bool entered_ = false;
};

}  // namespace uccl_ep::gpu
