// In place of device/launch.cuh: a launch queues a call per lane on the stream.
#pragma once

#include <cstdint>
#include <functional>
#include <tuple>

#include "device/runtime.h"
#include "lanes.h"
#include "streams.h"

namespace uccl_ep::gpu {

struct Launch {
  uint32_t blocks, threads, shared_bytes = 0;
  StreamHandle stream = nullptr;
};
template <typename... Parameters, typename... Arguments>
void launch_kernel(void (*kernel)(Parameters...), const Launch& how, const Arguments&... arguments) {
  gpu_on_cpu::queue_grid(how.stream, {how.blocks, how.threads, how.shared_bytes},
                         [kernel, given = std::tuple<Arguments...>(arguments...)] { std::apply(kernel, given); });
}
template <typename... Kernels>
Status load_all(uint32_t, Kernels...) {
  return cudaSuccess;
}
template <typename Kernel>
Status load_kernel(Kernel) {
  return cudaSuccess;
}
#define UCCL_EP_DYNAMIC_SHARED(name) uint8_t* const name = gpu_on_cpu::dynamic_memory()

}  // namespace uccl_ep::gpu
