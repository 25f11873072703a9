// The domain of each rank, and its rail in other domains. Pure data, the same on all ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/error.h"

namespace uccl_ep {

struct Topology {
  int num_ranks = 0;
  std::vector<int> domain_of;  // [rank]
  std::vector<std::vector<int>> members;  // [domain] ranks ascending; domains are numbered by their lowest rank
  std::vector<int> local_of;  // [rank] index inside its domain

  // `domain_of`: any labels; they are renumbered by lowest rank.
  static Topology from_labels(const std::vector<int>& labels) {
    if (labels.empty()) throw UsageFailure(UsageKind::kConfig, "domain_of is empty: give one domain per rank");
    Topology topo;
    topo.num_ranks = static_cast<int>(labels.size());
    std::vector<int> seen;
    for (int rank = 0; rank < topo.num_ranks; ++rank) {
      auto it = std::find(seen.begin(), seen.end(), labels[rank]);
      const int domain = static_cast<int>(it - seen.begin());
      if (it == seen.end()) {
        seen.push_back(labels[rank]);
        topo.members.emplace_back();
      }
      topo.domain_of.push_back(domain);
      topo.local_of.push_back(static_cast<int>(topo.members[domain].size()));
      topo.members[domain].push_back(rank);
    }
    return topo;
  }

  int num_domains() const { return static_cast<int>(members.size()); }
  int size_of(int domain) const { return static_cast<int>(members[domain].size()); }
  // The rank of `domain` that lands rows of `src` and relays its sums.
  int rail(int src, int domain) const { return members[domain][local_of[src] % size_of(domain)]; }
};

}  // namespace uccl_ep
