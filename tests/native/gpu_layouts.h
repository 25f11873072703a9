// Layouts of a GPU's memory, of many groups, rows and budgets.
#pragma once

#include <algorithm>
#include <vector>

#include "backend/gpu/windows.h"
#include "claims.h"
#include "common/units.h"

namespace uccl_ep {

// Labels of domains, by rank.
inline std::vector<int> several(const std::vector<int>& sizes) {
  std::vector<int> labels;
  for (size_t domain = 0; domain < sizes.size(); ++domain)
    labels.insert(labels.end(), static_cast<size_t>(sizes[domain]), static_cast<int>(domain));
  return labels;
}
inline std::vector<Topology> one_domain() {
  std::vector<Topology> all;
  for (int ranks : {1, 2, 4, 8, 64}) all.push_back(Topology::from_labels(several({ranks})));
  return all;
}
inline std::vector<Topology> several_domains() {
  std::vector<Topology> all;
  for (const std::vector<int>& labels : {several({2, 2}),
                                         several({1, 1, 1, 1}),
                                         several({3, 1}),
                                         {0, 1, 0, 1},
                                         several({2, 2, 2}),
                                         {2, 0, 1, 0, 2},
                                         several({8, 8, 8, 8, 8, 8, 8, 8}),
                                         several(std::vector<int>(64, 1)),
                                         several({63, 1})})
    all.push_back(Topology::from_labels(labels));
  return all;
}

// Of the widest row: 128 BF16, 7168 BF16, 8192 FP32, 25600 FP32 (five in a chunk).
constexpr uint64_t kRowBytes[] = {256, 14336, 32768, 102400};

// The layout of each domain of another size.
inline std::vector<gpu::DeviceRegionLayout> layouts_of(const Topology& topo, const gpu::RegionNeeds& needs,
                                                       uint64_t budget) {
  std::vector<gpu::DeviceRegionLayout> all;
  std::vector<int> seen;
  for (int domain = 0; domain < topo.num_domains(); ++domain) {
    if (std::find(seen.begin(), seen.end(), topo.size_of(domain)) != seen.end()) continue;
    seen.push_back(topo.size_of(domain));
    all.push_back(gpu::make_layout(topo, domain, needs, budget));
  }
  return all;
}

// Calls check(topology, row_bytes, layout) for small, odd and usual budgets.
template <typename Check>
void for_layouts(const std::vector<Topology>& topologies, Check check) {
  for (const Topology& topo : topologies)
    for (uint64_t row_bytes : kRowBytes) {
      const uint32_t experts = static_cast<uint32_t>(topo.num_ranks) * 32;
      const uint64_t least = gpu::least_budget_bytes(topo, {experts, row_bytes});
      for (uint64_t budget : {least, least + 12345, 2 * least, uint64_t{64} << 20, uint64_t{512} << 20}) {
        if (budget < least) continue;
        for (const gpu::DeviceRegionLayout& layout : layouts_of(topo, {experts, row_bytes}, budget)) {
          EXPECT(layout.total_bytes <= round_up(budget, gpu::kDevicePage));
          check(topo, row_bytes, layout);
        }
      }
    }
}

// The most pieces that a token block can have: a token reaches every member.
inline uint32_t most_members(const Topology& topo) {
  return static_cast<uint32_t>(topo.domains_of_size.rbegin()->first);
}
inline uint32_t most_pieces(const Topology& topo) { return gpu::kTokenBlock * most_members(topo); }

// Rows of every wire dtype that are no wider than `row_bytes`.
inline std::vector<uint64_t> wire_rows(uint64_t row_bytes) {
  std::vector<uint64_t> bytes;
  for (const RowFormat& format : kRowFormats)
    for (uint64_t hidden : {row_bytes / 4, row_bytes / 2})
      if (hidden % 128 == 0 && hidden > 0 && gpu::staged_row_bytes(format.id, hidden) <= row_bytes)
        bytes.push_back(gpu::staged_row_bytes(format.id, hidden));
  return bytes;
}

}  // namespace uccl_ep
