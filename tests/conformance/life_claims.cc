// Connection, registration, and the end: nothing foreign gets in, nothing pending does harm.
#include <dirent.h>

#include <algorithm>
#include <thread>

#include "ranks.h"
#include "suite.h"

using namespace conformance;

namespace {

// ---- connection -----------------------------------------------------------------------------------------------------
struct Made {
  explicit Made(int rank, uint64_t generation = 1, size_t num_ranks = 2) : region(1 << 20) {
    RanksOptions options;
    options.num_ranks = num_ranks;
    options.region_bytes = 1 << 20;
    TransportSetup setup = setup_for(options, rank, region);
    setup.generation = generation;
    transport = make_transport(options, setup);
  }
  TestRegion region;
  std::unique_ptr<Transport> transport;
};

// Rank 0 of generation 1 takes `address` for rank 1's.
void connect_to(const std::string& address) {
  Made own(0);
  own.transport->connect({own.transport->address(), address});
}

CLAIM("a stale peer is refused: the same rank of another generation") {
  for (uint64_t generation : {uint64_t{0}, uint64_t{2}, UINT64_MAX}) {
    Made stale(1, generation);
    EXPECT_THROWS(CommunicationFailure, connect_to(stale.transport->address()));
  }
  Made right(1);
  connect_to(right.transport->address());  // negative control
}

CLAIM("a stranger is refused: another rank's address, none at all, and any that is cut short") {
  Made other(2, 1, 3);
  EXPECT_THROWS(CommunicationFailure, connect_to(other.transport->address()));
  EXPECT_THROWS(CommunicationFailure, connect_to(""));
  EXPECT_THROWS(CommunicationFailure, connect_to("loop1 of an earlier release"));
  EXPECT_THROWS(CommunicationFailure, connect_to(std::string(300, '\xff')));
  Made right(1);
  const std::string address = right.transport->address();
  for (size_t length : {size_t{1}, address.size() / 4, address.size() / 2})
    EXPECT_THROWS(CommunicationFailure, connect_to(address.substr(0, length)));
}

CLAIM("the error of a refused peer names it") {
  Made stale(1, 77);
  try {
    connect_to(stale.transport->address());
  } catch (const CommunicationFailure& failure) {
    EXPECT_EQ(failure.record().peer, 1);
    EXPECT(failure.record().kind == ErrorKind::kTransport);
    EXPECT(failure.record().message[0] != 0);
    return;
  }
  throw std::logic_error("it was not refused");
}

// ---- registration ---------------------------------------------------------------------------------------------------
CLAIM("a write outside of a region or to nobody is a typed error, posts nothing, and leaves the transport usable") {
  RanksOptions options;
  options.region_bytes = 1 << 20;
  const uint64_t end = options.region_bytes;
  Ranks ranks(options);
  std::memset(ranks.at(1, kData), 0x77, end - kData);
  for (const WriteRequest& bad :
       {write_of(1, 1, end - 4, kData, 8), write_of(2, 1, kData, end - 4, 8), write_of(3, 1, kData, UINT64_MAX - 3, 8),
        write_of(4, 1, UINT64_MAX - 3, kData, 8), write_of(5, 1, end, kData, 1), write_of(6, 1, kData, end, 1),
        write_of(7, 0, kData, kData, 8), write_of(8, 2, kData, kData, 8), write_of(9, -1, kData, kData, 8)})
    EXPECT_THROWS(CommunicationFailure, ranks[0].post_write(bad));
  Book book(0, 1);
  fill(ranks.at(0, end - 8), 8, 10);
  post(book, ranks[0], ranks[1], write_of(10, 1, end - 8, end - 8, 8));
  settle(book, ranks[0], ranks[1]);
  expect_silence(book, ranks[0], ranks[1]);
  EXPECT(intact(ranks.at(1, end - 8), 8, 10));
  EXPECT(all_bytes_are(ranks.at(1, kData), end - 8 - kData, 0x77));
}

SLOW_CLAIM("a region larger than 1 GiB takes writes of the largest size across every place where pieces may meet") {
  constexpr uint64_t kGib = uint64_t{1} << 30, kStep = kGib / 8, kBytes = 1 << 20;
  RanksOptions options;
  options.region_bytes = kGib + 2 * kStep;  // sparse: only pages that are written exist, unless a NIC pins them
  if (suite().kind != "loop") need_memory(3 * options.region_bytes);
  Ranks ranks(options);
  Book book(0, 1);
  for (uint64_t number = 0; number < 10; ++number) {
    // Across a border there, across none here, and the other way round.
    const uint64_t border = (number + 1) * kStep, from = border - (number % 2 ? kBytes / 2 : 0);
    const uint64_t to = std::min(border - (number % 2 ? 0 : kBytes / 3), options.region_bytes - kBytes);
    const uint64_t safe_from = std::min(from, options.region_bytes - kBytes);
    fill(ranks.at(0, safe_from), kBytes, number);
    post(book, ranks[0], ranks[1], write_of(number, 1, safe_from, to, kBytes));
    settle(book, ranks[0], ranks[1]);
    book.expect_complete();
    EXPECT(intact(ranks.at(1, to), kBytes, number));
  }
  EXPECT_THROWS(CommunicationFailure, ranks[0].post_write(write_of(99, 1, kData, options.region_bytes - 4, 8)));
}

// ---- the end --------------------------------------------------------------------------------------------------------
constexpr uint64_t kPendingBytes = 64 << 10;

// Writes in both directions, none of them polled for.
void leave_pending(Ranks& ranks) {
  for (uint64_t number = 0; number < 40; ++number)
    for (int rank : {0, 1}) {
      const uint64_t at = kData + number % 8 * kPendingBytes;
      ranks[static_cast<size_t>(rank)].post_write(write_of(number, 1 - rank, at, at, kPendingBytes));
    }
  for (auto& transport : ranks.transports) transport->flush();
}

CLAIM("a transport with writes pending goes at once, whichever rank goes first, without harm to the other") {
  for (size_t first : {0, 1})
    for (int polls : {0, 3}) {
      Ranks ranks;
      leave_pending(ranks);
      for (int i = 0; i < polls; ++i)
        for (auto& transport : ranks.transports) poll_once(*transport);
      const Deadline deadline(5'000'000);
      ranks.transports[first].reset();
      for (int i = 0; i < 100; ++i) poll_once(*ranks.transports[1 - first]);
      ranks.transports[1 - first].reset();
      EXPECT(!deadline.over());
    }
}

CLAIM("a transport that was never connected, or connected and never used, goes at once") {
  const Deadline deadline(5'000'000);
  {
    Made lonely(0);
  }
  {
    Ranks unused;
  }
  EXPECT(!deadline.over());
}

CLAIM("writes to a rank that went away end once each, done or failed with a reason, and others are served") {
  RanksOptions options;
  options.num_ranks = 3;
  options.progress_timeout_usec = 1'000'000;
  Ranks ranks(options);
  Book gone(0, 1), served(0, 2);
  auto poll = [&] {
    for (auto& c : poll_once(ranks[0])) (c.peer == 1 ? gone : served).at_sender(c);
    for (auto& c : poll_once(ranks[2])) served.at_receiver(c);
  };
  auto poll_all = [&] {
    poll();
    for (auto& c : poll_once(ranks[1])) gone.at_receiver(c);
  };
  gone.posted(0, 8);
  EXPECT(post_patiently(ranks[0], write_of(0, 1, kData, kData, 8), poll_all));
  for (const Deadline deadline; !gone.complete() && !deadline.over();) poll_all();
  gone.expect_complete();
  ranks.transports[1].reset();
  for (uint64_t number = 1; number <= 8; ++number)  // may be refused for good
    if (ranks[0].post_write(write_of(number, 1, kData, kData, 4096)) == PostResult::kPosted) gone.posted(number, 4096);
  for (uint64_t number = 0; number < 100; ++number) {
    served.posted(number, 4096);
    EXPECT(post_patiently(ranks[0], write_of(number, 2, kData, kData, 4096), poll));
  }
  for (const Deadline deadline; !(served.complete() && gone.num_ended() == gone.num_posted()) && !deadline.over();)
    poll();
  served.expect_complete();
  EXPECT_EQ(gone.num_ended(), gone.num_posted());
}

size_t num_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  size_t count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

CLAIM("ranks come and go many times, and leave no descriptor behind") {
  size_t before = 0;
  for (int lap = 0; lap < 12; ++lap) {
    Ranks ranks;
    Book book(0, 1);
    for (uint64_t number = 0; number < 10; ++number)
      post(book, ranks[0], ranks[1], write_of(number, 1, kData, kData, 512));
    settle(book, ranks[0], ranks[1]);
    book.expect_complete();
    if (lap == 1) before = num_descriptors();  // libraries keep some of the first time
    if (lap == 11) EXPECT_EQ(num_descriptors(), before);
  }
}

}  // namespace
