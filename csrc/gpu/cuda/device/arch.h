// What the kernels that this GPU runs were compiled for.
#pragma once

namespace uccl_ep::gpu {

// Bulk copies between global and shared memory, of the current device. The kernels themselves are asked: a GPU that has
// them may run PTX that was made for one without.
bool has_bulk_copies();

}  // namespace uccl_ep::gpu
