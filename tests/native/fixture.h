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
#include "layout/topology.h"
#include "sync/control.h"
#include "transport/registry.h"

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

// What rank `rank` of `num_ranks` is made for, if each is the rail of all others.
inline TransportSetup setup_of(int rank, size_t num_ranks, const RegisteredRegion& region) {
  TransportSetup setup;
  setup.rank = rank;
  setup.num_ranks = static_cast<int>(num_ranks);
  setup.region = region;
  setup.generation = 1;
  setup.largest_write_bytes = region.bytes;
  for (int peer = 0; peer < setup.num_ranks; ++peer)
    if (peer != rank) setup.all.push_back(peer);
  setup.rails = setup.all;
  return setup;
}

// Makes what `options[rank]` asks for and connects the ranks: each with its rails and the other domains, or without a
// topology every one with every other.
inline std::vector<std::unique_ptr<Transport>> connect_all(const std::vector<std::unique_ptr<TestRegion>>& regions,
                                                           const std::vector<TransportOptions>& options,
                                                           const std::string& kind = "loop",
                                                           uint64_t progress_timeout_usec = 20'000'000,
                                                           const Topology* topo = nullptr) {
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<std::string> addresses;
  for (size_t rank = 0; rank < regions.size(); ++rank) {
    TransportSetup setup = setup_of(static_cast<int>(rank), regions.size(), regions[rank]->registered());
    setup.progress_timeout_usec = progress_timeout_usec;
    if (topo != nullptr) {
      setup.rails = topo->rails(setup.rank);
      setup.all = topo->others(setup.rank);
    }
    transports.push_back(transport_named(kind).make(setup, options[rank]));
    addresses.push_back(transports.back()->address());
  }
  for (auto& transport : transports) transport->connect(addresses);
  for (auto& transport : transports) transport->sealed();
  return transports;
}

}  // namespace uccl_ep
