#include "transport/cuda/visibility.h"

#include <cuda_runtime.h>

#include <string>

#include "backend/cuda/memory.h"

namespace uccl_ep::cuda {

CudaVisibility::CudaVisibility(int device) : device_(device) {
  int ordering = 0, options = 0;
  must(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device), "cudaDeviceGetAttribute");
  must(cudaDeviceGetAttribute(&options, cudaDevAttrGPUDirectRDMAFlushWritesOptions, device), "cudaDeviceGetAttribute");
  needed_ = ordering < cudaGPUDirectRDMAWritesOrderingAllDevices;
  if (needed_ && (options & cudaFlushGPUDirectRDMAWritesOptionHost) == 0)
    throw UsageFailure(
        UsageKind::kConfig,
        "GPU " + std::to_string(device) + ": what NICs write into its memory cannot be made visible to other GPUs");
}

void CudaVisibility::flush() {
  if (!entered_) must(cudaSetDevice(device_), "cudaSetDevice");
  entered_ = true;
  const cudaError_t status = cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                                                cudaFlushGPUDirectRDMAWritesToAllDevices);
  if (status == cudaSuccess) return;
  ErrorRecord record;
  record.kind = ErrorKind::kTransport;
  record.step = Step::kShip;
  record.set_message(std::string("flushing what NICs wrote into GPU memory: ") + cudaGetErrorString(status));
  throw CommunicationFailure(record);
}

}  // namespace uccl_ep::cuda
