// Calls that a rank of CUDA engines refuses take their numbers in the order of its operations; kernels on the CPU.
#include <sys/mman.h>

#include <cstring>

#include "blocked.h"
#include "device/memory.h"
#include "gpu_on_cpu/streams.h"
#include "gpu_runs.h"

using namespace uccl_ep;

namespace {

constexpr uint64_t kPromptlyUsec = 20'000'000;  // deadlines are 40 and 60 s

CudaRun small_run_of(const std::vector<int>& domain_of) {
  CudaRun run;
  run.domain_of = domain_of;
  return run;
}

// What a call throws: a mismatch, in time.
std::string mismatch_of(const std::function<void()>& call) {
  const uint64_t started = now_usec();
  try {
    call();
  } catch (const CommunicationFailure& failure) {
    if (failure.record().kind != ErrorKind::kRankMismatch)
      throw std::logic_error(std::string("another kind of error: ") + failure.what());
    EXPECT(now_usec() - started < kPromptlyUsec);
    return failure.what();
  }
  throw std::logic_error("rows of different calls met");
}
void expect_text(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    if (text.find(part) == std::string::npos) throw std::logic_error("not in \"" + text + "\": " + part);
}

using Call = std::function<void(CudaRank&, const RankInput&, Dispatched&)>;
// What follows a dispatch, a call each.
const std::vector<std::pair<std::string, Call>>& calls() {
  static const std::vector<std::pair<std::string, Call>> all = {
      {"dispatch", [](CudaRank& rank, const RankInput& in, Dispatched&) { rank.dispatch(in, false); }},
      {"dispatch", [](CudaRank& rank, const RankInput& in, Dispatched&) { rank.dispatch(in, true); }},
      {"combine", [](CudaRank& rank, const RankInput& in, Dispatched& got) { rank.combine(in, got); }},
  };
  return all;
}

}  // namespace

CLAIM("a rank that goes on after a refusal is a mismatch on all ranks, which hear what it refused and why") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1}})
    for (const auto& [name, call] : calls()) {
      CudaRun run = small_run_of(domain_of);
      run.packets = {0, 256, 2};  // where headers land is not where packets of the own domain lie
      const int last = run.num_ranks() - 1;
      auto ranks = make_ranks<CudaRank>(run);
      by_ranks(run.num_ranks(), [&](int r) {
        CudaRank& rank = *ranks[static_cast<size_t>(r)];
        const RankInput in(run, r, 0);
        Dispatched got = rank.dispatch(in, false);
        if (r == last) rank.engine().refused("DtypeError: x is float64", rank.stream());
        const std::string text = mismatch_of([&] { call(rank, in, got); });
        const std::string who = "rank " + std::to_string(last);
        expect_text(text, {"call 2 of rank ", ", met call 3 of " + who + ", " + name + "(",
                           ": " + who + " refused call 2: DtypeError: x is float64"});
      });
    }
}
CLAIM("ranks that all refuse are in step, whatever their reasons, and get the same rows") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    const CudaRun run = small_run_of(domain_of);
    auto ranks = make_ranks<CudaRank>(run);
    by_ranks(run.num_ranks(), [&](int r) {
      CudaRank& rank = *ranks[static_cast<size_t>(r)];
      const RankInput in(run, r, 0);
      Dispatched got[2];
      Combined sums[2];
      for (int turn = 0; turn < 2; ++turn) {
        const uint64_t calls_before = rank.engine().num_calls();
        got[turn] = rank.dispatch(in, turn != 0);
        sums[turn] = rank.combine(in, got[turn]);
        EXPECT_EQ(rank.engine().num_calls(), calls_before + 2);
        for (int n = 0; n < 3; ++n) rank.engine().refused("reason " + std::to_string(r + n), rank.stream());
        EXPECT_EQ(rank.engine().num_calls(), calls_before + 5);
      }
      expect_same(got[0].rows, got[1].rows, "rows");
      expect_same(sums[0].out, sums[1].out, "sums");
      rank.engine().close(false);
    });
  }
}
CLAIM("what is queued before a refusal does not see it, and an error has the reason of its own refusal") {
  const CudaRun run = small_run_of({0, 0});
  auto ranks = make_ranks<CudaRank>(run);
  by_ranks(run.num_ranks(), [&](int r) {
    CudaRank& rank = *ranks[static_cast<size_t>(r)];
    const RankInput in(run, r, 0);
    Dispatched got = rank.dispatch(in, false);
    Combined before, after;
    if (r == 1) {
      Blocked stream(rank.stream());
      const auto op = rank.engine().combine(rank.combine_of(in, got, before));
      rank.engine().refused("the first", rank.stream());
      const auto next = rank.engine().combine(rank.combine_of(in, got, after));
      rank.engine().refused("the second", rank.stream());
      stream.end();
      cudaStreamSynchronize(rank.stream());
    } else {
      before = rank.combine(in, got);
      after = before;
    }
    const std::string text = mismatch_of([&] {
      if (r == 1) rank.engine().check();
      rank.combine(in, got);
    });
    expect_text(text, {"call 3 of rank 0, ", ", met call 4 of rank 1, ", "rank 1 refused call 3: the first"});
    EXPECT(std::any_of(before.out.begin(), before.out.end(), [](uint8_t byte) { return byte != 0xFF; }));
    if (r == 1) EXPECT(std::all_of(after.out.begin(), after.out.end(), [](uint8_t byte) { return byte == 0xFF; }));
  });
}
CLAIM("a call that is refused while a graph is captured takes its number outside of the graph") {
  const CudaRun run = small_run_of({0, 1});
  auto ranks = make_ranks<CudaRank>(run);
  by_ranks(run.num_ranks(), [&](int r) {
    CudaRank& rank = *ranks[static_cast<size_t>(r)];
    const RankInput in(run, r, 0);
    Dispatched got = rank.dispatch(in, false);
    if (r == 1) {
      CpuGraph graph;
      Blocked stream(rank.stream());  // what is captured runs later
      gpu_on_cpu::capture(rank.stream(), &graph);
      rank.engine().refused("in a capture", rank.stream());  // and has been counted when it returns
      gpu_on_cpu::capture(rank.stream(), nullptr);
      EXPECT(graph.host_nodes.empty());
    }
    const std::string text = mismatch_of([&] { rank.combine(in, got); });
    expect_text(text, {"rank 1 refused call 2: in a capture"});
  });
}
CLAIM("a rank that never comes is named with the call that it refused, and in its domain why") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    CudaRun run = small_run_of(domain_of);
    run.arrival_timeout_s = 2;
    auto ranks = make_ranks<CudaRank>(run);
    by_ranks(run.num_ranks(), [&](int r) {
      CudaRank& rank = *ranks[static_cast<size_t>(r)];
      const RankInput in(run, r, 0);
      Dispatched got = rank.dispatch(in, false);
      if (r == 1) {
        rank.engine().refused("InputError: capacity = -1", rank.stream());
        usleep(5'000'000);
        return;
      }
      std::string text;
      try {
        rank.combine(in, got);
      } catch (const CommunicationFailure& failure) {
        EXPECT(failure.record().kind == ErrorKind::kArrivalTimeout);
        text = failure.what();
      }
      expect_text(text, {"to enter the operation; rank 1 refused call 2"});
      if (domain_of[1] == 0) expect_text(text, {"call 2: InputError: capacity = -1"});
    });
  }
}

namespace {

// What an engine says to a call that it refuses; to one that it takes: nothing, and to one that it fails at: so.
std::string said_to(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageFailure& failure) {
    return std::to_string(static_cast<int>(failure.kind())) + " " + failure.what();
  }
  return "";
}

// To a right dispatch and a right combine, then to wrong ones. `others`: a plan of another engine.
template <typename Rank>
std::vector<std::string> said_by(Rank& rank, const CudaRun& run, const std::shared_ptr<SavedPlan>& others) {
  const RankInput in(run, 0, 0);
  Dispatched got = rank.dispatch(in, false);
  std::vector<std::string> all;
  const auto dispatch = [&](const std::function<void(DispatchArgs&)>& change) {
    DispatchArgs args = dispatch_args(run, in, true);
    change(args);
    all.push_back(said_to([&] { rank.engine().dispatch(args); }));
  };
  Combined sums;
  const auto combine = [&](const std::function<void(CombineArgs&)>& change) {
    CombineArgs args = rank.combine_of(in, got, sums);
    change(args);
    all.push_back(said_to([&] { rank.engine().combine(args); }));
  };
  all.push_back(said_to([&] { rank.combine(in, got); }));
  dispatch([](DispatchArgs& args) { args.hidden = 0; });
  dispatch([](DispatchArgs& args) { args.hidden += 1; });
  dispatch([](DispatchArgs& args) { args.hidden *= 2; });
  dispatch([](DispatchArgs& args) { args.dtype = args.wire = kFp32; });
  dispatch([](DispatchArgs& args) { args.dtype = args.wire = kFp8; });
  dispatch([&](DispatchArgs& args) { args.scales = in.weights.data(); });
  dispatch([&](DispatchArgs& args) {
    args.dtype = kFp8;
    args.scales = in.weights.data();
  });
  dispatch([](DispatchArgs& args) { args.num_metadata = 1; });
  dispatch([](DispatchArgs& args) { args.num_metadata = 1u << 30; });
  dispatch([](DispatchArgs& args) { args.expert_alignment = 0; });
  dispatch([](DispatchArgs& args) { args.expert_alignment = (1u << 20) + 1; });
  dispatch([](DispatchArgs& args) {
    args.compact = true;
    args.expert_alignment = 2;
  });
  dispatch([](DispatchArgs& args) { args.num_tokens = UINT32_MAX; });
  dispatch([](DispatchArgs& args) { args.has_routing = false; });
  dispatch([&](DispatchArgs& args) { args.plan = others; });
  dispatch([&](DispatchArgs& args) {
    args.has_routing = false;
    args.plan = rank.plan();
    args.num_tokens -= 1;
  });
  combine([](CombineArgs& args) { args.hidden += 1; });
  combine([](CombineArgs& args) { args.wire = kFp32; });
  combine([](CombineArgs& args) { args.dtype = args.wire = kFp8; });
  combine([](CombineArgs& args) { args.plan = nullptr; });
  combine([&](CombineArgs& args) { args.plan = others; });
  return all;
}

}  // namespace

CLAIM("engines of both memories refuse the same calls, in the same words") {
  CudaRun run = small_run_of({0});
  auto hosts = make_ranks<HostRank>(run), other_hosts = make_ranks<HostRank>(run);
  auto ranks = make_ranks<CudaRank>(run);
  other_hosts[0]->dispatch(RankInput(run, 0, 0), false);
  hosts[0]->dispatch(RankInput(run, 0, 0), false);
  ranks[0]->dispatch(RankInput(run, 0, 0), false);
  // Those of the other memory, for all engines here are of one generation.
  const auto by_host = said_by(*hosts[0], run, ranks[0]->plan());
  const auto by_cuda = said_by(*ranks[0], run, other_hosts[0]->plan());
  EXPECT_EQ(by_host.size(), by_cuda.size());
  for (size_t i = 0; i < by_host.size(); ++i) {
    if (by_host[i] != by_cuda[i])
      throw std::logic_error("\"" + by_host[i] + "\" and \"" + by_cuda[i] + "\" to call " + std::to_string(i));
    EXPECT_EQ(by_host[i].empty(), i == 0);  // the right one
  }
}
CLAIM("a combine whose rows kernels cannot name is refused before anything is launched; one row fewer is summed") {
  CudaRun run = small_run_of({0});
  run.dtype = run.wire = kFp32;
  run.hidden = 16384;
  run.with_weights = false;
  const uint64_t row_bytes = uint64_t{run.hidden} * sizeof(float), most = gpu::kMostRowsBytes / row_bytes;
  auto ranks = make_ranks<CudaRank>(run);
  const RankInput in(run, 0, 0);
  // Addresses: only the rows that come take memory.
  void* const rows =
      mmap(nullptr, (most + 1) * row_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  EXPECT(rows != MAP_FAILED);
  for (const uint64_t capacity : {most + 1, most}) {
    GpuEngine& engine = ranks[0]->engine();
    DispatchArgs args = dispatch_args(run, in, true);
    args.capacity = static_cast<int64_t>(capacity);
    args.stream = ranks[0]->stream();
    const auto sent = engine.dispatch(args);
    std::vector<uint8_t> plan(sent->plan()->num_bytes());
    DispatchOutput output;
    output.rows = static_cast<uint8_t*>(rows);
    output.plan = plan.data();
    output.stream = ranks[0]->stream();
    sent->give_output(output);
    Combined sums;
    sums.out.assign(in.num_tokens * row_bytes, 0);
    CombineArgs combine;
    combine.rows = output.rows;
    combine.hidden = run.hidden;
    combine.dtype = combine.wire = kFp32;
    combine.plan = sent->plan();
    combine.out = sums.out.data();
    combine.stream = ranks[0]->stream();
    const std::string said = said_to([&] { engine.combine(combine); });
    cudaStreamSynchronize(ranks[0]->stream());
    engine.check();
    EXPECT_EQ(said.empty(), capacity == most);
    if (capacity > most)
      expect_text(said, {"a combine of " + std::to_string(capacity) + " rows of 65536 bytes", "at most 68719476736"});
  }
  EXPECT(munmap(rows, (most + 1) * row_bytes) == 0);
}
CLAIM("more routing than a buffer holds is refused with what it holds, and then it works on") {
  CudaRun run = small_run_of({0});
  run.experts_per_rank = 64;
  run.window_tokens = 4160;
  run.spare_bytes = 0;
  auto ranks = make_ranks<CudaRank>(run);
  const RankInput in(run, 0, 0);
  const auto refused = [&](uint64_t tokens, uint32_t width, RoutingKind kind) {
    DispatchArgs args = dispatch_args(run, in, true);
    args.num_tokens = tokens;
    args.routing.width = width;
    args.routing.kind = kind;
    return said_to([&] { ranks[0]->engine().dispatch(args); });
  };
  EngineConfig enough = config_of(run, 0);
  enough.window_tokens = 5000;
  expect_text(refused(5000, 3, RoutingKind::kTopk),
              {"5000 tokens: ", "holds the routing of 4160; window_tokens = 5000 needs a budget_bytes of at least " +
                                    std::to_string(gpu_least_budget_bytes(enough))});
  expect_text(refused(65537, 3, RoutingKind::kTopk), {"65537 tokens: the CUDA backend has at most 65536"});
  expect_text(refused(4160, 32, RoutingKind::kTopk),
              {"4160 tokens with 32 experts each: ", "holds the routing of 131584 experts of tokens; more with more"});
  ranks[0]->dispatch(in, false);  // no refusal broke it
}
CLAIM("engines that connect and never start give everything back") {
  for (const auto& domain_of : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    const CudaRun run = small_run_of(domain_of);
    std::vector<std::unique_ptr<CudaRank>> ranks;
    std::vector<std::string> handles;
    for (int rank = 0; rank < run.num_ranks(); ++rank) {
      ranks.push_back(std::make_unique<CudaRank>(run, rank));
      handles.push_back(ranks.back()->engine().export_handle());
    }
    by_ranks(run.num_ranks(), [&](int r) {
      GpuEngine& engine = ranks[static_cast<size_t>(r)]->engine();
      engine.connect(handles);
      engine.share_memory([] {});
      engine.close(false);
      engine.close(true);
      EXPECT_THROWS(UsageFailure, engine.dispatch({}));
    });
  }
}
CLAIM("a close that waits for ranks or for kernels is cut short by an abort, and both return when all is given back") {
  const CudaRun run = small_run_of({0, 0});
  for (const bool has_work : {false, true}) {
    auto ranks = make_ranks<CudaRank>(run);
    GpuEngine& engine = ranks[0]->engine();
    cudaStream_t stream = nullptr;
    EXPECT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    const RankInput in(run, 0, 0);
    if (has_work) {  // of which rank 1 knows nothing
      DispatchArgs args = dispatch_args(run, in, true);
      args.stream = stream;
      engine.dispatch(args);
    }
    std::atomic<bool> ended{false};
    std::jthread first([&] {
      engine.close(false);
      ended = true;
    });
    usleep(300'000);
    const bool waited = !ended;
    const uint64_t began = now_usec();
    engine.close(true);
    EXPECT(now_usec() - began < kPromptlyUsec);
    EXPECT_THROWS(UsageFailure, engine.dispatch({}));
    first.join();
    EXPECT(waited && now_usec() - began < kPromptlyUsec);
    EXPECT_THROWS(CommunicationFailure, ranks[1]->engine().check());
    cudaStreamDestroy(stream);
  }
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
