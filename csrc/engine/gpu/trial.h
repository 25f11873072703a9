// What a GPU has to be able to do before an engine is made on it.
#pragma once

#include <cstdint>
#include <string>

#include "transport/trial.h"

namespace uccl_ep {

// Allocates device memory, exports it, imports what was exported and reads there what was written here. Returns whether
// the driver gives a dmabuf of it. Throws std::runtime_error naming the call that failed or what was read.
bool try_device_memory(int device, uint64_t num_bytes);
// As try_registration, with `num_bytes` of device memory, too.
void try_device_registration(Trial trial, int device, uint64_t num_bytes);

}  // namespace uccl_ep
