// The driver's functions, for the other files of this folder. They are looked up when they are first needed, so that
// the library loads where there is no driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace uccl_ep::gpu {

// Null where the driver has none of that name.
template <typename Function>
Function find_driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}
// Throws std::runtime_error.
template <typename Function>
Function driver(const char* name) {
  const auto found = find_driver<Function>(name);
  if (found == nullptr) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  return found;
}
#define UCCL_EP_FIND_DRIVER(name) find_driver<decltype(&name)>(#name)
#define UCCL_EP_DRIVER(name) driver<decltype(&name)>(#name)

inline void must(CUresult status, const char* what) {
  if (status != CUDA_SUCCESS)
    throw std::runtime_error(std::string("CUDA driver: ") + what + " failed (" + std::to_string(status) + ")");
}

}  // namespace uccl_ep::gpu
