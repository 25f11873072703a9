#include "transport/verbs/address.h"

#include "address.h"

namespace {

// As post_write() finds the key of the first and the last byte of a memory.
void use(const uccl_ep::verbs::Address& address) {
  uint64_t sum = 0;
  for (const uccl_ep::verbs::NicAddress& nic : address.nics) {
    for (const uccl_ep::verbs::MemoryAddress* memory : {&nic.host, &nic.device})
      if (memory->num_bytes != 0) sum += memory->key_of(0) + memory->key_of(memory->num_bytes - 1);
    sum += nic.host.key_of(0);  // of a write without bytes
    for (const uccl_ep::verbs::PairAddress& pair : nic.pairs)
      fuzz::must(nic.pair_of(static_cast<int>(pair.rail)) == &pair, "a rail finds its queue pair");
    fuzz::must(nic.datagram_pair != 0, "datagrams have somewhere to go");
    fuzz::must(static_cast<uint16_t>(nic.lid) == nic.lid, "a LID fits its field");
  }
  volatile uint64_t used = sum;
  (void)used;
}

}  // namespace

FUZZ_ADDRESS(uccl_ep::verbs, use)
