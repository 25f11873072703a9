// Opens a transport and registers memory as an engine would, then frees all of it, to find faults before a job starts.
// It connects to no rank.
#pragma once

#include <cstdint>
#include <string>

#include "transport/transport.h"

namespace uccl_ep {

// The memory that a rank of a job would register.
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
