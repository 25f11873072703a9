// What of CUDA C++ only CUDA's compilers read: launches, and shared memory of a size that the launch says.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace uccl_ep::cuda {

struct Launch {
  uint32_t blocks, threads, shared_bytes = 0;
  cudaStream_t stream = nullptr;
};
// Asynchronous; cudaGetLastError() says whether it failed.
template <typename... Parameters, typename... Arguments>
void launch_kernel(void (*kernel)(Parameters...), const Launch& how, const Arguments&... arguments) {
  kernel<<<how.blocks, how.threads, how.shared_bytes, how.stream>>>(arguments...);
}

// A block's, of as many bytes as its launch says. No function: the compiler would order additions to it otherwise.
#define UCCL_EP_DYNAMIC_SHARED(name) extern __shared__ __align__(128) uint8_t name[]

}  // namespace uccl_ep::cuda
