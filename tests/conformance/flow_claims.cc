// Full queues, many writes in flight, peers that do not keep up, and windows.
#include <algorithm>

#include "ranks.h"
#include "suite.h"

using namespace conformance;

namespace {

constexpr uint64_t kMostPosts = 1 << 20;  // no queue is longer

uint64_t place(uint64_t number) { return kData + number % 4096 * 64; }

// Posts writes of 8 bytes to rank 1 without polling until one is refused; how many were posted.
uint64_t fill_queue(Ranks& ranks, Book& book) {
  for (uint64_t number = 0; number < kMostPosts; ++number) {
    if (ranks[0].post_write(write_of(number, 1, place(number), place(number), 8)) == PostResult::kAgain) return number;
    book.posted(number, 8);
  }
  throw std::logic_error("a queue took " + std::to_string(kMostPosts) + " writes");
}

CLAIM("a full queue refuses, takes again after polling, and nothing is lost or done that was refused") {
  RanksOptions options;
  options.loop.queue_depth = 64;
  Ranks ranks(options);
  Book book(0, 1);
  // A transport that connects when it is first used refuses until then.
  post(book, ranks[0], ranks[1], write_of(kMostPosts, 1, kData, kData, 8));
  settle(book, ranks[0], ranks[1]);
  book.expect_complete();
  const uint64_t posted = fill_queue(ranks, book);
  EXPECT(posted > 0);
  ranks[0].flush();
  for (int i = 0; i < 10; ++i) {  // refused again, or room has come meanwhile: both are right, and both count
    const uint64_t number = posted + static_cast<uint64_t>(i);
    if (ranks[0].post_write(write_of(number, 1, place(number), place(number), 8)) == PostResult::kPosted)
      book.posted(number, 8);
  }
  ranks[0].flush();
  settle(book, ranks[0], ranks[1]);
  book.expect_complete();
  for (uint64_t i = 0; i < 3 * posted; ++i)
    post(book, ranks[0], ranks[1], write_of(posted + 10 + i, 1, place(i), place(i), 8));
  settle(book, ranks[0], ranks[1]);
  expect_silence(book, ranks[0], ranks[1]);
}

CLAIM("thousands of writes are in flight at once, and each arrives intact and is done once") {
  constexpr size_t kRanks = 5;
  constexpr uint64_t kEach = 1024, kBytes = 64;
  RanksOptions options;
  options.num_ranks = kRanks;
  options.region_bytes = kData + kEach * kBytes;
  Ranks ranks(options);
  std::vector<Book> books;
  for (size_t peer = 0; peer < kRanks; ++peer) books.emplace_back(0, static_cast<int>(peer));
  auto poll = [&] {
    for (auto& c : poll_once(ranks[0])) books[static_cast<size_t>(c.peer)].at_sender(c);
    for (size_t peer = 1; peer < kRanks; ++peer)
      for (auto& c : poll_once(ranks[peer])) books[peer].at_receiver(c);
  };
  for (uint64_t i = 0; i < kEach; ++i) fill(ranks.at(0, kData + i * kBytes), kBytes, i);
  uint64_t peak = 0;
  for (uint64_t number = 0; number < kEach; ++number)
    for (size_t peer = 1; peer < kRanks; ++peer) {
      const uint64_t at = kData + number * kBytes;
      books[peer].posted(number, kBytes);
      EXPECT(post_patiently(ranks[0], write_of(number, static_cast<int>(peer), at, at, kBytes), poll));
      uint64_t in_flight = 0;
      for (auto& book : books) in_flight += book.num_posted() - book.num_ended();
      peak = std::max(peak, in_flight);
    }
  for (size_t peer = 1; peer < kRanks; ++peer) {
    for (const Deadline deadline; !books[peer].complete() && !deadline.over();) poll();
    books[peer].expect_complete();
    for (uint64_t i = 0; i < kEach; ++i) EXPECT(intact(ranks.at(peer, kData + i * kBytes), kBytes, i));
  }
  if (peak < 1000) throw std::logic_error("never more than " + std::to_string(peak) + " writes were in flight");
}

CLAIM("a peer that does not poll holds up no other, and gets all that it was sent once it polls") {
  constexpr uint64_t kSlow = 16, kBytes = 16 << 10, kWrites = 300;
  RanksOptions options;
  options.num_ranks = 3;
  options.region_bytes = kData + kSlow * kBytes;
  Ranks ranks(options);
  Book slow(0, 2), quick(0, 1);
  auto sort = [&](const Completion& c) { (c.peer == 2 ? slow : quick).at_sender(c); };
  auto poll = [&] {
    for (auto& c : poll_once(ranks[0])) sort(c);
    for (auto& c : poll_once(ranks[1])) quick.at_receiver(c);
  };
  auto poll_all = [&] {
    poll();
    for (auto& c : poll_once(ranks[2])) slow.at_receiver(c);
  };
  auto at = [&](uint64_t number) { return kData + number % kSlow * kBytes; };
  auto to_slow = [&](uint64_t number) { return write_of(number, 2, at(number), at(number), kBytes); };
  for (uint64_t number = 0; number < kSlow; ++number) fill(ranks.at(0, at(number)), kBytes, number);
  slow.posted(0, kBytes);
  EXPECT(post_patiently(ranks[0], to_slow(0), poll_all));  // both may have to poll until they are connected
  uint64_t num_slow = 1;
  while (num_slow < kSlow && ranks[0].post_write(to_slow(num_slow)) == PostResult::kPosted)
    slow.posted(num_slow++, kBytes);  // the queue to a peer that does not poll may be short
  for (uint64_t number = 0; number < kWrites; ++number) {
    quick.posted(number, kBytes);
    EXPECT(post_patiently(ranks[0], write_of(number, 1, at(number), at(number), kBytes), poll));
  }
  for (const Deadline deadline; !quick.complete() && !deadline.over();) poll();
  quick.expect_complete();
  for (; num_slow < kSlow; ++num_slow) {
    slow.posted(num_slow, kBytes);
    EXPECT(post_patiently(ranks[0], to_slow(num_slow), poll_all));
  }
  for (const Deadline deadline; !slow.complete() && !deadline.over();) poll_all();
  slow.expect_complete();
  for (uint64_t number = 0; number < kSlow; ++number)
    for (size_t rank : {1, 2}) EXPECT(intact(ranks.at(rank, at(number)), kBytes, number));
}

// ---- windows --------------------------------------------------------------------------------------------------------
constexpr uint64_t kLimitedBytes = 1000;

WriteRequest limited(uint64_t number) {
  WriteRequest request = write_of(number, 1, place(number), place(number), kLimitedBytes);
  request.limited = true;
  return request;
}

// Writes that were posted, without polling, before the limit was reached.
uint64_t writes_until_closed(Ranks& ranks, Book& book, uint64_t first) {
  for (uint64_t count = 0; count < 1000; ++count) {
    if (!ranks[0].has_room(kLimitedBytes)) return count;
    book.posted(first + count, kLimitedBytes);
    if (ranks[0].post_write(limited(first + count)) != PostResult::kPosted)
      throw std::logic_error("a queue is shorter than the limit");
  }
  throw std::logic_error("the limit does not hold");
}

void expect_window(uint64_t window_bytes, uint32_t window_ops, uint64_t most) {
  RanksOptions options;
  options.nic.window_bytes = window_bytes;
  options.nic.window_ops = window_ops;
  Ranks ranks(options);
  Book book(0, 1);
  post(book, ranks[0], ranks[1], write_of(1'000'000, 1, kData, kData, 8));  // connects; not counted
  settle(book, ranks[0], ranks[1]);
  book.expect_complete();
  for (uint64_t lap = 0; lap < 3; ++lap) {  // what was given back is there again, no more and no less
    EXPECT_EQ(writes_until_closed(ranks, book, lap * 1000), most * suite().num_nics);
    // Credits, errors and heartbeats do not ask, and do not count.
    for (uint64_t i = 0; i < 5; ++i)
      post(book, ranks[0], ranks[1], write_of(100'000 + lap * 1000 + i, 1, kData, kData, 8));
    settle(book, ranks[0], ranks[1]);
    book.expect_complete();
    EXPECT(ranks[0].has_room(kLimitedBytes));
  }
}

CLAIM("a limit of operations holds exactly so many writes") {
  for (uint32_t ops : {1u, 2u, 7u}) expect_window(0, ops, ops);
}

CLAIM("a limit of bytes holds exactly what fits, and always one write") {
  expect_window(3 * kLimitedBytes, 0, 3);
  expect_window(4 * kLimitedBytes - 1, 0, 3);
  expect_window(1, 0, 1);
}

CLAIM("of two limits the tighter one holds") {
  expect_window(3 * kLimitedBytes, 2, 2);
  expect_window(2 * kLimitedBytes, 3, 2);
}

}  // namespace
