// Limits of the host and of drivers, and failures because one is reached. The bindings add its name and value.
#pragma once

#include <cerrno>
#include <cstdint>
#include <string>

#include "common/error.h"

namespace uccl_ep {

enum class HostLimit : uint32_t { kThreads, kDescriptors, kSharedMemory, kAddressSpace, kFileSize };

inline const char* limit_name(HostLimit limit) {
  static const char* const names[] = {"threads", "descriptors", "shared_memory", "address_space", "file_size"};
  return names[static_cast<uint32_t>(limit)];
}

class LimitFailure : public UsageFailure {
 public:
  LimitFailure(HostLimit limit, const std::string& text, uint64_t wanted_bytes = 0)
      : UsageFailure(UsageKind::kConfig, text), limit_(limit), wanted_bytes_(wanted_bytes) {}
  HostLimit limit() const { return limit_; }
  uint64_t wanted_bytes() const { return wanted_bytes_; }

 private:
  HostLimit limit_;
  uint64_t wanted_bytes_;
};

constexpr uint32_t kFabricHandleBytes = 64;  // of CUDA's driver

inline bool lacks_descriptors(int error) { return error == EMFILE || error == ENFILE; }

}  // namespace uccl_ep
