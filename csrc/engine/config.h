// The configuration of an engine.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "common/fields.h"
#include "layout/region.h"
#include "transport/transport.h"

namespace uccl_ep {

struct EngineConfig {
  int rank = 0;
  int num_ranks = 1;
  std::vector<int> domain_of;
  std::vector<int> host_of;  // ranks of a host share its NICs; empty: not known, a domain is on one
  uint32_t num_experts = 0;
  uint32_t hidden = 0;  // largest row
  uint32_t max_element_bytes = 4;  // of a tensor on this buffer: 2 or 4
  uint64_t budget_bytes = 0;
  uint32_t window_tokens = 0;  // GPU engine: use only the budget that they need; 0: all of it
  uint64_t chunk_bytes = 0;  // 0: chosen from the budget
  uint32_t window_chunks = 0;  // 0: chosen
  double arrival_timeout_s = 300;
  double progress_timeout_s = 20;
  double mask_timeout_s = 0;  // of low latency: after which a rank is masked; 0: it is an error
  uint32_t num_proxies = 1;
  // GPU engine of one domain: memory for low latency, for so many tokens of a rank with so many experts each.
  uint32_t low_latency_tokens = 0;
  uint32_t low_latency_topk = 0;
  uint32_t low_latency_sms = 0;  // of its kernels; 0: 64
  uint32_t low_latency_fold_pairs = 384;  // from how many pairs on a combine sums before it sends
  PacketRoom packets;  // GPU engine of several domains
  bool bulk_copies = true;  // GPU engine: use them if the GPU has them
  std::vector<int> source_order;  // empty: ascending
  uint64_t generation = 0;  // the same on all ranks, fresh per engine
  std::string transport = "loop";
  LoopOptions loop;
  NicOptions nic;

  // Of the largest row. FP8 rows are narrower than BF16 rows for every H.
  uint64_t widest_row_bytes() const { return uint64_t{hidden} * max_element_bytes; }
};

// Fields that Python fills in by name; uccl_ep_train/settings/sections.py declares them.
template <>
inline constexpr auto kFields<EngineConfig> = std::tuple{UCCL_EP_FIELD(EngineConfig, rank),
                                                         UCCL_EP_FIELD(EngineConfig, num_ranks),
                                                         UCCL_EP_FIELD(EngineConfig, domain_of),
                                                         UCCL_EP_FIELD(EngineConfig, host_of),
                                                         UCCL_EP_FIELD(EngineConfig, num_experts),
                                                         UCCL_EP_FIELD(EngineConfig, hidden),
                                                         UCCL_EP_FIELD(EngineConfig, max_element_bytes),
                                                         UCCL_EP_FIELD(EngineConfig, budget_bytes),
                                                         UCCL_EP_FIELD(EngineConfig, window_tokens),
                                                         UCCL_EP_FIELD(EngineConfig, chunk_bytes),
                                                         UCCL_EP_FIELD(EngineConfig, window_chunks),
                                                         UCCL_EP_FIELD(EngineConfig, arrival_timeout_s),
                                                         UCCL_EP_FIELD(EngineConfig, progress_timeout_s),
                                                         UCCL_EP_FIELD(EngineConfig, mask_timeout_s),
                                                         UCCL_EP_FIELD(EngineConfig, num_proxies),
                                                         UCCL_EP_FIELD(EngineConfig, low_latency_tokens),
                                                         UCCL_EP_FIELD(EngineConfig, low_latency_topk),
                                                         UCCL_EP_FIELD(EngineConfig, low_latency_sms),
                                                         UCCL_EP_FIELD(EngineConfig, low_latency_fold_pairs),
                                                         UCCL_EP_FIELD(EngineConfig, bulk_copies),
                                                         UCCL_EP_FIELD(EngineConfig, source_order),
                                                         UCCL_EP_FIELD(EngineConfig, generation),
                                                         UCCL_EP_FIELD(EngineConfig, transport),
                                                         UCCL_EP_FIELD(EngineConfig, loop),
                                                         UCCL_EP_FIELD(EngineConfig, nic)};

// Returns it. Throws UsageFailure(kConfig) if it cannot work on any backend.
const EngineConfig& checked(const EngineConfig& config);

}  // namespace uccl_ep
