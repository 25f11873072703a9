// In place of csrc/backend/cuda/launch.cuh: a launch queues a call per lane on the stream.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <tuple>

#include "lanes.h"
#include "streams.h"

namespace uccl_ep::cuda {

struct Launch {
  uint32_t blocks, threads, shared_bytes = 0;
  cudaStream_t stream = nullptr;
};
template <typename... Parameters, typename... Arguments>
void launch_kernel(void (*kernel)(Parameters...), const Launch& how, const Arguments&... arguments) {
  cuda_on_cpu::queue_grid(how.stream, {how.blocks, how.threads, how.shared_bytes},
                          [kernel, given = std::tuple<Arguments...>(arguments...)] { std::apply(kernel, given); });
}
#define UCCL_EP_DYNAMIC_SHARED(name) uint8_t* const name = cuda_on_cpu::dynamic_memory()

}  // namespace uccl_ep::cuda
