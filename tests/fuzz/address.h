// The claims of every transport's address, which is text from another process.
#pragma once

#include <string>

#include "common/error.h"
#include "target.h"

// What a transport does with an address that was taken goes into `USE`: it must not leave any bounds.
#define FUZZ_ADDRESS(NAMESPACE, USE)                                                   \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {            \
    const std::string text(reinterpret_cast<const char*>(data), size);                 \
    fuzz_accepted = false;                                                             \
    try {                                                                              \
      const auto address = NAMESPACE::decode_address(text);                            \
      fuzz::must(NAMESPACE::encode_address(address) == text, "one text, one address"); \
      USE(address);                                                                    \
      fuzz_accepted = true;                                                            \
    } catch (const uccl_ep::CommunicationFailure& failure) {                           \
      fuzz::must(fuzz::is_printable(failure.what(), 208), "an error is printable");    \
    }                                                                                  \
    return 0;                                                                          \
  }
