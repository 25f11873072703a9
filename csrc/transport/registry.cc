#include "transport/registry.h"

#include <algorithm>

namespace uccl_ep {
namespace {

std::vector<TransportKind>& all() {
  static std::vector<TransportKind> kinds;  // constructed by the first registration
  return kinds;
}

}  // namespace

RegisterTransport::RegisterTransport(const TransportKind& kind) {
  all().push_back(kind);
  std::sort(all().begin(), all().end(), [](auto& a, auto& b) { return std::string(a.name) < std::string(b.name); });
}

const std::vector<TransportKind>& transports() { return all(); }

const TransportKind& transport_named(const std::string& name) {
  std::string names;
  for (const TransportKind& kind : all()) {
    if (kind.name == name) return kind;
    names += (names.empty() ? "" : ", ") + std::string(kind.name);
  }
  throw UsageFailure(UsageKind::kConfig, "transport = " + name + ": this build has " + names);
}

}  // namespace uccl_ep
