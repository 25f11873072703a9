// Whether the GPUs of a domain see what a NIC wrote into one's memory once the CPU knows of it, and what to do if not.
#pragma once

#include "transport/transport.h"

namespace uccl_ep::cuda {

class CudaVisibility final : public DeviceFlush {
 public:
  // Throws UsageFailure(kConfig) for a GPU whose NIC writes can be neither seen nor flushed.
  explicit CudaVisibility(int device);
  // False: the platform keeps the order of a NIC's writes for all devices.
  bool needed() const { return needed_; }
  void flush() override;

 private:
  const int device_;
  bool needed_ = false;
  bool entered_ = false;
};

}  // namespace uccl_ep::cuda
