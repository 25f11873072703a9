#include "device/arch.h"

#include "device/arch.cuh"
#include "device/runtime.h"

namespace uccl_ep::gpu {
namespace {

__global__ void compiled_alike() {}

}  // namespace

bool has_bulk_copies() {
  cudaFuncAttributes attributes{};
  must(cudaFuncGetAttributes(&attributes, compiled_alike), "cudaFuncGetAttributes");
  return arch_of(attributes.ptxVersion).bulk_copies;
}

}  // namespace uccl_ep::gpu
