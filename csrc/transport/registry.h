// The transports, by name. Each registers itself; every build has all of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace uccl_ep {

// The kind of link, by which "auto" chooses.
enum class LinkKind : uint32_t { kMemory, kEfa, kRdma, kTcp };

struct Probe {
  bool usable = false;
  std::string text;  // what it would use here, or why it cannot work here
  LinkKind link = LinkKind::kRdma;  // if usable
};

struct TransportKind {
  const char* name;
  // Throws UsageFailure(kConfig) for options that cannot work here, CommunicationFailure(kTransport) if something
  // fails.
  std::unique_ptr<Transport> (*make)(const TransportSetup& setup, const TransportOptions& options);
  // Bytes that the transport allocates, and what the driver of its NICs allocates for its queues, by the numbers of
  // ranks in TransportSetup::rails and TransportSetup::all.
  uint64_t (*memory_bytes)(const TransportOptions& options, size_t num_rails, size_t num_all);
  Probe (*probe)(const TransportOptions& options);
};

struct RegisterTransport {
  explicit RegisterTransport(const TransportKind& kind);
};

// Sorted by name.
const std::vector<TransportKind>& transports();
// Throws UsageFailure(kConfig) that names the known transports.
const TransportKind& transport_named(const std::string& name);

}  // namespace uccl_ep
