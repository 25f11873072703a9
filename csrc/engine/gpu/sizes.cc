#include "engine/gpu/sizes.h"

#include <algorithm>

#include "backend/gpu/low_latency.h"
#include "common/units.h"
#include "engine/group/control_plane.h"

namespace uccl_ep {
namespace {

gpu::RegionNeeds region_needs(const EngineConfig& config) {
  const gpu::LowLatencyRoom room{config.low_latency_tokens, config.low_latency_topk, uint64_t{2} * config.hidden,
                                 uint64_t{config.max_element_bytes} * config.hidden, config.mask_timeout_s > 0};
  return {config.num_experts, gpu::staged_bytes(config.widest_row_bytes()), config.window_tokens, room, config.packets};
}

int domain_of(const EngineConfig& config, const Topology& topo) {
  return topo.domain_of[static_cast<size_t>(config.rank)];
}

}  // namespace

// What neither memory nor a GPU can make right.
void check_group(const EngineConfig& config) {
  const auto require = [](bool good, const std::string& text) {
    if (!good) throw UsageFailure(UsageKind::kConfig, text);
  };
  const auto at_most = [&](uint64_t number, uint64_t most, const std::string& what) {
    require(number <= most,
            std::to_string(number) + " " + what + ": the CUDA backend has at most " + std::to_string(most));
  };
  at_most(static_cast<uint64_t>(config.num_ranks), gpu::kMaxGpuRanks, "ranks");
  const Topology topo = Topology::from_labels(config.domain_of);
  for (int domain = 0; domain < topo.num_domains(); ++domain)
    at_most(static_cast<uint64_t>(topo.size_of(domain)), gpu::kMaxMembers, "ranks in a domain");
  require(config.low_latency_tokens <= gpu::kMaxSlotTokens && config.low_latency_topk <= gpu::kPairsPerToken,
          "low_latency_tokens = " + std::to_string(config.low_latency_tokens) +
              ", low_latency_topk = " + std::to_string(config.low_latency_topk) + ": allowed are at most " +
              std::to_string(gpu::kMaxSlotTokens) + " and " + std::to_string(gpu::kPairsPerToken));
  if (config.low_latency_tokens > 0) {
    if (config.mask_timeout_s > 0)
      at_most(static_cast<uint64_t>(config.num_ranks), kMaxMaskedRanks, "ranks with mask_timeout_s");
  }
  gpu::DeviceMap map;
  map.num_ranks = static_cast<uint32_t>(config.num_ranks);
  map.num_domains = static_cast<uint32_t>(topo.num_domains());
  map.num_experts = config.num_experts;
  map.low_latency.tokens = config.low_latency_tokens;
  for (int rank : topo.classes())
    map.num_streams = std::max(map.num_streams, static_cast<uint32_t>(1 + topo.num_relayed(rank)));
  check_shared_bytes(config, map, gpu::kMostSharedBytes - gpu::kStaticSharedBytes);
  require(topo.num_domains() == 1 || config.low_latency_tokens == 0 || config.low_latency_sms != 1,
          "low_latency_sms = 1 with several domains: at least 2, one sees to the network");
}

uint64_t gpu_pinned_bytes(const EngineConfig& config) {
  return 2 * kPinnedBytes + round_up(8 * uint64_t{config.num_experts}, kPageBytes);
}

uint64_t gpu_host_bytes(const EngineConfig& config, const gpu::DeviceRegionLayout& layout) {
  uint64_t bytes = gpu_pinned_bytes(config);
  for (const auto& [name, size] : memory_entries(config, layout.rings)) bytes += size;
  return bytes;
}

namespace {

// As many experts, or ranks in as large domains, as a block has shared memory for. The largest block of a GPU so far
// has enough for any group with an expert each.
std::string fitting(const gpu::DeviceMap& map, uint32_t there) {
  const auto fits = [&](uint32_t ranks, uint32_t of_rank) {
    const auto share = [&](uint32_t number) { return (ranks * number + map.num_ranks - 1) / map.num_ranks; };
    gpu::DeviceMap other = map;
    other.num_ranks = ranks;
    other.num_domains = share(map.num_domains);
    other.num_streams = share(map.num_streams);
    other.num_experts = ranks * of_rank;
    return gpu::least_shared_bytes(other) <= there;
  };
  uint32_t ranks = map.num_ranks, of_rank = map.num_experts / map.num_ranks;
  while (of_rank > 1 && !fits(ranks, of_rank)) --of_rank;
  if (fits(ranks, of_rank)) return "num_experts = " + std::to_string(ranks * of_rank);
  while (ranks > 1 && !fits(ranks, of_rank)) --ranks;
  return std::to_string(ranks) + " ranks with an expert each";
}

void check_slot_bytes(const EngineConfig& config, gpu::DeviceMap map, uint32_t there) {
  const auto needed = [&] { return std::max(gpu::slot_dispatch_bytes(map), gpu::slot_combine_bytes(map)); };
  const uint32_t bytes = needed();
  if (map.low_latency.tokens == 0 || bytes <= there) return;
  uint32_t& tokens = map.low_latency.tokens;
  while (tokens > 0 && needed() > there) tokens = (tokens - 1) / gpu::kTileTokens * gpu::kTileTokens;
  throw UsageFailure(UsageKind::kConfig, "low_latency_tokens = " + std::to_string(config.low_latency_tokens) + " of " +
                                             std::to_string(config.num_ranks) + " ranks with num_experts = " +
                                             std::to_string(config.num_experts) + " need " + std::to_string(bytes) +
                                             " bytes of shared memory, and the GPU has " + std::to_string(there) +
                                             "; allowed are at most " + std::to_string(tokens) + " tokens");
}

}  // namespace

void check_shared_bytes(const EngineConfig& config, const gpu::DeviceMap& map, uint32_t there) {
  check_slot_bytes(config, map, there);
  if (const uint32_t needed = gpu::least_shared_bytes(map); needed > there)
    throw UsageFailure(UsageKind::kConfig, std::to_string(config.num_ranks) + " ranks with num_experts = " +
                                               std::to_string(config.num_experts) + ": a block needs " +
                                               std::to_string(needed) + " bytes of shared memory, and the GPU has " +
                                               std::to_string(there) + "; allowed are at most " + fitting(map, there));
}

namespace {

// Of the rank that needs most: all ranks have to come to the same layout.
uint64_t most_host_bytes(EngineConfig config, const Topology& topo, const gpu::DeviceRegionLayout& layout) {
  uint64_t bytes = 0;
  for (int rank : topo.classes()) {
    config.rank = rank;
    bytes = std::max(bytes, gpu_host_bytes(config, layout));
  }
  return bytes;
}

}  // namespace

gpu::DeviceRegionLayout gpu_layout_of(const EngineConfig& config) {
  check_group(config);
  const uint64_t least = gpu_least_budget_bytes(config);
  if (config.budget_bytes < least)
    throw UsageFailure(UsageKind::kBudget, "budget_bytes = " + std::to_string(config.budget_bytes) +
                                               ": this buffer needs at least " + std::to_string(least));
  const Topology topo = Topology::from_labels(config.domain_of);
  const auto within = [&](uint64_t bytes) {
    return gpu::make_layout(topo, domain_of(config, topo), region_needs(config), bytes);
  };
  // Host memory shrinks with device memory.
  gpu::DeviceRegionLayout layout =
      within(config.budget_bytes - most_host_bytes(config, topo, within(config.budget_bytes)));
  if (topo.num_domains() > 1) check_channels(topo, layout.rings);
  return layout;
}

MemoryEntries gpu_memory_entries(const EngineConfig& config) {
  const gpu::DeviceRegionLayout layout = gpu_layout_of(config);
  auto entries = layout.entries;
  entries.emplace_back("host.pinned", gpu_pinned_bytes(config));
  for (const auto& [name, bytes] : memory_entries(config, layout.rings)) entries.emplace_back("host." + name, bytes);
  return entries;
}

GpuLimits gpu_limits(const EngineConfig& config) {
  const gpu::DeviceRegionLayout layout = gpu_layout_of(config);
  return {layout.batch_streams, layout.stream_batches, layout.max_tokens, layout.max_pairs,
          gpu::window_tokens(layout, layout.row_bytes)};
}

uint64_t gpu_least_budget_bytes(const EngineConfig& config) {
  check_group(config);
  const Topology topo = Topology::from_labels(config.domain_of);
  const uint64_t least = gpu::least_budget_bytes(topo, region_needs(config));
  if (least > gpu::kMostRegionBytes)
    throw UsageFailure(UsageKind::kConfig, "this buffer needs at least " + std::to_string(least) +
                                               " bytes of GPU memory: the CUDA backend has at most " +
                                               std::to_string(gpu::kMostRegionBytes));
  const auto layout = gpu::make_layout(topo, domain_of(config, topo), region_needs(config), least);
  return least + most_host_bytes(config, topo, layout);
}

}  // namespace uccl_ep
