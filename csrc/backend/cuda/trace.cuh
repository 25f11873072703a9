// Events of kernels. Off, each costs a look at an argument of the kernel.
#pragma once

#include "backend/cuda/layout.h"
#include "backend/cuda/trace.h"
#include "sync/device.cuh"
#include "sync/trace.h"

namespace uccl_ep::cuda {

// By one thread, while d.trace is not null.
__device__ inline void note(const Domain& d, const TraceRecord& record) {
  const uint32_t i = take_number(&d.trace->next);
  if (i < d.trace->capacity) reinterpret_cast<TraceRecord*>(d.trace + 1)[i] = record;
}

__device__ inline void trace_now(const Domain& d, TraceKind kind, uint32_t what, uint64_t number,
                                 uint64_t num_bytes = 0) {
  if (d.trace == nullptr) return;
  const uint64_t now = now_nsec();
  note(d, {now, now, number, num_bytes, static_cast<uint32_t>(kind), what});
}
__device__ inline void trace_kernel(const Domain& d, TraceKind kind, OpKind operation, uint64_t epoch) {
  trace_now(d, kind, static_cast<uint32_t>(operation), epoch);
}

}  // namespace uccl_ep::cuda
