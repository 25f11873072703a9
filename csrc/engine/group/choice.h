// Which transport carries rows between domains: decided from what every rank says of its host. Every rank decides by
// itself from the same answers, so all come to the same. What cannot work is an error on all ranks that says what is
// missing where; nothing is replaced by something slower in silence.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "transport/registry.h"

namespace uccl_ep {

// Where a rank runs. Those with equal `memory` can map each other's; `host` is for people.
struct Place {
  std::string host, memory;
};
// "ranks 0-3, 8 on node1"; the hosts only where they are one or two. `places`: of all ranks.
std::string ranks_on(const std::vector<int>& ranks, const std::vector<Place>& places);

// What a rank's host offers, by the transport's name.
using Offers = std::map<std::string, Probe>;

struct TransportChoice {
  std::string name;
  std::string why;       // for people
  std::string provider;  // of ofi, where all ranks have to take the same; "": as configured
};
// wanted: "auto" or a transport, the same on all ranks. places, offers: by rank. Throws UsageFailure(kConfig) naming
// ranks and what they lack.
TransportChoice choose_transport(const std::string& wanted, const std::vector<Place>& places,
                                 const std::vector<Offers>& offers, int num_domains, bool on_gpu);

}  // namespace uccl_ep
