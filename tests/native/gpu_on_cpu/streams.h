// Streams of the stand-in for CUDA: a thread each, which does what is queued in its order.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lanes.h"

struct CpuStream;
// What is captured of a graph: its nodes of the host, and how many nodes they wait for.
struct CpuGraph {
  std::vector<std::function<void()>> host_nodes;
  size_t num_dependencies = 0;
  uint64_t capture = 0;
};

namespace gpu_on_cpu {

// What the stream is given from now on is part of `graph`, until that is null. Kernels run at once, all the same.
void capture(CpuStream* stream, CpuGraph* graph);
void queue(CpuStream* stream, std::function<void()> work);
// A Fault in a lane is printed and ends the program: nobody could go on.
void queue_grid(CpuStream* stream, const Grid& grid, std::function<void()> lane);

constexpr int kDevices = 256;
// Whether GPUs have fabric handles, as they do at first; memory that was imported by one.
void have_fabric(bool has);
uint64_t num_fabric_imports();
// A device has one from the first time that a thread made it its own.
bool has_context(int device);
// From now on copies that threads of this device hand over fail, and questions about a stream; -1: of none.
void break_copies_of(int device);
void break_streams_of(int device);
// Calls so far that made visible what NICs had written.
uint64_t num_flushes();

}  // namespace gpu_on_cpu
