// Whole CUDA engines, ranks as threads, kernels on the CPU: every byte is the host backend's, whatever order lanes,
// warps, blocks, streams and ranks run in. UCCL_EP_CUDA_SEEDS=first:count tries other orders and other data.
// Longer than 400 lines because claims of one program share its kernels, which take a minute to compile.
#include <cstdlib>
#include <cstring>
#include <thread>

#include "device/memory.h"
#include "gpu_on_cpu/streams.h"
#include "gpu_runs.h"
#include "transport/gpu/visibility.h"

using namespace uccl_ep;

namespace {

void try_seeds(const CudaRun& run) { each_seed(run, same_as_host); }

// Routing needs at least 16 chunks of tails.
void try_tables_alone(const std::vector<int>& domain_of) {
  for (const bool compact : {false, true}) {
    CudaRun run = run_of(domain_of, kBf16, kFp8);
    run.packets = {0, 256, 2};
    run.least_tails = 16;
    run.num_tokens = {240, 190};
    run.compact = compact;
    try_seeds(run);
    run.with_weights = false;
    run.loop = everything();
    try_seeds(run);
  }
}
}  // namespace

CLAIM("one rank gives itself the host's bits") { try_seeds(run_of({0})); }
CLAIM("2 ranks of a domain have the host's bits, BF16") { try_seeds(run_of({0, 0})); }
CLAIM("4 ranks of a domain have the host's bits, FP32") { try_seeds(run_of({0, 0, 0, 0}, kFp32, kFp32)); }
CLAIM("a domain has the host's bits in every form of a combine") {
  const std::vector<std::vector<uint64_t>> few_and_many = {{20, 40, 7}, {130, 97, 110}, {9, 130, 64}};
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 0, 0}})
    for (const bool compact : {true, false})
      for (const std::vector<uint64_t>& num_tokens : few_and_many) {
        CudaRun run = run_of(domain_of);
        run.compact = compact;
        run.num_tokens = num_tokens;
        run.hidden = 2048;  // two parts of a row
        try_seeds(run);
      }
}
CLAIM("combines without a dispatch between them have the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}})
    for (const bool compact : {true, false}) {
      CudaRun run = run_of(domain_of);
      run.compact = compact;
      run.combines_in_a_row = true;
      run.num_tokens = {3, 130};  // one rank is through before the other has merged
      run.rounds = 4;
      try_seeds(run);
    }
}
CLAIM("2 ranks of a domain have the host's bits, FP8, codes and scales") {
  CudaRun run = run_of({0, 0}, kBf16, kFp8);
  try_seeds(run);
  run.fp8_codes = true;
  try_seeds(run);
}
CLAIM("codes and scales that the caller gave, and metadata, have the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1, 1}})
    for (const bool compact : {true, false})
      for (const bool bulk_copies : {true, false}) {
        CudaRun run = run_of(domain_of, kBf16, Dtype::kFp8Fp32);
        run.compact = compact;
        run.bulk_copies = bulk_copies;
        run.fp8_codes = run.given_codes = true;
        run.rounds = 1;
        try_seeds(run);
        run.num_metadata = 37;
        try_seeds(run);
      }
}
CLAIM("rows of every format have the host's bits, quantised here or by the caller") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}})
    for (const RowFormat& format : kRowFormats) {
      CudaRun run = run_of(domain_of, format.id == kFp32 ? kFp32 : kBf16, format.id);
      run.rounds = 1;
      if (!is_quantised(format.id) || AllScaleRules::has(format.id)) try_seeds(run);
      if (!is_quantised(format.id)) continue;
      run.fp8_codes = run.given_codes = true;
      try_seeds(run);
    }
}
CLAIM("metadata beside quantised and unquantised rows has the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}})
    for (const Dtype wire : {kBf16, kFp8}) {
      CudaRun run = run_of(domain_of, kBf16, wire);
      run.num_metadata = 4;
      run.alignment = 16;
      try_seeds(run);
      run = windows_of(domain_of, kBf16, wire);
      run.num_metadata = 33;
      run.least_windows = 6;  // rows of the engine are wider than those of others
      try_seeds(run);
    }
}
CLAIM("metadata of unused rows becomes padding") {
  CudaRun run = run_of({0, 0});
  run.num_metadata = 5;
  run.capacity = 400;
  run.is_spacious = run.pad_to_capacity = true;
  try_seeds(run);
}
CLAIM("2 domains of a rank have the host's bits") { try_seeds(run_of({0, 1})); }
CLAIM("2 domains of 2 ranks have the host's bits, FP32") { try_seeds(run_of({0, 0, 1, 1}, kFp32, kFp32)); }
CLAIM("2 domains of 2 ranks have the host's bits, FP8") { try_seeds(run_of({0, 0, 1, 1}, kBf16, kFp8)); }
CLAIM("4 domains of a rank have the host's bits") { try_seeds(run_of({0, 1, 2, 3})); }
CLAIM("domains of 3 and 1 ranks have the host's bits") { try_seeds(run_of({0, 0, 0, 1})); }
CLAIM("interleaved domains have the host's bits") { try_seeds(run_of({0, 1, 0, 1})); }
CLAIM("plain loads in place of bulk copies give the same bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 0, 1, 1}}) {
    CudaRun run = run_of(domain_of, kBf16, kFp8);
    run.bulk_copies = false;
    try_seeds(run);
  }
}
CLAIM("compact rows of a map have the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1, 0}}) {
    CudaRun run = run_of(domain_of);
    run.compact = run.is_map = true;
    try_seeds(run);
  }
}
CLAIM("maps of more columns than a warp reads at a time have the host's bits") {
  for (uint32_t experts : {160, 150, 131}) {  // of two ranks: 320; and 300, 262, which are no multiples of 8
    CudaRun run = run_of({0, 0});
    run.experts_per_rank = experts;
    run.is_map = true;
    try_seeds(run);
  }
}
CLAIM("tiles for which a block has no room, and so reads twice, have the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}})
    for (const bool is_map : {false, true}) {
      CudaRun run = run_of(domain_of);
      run.experts_per_rank = 1500;  // 60 KiB a tile
      run.map_one_in = 500;
      run.is_map = is_map;
      run.num_tokens = {250, 130};
      run.rounds = 1;
      try_seeds(run);
    }
}
CLAIM("padded experts, ranks without tokens and rows without weights have the host's bits") {
  CudaRun run = run_of({0, 1, 0});
  run.alignment = 16;
  run.num_tokens = {0, 70, 1};
  try_seeds(run);
  run.with_weights = false;
  try_seeds(run);
}
CLAIM("ranks that have nothing to wait for but that a late one enters wait for that") {
  for (const std::vector<int>& domain_of : {std::vector<int>{0, 1}, {0, 0}}) {
    CudaRun run = run_of(domain_of);
    run.num_tokens = {0};
    run.late_usec = 200'000;
    run.arrival_timeout_s = 5;
    try_seeds(run);
  }
}
CLAIM("rows that an output has no room for are left out of the sums, and nobody waits for them") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2}}) {
    CudaRun run = run_of(domain_of);
    run.num_tokens = {90, 70};
    run.capacity = 40;
    try_seeds(run);
    run.bulk_copies = false;
    try_seeds(run);
  }
}
CLAIM("what no row came for becomes padding where that is asked for, and is not touched otherwise") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1, 0}})
    for (const bool pads : {false, true})
      for (const bool compact : {false, true}) {
        CudaRun run = run_of(domain_of);
        run.num_tokens = {40, 0, 27};
        run.rounds = 1;
        run.capacity = 300;
        run.is_spacious = true;
        run.pad_to_capacity = pads;
        run.compact = compact;
        try_seeds(run);
        if (!compact) run.alignment = 16;
        run.wire = kFp8;
        run.fp8_codes = true;
        try_seeds(run);
      }
}
CLAIM("with a capacity, more than the buffer holds at once goes in windows, dropped rows too") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 0, 0, 1}})
    for (const bool is_spacious : {true, false}) {
      CudaRun run = windows_of(domain_of, kFp32, kFp32);
      run.num_tokens = {150, 150};  // all in the same number of token blocks
      run.capacity = is_spacious ? 1500 : 120;
      run.is_spacious = is_spacious;
      try_seeds(run);
    }
  CudaRun run = windows_of({0, 0, 1, 1}, kBf16, kFp8);
  run.num_tokens = {100, 97, 128, 99};
  run.capacity = 1500;
  run.is_spacious = run.compact = true;
  try_seeds(run);
}
CLAIM("with a capacity, tokens of several windows differ if all ranks say the most") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1, 1}})
    for (const bool is_spacious : {true, false}) {
      CudaRun run = windows_of(domain_of, kFp32, kFp32);
      run.num_tokens = {150, 60, 0, 97};
      run.capacity = is_spacious ? 1500 : 60;
      run.max_tokens = 150;
      run.is_spacious = is_spacious;
      try_seeds(run);
    }
}
CLAIM("with a capacity, ranks that differ by windows raise an error that names one with more tokens") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    CudaRun run = windows_of(domain_of, kFp32, kFp32);
    run.num_tokens = {150, 60};
    run.capacity = 1500;
    run.is_spacious = true;
    auto ranks = make_ranks<CudaRank>(run);
    by_ranks(2, [&](int r) {
      CudaRank& rank = *ranks[static_cast<size_t>(r)];
      try {
        rank.dispatch(RankInput(run, r, 0), false);
      } catch (const std::exception& failure) {
        const std::string text = failure.what();
        EXPECT(text.find("rank 0 has 150 tokens; with a capacity rank 1 holds ") != std::string::npos);
        return;
      }
      throw std::logic_error("no error");
    });
  }
}
// Windows follow from the most experts that a token may have.
CLAIM("with a capacity, ranks whose tokens have other numbers of experts raise an error that names both calls") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}})
    for (const uint32_t other : {3u, 2u}) {
      CudaRun run = run_of(domain_of);
      run.capacity = 500;
      run.is_spacious = true;
      auto ranks = make_ranks<CudaRank>(run);
      by_ranks(2, [&](int r) {
        CudaRun its = run;
        if (r == 1) its.topk = other;
        try {
          ranks[static_cast<size_t>(r)]->dispatch(RankInput(its, r, 0), false);
        } catch (const std::exception& failure) {
          const std::string text = failure.what();
          EXPECT(other == 2 && text.find(", top-3, a capacity") != std::string::npos &&
                 text.find(", top-2, a capacity") != std::string::npos);
          return;
        }
        EXPECT_EQ(other, 3u);  // control
      });
    }
}
CLAIM("blocks that only stage change no bit") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    CudaRun run = run_of(domain_of);
    run.stage_sms = 5;
    try_seeds(run);
  }
}
CLAIM("rows that some warps plan and others place have the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    CudaRun run = run_of(domain_of);
    run.spare_bytes = 16 << 20;
    run.num_tokens = {400, 220};  // a warp that places has more than 32 rows
    run.rounds = 1;
    try_seeds(run);
  }
}
CLAIM("2 ranks of a domain have the host's bits in windows") { try_seeds(windows_of({0, 0}, kFp32, kFp32)); }
CLAIM("a domain has the host's bits in windows in every form of a combine") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 0, 0}})
    for (const bool compact : {true, false}) {
      CudaRun run = windows_of(domain_of, kBf16, kBf16);
      run.compact = compact;
      try_seeds(run);
    }
}
CLAIM("2 domains of a rank have the host's bits in windows, FP32") { try_seeds(windows_of({0, 1}, kFp32, kFp32)); }
CLAIM("2 domains of a rank have the host's bits in windows, BF16") { try_seeds(windows_of({0, 1}, kBf16, kBf16)); }
CLAIM("where token blocks have few rows for a domain, windows of a combine are longer, with the host's bits") {
  CudaRun run = windows_of({0, 1, 2, 3}, kBf16, kBf16);
  run.num_tokens = {256, 256, 256, 256};
  run.spare_bytes = 4 << 20;
  run.topk = 1;
  run.most_windows = 14;
  try_seeds(run);
}
CLAIM("a buffer for 64 tokens takes 200 in windows and has the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    CudaRun run = run_of(domain_of, kFp32, kFp32);
    run.num_tokens = {200, 130};
    run.spare_bytes = 64 << 20;
    run.rounds = 1;
    run.least_windows = 4 * 2 + 1;
    EXPECT_THROWS(std::logic_error, try_seeds(run));  // control: the budget would hold them in one
    run.window_tokens = 64;
    try_seeds(run);
  }
}
CLAIM("members of a domain on other hosts share memory by fabric handles, and have the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 0, 0, 1}}) {
    CudaRun run = run_of(domain_of);
    run.rounds = 1;
    const uint64_t before = gpu_on_cpu::num_fabric_imports();
    try_seeds(run);
    EXPECT_EQ(gpu_on_cpu::num_fabric_imports(), before);  // control: on one host by descriptors
    run.host_of = domain_of.size() == 2 ? std::vector<int>{0, 1} : std::vector<int>{0, 0, 1, 0};
    try_seeds(run);
    EXPECT(gpu_on_cpu::num_fabric_imports() > before);
  }
}
CLAIM("a GPU without fabric handles, or a rank that gives none, is refused by name where a domain spans hosts") {
  CudaRun run = run_of({0, 0});
  const auto engine_of = [&](int rank, const std::vector<int>& host_of) {
    run.host_of = host_of;
    EngineConfig config = config_of(run, rank);
    config.budget_bytes = gpu_least_budget_bytes(config);
    return std::make_unique<GpuEngine>(config, rank, 2, 2);
  };
  gpu_on_cpu::have_fabric(false);
  const std::string refused = refusal_of([&] { engine_of(0, {0, 1}); });
  gpu_on_cpu::have_fabric(true);
  EXPECT(refused.find("rank 0 has members of its domain on other hosts") != std::string::npos);
  auto here = engine_of(0, {0, 1}), there = engine_of(1, {0, 0});
  EXPECT(refusal_of([&] {
           here->connect({here->export_handle(), there->export_handle()});
         }).starts_with("rank 1 is on another host than rank 0, and gives no fabric handle"));
}
CLAIM("rows whose last block is short have the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 0, 1}})
    for (uint32_t hidden : {32, 160, 1440})
      for (const Dtype wire : {kBf16, kFp8, Dtype::kFp8Fp32})
        for (const bool bulk_copies : {true, false}) {
          CudaRun run = run_of(domain_of, kBf16, wire);
          run.hidden = hidden;
          run.bulk_copies = bulk_copies;
          run.alignment = 4;
          run.num_metadata = 3;
          run.rounds = 1;
          try_seeds(run);
          if (wire == kBf16) continue;
          run.fp8_codes = true;
          run.given_codes = wire == Dtype::kFp8Fp32;
          try_seeds(run);
        }
}
CLAIM("regions of more than 4 GiB give what small ones give") {
  CudaRun run = run_of({0, 1}, kFp32, kFp32);
  run.hidden = 8192;
  run.num_tokens = {70, 41};
  run.spare_bytes = int64_t{6} << 30;
  run.rounds = 1;
  try_seeds(run);
}
CLAIM("rows of which the first are summed in parts have the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}})
    for (uint32_t hidden : {2048, 3072, 3584}) {  // 2 and 3 short segments, 2 long ones
      CudaRun run = run_of(domain_of);
      run.hidden = hidden;
      run.num_tokens = {70, 41};
      try_seeds(run);
    }
}
// 9,600 pairs of a rank, and slots for 4,096.
CudaRun many_weights_of(const std::vector<int>& domain_of) {
  CudaRun run = run_of(domain_of, kFp32, kFp32);
  run.hidden = 128;
  run.num_tokens = {320, 290, 0, 300};
  run.topk = run.experts_per_rank = 30;
  run.spare_bytes = 1 << 20;
  run.rounds = 1;
  run.least_windows = run.most_windows = 4 * 10 + 2 * 3;
  return run;
}
CLAIM("weights' gradients of more pairs than slots hold go in several windows, with the host's bits") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 1}, {0, 0, 0, 1}}) {
    CudaRun run = many_weights_of(domain_of);
    try_seeds(run);
    run.with_weights = false;  // control
    run.least_windows = run.most_windows = 4 * 10;
    try_seeds(run);
  }
}
CLAIM("the same of compact rows, of a map and with a capacity, whatever the network does") {
  CudaRun run = many_weights_of({0, 0, 1, 1});
  run.loop = everything();
  run.compact = true;
  try_seeds(run);
  run.is_map = true;
  run.most_windows = UINT64_MAX;
  try_seeds(run);
  run.capacity = 500;
  run.max_tokens = 320;
  try_seeds(run);
}
CLAIM("2 domains of 2 ranks have the host's bits in windows, FP8") {
  CudaRun run = windows_of({0, 0, 1, 1}, kBf16, kFp8);
  run.num_tokens = {128, 100, 0, 60};
  run.least_windows = 0;
  try_seeds(run);
}
CLAIM("4 domains of a rank have the host's bits in windows, a map") {
  CudaRun run = windows_of({0, 1, 2, 3}, kFp32, kFp32);
  run.is_map = run.compact = true;
  run.hidden = 2048;
  run.spare_bytes = 2 << 20;
  run.num_tokens = {128, 100, 0, 60};
  run.least_windows = 4 + 1;
  try_seeds(run);
}
CLAIM("packets of which the slot holds the tables alone have the host's bits") { try_tables_alone({0, 1}); }
CLAIM("packets of which the slot holds the tables alone have the host's bits in domains of 2") {
  try_tables_alone({0, 0, 1, 1});
}
CLAIM("packets of which the slot holds the tables alone have the host's bits in domains of 3 and 1") {
  try_tables_alone({0, 0, 0, 1});
}
CLAIM("packets with tails have the host's bits in windows, with a capacity, and with a map") {
  CudaRun run = windows_of({0, 0, 1, 1}, kBf16, kFp8);
  run.packets = {0, 512, 3};
  run.least_tails = 30;
  run.rounds = 2;
  try_seeds(run);
  run.loop = everything();
  try_seeds(run);
  run.is_map = true;
  try_seeds(run);
  run = run_of({0, 1, 0, 1});
  run.packets = {8, 256, 1};
  run.least_tails = 20;
  run.num_tokens = {240, 190};
  run.capacity = 300;
  try_seeds(run);
  run.is_spacious = true;
  run.capacity = 2000;
  try_seeds(run);
}
CLAIM("a rank without rows, which gives no address for weights, reads tails like the others") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 1, 1}, {0, 0, 1, 1}}) {
    CudaRun run = run_of(domain_of);
    run.packets = {0, 256, 2};
    run.num_tokens = {1200, 900};
    run.hidden = 128;
    run.rounds = 1;
    run.idle_rank = run.num_ranks() - 1;
    run.least_tails = 64;
    try_seeds(run);
  }
}
CLAIM("what the network may do changes no bit, in windows of 2 domains of 2 ranks") {
  CudaRun run = windows_of({0, 0, 1, 1}, kFp32, kFp32);
  run.num_tokens = {128, 100, 0, 60};
  run.least_windows = 4 + 1;
  run.loop = everything();
  try_seeds(run);
}
CLAIM("control: one other bit of one rank is seen") {
  CudaRun run = run_of({0, 1});
  run.rounds = 1;
  auto hosts = make_ranks<HostRank>(run);
  auto expected = results_of(run, hosts);
  expected[1][0].combined[1].out.back() ^= 1;
  auto ranks = make_ranks<CudaRank>(run);
  EXPECT_THROWS(std::logic_error, compare(run, results_of(run, ranks), expected));
}

// ---- devices --------------------------------------------------------------------------------------------------------
CLAIM("a thread without a GPU of its own leaves no context on the first one") {
  std::thread([] { const gpu::OnDevice there(3); }).join();
  EXPECT(gpu::has_context(3) && !gpu::has_context(0));
  EXPECT(cudaSetDevice(1) == cudaSuccess);
  {
    const gpu::OnDevice there(3);
  }
  int device = -1;
  EXPECT(cudaGetDevice(&device) == cudaSuccess && device == 1);
}

// ---- faults ---------------------------------------------------------------------------------------------------------
namespace {

// All ranks but those that `leave` dispatch; what each threw, and that it did so in time.
void expect_failures(CudaRun run, const std::function<void(CudaRank&, int)>& leave, ErrorKind kind, double limit_s) {
  auto ranks = make_ranks<CudaRank>(run);
  by_ranks(run.num_ranks(), [&](int r) {
    CudaRank& rank = *ranks[static_cast<size_t>(r)];
    if (r == run.num_ranks() - 1 && leave) {
      leave(rank, r);
      return;
    }
    const uint64_t started = now_usec();
    const RankInput in(run, r, 0);
    try {
      Dispatched got = rank.dispatch(in, false);
      rank.combine(in, got);
    } catch (const CommunicationFailure& failure) {
      if (failure.record().kind != kind)
        throw std::logic_error("another kind of error: " + std::string(failure.what()));
      EXPECT(static_cast<double>(now_usec() - started) * 1e-6 < limit_s);
      return;
    }
    throw std::logic_error("did not fail");
  });
}

}  // namespace

CLAIM("a rank of another domain that never comes is an error of all others within the deadline") {
  CudaRun run = run_of({0, 0, 1});
  run.arrival_timeout_s = 1.5;
  expect_failures(run, [](CudaRank&, int) { usleep(3'000'000); }, ErrorKind::kArrivalTimeout, 12);
}
CLAIM("a rank of another domain that leaves is an error of all others at once") {
  CudaRun run = run_of({0, 0, 1});
  expect_failures(run, [](CudaRank& rank, int) { rank.engine().close(true); }, ErrorKind::kPeerFailed, 10);
}
CLAIM("a network that delivers nothing to a rank is an error of all within the deadline") {
  CudaRun run = run_of({0, 1});
  run.loop.drop_peer = 1;
  run.arrival_timeout_s = 1.5;
  expect_failures(run, {}, ErrorKind::kArrivalTimeout, 12);
}
CLAIM("operations in a graph wake the proxy at a replay, by one node that waits for nothing") {
  const CudaRun run = run_of({0, 1});
  auto ranks = make_ranks<CudaRank>(run);
  std::vector<CpuGraph> graphs(ranks.size());
  by_ranks(run.num_ranks(), [&](int r) {
    CudaRank& rank = *ranks[static_cast<size_t>(r)];
    const RankInput in(run, r, 0);
    rank.dispatch(in, false);
    gpu_on_cpu::capture(rank.stream(), &graphs[static_cast<size_t>(r)]);
    Dispatched got = rank.dispatch(in, true);
    rank.combine(in, got);
    gpu_on_cpu::capture(rank.stream(), nullptr);
  });
  for (size_t r = 0; r < ranks.size(); ++r) {
    EXPECT(graphs[r].host_nodes.size() == 1 && graphs[r].num_dependencies == 0);
    const auto seconds_awake_after = [&](const std::function<void()>& call) {
      usleep(50'000);  // it is asleep
      const double before = ranks[r]->stat("proxy.busy_seconds");
      call();
      usleep(100'000);
      return ranks[r]->stat("proxy.busy_seconds") - before;
    };
    EXPECT(seconds_awake_after(graphs[r].host_nodes[0]) >= 0.008);
    EXPECT(seconds_awake_after([] {}) < 0.05);  // as many have been launched as have ended
  }
}
CLAIM("copies that the GPU does not take are an error of all at once") {
  const CudaRun run = run_of({0, 1});
  auto ranks = make_ranks<CudaRank>(run);
  gpu_on_cpu::break_copies_of(1);
  std::atomic<int> failures{0};
  const uint64_t started = now_usec();
  by_ranks(run.num_ranks(), [&](int r) {
    try {
      const RankInput in(run, r, 0);
      Dispatched got = ranks[static_cast<size_t>(r)]->dispatch(in, false);
      ranks[static_cast<size_t>(r)]->combine(in, got);
      ranks[static_cast<size_t>(r)]->engine().check();
    } catch (const CommunicationFailure& failure) {
      EXPECT(std::string(failure.what()).find("copy between GPUs: CUDA: cudaMemcpy") != std::string::npos);
      failures.fetch_add(1);
    }
  });
  gpu_on_cpu::break_copies_of(-1);
  EXPECT_EQ(failures.load(), 2);
  EXPECT(now_usec() - started < 20'000'000);  // deadlines are 40 and 60 s
}
CLAIM("a context that is lost is an error, though no kernel runs any more that could find one") {
  const CudaRun run = run_of({0});
  auto ranks = make_ranks<CudaRank>(run);
  GpuEngine& engine = ranks[0]->engine();
  cudaStream_t stream = nullptr;
  EXPECT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  Flag over;  // what comes before, which never ends
  const auto wait = [](void* flag) {
    while (static_cast<Flag*>(flag)->read() == 0) usleep(100);
  };
  EXPECT(cudaLaunchHostFunc(stream, wait, &over) == cudaSuccess);
  const RankInput in(run, 0, 0);
  DispatchArgs args = dispatch_args(run, in, true);
  args.stream = stream;
  const auto op = engine.dispatch(args);
  usleep(300'000);
  const bool waited = !op->wait_counts(0);
  gpu_on_cpu::break_streams_of(0);
  std::string heard;
  for (const uint64_t deadline = now_usec() + 5'000'000; heard.empty() && now_usec() < deadline; usleep(1000)) {
    try {
      op->wait_counts(0);
    } catch (const CommunicationFailure& failure) {
      heard = failure.what();
    }
  }
  gpu_on_cpu::break_streams_of(-1);
  over.publish(1);
  cudaStreamSynchronize(stream);
  engine.close(true);
  cudaStreamDestroy(stream);
  EXPECT(waited);
  EXPECT(heard.find("lost its GPU's context") != std::string::npos);
}
CLAIM("a routing that a later block refuses is an error of every rank's dispatch, which has no counts") {
  CudaRun run = run_of({0, 0});
  run.num_tokens = {130, 130};  // the last tile is block 1's
  auto ranks = make_ranks<CudaRank>(run);
  std::atomic<int> failures{0};
  by_ranks(run.num_ranks(), [&](int r) {
    RankInput in(run, r, 0);
    const int64_t none = run.num_experts();
    if (r == 1) std::memcpy(in.routing.data() + in.routing.size() - sizeof(none), &none, sizeof(none));
    try {
      ranks[static_cast<size_t>(r)]->dispatch(in, false);
    } catch (const std::exception&) {
      failures.fetch_add(1);
    }
    EXPECT(!ranks[static_cast<size_t>(r)]->had_counts());
  });
  EXPECT_EQ(failures.load(), 2);
}
CLAIM("a dispatch that is refused on a rank stops the kernels of the others before their memory goes") {
  // Those that have asked for counts have launched nothing else when the error comes.
  CudaRun run = run_of({0, 1, 0});
  run.num_tokens = {1u << 16, 10, 10};
  run.hidden = 128;
  auto ranks = make_ranks<CudaRank>(run);
  std::atomic<int> failures{0};
  by_ranks(run.num_ranks(), [&](int r) {
    const RankInput in(run, r, 0);
    try {
      ranks[static_cast<size_t>(r)]->dispatch(in, false);
    } catch (const std::exception&) {
      failures.fetch_add(1);
    }
  });
  EXPECT_EQ(failures.load(), 3);
}

CLAIM("what NICs write is flushed once a call, by a GPU that does not order it") {
  gpu::GpuVisibility visibility(3);
  EXPECT(visibility.needed());
  const uint64_t before = gpu_on_cpu::num_flushes();
  visibility.flush();
  visibility.flush();
  EXPECT_EQ(gpu_on_cpu::num_flushes(), before + 2);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
