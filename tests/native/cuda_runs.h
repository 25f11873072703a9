// Ranks of CUDA engines in one process, on the stand-in for CUDA, beside ranks of the host backend that do the same:
// every byte that comes out is compared.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "claims.h"
#include "common/units.h"
#include "cuda_on_cpu/lanes.h"
#include "engine/cuda/engine.h"
#include "engine/engine.h"

namespace uccl_ep {

constexpr uint64_t kRunPatienceUsec = 100'000'000;

// What the ranks of a group do.
struct CudaRun {
  std::vector<int> domain_of = {0, 0};
  std::vector<uint64_t> num_tokens = {40, 27};  // by rank; again from the first when there are more ranks
  uint32_t experts_per_rank = 4, hidden = 256, topk = 3;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;  // of the rows of a dispatch
  bool compact = false, with_values = true;
  bool fp8_codes = false;  // FP8 rows come out as codes and scales
  bool is_map = false;
  uint32_t alignment = 1;
  int64_t spare_bytes = 8 << 20;  // of the budget, beyond the least
  uint32_t num_sms = 2, stage_sms = 0;
  bool bulk_copies = true;
  int rounds = 2;
  uint64_t seed = 1;
  double arrival_timeout_s = 60;
  LoopOptions loop;
  uint64_t least_windows = 0;  // that a rank's operations have to take

  uint64_t tokens_of(int rank) const { return num_tokens[static_cast<size_t>(rank) % num_tokens.size()]; }
  int num_ranks() const { return static_cast<int>(domain_of.size()); }
  uint32_t num_experts() const { return experts_per_rank * static_cast<uint32_t>(num_ranks()); }
  uint32_t width() const { return is_map ? num_experts() : topk; }
  Dtype combine_wire() const { return dtype; }
};

inline EngineConfig config_of(const CudaRun& run, int rank) {
  EngineConfig config;
  config.rank = rank;
  config.num_ranks = run.num_ranks();
  config.domain_of = run.domain_of;
  config.num_experts = run.num_experts();
  config.hidden = run.hidden;
  config.max_element_bytes = dtype_bytes(run.dtype);
  config.generation = 42;
  config.arrival_timeout_s = run.arrival_timeout_s;
  config.progress_timeout_s = 40;
  config.bulk_copies = run.bulk_copies;
  config.loop = run.loop;
  return config;
}

// A rank's tensors of one round.
struct RankInput {
  uint64_t num_tokens = 0;
  std::vector<uint8_t> x, routing;
  std::vector<float> values;

  RankInput(const CudaRun& run, int rank, int round) : num_tokens(run.tokens_of(rank)) {
    std::mt19937_64 random(run.seed * 1000 + static_cast<uint64_t>(rank * 100 + round));
    std::normal_distribution<float> normal;
    const auto chance = [&](uint64_t n) { return random() % n == 0; };
    for (uint64_t i = 0; i < num_tokens * run.hidden; ++i) {
      const float value = chance(50) ? 0.0f : normal(random) * (chance(40) ? 1e3f : 1.0f);
      const auto* const bytes = reinterpret_cast<const uint8_t*>(&value);
      x.insert(x.end(), bytes + 4 - dtype_bytes(run.dtype), bytes + 4);  // the upper half of it is a BF16
    }
    const uint32_t experts = run.num_experts();
    for (uint64_t t = 0; t < num_tokens; ++t) {
      const uint64_t first = random() % experts, step = 1 + random() % (experts / run.width());
      for (uint32_t k = 0; k < run.width(); ++k) {
        if (run.is_map) {
          routing.push_back(chance(3));
        } else {
          const int64_t expert = chance(8) ? -1 : static_cast<int64_t>((first + k * step) % experts);
          const auto* const bytes = reinterpret_cast<const uint8_t*>(&expert);
          routing.insert(routing.end(), bytes, bytes + sizeof(expert));
        }
        values.push_back(normal(random));
      }
    }
    x.reserve(1);  // a rank without tokens has addresses, too
    routing.reserve(1);
    values.reserve(1);
  }
};

struct Dispatched {
  std::vector<uint64_t> counts;
  std::vector<uint8_t> rows;
  std::vector<float> scales, values;
  std::vector<int64_t> experts;

  // Nothing of what is there is right by chance.
  void make_room(const CudaRun& run, uint64_t num_rows) {
    constexpr uint8_t kGarbage = 0xEE;
    const uint64_t width = run.compact ? std::min(run.width(), run.experts_per_rank) : 1;
    rows.assign(num_rows * run.hidden * (run.fp8_codes ? 1 : dtype_bytes(run.dtype)), kGarbage);
    scales.assign(run.fp8_codes ? num_rows * run.hidden / kFp8Block : 0, -7.0f);
    values.assign(run.with_values ? num_rows * width : 0, -7.0f);
    experts.assign(run.compact ? num_rows * width : 0, -7);
  }
};
struct Combined {
  std::vector<uint8_t> out;
  std::vector<float> values;
};

// An address, also of nothing.
template <typename T>
T* address_if(bool wanted, std::vector<T>& v) {
  v.reserve(1);
  return wanted ? v.data() : nullptr;
}

inline DispatchArgs dispatch_args(const CudaRun& run, const RankInput& in, bool has_routing) {
  DispatchArgs args;
  args.x = in.x.data();
  args.num_tokens = in.num_tokens;
  args.hidden = run.hidden;
  args.dtype = run.dtype;
  args.wire = run.wire;
  args.has_routing = has_routing;
  args.routing = {run.is_map ? RoutingKind::kMap : RoutingKind::kTopk, in.routing.data(), run.width()};
  args.values = run.with_values ? in.values.data() : nullptr;
  args.expert_alignment = run.alignment;
  args.compact = run.compact;
  return args;
}
inline CombineArgs combine_args(const CudaRun& run, const RankInput& in, Dispatched& from, Combined& to) {
  to.out.assign(in.num_tokens * run.hidden * dtype_bytes(run.dtype), 0xEE);
  to.values.assign(run.with_values ? in.values.size() : 0, 0.0f);
  CombineArgs args;
  args.rows = address_if(true, from.rows);
  args.hidden = run.hidden;
  args.dtype = run.dtype;
  args.wire = run.combine_wire();
  args.values = address_if(run.with_values, from.values);
  args.out = address_if(true, to.out);
  args.values_out = address_if(run.with_values, to.values);
  return args;
}

// One rank of either backend.
class HostRank {
 public:
  HostRank(const CudaRun& run, int rank) : run_(run), engine_(with_budget(config_of(run, rank))) {}
  Engine& engine() { return engine_; }

  Dispatched dispatch(const RankInput& in, bool cached) {
    DispatchArgs args = dispatch_args(run_, in, !cached);
    if (cached) args.plan = plan_;
    auto op = engine_.dispatch(args);
    EXPECT(engine_.wait_counts(*op, kRunPatienceUsec));
    plan_ = op->plan;
    Dispatched got;
    got.make_room(run_, op->plan->num_rows);
    got.counts = op->plan->tokens_per_expert;
    if (run_.compact) engine_.give_row_experts(*op, got.experts.data());
    engine_.give_output(*op, {address_if(true, got.rows), address_if(run_.fp8_codes, got.scales),
                              address_if(run_.with_values, got.values)});
    EXPECT(engine_.wait(*op, kRunPatienceUsec));
    return got;
  }
  Combined combine(const RankInput& in, Dispatched& from) {
    Combined got;
    CombineArgs args = combine_args(run_, in, from, got);
    args.plan = plan_;
    auto op = engine_.combine(args);
    EXPECT(engine_.wait(*op, kRunPatienceUsec));
    return got;
  }

 private:
  static EngineConfig with_budget(EngineConfig config) {
    config.budget_bytes = 64 << 20;
    return config;
  }
  const CudaRun run_;
  Engine engine_;
  std::shared_ptr<Plan> plan_;
};

// Kernels that run may write to memory that goes with the stack.
struct CloseOnFailure {
  CudaEngine& engine;
  const int before = std::uncaught_exceptions();
  ~CloseOnFailure() {
    if (std::uncaught_exceptions() > before) engine.close(true);
  }
};

class CudaRank {
 public:
  CudaRank(const CudaRun& run, int rank)
      : run_(run),
        rank_(rank),
        engine_(with_budget(run, config_of(run, rank)), rank, run.num_sms, std::max(run.num_sms, run.stage_sms)) {
    EXPECT(cudaSetDevice(rank) == cudaSuccess);
    EXPECT(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
  }
  ~CudaRank() {
    engine_.close(true);
    cudaStreamDestroy(stream_);
  }
  CudaEngine& engine() { return engine_; }

  Dispatched dispatch(const RankInput& in, bool cached) {
    Dispatched got;
    const CloseOnFailure guard{engine_};
    auto op = engine_.dispatch(dispatch_args(run_, in, !cached), {cached ? plan_ : nullptr, stream_});
    const bool guessed = !op->counts_known && op->place.fit == cuda::Fit::kIfLargeEnough;
    if (guessed || op->counts_known) give(*op, got);
    const uint64_t deadline = now_usec() + kRunPatienceUsec;
    while (!engine_.poll_counts(*op)) {
      EXPECT(now_usec() < deadline);
      usleep(200);
    }
    std::vector<uint8_t> unused = std::move(storage_);  // kernels may still look at it
    if (op->placed)
      storage_ = std::move(unused);
    else
      give(*op, got);
    plan_ = op->plan;
    finish(*op);
    got.counts = plan_->tokens_per_expert;
    shrink(got, plan_->sizes.num_rows);
    return got;
  }
  Combined combine(const RankInput& in, Dispatched& from) {
    Combined got;
    const CloseOnFailure guard{engine_};
    auto op = engine_.combine(combine_args(run_, in, from, got), {plan_, stream_});
    finish(*op);
    return got;
  }
  double stat(const std::string& name) const {
    for (const auto& [its, value] : engine_.stats())
      if (its == name) return value;
    throw std::logic_error("no stat " + name);
  }

 private:
  static EngineConfig with_budget(const CudaRun& run, EngineConfig config) {
    config.budget_bytes = cuda_least_budget_bytes(config) + static_cast<uint64_t>(run.spare_bytes);
    return config;
  }
  void give(CudaOp& op, Dispatched& got) {
    got.make_room(run_, op.plan->sizes.num_rows);
    if (op.place.state != cuda::PlanState::kKnown) storage_.assign(op.plan->storage_bytes, 0xDD);
    CudaOutput output;
    output.rows = address_if(true, got.rows);
    output.scales = address_if(run_.fp8_codes, got.scales);
    output.values = address_if(run_.with_values, got.values);
    output.row_experts = address_if(run_.compact, got.experts);
    output.plan = storage_.data();
    output.stream = stream_;
    engine_.give_output(op, output);
  }
  void finish(CudaOp& op) {
    engine_.wait(op, stream_);
    cudaStreamSynchronize(stream_);
    engine_.check();
  }
  void shrink(Dispatched& got, uint64_t num_rows) const {
    Dispatched exact;
    exact.make_room(run_, num_rows);
    got.rows.resize(exact.rows.size());
    got.scales.resize(exact.scales.size());
    got.values.resize(exact.values.size());
    got.experts.resize(exact.experts.size());
  }

  const CudaRun run_;
  const int rank_;
  CudaEngine engine_;
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<CudaPlan> plan_;
  std::vector<uint8_t> storage_;
};

template <typename T>
void expect_same(const std::vector<T>& ours, const std::vector<T>& theirs, const std::string& what) {
  if (ours.size() != theirs.size())
    throw std::logic_error(what + ": " + std::to_string(ours.size()) + " instead of " + std::to_string(theirs.size()));
  for (size_t i = 0; i < ours.size(); ++i)
    if (std::memcmp(&ours[i], &theirs[i], sizeof(T)) != 0)
      throw std::logic_error(what + ": differs first at " + std::to_string(i) + " of " + std::to_string(ours.size()));
}

// By threads, a rank each; throws the first failure by rank.
inline void by_ranks(int num_ranks, const std::function<void(int)>& body) {
  std::vector<std::string> failures(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& failure) {
        failures[static_cast<size_t>(rank)] = failure.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::string all;
  for (int rank = 0; rank < num_ranks; ++rank)
    if (const std::string& text = failures[static_cast<size_t>(rank)]; !text.empty())
      all += " rank " + std::to_string(rank) + ": " + text + ";";
  if (!all.empty()) throw std::logic_error(all);
}

template <typename Rank>
std::vector<std::unique_ptr<Rank>> make_ranks(const CudaRun& run) {
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::string> handles;
  for (int rank = 0; rank < run.num_ranks(); ++rank) {
    ranks.push_back(std::make_unique<Rank>(run, rank));
    handles.push_back(ranks.back()->engine().export_handle());
  }
  std::barrier meeting(run.num_ranks());
  by_ranks(run.num_ranks(), [&](int rank) {
    ranks[static_cast<size_t>(rank)]->engine().connect(handles);
    meeting.arrive_and_wait();
    ranks[static_cast<size_t>(rank)]->engine().start();
  });
  return ranks;
}

// A new plan and then the same one again, each there and back.
struct RoundResult {
  Dispatched dispatched[2];
  Combined combined[2];
};
template <typename Rank>
std::vector<std::vector<RoundResult>> results_of(const CudaRun& run, std::vector<std::unique_ptr<Rank>>& ranks) {
  std::vector<std::vector<RoundResult>> all(ranks.size());
  by_ranks(run.num_ranks(), [&](int r) {
    Rank& rank = *ranks[static_cast<size_t>(r)];
    std::string failure;
    try {
      for (int round = 0; round < run.rounds; ++round) {
        RoundResult result;
        const RankInput in(run, r, round);
        for (int again = 0; again < 2; ++again) {
          result.dispatched[again] = rank.dispatch(in, again != 0);
          if (!run.fp8_codes) result.combined[again] = rank.combine(in, result.dispatched[again]);
        }
        all[static_cast<size_t>(r)].push_back(std::move(result));
      }
    } catch (const std::exception& caught) {
      failure = caught.what();
    }
    rank.engine().close(!failure.empty());
    if (!failure.empty()) throw std::logic_error(failure);
  });
  return all;
}

inline void compare(const CudaRun& run, const std::vector<std::vector<RoundResult>>& ours,
                    const std::vector<std::vector<RoundResult>>& theirs) {
  for (size_t rank = 0; rank < ours.size(); ++rank)
    for (size_t round = 0; round < ours[rank].size(); ++round)
      for (int again = 0; again < 2; ++again) {
        const Dispatched &a = ours[rank][round].dispatched[again], &b = theirs[rank][round].dispatched[again];
        const std::string where = "rank " + std::to_string(rank) + ", round " + std::to_string(round) +
                                  (again != 0 ? ", known plan: " : ", new plan: ");
        expect_same(a.counts, b.counts, where + "counts");
        expect_same(a.rows, b.rows, where + "rows");
        expect_same(a.scales, b.scales, where + "scales");
        expect_same(a.values, b.values, where + "weights");
        expect_same(a.experts, b.experts, where + "experts");
        if (run.fp8_codes) continue;
        const Combined &c = ours[rank][round].combined[again], &d = theirs[rank][round].combined[again];
        expect_same(c.out, d.out, where + "combined rows");
        expect_same(c.values, d.values, where + "combined weights");
      }
}

inline void same_as_host(const CudaRun& run) {
  cuda_on_cpu::disturb(0);
  auto hosts = make_ranks<HostRank>(run);
  const auto expected = results_of(run, hosts);
  hosts.clear();
  cuda_on_cpu::disturb(run.seed);
  auto ranks = make_ranks<CudaRank>(run);
  compare(run, results_of(run, ranks), expected);
  for (const auto& rank : ranks)
    if (rank->stat("windows") < static_cast<double>(run.least_windows))
      throw std::logic_error("only " + std::to_string(rank->stat("windows")) + " windows");
}

}  // namespace uccl_ep
