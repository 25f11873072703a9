// Ranks over libfabric's tcp provider: several in one process, and one in a process of its own that a test may kill.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "claims.h"
#include "common/clock.h"
#include "common/units.h"
#include "fixture.h"
#include "transport/ofi/ofi.h"

namespace uccl_ep {

constexpr uint64_t kRegionBytes = 4 << 20;
constexpr uint64_t kPatienceUsec = 20'000'000;

inline NicOptions tcp() {
  NicOptions options;
  options.provider = "tcp";
  return options;
}

// Before a claim that needs libfabric.
inline void need_libfabric() {
  const Probe found = transport_named("ofi").probe({{}, tcp()});
  if (!found.usable) throw claims::Skip{found.text};
}

struct OfiRank {
  OfiRank(TransportSetup setup, std::unique_ptr<TestRegion> owned, ofi::Naming naming,
          const NicOptions& options = tcp())
      : region(std::move(owned)), transport(std::make_unique<ofi::OfiTransport>(setup, options, &naming)) {}

  std::vector<Completion> poll() {
    std::vector<Completion> out(64);
    out.resize(transport->poll(out));
    return out;
  }

  std::unique_ptr<TestRegion> region;
  std::unique_ptr<ofi::OfiTransport> transport;
};

inline std::unique_ptr<OfiRank> make_rank(int rank, size_t num_ranks, ofi::Naming naming = ofi::Naming::kTag,
                                          const std::function<void(TransportSetup&)>& change = {},
                                          const NicOptions& options = tcp(),
                                          std::unique_ptr<TestRegion> region = nullptr) {
  if (region == nullptr) region = std::make_unique<TestRegion>(kRegionBytes);
  TransportSetup setup = setup_of(rank, num_ranks, region->registered());
  setup.largest_write_bytes = 1 << 20;
  if (change) change(setup);
  return std::make_unique<OfiRank>(setup, std::move(region), naming, options);
}

// Connected ranks of this process.
struct OfiRanks {
  explicit OfiRanks(size_t num_ranks, ofi::Naming naming = ofi::Naming::kTag, const NicOptions& options = tcp()) {
    std::vector<std::string> addresses;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      ranks.push_back(make_rank(static_cast<int>(rank), num_ranks, naming, {}, options));
      addresses.push_back(ranks.back()->transport->address());
    }
    for (auto& rank : ranks) rank->transport->connect(addresses);
  }
  OfiRank& operator[](size_t rank) { return *ranks[rank]; }

  std::vector<std::unique_ptr<OfiRank>> ranks;
};

// Polls all ranks, each completion to `seen`, until the condition holds. False after the patience.
inline bool poll_until(OfiRanks& all, const std::function<bool()>& holds,
                       const std::function<void(size_t rank, const Completion&)>& seen,
                       uint64_t limit_usec = kPatienceUsec) {
  const uint64_t deadline = now_usec() + limit_usec;
  while (!holds()) {
    if (now_usec() > deadline) return false;
    for (size_t rank = 0; rank < all.ranks.size(); ++rank)
      if (all.ranks[rank] != nullptr)
        for (const Completion& completion : all[rank].poll()) seen(rank, completion);
  }
  return true;
}

constexpr uint64_t kData = kPageBytes;  // where payloads lie
// Those that tcp can be asked for.
constexpr ofi::Naming kNamings[] = {ofi::Naming::kTag, ofi::Naming::kMessage};

inline WriteRequest write_to(int peer, uint64_t offset, uint64_t num_bytes, uint32_t immediate) {
  return {peer, offset, offset, num_bytes, immediate, uint64_t{immediate} + 1000, Memory::kHost, false};
}

// Posts when there is room; polls meanwhile.
inline bool post(OfiRanks& all, size_t sender, const WriteRequest& request,
                 const std::function<void(size_t rank, const Completion&)>& seen) {
  return poll_until(all, [&] { return all[sender].transport->post_write(request) == PostResult::kPosted; }, seen);
}

// Rank 1 of two or more in a process of its own, which polls until it is killed.
class ForkedRank {
 public:
  explicit ForkedRank(size_t num_ranks) : region_(std::make_unique<TestRegion>(kRegionBytes)) {
    EXPECT(pipe(to_child_) == 0 && pipe(from_child_) == 0);
    pid_ = fork();
    if (pid_ == 0) _exit(run(num_ranks));
    address_ = get(from_child_[0]);
  }
  ~ForkedRank() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    for (int fd : {to_child_[0], to_child_[1], from_child_[0], from_child_[1]}) close(fd);
  }
  ForkedRank(const ForkedRank&) = delete;
  ForkedRank& operator=(const ForkedRank&) = delete;

  const std::string& address() const { return address_; }
  const TestRegion& region() const { return *region_; }  // of both processes
  void connect(const std::vector<std::string>& addresses) {
    for (const std::string& address : addresses) put(to_child_[1], address);
    EXPECT(get(from_child_[0]) == "connected");
  }
  // A SIGSTOP has taken effect when this returns.
  void signal(int number) const {
    kill(pid_, number);
    int status = 0;
    if (number == SIGSTOP) EXPECT(waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status));
  }

 private:
  int run(size_t num_ranks) {
    try {
      alarm(100);  // should the test itself be gone
      auto rank = make_rank(1, num_ranks, ofi::Naming::kTag, {}, tcp(), std::move(region_));
      put(from_child_[1], rank->transport->address());
      std::vector<std::string> addresses;
      for (size_t i = 0; i < num_ranks; ++i) addresses.push_back(get(to_child_[0]));
      rank->transport->connect(addresses);
      put(from_child_[1], "connected");
      for (;;) rank->poll();
    } catch (...) {
      return 1;
    }
  }
  static void put(int fd, const std::string& text) {
    const uint64_t size = text.size();
    EXPECT(write(fd, &size, sizeof(size)) == sizeof(size));
    EXPECT(write(fd, text.data(), size) == static_cast<ssize_t>(size));
  }
  static std::string get(int fd) {
    uint64_t size = 0;
    EXPECT(read(fd, &size, sizeof(size)) == sizeof(size));
    std::string text(size, 0);
    EXPECT(read(fd, text.data(), size) == static_cast<ssize_t>(size));
    return text;
  }

  std::unique_ptr<TestRegion> region_;
  int to_child_[2], from_child_[2];
  pid_t pid_;
  std::string address_;
};

}  // namespace uccl_ep
