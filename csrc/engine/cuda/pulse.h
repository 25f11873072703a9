// A thread that tells kernels that their host runs: their clock runs on while it does not. It calls nothing that may
// wait, CUDA least of all.
#pragma once

#include <thread>

#include "backend/cuda/layout.h"
#include "engine/engine.h"
#include "sync/flag.h"

namespace uccl_ep {

class Pulse {
 public:
  // Writes `words`, in pinned memory, about `life`, which has started. Both outlive this.
  Pulse(cuda::HostPulse& words, const Engine& life);
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

 private:
  void run();

  cuda::HostPulse& words_;
  const Engine& life_;
  Flag stopping_;
  Bell bell_;
  std::thread thread_;
};

}  // namespace uccl_ep
