#include "backend/cuda/arch.h"

#include "backend/cuda/memory.h"

namespace uccl_ep::cuda {
namespace {

constexpr int kLeastWithBulk = 90;  // of PTX, as in __CUDA_ARCH__ / 10

__global__ void compiled_alike() {}

}  // namespace

bool has_bulk_copies() {
  cudaFuncAttributes attributes{};
  must(cudaFuncGetAttributes(&attributes, compiled_alike), "cudaFuncGetAttributes");
  return attributes.ptxVersion >= kLeastWithBulk;
}

}  // namespace uccl_ep::cuda
