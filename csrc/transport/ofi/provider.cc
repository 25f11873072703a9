#include "transport/ofi/provider.h"

#include <stdlib.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "common/error.h"

namespace uccl_ep::ofi {
namespace {

// In order of preference. efa reports the sender and length of each write. cxi takes no data with a write. verbs takes
// 32 bits, which have no room for a tag.
constexpr Family kFamilies[] = {
    {"efa", Naming::kSource}, {"cxi", Naming::kMessage}, {"verbs", Naming::kMessage}, {"tcp", Naming::kTag}};

bool is_tcp(const Family& family) { return std::string(family.name) == "tcp"; }

// Unknown providers use messages, which have the lowest requirements.
Family family_of(const std::string& provider) {
  for (const Family& family : kFamilies)
    if (provider == family.name || provider.starts_with(std::string(family.name) + ';')) return family;
  return {"", Naming::kMessage};
}

Info make_hints(const std::string& provider, Naming naming, bool device_memory) {
  Info hints(fi_allocinfo());
  if (hints == nullptr) fail(-1, -1, "libfabric has no memory");
  hints->caps = kFiMsg | kFiRma | kFiWrite | kFiRemoteWrite | kFiSend | kFiRecv;
  if (naming == Naming::kSource) hints->caps |= kFiSource;
  if (device_memory) hints->caps |= kFiHmem;
  hints->mode = kFiContext | kFiContext2;
  hints->ep_attr->type = kFiEpRdm;
  // A write that is done has reached the peer's memory.
  hints->tx_attr->op_flags = kFiDeliveryComplete;
  hints->domain_attr->threading = kFiThreadDomain;
  hints->domain_attr->control_progress = kFiProgressManual;
  hints->domain_attr->data_progress = kFiProgressManual;
  hints->domain_attr->resource_mgmt = kFiRmEnabled;
  hints->domain_attr->mr_mode =
      kFiMrLocal | kFiMrVirtAddr | kFiMrAllocated | kFiMrProvKey | kFiMrEndpoint | (device_memory ? kFiMrHmem : 0);
  if (!provider.empty()) hints->fabric_attr->prov_name = strdup(provider.c_str());  // fi_freeinfo() frees it
  return hints;
}

// Whether a peer on another host can use the socket address: a link-local one names an interface of our host.
bool reachable(const fi_info& info) {
  if (info.addr_format != kFiSockaddrIn6 || info.src_addr == nullptr || info.src_addrlen < 28) return true;
  const uint8_t* address = static_cast<const uint8_t*>(info.src_addr) + 8;
  return !(address[0] == 0xfe && (address[1] & 0xc0) == 0x80);
}

// Takes the first offer of each domain: libfabric lists a domain once per address and way of using it, best first.
std::vector<Offer> offers_of(const std::string& provider, bool device_memory) {
  const Family family = family_of(provider);
  const Info hints = make_hints(provider, family.naming, device_memory);
  fi_info* list = nullptr;
  if (fi_getinfo(api_version(), nullptr, nullptr, 0, hints.get(), &list) != 0) return {};
  const Info all(list);
  std::vector<Offer> offers;
  for (const fi_info* info = list; info != nullptr; info = info->next) {
    const bool known = std::any_of(offers.begin(), offers.end(),
                                   [&](const Offer& o) { return o.domain() == info->domain_attr->name; });
    const bool other = !offers.empty() && offers[0].provider() != info->fabric_attr->prov_name;
    if (known || other || !reachable(*info)) continue;
    offers.push_back({Info(fi_dupinfo(info)), family});
  }
  return offers;
}

std::vector<Offer> offers_of(const std::string& provider, const Wanted& wanted) {
  std::vector<Offer> offers;
  if (wanted.device_memory) offers = offers_of(provider, true);
  return offers.empty() ? offers_of(provider, false) : std::move(offers);
}

[[noreturn]] void refuse(const std::string& text) {
  throw UsageFailure(UsageKind::kConfig, "transport = ofi: " + text);
}

std::string domains_of(const std::vector<Offer>& offers) {
  std::string names;
  for (const Offer& offer : offers) names += (names.empty() ? "" : ", ") + offer.domain();
  return names;
}

// Keeps the offers that the options name, in the order of the options.
std::vector<Offer> take_named(std::vector<Offer> offers, const std::vector<std::string>& names) {
  std::vector<Offer> taken;
  for (const std::string& name : names) {
    const auto found = std::find_if(offers.begin(), offers.end(),
                                    [&](const Offer& o) { return o.info != nullptr && o.domain() == name; });
    if (found == offers.end()) {
      std::erase_if(offers, [](const Offer& o) { return o.info == nullptr; });
      refuse("no domain " + name + " (others: " + domains_of(offers) + ")");
    }
    taken.push_back(std::move(*found));
  }
  return taken;
}

std::string sysfs_path(const std::string& pci) {
  char* path = realpath(("/sys/bus/pci/devices/" + pci).c_str(), nullptr);
  const std::string text = path != nullptr ? path : "";
  free(path);
  return text;
}

// The number of bridges, from the root, that lead to both.
size_t shared_bridges(const std::string& a, const std::string& b) {
  const size_t length = static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  return static_cast<size_t>(std::count(a.begin(), a.begin() + static_cast<ptrdiff_t>(length), '/'));
}

// All offers that are as near to the GPU as the nearest. Without a GPU the host's ranks take turns.
std::vector<Offer> take_nearest(std::vector<Offer> offers, const Wanted& wanted) {
  std::vector<Offer> taken;
  if (is_tcp(offers[0].family)) {
    const auto real = std::find_if(offers.begin(), offers.end(), [](const Offer& o) { return o.domain() != "lo"; });
    taken.push_back(std::move(real == offers.end() ? offers[0] : *real));
  } else if (wanted.near_pci.empty()) {
    taken.push_back(std::move(offers[wanted.local_idx % offers.size()]));
  } else {
    const std::string gpu = sysfs_path(wanted.near_pci);
    auto nearness = [&](const Offer& offer) { return shared_bridges(gpu, sysfs_path(offer.pci())); };
    size_t best = 0;
    for (const Offer& offer : offers) best = std::max(best, nearness(offer));
    for (Offer& offer : offers)
      if (nearness(offer) == best) taken.push_back(std::move(offer));
  }
  return taken;
}

}  // namespace

std::string Offer::pci() const {
  if (info->nic == nullptr || info->nic->bus_attr == nullptr || info->nic->bus_attr->bus_type != kFiBusPci) return "";
  const fi_pci_attr& pci = info->nic->bus_attr->attr.pci;
  char text[32];
  std::snprintf(text, sizeof(text), "%04x:%02x:%02x.%x", pci.domain_id, pci.bus_id, pci.device_id, pci.function_id);
  return text;
}

std::vector<Offer> choose_offers(const Wanted& wanted) {
  if (!library_problem().empty()) refuse(library_problem());
  const NicOptions& options = *wanted.options;
  std::vector<Offer> offers;
  std::string asked = options.provider;
  if (!asked.empty()) {
    offers = offers_of(asked, wanted);
  } else {
    for (const Family& family : kFamilies) {
      asked += (asked.empty() ? "" : ", ") + std::string(family.name);
      if (offers.empty()) offers = offers_of(family.name, wanted);
    }
  }
  if (offers.empty())
    refuse(library_text() +
           " finds no provider for reliable datagrams and writes with delivery completion (asked: " + asked + ")");
  std::vector<std::string> names = options.devices;
  if (names.empty() && !options.interface.empty()) names.push_back(options.interface);
  return names.empty() ? take_nearest(std::move(offers), wanted) : take_named(std::move(offers), names);
}

std::string offers_text(const std::vector<Offer>& offers) {
  return offers[0].provider() + ", domain " + domains_of(offers) + ", " + library_text();
}

}  // namespace uccl_ep::ofi
