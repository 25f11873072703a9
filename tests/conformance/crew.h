// Ranks as processes, for a parent that kills, freezes and continues them. The parent itself never touches a transport.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "ranks.h"

namespace conformance {

// What parent and ranks share. Each flag is written by the one that it belongs to.
struct CrewBoard {
  static constexpr int kMostRanks = 4;
  static constexpr size_t kMostAddressBytes = 64 << 10;
  struct Rank {
    Flag has_address, connected, progress, over;
    uint64_t address_bytes = 0;
    char address[kMostAddressBytes];
    char why[512] = {};  // it failed
  };
  Flag parent;  // what the parent has done, counted by it
  Rank ranks[kMostRanks];
};

// One rank, in its process.
struct Member {
  int rank;
  CrewBoard& board;
  TestRegion& region;
  Transport& transport;
  uint8_t* at(uint64_t offset) { return region.base() + offset; }
  CrewBoard::Rank& own() { return board.ranks[rank]; }
};

class Crew {
 public:
  using Body = std::function<void(Member&)>;

  Crew(const RanksOptions& options, const Body& body) : options_(options) {
    void* memory = mmap(nullptr, sizeof(CrewBoard), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::logic_error("no memory for the board");
    board_ = new (memory) CrewBoard;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      const pid_t pid = fork();
      if (pid == 0) run(rank, body);
      pids_.push_back(pid);
    }
  }
  ~Crew() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] <= 0) continue;
      kill(pids_[rank], SIGKILL);
      waitpid(pids_[rank], nullptr, 0);
    }
    munmap(board_, sizeof(CrewBoard));
  }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  CrewBoard& board() { return *board_; }
  void send(int rank, int signal) { kill(pids_[static_cast<size_t>(rank)], signal); }
  // The condition holds, or a rank says why not, or the deadline is over.
  template <typename Condition>
  void wait(Condition condition, const char* what, uint64_t usec = kPatientUsec) {
    const Deadline deadline(usec);
    while (!condition()) {
      for (int rank = 0; rank < num_ranks(); ++rank)
        if (board_->ranks[rank].over.read() == 2)
          throw std::logic_error("rank " + std::to_string(rank) + ": " + board_->ranks[rank].why);
      if (deadline.over()) throw std::logic_error(std::string("waited in vain: ") + what);
      usleep(500);
    }
  }
  void wait_over(int rank) {
    wait([&] { return board_->ranks[rank].over.read() == 1; }, "a rank never ended", 3 * kPatientUsec);
  }

 private:
  int num_ranks() const { return static_cast<int>(options_.num_ranks); }

  [[noreturn]] void run(int rank, const Body& body) {
    CrewBoard::Rank& own = board_->ranks[rank];
    try {
      TestRegion region(options_.region_bytes);
      auto transport = make_transport(options_, setup_for(options_, rank, region));
      connect(own, *transport);
      region.mapping.unlink();  // or a killed rank would leave its name
      Member member{rank, *board_, region, *transport};
      body(member);
      own.over.publish(1);
    } catch (const std::exception& failure) {
      std::snprintf(own.why, sizeof(own.why), "%s", failure.what());
      own.over.publish(2);
    }
    _exit(0);
  }
  void connect(CrewBoard::Rank& own, Transport& transport) {
    const std::string address = transport.address();
    if (address.size() > CrewBoard::kMostAddressBytes) throw std::logic_error("an address is too long");
    std::memcpy(own.address, address.data(), address.size());
    own.address_bytes = address.size();
    own.has_address.publish(1);
    await(&CrewBoard::Rank::has_address);
    std::vector<std::string> addresses;
    for (int peer = 0; peer < num_ranks(); ++peer)
      addresses.emplace_back(board_->ranks[peer].address, board_->ranks[peer].address_bytes);
    transport.connect(addresses);
    own.connected.publish(1);
    await(&CrewBoard::Rank::connected);
    transport.sealed();
  }
  void await(Flag CrewBoard::Rank::* flag) {
    const Deadline deadline;
    for (int peer = 0; peer < num_ranks(); ++peer)
      while ((board_->ranks[peer].*flag).read() == 0) {
        if (deadline.over()) throw std::logic_error("rank " + std::to_string(peer) + " never came");
        usleep(200);
      }
  }

  const RanksOptions options_;
  CrewBoard* board_ = nullptr;
  std::vector<pid_t> pids_;
};

}  // namespace conformance
