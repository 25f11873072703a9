// What the kernels that this GPU runs were compiled for.
#pragma once

namespace uccl_ep::gpu {

// Whether kernels on the current device have bulk copies between global and shared memory. A compiled kernel is asked,
// because a GPU with bulk copies may run PTX that was made for one without.
bool has_bulk_copies();

}  // namespace uccl_ep::gpu
