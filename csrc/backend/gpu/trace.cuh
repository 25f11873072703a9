// Events of kernels. While tracing is off, each costs one test of a kernel argument.
#pragma once

#include "backend/gpu/group.h"
#include "backend/gpu/trace.h"
#include "sync/device.cuh"
#include "sync/trace.h"

namespace uccl_ep::gpu {

// By one thread, while g.trace is not null.
__device__ inline void note(const Group& g, const TraceRecord& record) {
  const uint32_t i = take_number(&g.trace->next);
  if (i < g.trace->capacity) reinterpret_cast<TraceRecord*>(g.trace + 1)[i] = record;
}

__device__ inline void trace_now(const Group& g, TraceKind kind, uint32_t what, uint64_t number,
                                 uint64_t num_bytes = 0) {
  if (g.trace == nullptr) return;
  const uint64_t now = now_nsec();
  note(g, {now, now, number, num_bytes, static_cast<uint32_t>(kind), what});
}
__device__ inline void trace_kernel(const Group& g, TraceKind kind, OpKind operation, uint64_t epoch) {
  trace_now(g, kind, static_cast<uint32_t>(operation), epoch);
}

}  // namespace uccl_ep::gpu
