// A thread that tells kernels that their host runs, because the GPU's clock goes on while the host is paused. The
// thread calls nothing that may wait, least of all the GPU's runtime.
#pragma once

#include <thread>

#include "backend/gpu/layout.h"
#include "engine/group/control_plane.h"
#include "sync/flag.h"

namespace uccl_ep {

class Pulse {
 public:
  // Writes `words`, in pinned memory, about `plane`, which has started. Both outlive this.
  Pulse(gpu::HostPulse& words, const ControlPlane& plane);
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

 private:
  void run();

  gpu::HostPulse& words_;
  const ControlPlane& plane_;
  Flag stopping_;
  Bell bell_;
  std::thread thread_;
};

}  // namespace uccl_ep
