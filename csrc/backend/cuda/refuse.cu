// A call that was refused takes its number in the order of the operations, so that replays of a graph carry the count
// of when they run, and what was queued before does not.
#include "backend/cuda/launch.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {
namespace {

__global__ void count_refusal(uint64_t* num_refused) { *num_refused += 1; }

}  // namespace

cudaError_t launch_refusal(const Group& group, cudaStream_t stream) {
  Local* const local = group.map.local.in(group.base[group.rank]);
  launch_kernel(count_refusal, {1, 1, 0, stream}, &local->progress.num_refused);
  return cudaGetLastError();
}

cudaError_t load_refusal(uint32_t) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, count_refusal);
}

}  // namespace uccl_ep::cuda
