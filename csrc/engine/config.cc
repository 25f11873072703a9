#include "engine/config.h"

#include <algorithm>
#include <cstdio>

#include "common/error.h"
#include "layout/wire.h"
#include "layout/words.h"
#include "transport/registry.h"

namespace uccl_ep {
namespace {

void require(bool holds, const std::string& text) {
  if (!holds) throw UsageFailure(UsageKind::kConfig, text);
}

constexpr double kMostTimeoutS = 1e6;

void check_deadline(double seconds, const char* name) {
  if (seconds > 0 && seconds <= kMostTimeoutS) return;
  char value[32];
  std::snprintf(value, sizeof(value), "%g", seconds);
  require(false, std::string(name) + " = " + value + ": allowed is more than 0, at most 10^6 seconds");
}

}  // namespace

const EngineConfig& checked(const EngineConfig& c) {
  require(c.num_ranks >= 1 && static_cast<uint32_t>(c.num_ranks) <= kMaxRanks,
          "num_ranks = " + std::to_string(c.num_ranks) + ": allowed 1 to " + std::to_string(kMaxRanks));
  require(c.rank >= 0 && c.rank < c.num_ranks,
          "rank = " + std::to_string(c.rank) + " of " + std::to_string(c.num_ranks));
  require(c.domain_of.size() == static_cast<size_t>(c.num_ranks),
          "domain_of has " + std::to_string(c.domain_of.size()) + " entries: allowed is a domain for each of the " +
              std::to_string(c.num_ranks) + " ranks");
  require(c.host_of.empty() || c.host_of.size() == static_cast<size_t>(c.num_ranks),
          "host_of must name a host for each of the ranks, or be empty");
  require(c.num_experts > 0 && c.num_experts % static_cast<uint32_t>(c.num_ranks) == 0,
          "num_experts = " + std::to_string(c.num_experts) + ": a positive multiple of the " +
              std::to_string(c.num_ranks) + " ranks is needed");
  require(c.hidden > 0 && c.hidden % kHiddenUnit == 0,
          "hidden = " + std::to_string(c.hidden) + ": a multiple of " + std::to_string(kHiddenUnit) + " is needed");
  require(c.max_element_bytes == 2 || c.max_element_bytes == 4,
          "max_element_bytes = " + std::to_string(c.max_element_bytes) + ": allowed is 2 or 4");
  check_deadline(c.arrival_timeout_s, "arrival_timeout_s");
  check_deadline(c.progress_timeout_s, "progress_timeout_s");
  std::vector<int> order = c.source_order;
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i)
    require(order.size() == static_cast<size_t>(c.num_ranks) && order[i] == static_cast<int>(i),
            "source_order must be a permutation of the ranks");
  require(c.num_proxies == 1, "num_proxies = " + std::to_string(c.num_proxies) + ": allowed is 1");
  transport_named(c.transport);
  return c;
}

}  // namespace uccl_ep
