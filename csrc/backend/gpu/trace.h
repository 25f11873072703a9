// What kernels note while a trace is on, as it lies in device memory, and the clock that they use.
#pragma once

#include <cstdint>

#include "device/runtime.h"

namespace uccl_ep::gpu {

struct TraceRecord {
  uint64_t begin_nsec, end_nsec;  // the GPU's clock; equal unless it is an interval
  uint64_t number, num_bytes;     // as in TraceEvent: epoch, chunk, chunks
  uint32_t kind;                  // TraceKind; 0: not written
  uint32_t what;  // OpKind of a kernel, Step of a step, channel of a push, of a word that is followed
};
// Followed by `capacity` records. Writers: kernels of the rank; reader: its host, when they are through. The host
// zeroes the log and its records before it switches the trace on.
struct TraceLog {
  uint32_t next;  // records that were wanted
  uint32_t capacity;
};

// Both clocks at one moment, as far as the host can tell: within `error_nsec`.
struct ClockSample {
  uint64_t host_nsec = 0, gpu_nsec = 0, error_nsec = 0;
};
// The best of a few. `word`: of pinned memory, nobody else's. Throws std::runtime_error.
ClockSample sample_clock(uint64_t* word, StreamHandle stream);
// Before the first sample.
Status load_clock(uint32_t shared_bytes);

}  // namespace uccl_ep::gpu
