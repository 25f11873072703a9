// Opens a transport and registers memory with it as an engine would, then gives all of it back: what a job would
// stumble over is found before there is one. Nothing is connected.
#pragma once

#include <cstdint>
#include <string>

#include "transport/transport.h"

namespace uccl_ep {

// What a rank of a job would register.
struct Trial {
  std::string transport;
  TransportOptions options;
  uint64_t host_bytes = 0;
  RegisteredRegion device;  // bytes 0: none
  // As in TransportSetup.
  int rank = 0;
  uint32_t local_idx = 0, local_size = 1;
  std::string near_pci;
};

// Throws what the transport throws: UsageFailure(kConfig), CommunicationFailure(kTransport).
void try_registration(const Trial& trial);

}  // namespace uccl_ep
