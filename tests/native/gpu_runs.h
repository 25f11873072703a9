// Ranks of CUDA engines in one process, on the stand-in for CUDA, beside ranks of the host backend that do the same:
// every byte that comes out is compared.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "claims.h"
#include "common/clock.h"
#include "engine/gpu/engine.h"
#include "engine/host/engine.h"
#include "gpu_on_cpu/lanes.h"
#include "gpu_run.h"
#include "mirror.h"

namespace uccl_ep {

constexpr uint64_t kRunPatienceUsec = 100'000'000;  // beyond the arrival deadline

// One rank of either backend.
class HostRank {
 public:
  HostRank(const CudaRun& run, int rank) : run_(run), engine_(with_budget(config_of(run, rank))) {}
  HostEngine& engine() { return engine_; }

  Dispatched dispatch(const RankInput& in, bool cached) {
    DispatchArgs args = dispatch_args(run_, in, !cached);
    if (cached) args.plan = plan_;
    auto op = engine_.dispatch(args);
    EXPECT(op->wait_counts(kRunPatienceUsec));
    plan_ = op->plan();
    Dispatched got;
    got.make_room(run_, plan_->num_rows());
    got.counts = plan_->tokens_per_expert();
    op->give_output(output_of(run_, got));
    EXPECT(op->wait(nullptr, kRunPatienceUsec));
    if (run_.capacity >= 0) {
      got.counts.clear();
      got.fit_capacity(run_);
    }
    return got;
  }
  // Zeros add as much as what a capacity dropped.
  Combined combine(const RankInput& in, Dispatched from) {
    from.resize(run_, plan_->num_rows());
    Combined got;
    EXPECT(engine_.combine(combine_of(in, from, got))->wait(nullptr, kRunPatienceUsec));
    return got;
  }
  CombineArgs combine_of(const RankInput& in, Dispatched& from, Combined& got) const {
    CombineArgs args = combine_args(run_, in, from, got);
    args.plan = plan_;
    return args;
  }
  const std::shared_ptr<SavedPlan>& plan() const { return plan_; }

 private:
  static EngineConfig with_budget(EngineConfig config) {
    config.budget_bytes = 64 << 20;
    return config;
  }
  const CudaRun run_;
  HostEngine engine_;
  std::shared_ptr<SavedPlan> plan_;
};

inline std::string refusal_of(const std::function<void()>& make) {
  try {
    make();
  } catch (const UsageFailure& refused) {
    return refused.what();
  }
  return "";
}

// Kernels that run may write to memory that goes with the stack.
struct CloseOnFailure {
  GpuEngine& engine;
  const int before = std::uncaught_exceptions();
  ~CloseOnFailure() {
    if (std::uncaught_exceptions() > before) engine.close(true);
  }
};

class CudaRank {
 public:
  static EngineConfig config_of(const CudaRun& run, int rank) {
    EngineConfig config = uccl_ep::config_of(run, rank);
    config.budget_bytes = gpu_least_budget_bytes(config) + static_cast<uint64_t>(run.spare_bytes);
    return config;
  }

  CudaRank(const CudaRun& run, int rank)
      : run_(run), rank_(rank), engine_(config_of(run, rank), rank, run.num_sms, std::max(run.num_sms, run.stage_sms)) {
    EXPECT(cudaSetDevice(rank) == cudaSuccess);
    EXPECT(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
  }
  ~CudaRank() {
    engine_.close(true);
    cudaStreamDestroy(stream_);
  }
  GpuEngine& engine() { return engine_; }
  bool had_counts() const { return plan_ != nullptr; }

  Dispatched dispatch(const RankInput& in, bool cached) {
    Dispatched got;
    const CloseOnFailure guard{engine_};
    DispatchArgs args = dispatch_args(run_, in, !cached);
    if (!cached) args.capacity = run_.capacity;
    args.pad_to_capacity = run_.pad_to_capacity;
    if (!cached) args.max_tokens = run_.max_tokens;
    args.plan = cached ? plan_ : nullptr;
    args.stream = stream_;
    auto op = engine_.dispatch(args);
    if (op->is_guessed() || op->counts_known()) give(*op, got, cached);
    const uint64_t deadline = now_usec() + kRunPatienceUsec + static_cast<uint64_t>(1e6 * run_.arrival_timeout_s);
    while (!op->wait_counts(0)) {
      EXPECT(now_usec() < deadline);
      usleep(200);
    }
    std::vector<uint8_t> unused = std::move(storage_);  // kernels may still look at it
    if (op->placed())
      storage_ = std::move(unused);
    else
      give(*op, got, cached);
    plan_ = op->plan();
    finish(*op);
    got.counts = plan_->tokens_per_expert();
    got.resize(run_, plan_->num_rows());
    return got;
  }
  Combined combine(const RankInput& in, Dispatched& from) {
    Combined got;
    const CloseOnFailure guard{engine_};
    finish(*engine_.combine(combine_of(in, from, got)));
    return got;
  }
  CombineArgs combine_of(const RankInput& in, Dispatched& from, Combined& got) const {
    CombineArgs args = combine_args(run_, in, from, got);
    args.plan = plan_;
    args.stream = stream_;
    return args;
  }
  cudaStream_t stream() const { return stream_; }
  const std::shared_ptr<SavedPlan>& plan() const { return plan_; }
  double stat(const std::string& name) const {
    for (const auto& [its, value] : engine_.stats())
      if (its == name) return value;
    throw std::logic_error("no stat " + name);
  }
  double sum_of_stats(const std::string& begin, const std::string& end) const {
    double sum = 0;
    for (const auto& [its, value] : engine_.stats())
      if (its.starts_with(begin) && its.ends_with(end)) sum += value;
    return sum;
  }

 private:
  void give(Operation& op, Dispatched& got, bool cached) {
    got.make_room(run_, op.plan()->num_rows());
    if (!cached) storage_.assign(op.plan()->num_bytes(), 0xDD);
    DispatchOutput output = output_of(run_, got);
    output.plan = storage_.data();
    output.stream = stream_;
    op.give_output(output);
  }
  void finish(Operation& op) {
    op.wait(stream_, 0);
    cudaStreamSynchronize(stream_);
    engine_.check();
  }

  const CudaRun run_;
  const int rank_;
  GpuEngine engine_;
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<SavedPlan> plan_;
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

// Until it goes: says what every lane waits for if that takes so long that a rank may hang. Deadlines of the ranks come
// later, and end the kernels.
inline std::jthread watch() {
  return std::jthread([](const std::stop_token& over) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any never;
    if (never.wait_for(lock, over, std::chrono::seconds(30), [&] { return over.stop_requested(); })) return;
    std::fprintf(stderr, "after 30 s:\n%s", gpu_on_cpu::report().c_str());
    std::fflush(stderr);
  });
}

// What an error says beside its text.
inline std::string told_by(const std::exception& caught) {
  std::string text = caught.what();
  if (const auto* failure = dynamic_cast<const CommunicationFailure*>(&caught)) {
    const ErrorRecord& record = failure->record();
    text += " (epoch " + std::to_string(record.epoch) + ", chunk " + std::to_string(record.chunk) + ", expected " +
            std::to_string(record.expected) + ", seen " + std::to_string(record.seen) + ")";
  }
  return text;
}

// Told for which rank the calling thread works from now on; -1: for none.
inline void (*on_rank)(int) = [](int) {};

// By threads, a rank each; throws the first failure by rank.
inline void by_ranks(int num_ranks, const std::function<void(int)>& body) {
  std::vector<std::string> failures(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank)
    threads.emplace_back([&, rank] {
      on_rank(rank);
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

// Images of a rank would have its handle.
template <typename Rank, typename Run>
std::vector<std::unique_ptr<Rank>> make_ranks(const Run& run) {
  constexpr bool kOnGpu = !std::is_same_v<Rank, HostRank>;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::string> handles;
  for (int rank = 0; rank < run.num_running(); ++rank) {
    if constexpr (kOnGpu)
      if (run.mirrored != 0) Mirror::prepare(Rank::config_of(run, rank));
    on_rank(rank);
    ranks.push_back(std::make_unique<Rank>(run, rank));
    handles.push_back(ranks.back()->engine().export_handle());
  }
  on_rank(-1);
  for (int rank = run.num_running(); rank < run.num_ranks(); ++rank)
    handles.push_back(handles[static_cast<size_t>(run.origin_of(rank))]);
  std::barrier meeting(run.num_running());
  by_ranks(run.num_running(), [&](int rank) {
    auto& engine = ranks[static_cast<size_t>(rank)]->engine();
    engine.connect(handles);
    if constexpr (kOnGpu) {
      meeting.arrive_and_wait();
      engine.share_memory([] {});
    }
    meeting.arrive_and_wait();
    engine.start();
  });
  return ranks;
}

// What each rank does, until it closes; at once if it fails.
template <typename Run, typename Rank>
void run_to_the_end(const Run& run, std::vector<std::unique_ptr<Rank>>& ranks,
                    const std::function<void(Rank&, int)>& body) {
  const std::jthread watching = watch();
  by_ranks(run.num_running(), [&](int r) {
    Rank& rank = *ranks[static_cast<size_t>(r)];
    std::string failure;
    try {
      body(rank, r);
    } catch (const std::exception& caught) {
      failure = told_by(caught);
    }
    rank.engine().close(!failure.empty());
    if (!failure.empty()) throw std::logic_error(failure);
  });
}

// A new plan and then the same one again, each there and back.
struct RoundResult {
  Dispatched dispatched[2];
  Combined combined[2];
};
template <typename Rank>
std::vector<std::vector<RoundResult>> results_of(const CudaRun& run, std::vector<std::unique_ptr<Rank>>& ranks) {
  std::vector<std::vector<RoundResult>> all(ranks.size());
  run_to_the_end<CudaRun, Rank>(run, ranks, [&](Rank& rank, int r) {
    for (int round = 0; round < run.rounds; ++round) {
      RoundResult result;
      const RankInput in(run, r, round);
      const auto be_late = [&] {
        if (r == run.num_ranks() - 1) usleep(run.late_usec);
      };
      for (int again = 0; again < 2; ++again) {
        be_late();
        result.dispatched[again] = rank.dispatch(in, again != 0);
        be_late();
        if (!run.fp8_codes && !run.combines_in_a_row)
          result.combined[again] = rank.combine(in, result.dispatched[again]);
      }
      for (int again = 0; again < 2 && run.combines_in_a_row; ++again) {
        // Other rows than those of the combine before.
        Dispatched from = result.dispatched[again];
        std::rotate(from.rows.begin(), from.rows.begin() + again * dtype_bytes(run.dtype), from.rows.end());
        result.combined[again] = rank.combine(in, from);
      }
      all[static_cast<size_t>(r)].push_back(std::move(result));
    }
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
        expect_same(a.weights, b.weights, where + "weights");
        expect_same(a.experts, b.experts, where + "experts");
        expect_same(a.metadata, b.metadata, where + "metadata");
        if (run.fp8_codes) continue;
        const Combined &c = ours[rank][round].combined[again], &d = theirs[rank][round].combined[again];
        expect_same(c.out, d.out, where + "combined rows");
        expect_same(c.weights, d.weights, where + "combined weights");
      }
}

// Tries a run with the seeds that UCCL_EP_CUDA_SEEDS=first:count names, or with one.
template <typename Run, typename Try>
void each_seed(Run run, Try attempt) {
  uint64_t first = 1, count = 1;
  if (const char* given = std::getenv("UCCL_EP_CUDA_SEEDS")) {
    char* rest = nullptr;
    first = std::strtoull(given, &rest, 10);
    count = *rest == ':' ? std::strtoull(rest + 1, nullptr, 10) : 1;
  }
  for (run.seed = first; run.seed < first + count; ++run.seed) {
    try {
      attempt(run);
    } catch (const std::exception& failure) {  // before another one hides it
      throw std::logic_error("UCCL_EP_CUDA_SEEDS=" + std::to_string(run.seed) + ": " + failure.what());
    }
  }
}

inline void same_as_host(const CudaRun& run) {
  gpu_on_cpu::disturb(0);
  auto hosts = make_ranks<HostRank>(run);
  const auto expected = results_of(run, hosts);
  std::vector<std::map<std::string, double>> host_stats;
  for (const auto& host : hosts) {
    const Stats stats = host->engine().stats();
    host_stats.emplace_back(stats.begin(), stats.end());
  }
  hosts.clear();
  gpu_on_cpu::disturb(run.seed);
  auto ranks = make_ranks<CudaRank>(run);
  compare(run, results_of(run, ranks), expected);
  for (size_t r = 0; r < ranks.size() && run.capacity < 0; ++r)
    for (const char* rows : {"rows.shipped", "rows.placed", "rows.folded", "rows.relayed"})
      if (ranks[r]->stat(rows) != host_stats[r][rows])
        throw std::logic_error(std::string(rows) + " of rank " + std::to_string(r) + ": " +
                               std::to_string(ranks[r]->stat(rows)) + " instead of " +
                               std::to_string(host_stats[r][rows]));
  for (const auto& rank : ranks)
    if (const double windows = rank->stat("windows");
        windows < static_cast<double>(run.least_windows) || windows > static_cast<double>(run.most_windows))
      throw std::logic_error(std::to_string(windows) + " windows");
  double tails = 0;
  for (const auto& rank : ranks) tails += rank->sum_of_stats("ship.tail.", ".chunks");
  if (tails < static_cast<double>(run.least_tails))
    throw std::logic_error("only " + std::to_string(tails) + " chunks of tails");
}

}  // namespace uccl_ep
