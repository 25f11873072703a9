// The providers that libfabric offers on this host, and which of them a rank uses.
#pragma once

#include <string>
#include <vector>

#include "transport/ofi/library.h"
#include "transport/ofi/naming.h"
#include "transport/transport.h"

namespace uccl_ep::ofi {

// Known properties of a provider that it does not report.
struct Family {
  const char* name;
  Naming naming;
};

// A domain of a provider: a NIC, or a network interface of tcp.
struct Offer {
  Info info;
  Family family;
  std::string provider() const { return info->fabric_attr->prov_name; }
  std::string domain() const { return info->domain_attr->name; }
  bool has_device_memory() const { return (info->caps & kFiHmem) != 0; }
  std::string pci() const;  // "0000:1b:00.0"; empty: unknown
};

struct Wanted {
  const NicOptions* options = nullptr;
  bool device_memory = false;  // preferred; an offer without it is taken if there is no other
  std::string near_pci;
  uint32_t local_idx = 0;
};

// Returns at least one offer; all are of one provider. Throws UsageFailure(kConfig) that says what is missing.
std::vector<Offer> choose_offers(const Wanted& wanted);
// "tcp;ofi_rxm, domain eth0, libfabric 1.17".
std::string offers_text(const std::vector<Offer>& offers);

}  // namespace uccl_ep::ofi
