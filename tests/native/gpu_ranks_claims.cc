// Claims about groups of more ranks, domains or members than a warp has lanes or a word has bits: the CUDA engines of
// all ranks, on the stand-in for GPUs, against the host's.
#include <functional>
#include <string>
#include <vector>

#include "claims.h"
#include "gpu_on_cpu/streams.h"
#include "mirrored.h"
#include "slot_tries.h"

namespace uccl_ep {
namespace {

// Domains of these sizes.
CudaRun ranks_in(const std::vector<int>& sizes) {
  CudaRun run;
  run.domain_of.clear();
  for (size_t domain = 0; domain < sizes.size(); ++domain)
    run.domain_of.insert(run.domain_of.end(), static_cast<size_t>(sizes[domain]), static_cast<int>(domain));
  run.num_tokens = {5, 3, 0, 7};
  run.experts_per_rank = 1;
  run.hidden = 128;
  run.topk = 4;
  run.rounds = 1;
  run.spare_bytes = 1 << 20;
  run.arrival_timeout_s = 120;
  return run;
}

CLAIM("65 ranks in 8 domains of 8 and one of 1 have the host's bits") {
  each_seed(ranks_in({8, 8, 8, 8, 8, 8, 8, 8, 1}), same_as_host);
}
CLAIM("72 ranks of a domain have the host's bits, FP8") {
  CudaRun run = ranks_in({72});
  run.wire = kFp8;
  each_seed(run, same_as_host);
}
CLAIM("66 ranks in interleaved domains have the host's bits") {
  CudaRun run = ranks_in({});
  for (int rank = 0; rank < 66; ++rank) run.domain_of.push_back(rank % 11);
  run.compact = true;
  each_seed(run, same_as_host);
}
CLAIM("a map whose tokens reach more than 32 other domains has the host's bits") {
  CudaRun run = ranks_in(std::vector<int>(40, 1));
  run.is_map = true;
  run.map_one_in = 1;
  run.num_tokens = {30, 3, 0, 7};
  each_seed(run, same_as_host);
}

// Ranks that relay more streams than a batch has, in two windows of tokens with two batches each. Weights have a window
// of their own.
CudaRun batches_in(const std::vector<int>& sizes) {
  CudaRun run = ranks_in(sizes);
  run.num_tokens = {40, 3, 0, 64};
  run.hidden = 1024;
  run.dtype = run.wire = kFp32;
  run.spare_bytes = 0;
  run.least_windows = run.most_windows = 2 * 2 + 2 * (4 + 1);
  return run;
}
CLAIM("streams in batches have the host's bits, in windows of 11 domains of 2") {
  each_seed(batches_in(std::vector<int>(11, 2)), same_as_host);
}
CLAIM("streams in batches have the host's bits, beside a rank that is alone") {
  std::vector<int> sizes(10, 2);
  sizes.push_back(1);
  CudaRun run = batches_in(sizes);
  run.compact = true;
  each_seed(run, same_as_host);
}
CLAIM("what the network may do changes no bit of streams in batches") {
  CudaRun run = batches_in(std::vector<int>(11, 2));
  run.is_map = true;
  run.map_one_in = 2;
  run.loop = everything();
  each_seed(run, same_as_host);
}
CLAIM("a ring back that holds one token block carries several, in turn") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}, {0, 0, 1}}) {
    CudaRun run = batches_in({});
    run.domain_of = domain_of;
    run.experts_per_rank = 4;
    run.hidden = 8192;
    run.num_tokens = {170, 150, 0};
    run.window_tokens = 170;
    run.least_windows = run.most_windows = 2 * 6 + 2 * (6 + 1);
    EngineConfig config = config_of(run, 0);
    config.budget_bytes = gpu_least_budget_bytes(config);
    const gpu::DeviceRegionLayout layout = gpu_layout_of(config);
    EXPECT(layout.sum_slots * (layout.slot_bytes / (4 * run.hidden)) < 2 * gpu::kTokenBlock);
    each_seed(run, same_as_host);
  }
}

// Dispatches whose later windows are longer than the first one: each domain gets few of a token's rows.
CudaRun longer_windows(const std::vector<int>& sizes) {
  CudaRun run = ranks_in(sizes);
  run.hidden = 1024;
  run.num_tokens = {170, 100, 0, 64};
  run.topk = 1;
  run.spare_bytes = 4 << 20;
  run.rounds = 2;
  return run;
}
CLAIM("where a domain gets few rows, later windows of a dispatch are longer, with the host's bits") {
  CudaRun run = longer_windows(std::vector<int>(16, 1));
  run.most_windows = 30;
  each_seed(run, same_as_host);
  // Control: where all rows go everywhere, no window is longer.
  run.is_map = true;
  run.map_one_in = 1;
  run.most_windows = UINT64_MAX;
  run.least_windows = 20;
  run.rounds = 1;
  each_seed(run, same_as_host);
}
CLAIM("so they are with FP8 rows, on a network that repeats and delays") {
  CudaRun run = longer_windows(std::vector<int>(16, 1));
  run.wire = kFp8;
  run.loop = everything();
  run.most_windows = 26;
  each_seed(run, same_as_host);
}
CLAIM("so they are in domains of two, where counts stay on the GPU") {
  CudaRun run = longer_windows(std::vector<int>(16, 2));
  run.compact = true;
  run.capacity = 300;
  run.is_spacious = run.pad_to_capacity = true;
  run.max_tokens = 170;
  each_seed(run, same_as_host);
}

CLAIM("low latency has more ranks than a word has bits, and more domains than a warp has lanes") {
  for (const auto& [domains, members] : {std::pair{1, 66}, {33, 2}}) {
    SlotRun run = slots_of(0, members == 2 ? kFp8 : kBf16);
    for (int rank = 0; rank < domains * members; ++rank) run.domain_of.push_back(rank % domains);
    run.max_tokens = 8;
    run.num_tokens = {8, 5, 0};
    run.experts_per_rank = 1;
    run.topk = 4;
    run.num_sms = 2;
    run.num_rounds = 1;
    try_run(run);
  }
}
CLAIM("memory_plan refuses what an engine refuses, in the same words, and nothing else") {
  const auto expect_same_refusal = [](const EngineConfig& config, const std::string& words) {
    const std::string planned = refusal_of([&] { gpu_memory_entries(config); });
    const std::string refused = refusal_of([&] { GpuEngine(config, config.rank % gpu_on_cpu::kDevices, 2, 2); });
    if (planned != refused || (words.empty() ? !planned.empty() : planned.find(words) == std::string::npos))
      throw std::logic_error("planned: " + planned + "; engine: " + refused + "; wanted: " + words);
  };
  for (const std::vector<int>& sizes : std::vector<std::vector<int>>{{1},
                                                                     {3, 1},
                                                                     {8, 8, 8, 8, 8, 8, 8, 8, 1},
                                                                     {72},
                                                                     std::vector<int>(40, 1),
                                                                     std::vector<int>(32, 8),
                                                                     std::vector<int>(75, 8),
                                                                     std::vector<int>(256, 8),
                                                                     std::vector<int>(2048, 1)}) {
    EngineConfig config = config_of(ranks_in(sizes), 0);
    config.budget_bytes = gpu_least_budget_bytes(config) - 1;
    expect_same_refusal(config, "this buffer needs at least " + std::to_string(config.budget_bytes + 1));
    ++config.budget_bytes;
    expect_same_refusal(config, "");
  }
  EngineConfig config = config_of(ranks_in({129}), 0);
  config.budget_bytes = uint64_t{8} << 30;
  expect_same_refusal(config, "129 ranks in a domain: the CUDA backend has at most 128");
  config = config_of(ranks_in(std::vector<int>(256, 8)), 0);
  config.num_experts *= 7;
  config.budget_bytes = uint64_t{16} << 30;
  expect_same_refusal(config, "2048 ranks with num_experts = 14336: a block needs");
  expect_same_refusal(config, "allowed are at most num_experts = 12288");
  config = config_of(ranks_in(std::vector<int>(2048, 1)), 0);
  config.num_experts *= 3;
  config.budget_bytes = uint64_t{16} << 30;
  expect_same_refusal(config, "allowed are at most num_experts = 4096");
  config = config_of(ranks_in({65}), 0);
  config.budget_bytes = uint64_t{8} << 30;
  config.low_latency_tokens = config.low_latency_topk = 8;
  expect_same_refusal(config, "");
  for (const int single : {0, 1}) {  // 512 ranks, and one more than may be masked
    std::vector<int> sizes(64, 8);
    sizes.insert(sizes.end(), static_cast<size_t>(single), 1);
    config = config_of(ranks_in(sizes), 0);
    config.budget_bytes = uint64_t{16} << 30;
    config.low_latency_tokens = config.low_latency_topk = 8;
    config.mask_timeout_s = 1;
    expect_same_refusal(config, single ? "513 ranks with mask_timeout_s: the CUDA backend has at most 512" : "");
  }
  config = config_of(ranks_in(std::vector<int>(18, 8)), 0);
  config.budget_bytes = uint64_t{8} << 30;
  config.low_latency_tokens = 2048;
  config.low_latency_topk = 8;
  config.num_experts *= 8;
  expect_same_refusal(config, "low_latency_tokens = 2048 of 144 ranks with num_experts = 1152 need");
  expect_same_refusal(config, "; allowed are at most 1");
  config = config_of(ranks_in(std::vector<int>(8, 8)), 0);
  config.budget_bytes = uint64_t{1} << 40;
  config.low_latency_tokens = gpu::kMaxSlotTokens;
  config.low_latency_topk = gpu::kPairsPerToken;
  config.hidden = 16384;
  expect_same_refusal(config, "bytes of GPU memory: the CUDA backend has at most 68719476736");
}
CLAIM("a GPU whose blocks have less shared memory has fewer ranks, and the error says how many") {
  constexpr uint32_t kThere = 163 << 10;  // a block's of sm_80
  const auto refusal_with = [](int ranks) {
    EngineConfig config = config_of(ranks_in(std::vector<int>(static_cast<size_t>(ranks), 1)), 0);
    gpu::DeviceMap map;
    map.num_ranks = map.num_domains = map.num_streams = map.num_experts = static_cast<uint32_t>(ranks);
    return refusal_of([&] { check_shared_bytes(config, map, kThere); });
  };
  const std::string text = refusal_with(2048), before = "allowed are at most ";
  EXPECT(text.find(" ranks with an expert each") != std::string::npos);
  const int most = std::stoi(text.substr(text.find(before) + before.size()));
  EXPECT(most > 1162 && most < 2048);
  EXPECT(refusal_with(most).empty() && !refusal_with(most + 1).empty());
}
CLAIM("ranks of uneven domains agree on windows and slots, those of a domain on all, within any budget") {
  for (const std::vector<int>& sizes : std::vector<std::vector<int>>{
           {3, 1}, {2, 1, 1}, {8, 8, 8, 8, 8, 8, 8, 8, 2}, {1, 8, 8, 8}, {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1}}) {
    EngineConfig config = config_of(ranks_in(sizes), 0);
    const uint64_t least = gpu_least_budget_bytes(config);
    for (uint64_t more = 0; more < uint64_t{64} << 20; more += (2 << 20) + 12345) {
      config.budget_bytes = least + more;
      std::map<int, gpu::DeviceRegionLayout> of_domain;
      for (config.rank = 0; config.rank < config.num_ranks; ++config.rank) {
        const gpu::DeviceRegionLayout layout = gpu_layout_of(config);
        const gpu::DeviceRegionLayout& near =
            of_domain.try_emplace(config.domain_of[static_cast<size_t>(config.rank)], layout).first->second;
        const gpu::DeviceRegionLayout& first = of_domain.begin()->second;
        if (layout.entries != near.entries || layout.group_hash != first.group_hash ||
            layout.half_bytes != first.half_bytes || layout.piece_bytes != first.piece_bytes ||
            layout.max_tokens != first.max_tokens || layout.sum_slots != first.sum_slots ||
            layout.stream_batches != first.stream_batches || layout.batch_streams != first.batch_streams ||
            gpu_host_bytes(config, layout) + layout.total_bytes > config.budget_bytes)
          throw std::logic_error("rank " + std::to_string(config.rank) + " differs within " +
                                 std::to_string(config.budget_bytes) + " bytes");
      }
    }
  }
}
CLAIM("a rank that lays out its memory otherwise is refused by name") {
  std::vector<std::string> handles;
  std::vector<std::unique_ptr<GpuEngine>> engines;
  for (int rank = 0; rank < 2; ++rank) {
    EngineConfig config = config_of(ranks_in({1, 1}), rank);
    config.budget_bytes = uint64_t{64} << 20;
    config.window_tokens = uint32_t{64} << rank;
    engines.push_back(std::make_unique<GpuEngine>(config, rank, 2, 2));
    handles.push_back(engines.back()->export_handle());
  }
  EXPECT(refusal_of([&] { engines[0]->connect(handles); }).starts_with("rank 1 lays out its memory otherwise"));
}

// The first of so many domains. The others are its mirror images.
CudaRun mirrored(int domains, int members) {
  CudaRun run = ranks_in(std::vector<int>(static_cast<size_t>(domains), members));
  run.mirrored = members;
  run.num_tokens = {40, 64, 0, 33};
  run.topk = 8;
  return run;
}
CLAIM("a domain of 257 ranks, which are domains each, gets the rows of all, and every sum") {
  each_seed(mirrored(257, 1), try_mirrored);
}
CLAIM("a domain of 600 ranks gets the rows of all, and every sum") { each_seed(mirrored(75, 8), try_mirrored); }
CLAIM("a domain of 600 ranks gets the rows of all, and every sum, in windows, with tails of packets") {
  CudaRun run = mirrored(75, 8);
  run.hidden = 1024;
  run.spare_bytes = 0;
  run.num_tokens = {200, 130, 0, 33};
  run.packets = {0, 256, 2};
  run.least_windows = 9;
  run.least_tails = 64;
  each_seed(run, try_mirrored);
}
CLAIM("a domain of 600 ranks gets the rows of all, and every sum, with several experts a rank") {
  CudaRun run = mirrored(75, 8);
  run.experts_per_rank = 4;
  run.num_tokens = {300, 64, 1, 0, 200, 257, 7, 40};
  run.spare_bytes = 64 << 20;
  each_seed(run, try_mirrored);
}
CLAIM("a domain of 2048 ranks gets the rows of all, and every sum") { each_seed(mirrored(256, 8), try_mirrored); }
CLAIM("a domain of 2048 ranks, which are domains each, gets the rows of all, and every sum, in windows") {
  CudaRun run = mirrored(2048, 1);
  run.hidden = 1024;
  run.spare_bytes = 16 << 20;
  run.num_tokens = {128, 64, 0, 33};
  run.least_windows = 6;
  each_seed(run, try_mirrored);
}
CLAIM("control: one other bit in a row that came to a domain of 600 ranks is seen") {
  std::string seen;
  Mirror::flipped_rank = 3;
  try {
    each_seed(mirrored(75, 8), try_mirrored);
  } catch (const std::exception& failure) {
    seen = failure.what();
  }
  Mirror::flipped_rank = -1;
  EXPECT(seen.find("rank 3: rows: differs first at") != std::string::npos);
}
CLAIM("low latency of 256 and 600 ranks gives a domain the rows of all, in their slots, and every sum") {
  for (const int domains : {32, 75}) {
    SlotRun run = slots_of(mirrored(domains, 8).domain_of, kFp8);
    run.mirrored = 8;
    run.max_tokens = 16;
    run.num_tokens = {16, 5, 0, 9};
    run.experts_per_rank = 1;
    run.topk = 8;
    run.num_sms = 2;
    run.num_rounds = 2;
    try_run(run);
  }
}
CLAIM("129 ranks in 16 domains of 8 and one of 1 have the host's bits") {
  gpu_on_cpu::stand_at_most(std::chrono::minutes(3));  // few cores need long for so many threads
  std::vector<int> sizes(16, 8);
  sizes.push_back(1);
  each_seed(ranks_in(sizes), same_as_host);
}

}  // namespace
}  // namespace uccl_ep

int main(int argc, char** argv) { return claims::main(argc, argv); }
