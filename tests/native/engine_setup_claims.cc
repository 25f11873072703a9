// Engines that are set up by ranks which have nothing but an all-gather of bytes.
#include "engine/group/setup.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>

#include "common/clock.h"
#include "engine/call.h"
#include "engine/group/domains.h"
#include "engine/group/handle.h"
#include "engine_runs.h"
#include "transport/registry.h"

using namespace uccl_ep;

namespace {

// An all-gather between threads. `change` puts other bytes in the place of a rank's.
class Room {
 public:
  using Change = std::function<void(int rank, const std::string& step, std::string& bytes)>;
  explicit Room(int ranks, Change change = {}) : ranks_(static_cast<size_t>(ranks)), change_(std::move(change)) {}

  AllGather of(int rank) {
    return [this, rank](const std::string& mine, const std::string& step) {
      std::unique_lock lock(mutex_);
      std::vector<std::string>& all = said_[step];
      all.resize(ranks_);
      all[static_cast<size_t>(rank)] = mine;
      if (change_) change_(rank, step, all[static_cast<size_t>(rank)]);
      ++count_[step];
      changed_.notify_all();
      if (!changed_.wait_for(lock, std::chrono::seconds(30), [&] { return count_[step] == ranks_; }))
        throw std::runtime_error("a rank did not come to " + step);
      return said_[step];
    };
  }

 private:
  const size_t ranks_;
  const Change change_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<std::string>> said_;
  std::map<std::string, size_t> count_;
};

EngineConfig wanted(int rank, int ranks, const std::vector<int>& domain_of) {
  EngineConfig config = config_of(rank, domain_of, {});
  config.num_ranks = ranks;
  config.generation = 0;
  config.transport = "auto";
  return config;
}

// A transport that tells which of the host's NICs a rank would share, and is "loop" otherwise.
std::map<int, std::pair<uint32_t, uint32_t>> seen_of_rank;  // index among so many
const RegisterTransport seen({"seen",
                              [](const TransportSetup& setup, const TransportOptions& options) {
                                seen_of_rank[setup.rank] = {setup.local_idx, setup.local_size};
                                return transport_named("loop").make(setup, options);
                              },
                              [](const TransportOptions&, size_t, size_t) { return uint64_t{0}; },
                              [](const TransportOptions&) { return Probe{true, "", LinkKind::kMemory}; }});

std::unique_ptr<Engine> host_engine(const EngineConfig& config) { return std::make_unique<HostEngine>(config); }

// What each rank says in the end: "", or its error.
std::vector<std::string> on_each(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> said(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        said[static_cast<size_t>(rank)] = std::string(error_name(error)) + ": " + error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return said;
}

void expect_all(const std::vector<std::string>& said, const std::string& text) {
  for (const std::string& one : said)
    if (one.find(text) == std::string::npos) throw std::logic_error("not in \"" + one + "\": " + text);
}

// Segments of this process.
int num_segments() {
  int found = 0;
  DIR* const folder = opendir("/dev/shm");
  const std::string ours = "uccl_ep." + std::to_string(getpid()) + ".";
  while (const dirent* entry = readdir(folder))
    if (std::string(entry->d_name).rfind(ours, 0) == 0) ++found;
  closedir(folder);
  return found;
}

CLAIM("ranks that have nothing but an all-gather are set up, find their domain, and dispatch") {
  constexpr int kRanks = 3;
  Room room(kRanks);
  const auto said = on_each(kRanks, [&](int rank) {
    SetUp made = set_up(wanted(rank, kRanks, {}), false, room.of(rank), host_engine);
    EXPECT(made.config.domain_of == std::vector<int>(kRanks, 0) && made.config.host_of == made.config.domain_of);
    EXPECT(made.config.generation != 0 && made.transport.name == "loop");
    RankRun(*made.engine, rank).dispatch_and_combine(true);
    made.engine->close(false);
  });
  for (const std::string& one : said) EXPECT(one == std::string());
  EXPECT_EQ(num_segments(), 0);
}

CLAIM("domains that are given are taken, and rows go between them") {
  constexpr int kRanks = 3;
  Room room(kRanks);
  const auto said = on_each(kRanks, [&](int rank) {
    SetUp made = set_up(wanted(rank, kRanks, {0, 1, 1}), false, room.of(rank), host_engine);
    EXPECT(made.config.domain_of == (std::vector<int>{0, 1, 1}) && made.config.host_of == std::vector<int>(kRanks, 0));
    RankRun(*made.engine, rank).dispatch_and_combine(false);
    made.engine->close(false);
  });
  for (const std::string& one : said) EXPECT(one == std::string());
}

CLAIM("a setting that differs is a mismatch on all ranks, which names both values") {
  Room room(2);
  const auto said = on_each(2, [&](int rank) {
    EngineConfig config = wanted(rank, 2, {});
    config.num_experts = rank == 0 ? 4 : 8;
    set_up(config, false, room.of(rank), host_engine);
  });
  expect_all(
      said,
      "RankMismatchError: ranks disagree on the configuration: rank 0 has num_experts = 4, rank 1 has num_experts = 8");
}

CLAIM("a group that cannot be is refused on all ranks, with the value and what is allowed") {
  const auto errors_of = [](const std::function<void(EngineConfig&)>& change) {
    Room room(2);
    return on_each(2, [&](int rank) {
      EngineConfig config = wanted(rank, 2, {});
      change(config);
      set_up(config, false, room.of(rank), host_engine);
    });
  };
  expect_all(errors_of([](EngineConfig& config) { config.domain_of = {0, 0, 1}; }),
             "ConfigError: domain_of = (0, 0, 1): allowed is a domain for each of the 2 ranks, or none");
  expect_all(errors_of([](EngineConfig& config) { config.num_ranks = 3; }),
             "ConfigError: the all-gather gave the bytes of 2 ranks: allowed are num_ranks = 3");
  const auto said = errors_of([](EngineConfig& config) { config.rank = config.rank == 1 ? 7 : 0; });
  expect_all({said[1]}, "ConfigError: rank = 7 of num_ranks = 2: allowed is 0 to num_ranks - 1");
  expect_all({said[0]}, "PeerFailed: creation, configuration: rank 1 failed with ConfigError: rank = 7");
}

CLAIM("a rank that fails in a step is an error of all ranks, and nothing is left behind") {
  Room room(3);
  const auto said = on_each(3, [&](int rank) {
    set_up(wanted(rank, 3, {}), false, room.of(rank), [&](const EngineConfig& config) {
      if (rank == 1) throw UsageFailure(UsageKind::kBudget, "no memory here");
      return host_engine(config);
    });
  });
  EXPECT(said[1] == std::string("MemoryBudgetError: no memory here"));
  expect_all({said[0], said[2]},
             "PeerFailed: creation, allocate: rank 1 failed with MemoryBudgetError: no memory here");
  EXPECT_EQ(num_segments(), 0);
}

CLAIM("bytes that no rank sends are an error that names the rank, in every step that reads them") {
  for (const char* step : {"configuration", "topology: reach"}) {
    Room room(2, [&](int rank, const std::string& in, std::string& bytes) {
      if (rank == 1 && in == step) bytes = "+nothing";
    });
    const auto said = on_each(2, [&](int rank) { set_up(wanted(rank, 2, {}), false, room.of(rank), host_engine); });
    // Rank 1 itself may fail with what rank 0 tells it.
    expect_all({said[0]}, std::string("TransportError: creation, ") + step + ": rank 1 sent 'nothing', which no rank");
    EXPECT(!said[1].empty());
  }
  EXPECT_EQ(num_segments(), 0);
}

CLAIM("ranks share the NICs of their host, whatever their domains; without hosts, those of the domain") {
  const auto of = [](int rank, const std::vector<int>& host_of) {
    EngineConfig config = config_of(rank, {0, 1, 0, 1, 0, 1}, {});
    config.host_of = host_of;
    config.transport = "seen";
    const HostEngine engine(config);
    return seen_of_rank[rank];
  };
  const std::vector<int> hosts = {0, 0, 0, 0, 1, 1};
  EXPECT(of(1, hosts) == std::pair(1u, 4u) && of(2, hosts) == std::pair(2u, 4u) && of(4, hosts) == std::pair(0u, 2u));
  EXPECT(of(1, {}) == std::pair(0u, 3u) && of(2, {}) == std::pair(1u, 3u) && of(4, {}) == std::pair(2u, 3u));
  expect_all(on_each(1, [&](int) { of(1, {0, 1}); }), "ConfigError: host_of must name a host for each of the ranks");
}

CLAIM("a rank whose memory cannot be mapped is no member of the domain") {
  const DomainProbe here("kernel"), there("another kernel"), gone("kernel");
  DomainOffer lost = decode_domain_offer(gone.offer());
  lost.nonce[0] ^= 1;
  const std::vector<std::string> offers = {here.offer(), there.offer(), encode_domain_offer(lost), gone.offer()};
  EXPECT(here.reach(0, offers) == std::string("1001"));
  EXPECT(there.reach(1, offers) == std::string("0100"));
}

// Removes each segment of this process that is not locked, as leftovers.py does. How many that were.
int sweep_once() {
  int swept = 0;
  DIR* const folder = opendir("/dev/shm");
  const std::string ours = "uccl_ep." + std::to_string(getpid()) + ".";
  while (const dirent* entry = readdir(folder)) {
    const std::string path = "/dev/shm/" + std::string(entry->d_name);
    if (std::string(entry->d_name).rfind(ours, 0) != 0) continue;
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) continue;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && unlink(path.c_str()) == 0) ++swept;
    close(fd);
  }
  closedir(folder);
  return swept;
}

CLAIM("a segment that a sweep meets before it is locked is made again") {
  std::atomic<bool> over = false;
  std::atomic<int> swept = 0;
  std::thread sweeper([&] {
    while (!over) swept += sweep_once();
  });
  int lost = 0;
  const uint64_t until = now_usec() + 20'000'000;
  for (int made = 0; (made < 200 || swept == 0) && now_usec() < until; ++made) {
    const Mapping segment = Mapping::create();
    if (access(("/dev/shm" + segment.name()).c_str(), F_OK) != 0) ++lost;
  }
  over = true;
  sweeper.join();
  EXPECT(swept > 0);
  EXPECT_EQ(lost, 0);
}

CLAIM("ranks that disagree on their domain are named") {
  const auto error_of = [](const std::vector<std::string>& reached) {
    const auto said = on_each(1, [&](int) { domains_of(0, reached); });
    return said[0];
  };
  EXPECT(error_of({"11", "11"}) == std::string());
  expect_all({error_of({"11", "01"})},
             "TopologyError: ranks disagree on their domain: rank 0 reaches the memory of "
             "[0, 1], rank 1 that of [1]");
  expect_all({error_of({"110", "111", "011"})}, "rank 1");  // not transitive
  expect_all({error_of({"01", "01"})}, "rank 0 does not reach its own memory");
  EXPECT(domains_of(0, {"1010", "0101", "1010", "0101"}) == (std::vector<int>{0, 1, 0, 1}));
}

CLAIM("bf16 rows are refused for every format of codes that has no rule for scales") {
  for (const RowFormat& format : kRowFormats) {
    if (format.scale_bytes == 0) continue;
    DispatchArgs args;
    args.hidden = 256;
    args.dtype = Dtype::kBf16;
    args.wire = format.id;
    args.expert_alignment = 1;
    args.has_routing = true;
    const CallLimits limits{.widest_row_bytes = 4096};
    if (AllScaleRules::has(format.id))
      check_call(args, limits);
    else
      EXPECT_THROWS(UsageFailure, check_call(args, limits));
  }
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
