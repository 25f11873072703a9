#include "backend/cuda/arch.h"

#include "backend/cuda/memory.h"
#include "sync/arch.cuh"

namespace uccl_ep::cuda {
namespace {

__global__ void compiled_alike() {}

}  // namespace

bool has_bulk_copies() {
  cudaFuncAttributes attributes{};
  must(cudaFuncGetAttributes(&attributes, compiled_alike), "cudaFuncGetAttributes");
  return arch_of(attributes.ptxVersion).bulk_copies;
}

}  // namespace uccl_ep::cuda
