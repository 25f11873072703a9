// What a rank tells the others about its engine, as bytes that the bootstrap carries. The others may be of another
// build, or broken: a decoder takes only what its encoder can have written.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "common/error.h"
#include "common/limits.h"

namespace uccl_ep {

struct Handle {
  std::string region_name;
  uint64_t region_bytes = 0;
  std::string address;  // of the transport
};

// Of an engine with memory on a GPU.
struct DeviceHandle {
  std::string socket_name;  // where descriptors are passed
  uint64_t region_bytes = 0;
  uint64_t layout = 0;  // a hash of what lies where in the region
  std::string fabric;  // its fabric handle, for members of its domain on other hosts; empty: all are on its host
  std::string plane;  // Handle of its control plane
};

// What a rank offers to those that may be in its domain: a segment of shared memory with a nonce.
struct DomainOffer {
  std::string kernel;
  std::string segment;
  std::string nonce;
};
constexpr size_t kNonceBytes = 32;

// A name goes into a socket's or a segment's address.
constexpr size_t kMostNameBytes = 100;

namespace detail {

// field: its size, 8 bytes, then its bytes
inline void put(std::string& bytes, const std::string& field) {
  const uint64_t size = field.size();
  bytes.append(reinterpret_cast<const char*>(&size), sizeof(size));
  bytes += field;
}
inline void put(std::string& bytes, uint64_t number) {
  put(bytes, std::string(reinterpret_cast<const char*>(&number), sizeof(number)));
}

class Fields {
 public:
  explicit Fields(const std::string& bytes) : bytes_(bytes) {}
  std::string text() {
    uint64_t size = 0;
    if (bytes_.size() - at_ < sizeof(size)) cut_short();
    std::memcpy(&size, bytes_.data() + at_, sizeof(size));
    at_ += sizeof(size);
    if (bytes_.size() - at_ < size) cut_short();
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }
  uint64_t number() {
    const std::string field = text();
    uint64_t number = 0;
    if (field.size() != sizeof(number)) cut_short();
    std::memcpy(&number, field.data(), sizeof(number));
    return number;
  }
  std::string name() {
    const std::string field = text();
    if (field.empty() || field.size() > kMostNameBytes || field.find('\0') != std::string::npos)
      throw UsageFailure(UsageKind::kConfig, "a handle has a name of " + std::to_string(field.size()) +
                                                 " bytes: allowed are 1 to " + std::to_string(kMostNameBytes));
    return field;
  }
  void end() const {
    if (at_ != bytes_.size())
      throw UsageFailure(UsageKind::kConfig,
                         "a handle has " + std::to_string(bytes_.size() - at_) + " bytes more than it needs");
  }

 private:
  [[noreturn]] void cut_short() const {
    throw UsageFailure(UsageKind::kConfig, "a handle of " + std::to_string(bytes_.size()) + " bytes is cut short");
  }
  const std::string& bytes_;
  size_t at_ = 0;
};

}  // namespace detail

inline std::string encode_handle(const Handle& h) {
  std::string bytes;
  detail::put(bytes, h.region_name);
  detail::put(bytes, h.region_bytes);
  detail::put(bytes, h.address);
  return bytes;
}
// Throws UsageFailure(kConfig).
inline Handle decode_handle(const std::string& bytes) {
  detail::Fields fields(bytes);
  Handle h;
  h.region_name = fields.name();
  h.region_bytes = fields.number();
  h.address = fields.text();
  fields.end();
  return h;
}

inline std::string encode_domain_offer(const DomainOffer& offer) {
  std::string bytes;
  detail::put(bytes, offer.kernel);
  detail::put(bytes, offer.segment);
  detail::put(bytes, offer.nonce);
  return bytes;
}
// Throws UsageFailure(kConfig).
inline DomainOffer decode_domain_offer(const std::string& bytes) {
  detail::Fields fields(bytes);
  DomainOffer offer;
  offer.kernel = fields.name();
  offer.segment = fields.name();
  offer.nonce = fields.text();
  fields.end();
  if (offer.segment.rfind("/uccl_ep.", 0) != 0 || offer.segment.find('/', 1) != std::string::npos ||
      offer.nonce.size() != kNonceBytes)
    throw UsageFailure(UsageKind::kConfig, "an offer of memory names no segment of ours, or has no nonce");
  return offer;
}

inline std::string encode_device_handle(const DeviceHandle& h) {
  std::string bytes;
  detail::put(bytes, h.socket_name);
  detail::put(bytes, h.region_bytes);
  detail::put(bytes, h.layout);
  detail::put(bytes, h.fabric);
  detail::put(bytes, h.plane);
  return bytes;
}
// Throws UsageFailure(kConfig).
inline DeviceHandle decode_device_handle(const std::string& bytes) {
  detail::Fields fields(bytes);
  DeviceHandle h;
  h.socket_name = fields.name();
  h.region_bytes = fields.number();
  h.layout = fields.number();
  h.fabric = fields.text();
  if (!h.fabric.empty() && h.fabric.size() != kFabricHandleBytes)
    throw UsageFailure(UsageKind::kConfig,
                       "a handle has a fabric handle of " + std::to_string(h.fabric.size()) + " bytes");
  h.plane = fields.text();
  fields.end();
  return h;
}

}  // namespace uccl_ep
