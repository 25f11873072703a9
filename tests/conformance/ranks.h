// Ranks of one process, each with a transport and a region, and the book of what was posted, arrived, and completed.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fixture.h"
#include "suite.h"

namespace conformance {

using namespace uccl_ep;

constexpr uint64_t kData = kPageBytes;  // payloads lie behind the control block

// ---- payloads -------------------------------------------------------------------------------------------------------
// Byte `i` of write `number`.
inline uint64_t pattern_word(uint64_t number, uint64_t word) {
  const uint64_t mixed = (number + 1) * 0x9E3779B97F4A7C15u + word * 0xBF58476D1CE4E5B9u;
  return mixed ^ (mixed >> 29);
}
inline void fill(uint8_t* at, uint64_t num_bytes, uint64_t number) {
  for (uint64_t i = 0; i < num_bytes; i += 8) {
    const uint64_t word = pattern_word(number, i / 8);
    std::memcpy(at + i, &word, std::min<uint64_t>(8, num_bytes - i));
  }
}
inline bool intact(const uint8_t* at, uint64_t num_bytes, uint64_t number) {
  for (uint64_t i = 0; i < num_bytes; i += 8) {
    const uint64_t word = pattern_word(number, i / 8);
    if (std::memcmp(at + i, &word, std::min<uint64_t>(8, num_bytes - i)) != 0) return false;
  }
  return true;
}
inline bool all_bytes_are(const uint8_t* at, uint64_t num_bytes, uint8_t value) {
  for (uint64_t i = 0; i < num_bytes; ++i)
    if (at[i] != value) return false;
  return true;
}

// A write's number as its immediate: all 32 bits are used, and have to survive.
constexpr uint32_t kMix = 2654435761u, kUnmix = 244002641u;
static_assert(kMix * kUnmix == 1);
constexpr uint32_t immediate_of(uint64_t number) { return static_cast<uint32_t>(number) * kMix; }
constexpr uint32_t number_of(uint32_t immediate) { return immediate * kUnmix; }

// ---- ranks ----------------------------------------------------------------------------------------------------------
struct RanksOptions {
  size_t num_ranks = 2;
  uint64_t region_bytes = 4 << 20;
  uint64_t largest_write_bytes = 1 << 20;
  uint64_t progress_timeout_usec = kPatientUsec;
  std::vector<int> labels;  // domains of the ranks; empty: every rank is a rail of all others
  LoopOptions loop;
  NicOptions nic = suite().nic;
};

inline TransportSetup setup_for(const RanksOptions& options, int rank, const TestRegion& region) {
  TransportSetup setup = setup_of(rank, options.num_ranks, region.registered());
  setup.largest_write_bytes = options.largest_write_bytes;
  if (!options.labels.empty()) {
    const Topology topo = Topology::from_labels(options.labels);
    setup.rails = topo.rails(rank);
    setup.all = topo.others(rank);
  }
  setup.progress_timeout_usec = suite().patient_usec(options.progress_timeout_usec);
  return setup;
}
inline std::unique_ptr<Transport> make_transport(const RanksOptions& options, const TransportSetup& setup) {
  TransportOptions all{options.loop, options.nic};
  all.nic.devices = suite().devices_of(setup.rank);
  return transport_named(suite().kind).make(setup, all);
}

class Ranks {
 public:
  explicit Ranks(const RanksOptions& options = {}) {
    std::vector<std::string> addresses;
    for (size_t rank = 0; rank < options.num_ranks; ++rank) {
      regions.push_back(std::make_unique<TestRegion>(options.region_bytes));
      transports.push_back(make_transport(options, setup_for(options, static_cast<int>(rank), *regions[rank])));
      addresses.push_back(transports[rank]->address());
    }
    for (auto& transport : transports) transport->connect(addresses);
    for (auto& transport : transports) transport->sealed();
  }
  Transport& operator[](size_t rank) { return *transports[rank]; }
  uint8_t* at(size_t rank, uint64_t offset) { return regions[rank]->base() + offset; }

  std::vector<std::unique_ptr<TestRegion>> regions;
  std::vector<std::unique_ptr<Transport>> transports;  // go before their regions
};

inline std::vector<Completion> poll_once(Transport& transport) {
  std::vector<Completion> out(64);
  out.resize(transport.poll(out));
  return out;
}

// Posts, whatever it takes: `meanwhile` polls. False: refused until the deadline.
template <typename Meanwhile>
bool post_patiently(Transport& transport, const WriteRequest& request, Meanwhile meanwhile) {
  const Deadline deadline;
  while (transport.post_write(request) == PostResult::kAgain) {
    transport.flush();
    meanwhile();
    if (deadline.over()) return false;
  }
  transport.flush();
  return true;
}

// ---- book -----------------------------------------------------------------------------------------------------------
// Of the writes between two ranks. Throws std::logic_error as soon as something is reported that cannot be.
class Book {
 public:
  Book(int sender, int receiver) : sender_(sender), receiver_(receiver) {}

  void posted(uint64_t number, uint64_t num_bytes) { writes_[number] = {num_bytes}; }
  void at_sender(const Completion& c) {
    if (c.kind == Completion::Kind::kArrival) wrong("the sender has an arrival", c.immediate);
    if (c.peer != receiver_) wrong("completed for rank " + std::to_string(c.peer), c.cookie);
    Write& write = found(c.cookie, "completed");
    if (write.ended) wrong("was completed twice", c.cookie);
    write.ended = true;
    ++num_ended_;
    if (c.kind == Completion::Kind::kFailure) {
      if (c.reason == nullptr || c.reason[0] == 0) wrong("failed without a reason", c.cookie);
      ++num_failed_;
    } else if (c.num_bytes != write.num_bytes) {
      wrong("was completed with " + std::to_string(c.num_bytes) + " bytes", c.cookie);
    }
  }
  // Returns the write's number if it is its first arrival, else -1.
  int64_t at_receiver(const Completion& c) {
    const uint64_t number = number_of(c.immediate);
    if (c.kind != Completion::Kind::kArrival) wrong("completed at the receiver", c.cookie);
    if (c.peer != sender_) wrong("arrived from rank " + std::to_string(c.peer), number);
    Write& write = found(number, "arrived");
    if (c.num_bytes != write.num_bytes) wrong("arrived with " + std::to_string(c.num_bytes) + " bytes", number);
    if (write.arrived) return -1;
    write.arrived = true;
    ++num_arrived_;
    return static_cast<int64_t>(number);
  }
  size_t num_posted() const { return writes_.size(); }
  size_t num_ended() const { return num_ended_; }
  size_t num_failed() const { return num_failed_; }
  size_t num_arrived() const { return num_arrived_; }
  bool complete() const { return num_ended_ == writes_.size() && num_arrived_ == writes_.size() && num_failed_ == 0; }
  void expect_complete() const {
    if (complete()) return;
    throw std::logic_error(std::to_string(writes_.size()) + " writes to rank " + std::to_string(receiver_) + ": " +
                           std::to_string(num_ended_) + " completed, " + std::to_string(num_failed_) +
                           " of them failed, " + std::to_string(num_arrived_) + " arrived");
  }

 private:
  struct Write {
    uint64_t num_bytes = 0;
    bool ended = false, arrived = false;
  };
  [[noreturn]] static void wrong(const std::string& what, uint64_t number) {
    throw std::logic_error("write " + std::to_string(number) + ": " + what);
  }
  Write& found(uint64_t number, const char* what) {
    const auto write = writes_.find(number);
    if (write == writes_.end()) wrong(std::string(what) + ", but was never posted", number);
    return write->second;
  }

  const int sender_, receiver_;
  std::map<uint64_t, Write> writes_;  // by number
  size_t num_ended_ = 0, num_failed_ = 0, num_arrived_ = 0;
};

// Polls both once; what arrives and completes goes into the book.
inline void poll_both(Book& book, Transport& sender, Transport& receiver) {
  for (auto& c : poll_once(sender)) book.at_sender(c);
  for (auto& c : poll_once(receiver)) book.at_receiver(c);
}

// Posts a write, whose cookie is its number, and polls both while it is refused.
inline void post(Book& book, Transport& sender, Transport& receiver, const WriteRequest& request) {
  book.posted(request.cookie, request.num_bytes);
  if (!post_patiently(sender, request, [&] { poll_both(book, sender, receiver); }))
    throw std::logic_error("write " + std::to_string(request.cookie) + " was refused until the deadline");
}
inline WriteRequest write_of(uint64_t number, int peer, uint64_t from, uint64_t to, uint64_t num_bytes) {
  return {peer, from, to, num_bytes, immediate_of(number), number};
}

// Polls both until the book is complete or the deadline is over.
inline void settle(Book& book, Transport& sender, Transport& receiver, uint64_t usec = kPatientUsec) {
  const Deadline deadline(usec);
  while (!book.complete() && !deadline.over()) poll_both(book, sender, receiver);
}

// Nothing more is reported for a while: what is late would show.
inline void expect_silence(Book& book, Transport& sender, Transport& receiver) {
  const Deadline pause(20'000);
  while (!pause.over()) poll_both(book, sender, receiver);  // throws: each is completed already
  book.expect_complete();
}

}  // namespace conformance
