#include "transport/loop/address.h"

#include "address.h"
#include "transport/loop/inbox.h"

namespace {

// As connect() sizes and places the queue of the last of 256 ranks.
void use(const uccl_ep::loop::Address& address) {
  const uint64_t end = uccl_ep::loop::inbox_bytes(address.inbox_slots, 256);
  const uint64_t one = uccl_ep::loop::inbox_queue_bytes(address.inbox_slots) + sizeof(uccl_ep::loop::MailQueue);
  const uint64_t queues = end - uccl_ep::loop::kInboxMarksBytes;
  fuzz::must(queues / 256 == one && one > uint64_t{address.inbox_slots} * 16, "an inbox's size does not overflow");
}

}  // namespace

FUZZ_ADDRESS(uccl_ep::loop, use)
