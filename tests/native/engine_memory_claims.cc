// A host engine that finds no memory: an error of all ranks, and the end of nothing else.
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>

#include "claims.h"
#include "engine_runs.h"

using namespace uccl_ep;

namespace {

enum class Of { kNobody, kCallers, kEngines };  // whose allocations fail
std::atomic<Of> fails{Of::kNobody};
std::atomic<int64_t> left_before{0};  // so many succeed before
std::atomic<int64_t> left_to_fail{0};
thread_local bool calls = false;  // this thread is a caller of engines

bool is_to_fail() {
  const Of of = fails;
  if (of == Of::kNobody || calls != (of == Of::kCallers)) return false;
  return left_before.fetch_sub(1) <= 0 && left_to_fail.fetch_sub(1) > 0;
}

// True if an allocation failed.
bool has_failed(int64_t num_failures) { return left_to_fail < num_failures; }

void let_fail(Of of, int64_t num_before, int64_t num_failures) {
  left_before = num_before;
  left_to_fail = num_failures;
  fails = of;
}

constexpr int64_t kAllLater = 1'000'000;

// What ends a round of calls of two ranks, by rank, if after `num_before` allocations of their workers and proxies
// `num_failures` more fail.
std::vector<std::string> ends(const std::vector<int>& domain_of, int64_t num_before, int64_t num_failures) {
  std::vector<std::string> found(domain_of.size());
  std::barrier ready(static_cast<ptrdiff_t>(domain_of.size()), []() noexcept {});
  std::mutex arming;
  by_engines(domain_of, {}, [&](Engine& engine, int rank) {
    calls = true;
    RankRun run(engine, rank);
    run.dispatch_and_combine(true);
    ready.arrive_and_wait();
    {
      const std::lock_guard lock(arming);
      if (fails == Of::kNobody) let_fail(Of::kEngines, num_before, num_failures);
    }
    try {
      run.dispatch_and_combine(true);
    } catch (const CommunicationFailure& failure) {
      found[static_cast<size_t>(rank)] = failure.what();
    }
    ready.arrive_and_wait();
    fails = Of::kNobody;
    ready.arrive_and_wait();
  });
  return found;
}

}  // namespace

__attribute__((noinline)) void* operator new(size_t size) {
  if (!is_to_fail())
    if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

CLAIM("a worker or proxy that finds no memory tells all ranks, whichever of its allocations fails") {
  for (const std::vector<int>& domain_of : {std::vector<int>{0, 0}, {0, 1}}) {
    bool fail = true;
    int num_tried = 0;
    for (int64_t before = 0; fail; before += 1 + before / 4) {
      for (int64_t failures : {int64_t{1}, kAllLater}) {
        const std::vector<std::string> found = ends(domain_of, before, failures);
        fail = has_failed(failures);
        num_tried += fail;
        for (const std::string& text : found) EXPECT_EQ(text.find("bad_alloc") != std::string::npos, fail);
      }
    }
    EXPECT(num_tried > 10);
  }
}

CLAIM("a call that finds no memory takes no number: the next one meets the other ranks'") {
  by_engines({0, 1}, {}, [&](Engine& engine, int rank) {
    calls = rank == 0;
    const std::vector<float> x(kHidden, 1.0f);
    const std::vector<int64_t> idx = {0, -1, kExperts - 1};
    DispatchArgs args;
    args.x = reinterpret_cast<const uint8_t*>(x.data());
    args.num_tokens = 1;
    args.hidden = kHidden;
    args.dtype = args.wire = Dtype::kFp32;
    args.has_routing = true;
    args.routing = {RoutingKind::kTopk, idx.data(), kTopk};
    engine.refused("a reason that every later call takes along", nullptr);
    std::shared_ptr<Operation> made;
    int num_failed = 0;
    while (made == nullptr) {
      const uint64_t before = engine.num_calls();
      if (calls) let_fail(Of::kCallers, num_failed, 1);
      try {
        made = engine.dispatch(args);
      } catch (const std::bad_alloc&) {
        EXPECT_EQ(engine.num_calls(), before);
        ++num_failed;
      }
      if (calls) fails = Of::kNobody;
    }
    EXPECT(!calls || num_failed > 3);
    EXPECT(made->wait_counts(kPatienceUsec));
    std::vector<float> rows(made->plan()->num_rows() * kHidden);
    DispatchOutput output;
    output.rows = reinterpret_cast<uint8_t*>(rows.data());
    made->give_output(output);
    EXPECT(made->wait(nullptr, kPatienceUsec));
    EXPECT_EQ(rows.size(), 2 * kHidden);
    for (float value : rows) EXPECT_EQ(value, 1.0f);
    calls = false;
  });
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
