// The handles of engines and offers of memory: the first byte says which of the three.
#include "engine/group/handle.h"

#include "target.h"

namespace {

using namespace uccl_ep;

void check(const std::string& bytes, int kind) {
  if (kind == 2) {
    const DomainOffer offer = decode_domain_offer(bytes);
    fuzz::must(encode_domain_offer(offer) == bytes, "one text, one offer");
    fuzz::must(offer.nonce.size() == kNonceBytes, "a nonce is whole");
  } else if (kind == 1) {
    const DeviceHandle handle = decode_device_handle(bytes);
    fuzz::must(encode_device_handle(handle) == bytes, "one text, one handle");
    fuzz::must(!handle.socket_name.empty() && handle.socket_name.size() <= kMostNameBytes, "a name fits an address");
    fuzz::must(handle.fabric.empty() || handle.fabric.size() == kFabricHandleBytes, "a fabric handle is whole");
  } else {
    const Handle handle = decode_handle(bytes);
    fuzz::must(encode_handle(handle) == bytes, "one text, one handle");
    fuzz::must(std::strlen(handle.region_name.c_str()) == handle.region_name.size(), "a name is whole");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz_accepted = false;
  if (size == 0) return 0;
  try {
    check(std::string(reinterpret_cast<const char*>(data) + 1, size - 1), data[0] % 3);
    fuzz_accepted = true;
  } catch (const UsageFailure& failure) {
    fuzz::must(fuzz::is_printable(failure.what(), 4096), "an error is printable");
  }
  return 0;
}
