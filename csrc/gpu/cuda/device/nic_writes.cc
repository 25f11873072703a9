#include "device/nic_writes.h"

#include "device/runtime.h"

namespace uccl_ep::gpu {

NicWrites nic_writes(int device) {
  int ordering = 0, options = 0;
  must(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device), "cudaDeviceGetAttribute");
  must(cudaDeviceGetAttribute(&options, cudaDevAttrGPUDirectRDMAFlushWritesOptions, device), "cudaDeviceGetAttribute");
  if (ordering >= cudaGPUDirectRDMAWritesOrderingAllDevices) return NicWrites::kSeenByAll;
  return (options & cudaFlushGPUDirectRDMAWritesOptionHost) != 0 ? NicWrites::kFlushed : NicWrites::kNeither;
}

std::string flush_nic_writes() {
  const cudaError_t status = cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                                                cudaFlushGPUDirectRDMAWritesToAllDevices);
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

}  // namespace uccl_ep::gpu
