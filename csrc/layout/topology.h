// The domain of each rank, and its rail in other domains. Pure data, the same on all ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"

namespace uccl_ep {

struct Topology {
  int num_ranks = 0;
  std::vector<int> domain_of;  // [rank]
  std::vector<std::vector<int>> members;  // [domain] ranks ascending; domains are numbered by their lowest rank
  std::vector<int> local_of;  // [rank] index inside its domain
  std::map<int, int> domains_of_size;  // how many

  // `domain_of`: any labels; they are renumbered by lowest rank.
  static Topology from_labels(const std::vector<int>& labels) {
    if (labels.empty()) throw UsageFailure(UsageKind::kConfig, "domain_of is empty: give one domain per rank");
    Topology topo;
    topo.num_ranks = static_cast<int>(labels.size());
    std::map<int, int> seen;
    for (int rank = 0; rank < topo.num_ranks; ++rank) {
      const auto [it, is_new] = seen.try_emplace(labels[rank], static_cast<int>(seen.size()));
      const int domain = it->second;
      if (is_new) topo.members.emplace_back();
      topo.domain_of.push_back(domain);
      topo.local_of.push_back(static_cast<int>(topo.members[domain].size()));
      topo.members[domain].push_back(rank);
    }
    for (int domain = 0; domain < topo.num_domains(); ++domain) ++topo.domains_of_size[topo.size_of(domain)];
    return topo;
  }

  int num_domains() const { return static_cast<int>(members.size()); }
  int size_of(int domain) const { return static_cast<int>(members[domain].size()); }
  // Ranks of other domains whose rows `rank` lands and whose sums it relays.
  uint32_t num_relayed(int rank) const {
    const int own = size_of(domain_of[static_cast<size_t>(rank)]), local = local_of[static_cast<size_t>(rank)];
    uint32_t all = 0;
    for (const auto& [size, number] : domains_of_size) {
      const int domains = number - (size == own);
      all += static_cast<uint32_t>(domains * ((size - local + own - 1) / own));  // local, local + own, ... below size
    }
    return all;
  }
  // One rank of each class: ranks with equal sizes of their domains and equal numbers of relayed ranks need equal
  // memory.
  std::vector<int> classes() const {
    std::map<std::pair<int, uint32_t>, int> first;
    for (int rank = 0; rank < num_ranks; ++rank)
      first.try_emplace({size_of(domain_of[static_cast<size_t>(rank)]), num_relayed(rank)}, rank);
    std::vector<int> ranks;
    for (const auto& [key, rank] : first) ranks.push_back(rank);
    return ranks;
  }
  // The rank of `domain` that lands rows of `src` and relays its sums.
  int rail(int src, int domain) const { return members[domain][local_of[src] % size_of(domain)]; }
  // Whether `rank` lands rows of `src`, of another domain.
  bool lands(int rank, int src) const {
    return domain_of[src] != domain_of[rank] && rail(src, domain_of[rank]) == rank;
  }
  // The ranks whose rows `rank` lands, ascending.
  std::vector<int> landed(int rank) const {
    const int own = domain_of[static_cast<size_t>(rank)];
    std::vector<int> ranks;
    for (int domain = 0; domain < num_domains(); ++domain)
      for (int local = local_of[static_cast<size_t>(rank)]; domain != own && local < size_of(domain);
           local += size_of(own))
        ranks.push_back(members[static_cast<size_t>(domain)][static_cast<size_t>(local)]);
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }
  // Ranks of other domains that `rank` exchanges rows with, ascending: those that land its rows, and those whose rows
  // it lands.
  std::vector<int> rails(int rank) const {
    std::vector<int> ranks = landed(rank);
    for (int domain = 0; domain < num_domains(); ++domain)
      if (domain != domain_of[static_cast<size_t>(rank)]) ranks.push_back(rail(rank, domain));
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }
  // Ranks of other domains, ascending.
  std::vector<int> others(int rank) const {
    std::vector<int> ranks;
    for (int other = 0; other < num_ranks; ++other)
      if (domain_of[static_cast<size_t>(other)] != domain_of[static_cast<size_t>(rank)]) ranks.push_back(other);
    return ranks;
  }
};

// Ranks numbered by domain, then by member, so that those of a domain are neighbours. Kernels use these numbers.
struct RankNumbers {
  std::vector<uint16_t> number_of;  // [rank]
  std::vector<uint16_t> rank_of;  // [number]
  std::vector<uint16_t> domain_of;  // [number]
  std::vector<uint16_t> first_of;  // [domain] number of its first member; behind the last the number of ranks

  explicit RankNumbers(const Topology& topo) : number_of(static_cast<size_t>(topo.num_ranks)) {
    for (int domain = 0; domain < topo.num_domains(); ++domain) {
      first_of.push_back(static_cast<uint16_t>(rank_of.size()));
      for (int rank : topo.members[static_cast<size_t>(domain)]) {
        number_of[static_cast<size_t>(rank)] = static_cast<uint16_t>(rank_of.size());
        rank_of.push_back(static_cast<uint16_t>(rank));
        domain_of.push_back(static_cast<uint16_t>(domain));
      }
    }
    first_of.push_back(static_cast<uint16_t>(rank_of.size()));
  }
};

}  // namespace uccl_ep
