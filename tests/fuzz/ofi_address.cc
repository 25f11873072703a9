#include "transport/ofi/address.h"

#include "address.h"

namespace {

// As a write to the first and the last byte of a memory finds its piece.
void use(const uccl_ep::ofi::Address& address) {
  uint64_t sum = 0;
  for (const uccl_ep::ofi::NicAddress& nic : address.nics)
    for (const uccl_ep::ofi::RemoteMemory* memory : {&nic.region, &nic.device})
      if (memory->bytes != 0)
        for (uint64_t offset : {uint64_t{0}, memory->bytes - 1})
          sum += memory->pieces[offset / memory->stride_bytes].key;
  volatile uint64_t used = sum;
  (void)used;
}

}  // namespace

FUZZ_ADDRESS(uccl_ep::ofi, use)
