// Samples the GPU's clock together with the host's.
#include "backend/gpu/trace.h"
#include "common/clock.h"
#include "device/launch.cuh"
#include "device/memory.h"
#include "sync/device.cuh"

namespace uccl_ep::gpu {
namespace {

constexpr int kSamples = 16;

__global__ void read_clock(uint64_t* to) { *to = now_nsec(); }

}  // namespace

ClockSample sample_clock(uint64_t* word, StreamHandle stream) {
  ClockSample best;
  for (int i = 0; i < kSamples; ++i) {
    const uint64_t before = uccl_ep::now_nsec();
    launch_kernel(read_clock, {1, 1, 0, stream}, word);
    must(launch_status(), "read_clock");
    synchronize(stream);
    const uint64_t error = (uccl_ep::now_nsec() - before) / 2;
    if (i == 0 || error < best.error_nsec) best = {before + error, *word, error};
  }
  return best;
}

Status load_clock(uint32_t) { return load_kernel(read_clock); }

}  // namespace uccl_ep::gpu
