// CUDA engines that close while replays of graphs are queued; kernels on the CPU.
#include <atomic>
#include <thread>

#include "blocked.h"
#include "gpu_on_cpu/streams.h"
#include "gpu_runs.h"

using namespace uccl_ep;

namespace {

// A rank's combine that waits in a stream behind other work, as a replay of a graph does. Its engine may go before it.
class Queued {
 public:
  Queued(const CudaRun& run, CudaRank& rank, int r) : in_(run, r, 0), got_(rank.dispatch(in_, false)) {
    EXPECT(cudaSetDevice(r) == cudaSuccess);
    EXPECT(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
    work_ = std::make_unique<Blocked>(stream_);
    CombineArgs args = rank.combine_of(in_, got_, sums_);
    args.stream = stream_;
    gpu_on_cpu::capture(stream_, &graph_);
    rank.engine().combine(args);
    gpu_on_cpu::capture(stream_, nullptr);
    EXPECT_EQ(graph_.host_nodes.size(), run.domain_of.back() > 0 ? 1u : 0u);
  }
  ~Queued() {
    work_.reset();
    cudaStreamDestroy(stream_);
  }
  // What the host does when a replay begins.
  void begin() {
    for (const auto& note : graph_.host_nodes) note();
  }
  // The replay begins, and ends.
  void run() {
    begin();
    work_.reset();
    EXPECT(cudaStreamSynchronize(stream_) == cudaSuccess);
  }

 private:
  const RankInput in_;
  Dispatched got_;
  Combined sums_;
  CpuGraph graph_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Blocked> work_;
};

using Ranks = std::vector<std::unique_ptr<CudaRank>>;
std::vector<std::unique_ptr<Queued>> queue_combines(const CudaRun& run, const Ranks& ranks) {
  std::vector<std::unique_ptr<Queued>> queued(ranks.size());
  by_ranks(run.num_ranks(), [&](int r) {
    const auto i = static_cast<size_t>(r);
    queued[i] = std::make_unique<Queued>(run, *ranks[i], r);
  });
  return queued;
}
const std::vector<std::vector<int>> kGroups = {{0}, {0, 0}, {0, 1}};

}  // namespace

CLAIM("an engine whose replay is queued closes when that has ended, with the others or without") {
  for (const bool abort : {false, true})
    for (const auto& domain_of : kGroups) {
      const CudaRun run = run_of(domain_of);
      const Ranks ranks = make_ranks<CudaRank>(run);
      const auto queued = queue_combines(run, ranks);
      by_ranks(run.num_ranks(), [&](int r) {
        const auto i = static_cast<size_t>(r);
        std::atomic<bool> is_closed{false};
        const std::jthread closer([&] {
          ranks[i]->engine().close(abort);
          is_closed = true;
        });
        usleep(300'000);
        EXPECT(!is_closed);
        queued[i]->run();
      });
    }
}
CLAIM("an engine closes though its GPU is never idle, and the replay finds memory and has to end") {
  for (const auto& domain_of : kGroups) {
    CudaRun run = run_of(domain_of);
    run.progress_timeout_s = 1;
    Ranks ranks = make_ranks<CudaRank>(run);
    const auto queued = queue_combines(run, ranks);
    const uint64_t started = now_usec();
    by_ranks(run.num_ranks(), [&](int r) { ranks[static_cast<size_t>(r)]->engine().close(true); });
    EXPECT(now_usec() - started >= 1'000'000);
    const uint64_t gone = now_usec();
    EXPECT(gone - started < 10'000'000);
    by_ranks(run.num_ranks(), [&](int r) { queued[static_cast<size_t>(r)]->run(); });
    EXPECT(now_usec() - gone < 10'000'000);  // deadlines are 60 s
    ranks.clear();
    for (const auto& replay : queued) replay->begin();  // it finds no engine
  }
}
CLAIM("an engine with no operation in a graph does not wait for the work of others") {
  const CudaRun run = run_of({0});
  auto ranks = make_ranks<CudaRank>(run);
  const RankInput in(run, 0, 0);
  ranks[0]->dispatch(in, false);
  cudaStream_t others = nullptr;
  EXPECT(cudaStreamCreateWithFlags(&others, cudaStreamNonBlocking) == cudaSuccess);
  {
    const Blocked work(others);
    const uint64_t started = now_usec();
    ranks[0]->engine().close(true);
    EXPECT(now_usec() - started < 10'000'000);
  }
  cudaStreamDestroy(others);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
