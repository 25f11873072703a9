// Ranks with proxies over the transport of this run.
#pragma once

#include "proxy_world.h"
#include "suite.h"

namespace conformance {

inline uccl_ep::WorldOptions world_options() {
  uccl_ep::WorldOptions options;
  options.kind = suite().kind;
  options.nic = suite().nic;
  options.devices = suite().devices;
  options.progress_timeout_usec = suite().patient_usec(options.progress_timeout_usec);
  return options;
}

}  // namespace conformance
