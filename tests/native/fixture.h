// Regions and transports of several ranks in one process.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "common/mapping.h"
#include "sync/control.h"
#include "transport/transport.h"

namespace uccl_ep {

// A rank's region with its control block.
struct TestRegion {
  explicit TestRegion(uint64_t num_bytes) : mapping(Mapping::create()) {
    mapping.grow(num_bytes);
    control = new (mapping.base()) ControlBlock;
    control->pid = getpid();
  }
  RegisteredRegion registered() const { return {mapping.base(), mapping.num_bytes(), mapping.name()}; }
  uint8_t* base() const { return mapping.base(); }

  Mapping mapping;
  ControlBlock* control;
};

inline bool name_exists(const std::string& name) {
  const int fd = shm_open(name.c_str(), O_RDWR, 0);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

// Makes what `options[rank]` asks for and connects every rank to every other.
inline std::vector<std::unique_ptr<Transport>> connect_all(const std::vector<std::unique_ptr<TestRegion>>& regions,
                                                           const std::vector<LoopOptions>& options) {
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<std::string> addresses;
  for (size_t rank = 0; rank < regions.size(); ++rank) {
    transports.push_back(make_loop_transport(static_cast<int>(rank), regions[rank]->registered(), options[rank]));
    addresses.push_back(transports.back()->address());
  }
  for (size_t rank = 0; rank < regions.size(); ++rank) {
    std::vector<int> peers;
    for (size_t peer = 0; peer < regions.size(); ++peer)
      if (peer != rank) peers.push_back(static_cast<int>(peer));
    transports[rank]->connect(addresses, peers);
  }
  for (auto& transport : transports) transport->sealed();
  return transports;
}

}  // namespace uccl_ep
