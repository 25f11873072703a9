// A refused call is counted on the GPU, in the order of the operations. So a replay of a graph carries the count at the
// time when it runs, and operations that were queued before the call do not count it.
#include "backend/gpu/steps.h"
#include "device/launch.cuh"

namespace uccl_ep::gpu {
namespace {

__global__ void count_refusal(uint64_t* num_refused) { *num_refused += 1; }

}  // namespace

Status launch_refusal(const Group& group, StreamHandle stream) {
  Local* const local = group.map.local.in(group.own);
  launch_kernel(count_refusal, {1, 1, 0, stream}, &local->progress.num_refused);
  return launch_status();
}

Status load_refusal(uint32_t) { return load_kernel(count_refusal); }

}  // namespace uccl_ep::gpu
