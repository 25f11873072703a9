// The parts of CUDA C++ that only CUDA's compilers read: launches, and shared memory whose size the launch sets.
#pragma once

#include <cstdint>

#include "device/runtime.h"

namespace uccl_ep::gpu {

struct Launch {
  uint32_t blocks, threads, shared_bytes = 0;
  StreamHandle stream = nullptr;
};
// Asynchronous; launch_status() says whether it failed.
template <typename... Parameters, typename... Arguments>
void launch_kernel(void (*kernel)(Parameters...), const Launch& how, const Arguments&... arguments) {
  kernel<<<how.blocks, how.threads, how.shared_bytes, how.stream>>>(arguments...);
}

// Loads kernels on the current device and lets their blocks have `shared_bytes`. A kernel that is loaded at its first
// launch may have to wait for running kernels, which may wait for it (contract 12).
template <typename... Kernels>
Status load_all(uint32_t shared_bytes, Kernels... kernels) {
  cudaFuncAttributes attributes{};
  Status status = cudaSuccess;
  const auto load = [&](const auto kernel) {
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, kernel);
    const uint32_t free = shared_bytes - static_cast<uint32_t>(attributes.sharedSizeBytes);
    if (status == cudaSuccess)
      status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(free));
  };
  (load(kernels), ...);
  return status;
}

// The same for a kernel whose blocks have only the shared memory that it declares.
template <typename Kernel>
Status load_kernel(Kernel kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel);
}

// A block's shared memory of as many bytes as its launch says. It is no function, because the compiler would then order
// additions to the address differently.
#define UCCL_EP_DYNAMIC_SHARED(name) extern __shared__ __align__(128) uint8_t name[]

}  // namespace uccl_ep::gpu
