#include "transport/trial.h"

#include <memory>

#include "common/mapping.h"
#include "transport/registry.h"

namespace uccl_ep {

void try_registration(const Trial& trial) {
  constexpr uint64_t kLargestWriteBytes = 1 << 20;
  Mapping memory = Mapping::create();
  memory.grow(trial.host_bytes);
  memory.reserve(0, trial.host_bytes);
  TransportSetup setup;
  setup.rank = trial.rank;
  setup.num_ranks = trial.rank + 1;
  setup.region = {memory.base(), memory.num_bytes(), memory.name()};
  setup.generation = 1;
  setup.largest_write_bytes = kLargestWriteBytes;
  setup.local_idx = trial.local_idx;
  setup.local_size = trial.local_size;
  setup.near_pci = trial.near_pci;
  const std::unique_ptr<Transport> transport = transport_named(trial.transport).make(setup, trial.options);
  if (trial.device.bytes != 0) transport->register_device(trial.device);
}

}  // namespace uccl_ep
