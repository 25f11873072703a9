// What arrives is what was posted: bytes before their arrival, each write once, any size, any alignment, any amount.
#include <algorithm>
#include <thread>

#include "broken.h"
#include "ranks.h"
#include "suite.h"

using namespace conformance;

namespace {

// ---- an arrival implies its data ------------------------------------------------------------------------------------
constexpr uint64_t kSlotBytes = 32 << 10;
constexpr uint64_t kSlots = 16;
uint64_t slot_offset(uint64_t round) { return kData + round % kSlots * kSlotBytes; }
uint64_t round_bytes(uint64_t round) {  // many small ones, some large
  const uint64_t mixed = pattern_word(round, 1);
  return 1 + mixed % (mixed >> 32 & 7 ? 512 : kSlotBytes);
}

// The receiver of the rounds, in a thread of its own: checks every byte as soon as a round arrives. It polls to the
// end: a sender may need that for its last reports.
struct Receiver {
  void run(Ranks& ranks, uint64_t num_rounds, const Flag& stop) {
    while (stop.read() == 0)
      for (auto& c : poll_once(ranks[1])) {
        const uint64_t round = number_of(c.immediate);
        if (c.kind != Completion::Kind::kArrival || round >= num_rounds) continue;
        Flag& slot = checked[round % kSlots];
        if (slot.own() > round) continue;  // a duplicate
        num_wrong += !intact(ranks.at(1, slot_offset(round)), round_bytes(round), round);
        slot.publish(round + 1);
      }
  }
  Flag checked[kSlots];  // the last round of the slot, + 1. Writer: the receiver; reader: the sender
  uint64_t num_wrong = 0;
};

// Sends the rounds from `sender`; a slot is used again when its last round was checked and is done.
bool send_rounds(Ranks& ranks, Transport& sender, uint64_t num_rounds, const Receiver& receiver) {
  std::vector<uint64_t> done(kSlots, 0);
  auto poll = [&] {
    for (auto& c : poll_once(sender)) {
      if (c.kind == Completion::Kind::kFailure) throw std::logic_error(c.reason);
      if (c.kind == Completion::Kind::kWriteDone) done[c.cookie % kSlots] = c.cookie + 1;
    }
  };
  auto free = [&](uint64_t round) {
    return round < kSlots ||
           (done[round % kSlots] > round - kSlots && receiver.checked[round % kSlots].read() > round - kSlots);
  };
  const Deadline deadline(3 * kPatientUsec);
  for (uint64_t round = 0; round < num_rounds + kSlots && !deadline.over(); ++round) {
    while (!free(round) && !deadline.over()) poll();
    if (round >= num_rounds) continue;  // only waits
    const uint64_t offset = slot_offset(round), num_bytes = round_bytes(round);
    fill(ranks.at(0, offset), num_bytes, round);
    if (!post_patiently(sender, {1, offset, offset, num_bytes, immediate_of(round), round}, poll)) return false;
  }
  return !deadline.over();
}

// How many rounds had arrived without their bytes.
uint64_t early_arrivals(Ranks& ranks, Transport& sender, uint64_t num_rounds) {
  Receiver receiver;
  Flag stop;
  std::thread thread([&] { receiver.run(ranks, num_rounds, stop); });
  bool sent = false;
  std::string why = "the rounds took too long";
  try {
    sent = send_rounds(ranks, sender, num_rounds, receiver);
  } catch (const std::exception& failure) {
    why = failure.what();
  }
  stop.publish(1);
  thread.join();
  if (!sent) throw std::logic_error(why);
  return receiver.num_wrong;
}

CLAIM("an arrival implies its data: a receiver that checks every byte at once finds all of them, every time") {
  for (const Variant& variant : variants()) {
    RanksOptions options;
    options.loop = variant.loop;
    Ranks ranks(options);
    EXPECT_EQ(early_arrivals(ranks, ranks[0], 4000), uint64_t{0});
  }
}

CLAIM("that check notices an arrival that is reported before its data") {
  Ranks ranks;
  EarlyImmediate early(std::move(ranks.transports[0]), 20);
  EXPECT(early_arrivals(ranks, early, 400) > 0);  // a receiver that is not scheduled sees none
}

// ---- each write once ------------------------------------------------------------------------------------------------
// Posts `num_writes`, each to a place of its own, and expects of them what the contract says.
void expect_each_once(Ranks& ranks, Transport& sender, uint64_t num_writes, uint64_t deadline_usec = kPatientUsec) {
  constexpr uint64_t kBytes = 200;
  Book book(0, 1);
  auto poll = [&] {
    for (auto& c : poll_once(sender)) book.at_sender(c);
    for (auto& c : poll_once(ranks[1])) {
      const int64_t number = book.at_receiver(c);
      if (number >= 0)
        EXPECT(
            intact(ranks.at(1, kData + static_cast<uint64_t>(number) * kBytes), kBytes, static_cast<uint64_t>(number)));
    }
  };
  for (uint64_t number = 0; number < num_writes; ++number) {
    const uint64_t offset = kData + number * kBytes;
    fill(ranks.at(0, offset), kBytes, number);
    book.posted(number, kBytes);
    EXPECT(post_patiently(sender, {1, offset, offset, kBytes, immediate_of(number), number}, poll));
  }
  settle(book, sender, ranks[1], deadline_usec);
  book.expect_complete();
  expect_silence(book, sender, ranks[1]);
  for (uint64_t number = 0; number < num_writes; ++number)
    EXPECT(intact(ranks.at(1, kData + number * kBytes), kBytes, number));
}

CLAIM("in whatever order, exactly what was posted arrives and completes, and each write is done exactly once") {
  for (const Variant& variant : variants()) {
    RanksOptions options;
    options.loop = variant.loop;
    Ranks ranks(options);
    expect_each_once(ranks, ranks[0], 3000);
  }
}

CLAIM("that check notices bytes and writes that are lost, and reports that are doubled or missing") {
  for (Breach breach : {Breach::kLosesBytes, Breach::kLosesWrite, Breach::kReportsTwice, Breach::kSwallowsReport}) {
    Ranks ranks;
    Breaching sender(std::move(ranks.transports[0]), breach, 50);
    EXPECT_THROWS(std::logic_error, expect_each_once(ranks, sender, 200, 300'000));
  }
}

CLAIM("both directions at once keep apart what belongs to whom") {
  Ranks ranks;
  constexpr uint64_t kWrites = 500, kBytes = 1000, kHalf = 2 << 20;
  Book books[2] = {Book(0, 1), Book(1, 0)};
  auto poll = [&] {
    for (size_t rank : {0, 1})
      for (auto& c : poll_once(ranks[rank]))
        c.kind == Completion::Kind::kArrival ? void(books[1 - rank].at_receiver(c)) : books[rank].at_sender(c);
  };
  auto offset_of = [&](size_t rank, uint64_t number) { return kData + rank * kHalf + number * kBytes; };
  for (uint64_t number = 0; number < kWrites; ++number)
    for (size_t rank : {0, 1}) {
      const uint64_t offset = offset_of(rank, number), label = 2 * number + rank;
      fill(ranks.at(rank, offset), kBytes, label);
      books[rank].posted(label, kBytes);
      const WriteRequest request{1 - static_cast<int>(rank), offset, offset, kBytes, immediate_of(label), label};
      EXPECT(post_patiently(ranks[rank], request, poll));
    }
  for (const Deadline deadline; !deadline.over() && !(books[0].complete() && books[1].complete());) poll();
  for (size_t rank : {0, 1}) {
    books[rank].expect_complete();
    for (uint64_t number = 0; number < kWrites; ++number)
      EXPECT(intact(ranks.at(1 - rank, offset_of(rank, number)), kBytes, 2 * number + rank));
  }
}

// ---- sizes ----------------------------------------------------------------------------------------------------------
CLAIM("a write without bytes brings its immediate and touches no memory") {
  Ranks ranks;
  std::memset(ranks.at(0, kData), 0x11, 4096);
  std::memset(ranks.at(1, kData), 0x22, 4096);
  Book book(0, 1);
  for (uint64_t number = 0; number < 100; ++number)
    post(book, ranks[0], ranks[1], write_of(number, 1, kData, kData, 0));
  settle(book, ranks[0], ranks[1]);
  book.expect_complete();
  EXPECT(all_bytes_are(ranks.at(1, kData), 4096, 0x22));
}

CLAIM("every 32-bit immediate comes as it was sent") {
  Ranks ranks;
  for (uint32_t immediate : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xfffffffeu, UINT32_MAX, 0x01020304u}) {
    EXPECT(post_patiently(ranks[0], {1, kData, kData, 8, immediate, UINT64_MAX - immediate}, [&] {
      EXPECT(poll_once(ranks[0]).empty());
      EXPECT(poll_once(ranks[1]).empty());
    }));
    bool arrived = false, done = false;
    for (const Deadline deadline; !(arrived && done) && !deadline.over();) {
      for (auto& c : poll_once(ranks[0])) done |= c.cookie == UINT64_MAX - immediate;
      for (auto& c : poll_once(ranks[1])) arrived |= c.immediate == immediate;
    }
    EXPECT(arrived && done);
  }
}

// One write of each size at each of `num_alignments` places of a line, with guards around where it lands.
void expect_sizes(const std::vector<uint64_t>& sizes, uint64_t num_alignments) {
  constexpr uint64_t kGuard = 64, kRoom = (1 << 20) + 4 * kGuard, kTo = kData + 2 * kRoom;
  RanksOptions options;
  options.region_bytes = kTo + 2 * kRoom;
  Ranks ranks(options);
  uint64_t number = 0;
  for (uint64_t num_bytes : sizes)
    for (uint64_t i = 0; i < num_alignments; ++i) {
      const uint64_t from = kData + i * 64 / num_alignments, to = kTo + kGuard + (37 * i + number / 64) % 64;
      fill(ranks.at(0, from), num_bytes, ++number);
      std::memset(ranks.at(1, to - kGuard), 0x5a, num_bytes + 2 * kGuard);
      Book book(0, 1);
      post(book, ranks[0], ranks[1], write_of(number, 1, from, to, num_bytes));
      settle(book, ranks[0], ranks[1]);
      book.expect_complete();
      const bool right = intact(ranks.at(1, to), num_bytes, number) &&
                         all_bytes_are(ranks.at(1, to - kGuard), kGuard, 0x5a) &&
                         all_bytes_are(ranks.at(1, to + num_bytes), kGuard, 0x5a);
      if (!right)
        throw std::logic_error(std::to_string(num_bytes) + " bytes from " + std::to_string(from % 64) + " to " +
                               std::to_string(to % 64) + " modulo 64 landed wrong");
    }
}

CLAIM("1 byte to 4 KiB land exactly where they should at all alignments") {
  expect_sizes({1, 2, 3, 4, 7, 8, 9, 15, 16, 31, 63, 64, 65, 127, 255, 256, 257, 511, 1023, 1500, 4095, 4096}, 64);
}

CLAIM("4 KiB to 1 MiB land exactly where they should, at alignments all over a line") {
  expect_sizes({4097, 8191, 16384, 65535, 65536, 65537, 262144, (1 << 20) - 1, 1 << 20}, 16);
}

// ---- amounts --------------------------------------------------------------------------------------------------------
SLOW_CLAIM("more than 2^32 bytes arrive intact, and are counted") {
  constexpr uint64_t kBytes = 1 << 20, kWrites = (uint64_t{1} << 32) / kBytes + 3, kInFlight = 8;
  RanksOptions options;
  options.region_bytes = kData + kInFlight * kBytes;
  Ranks ranks(options);
  Book book(0, 1);
  uint64_t posted = 0, arrived_bytes = 0;
  auto offset_of = [&](uint64_t number) { return kData + number % kInFlight * kBytes; };
  auto poll = [&] {
    for (auto& c : poll_once(ranks[0])) book.at_sender(c);
    for (auto& c : poll_once(ranks[1])) {
      const int64_t number = book.at_receiver(c);
      if (number < 0) continue;
      arrived_bytes += c.num_bytes;
      EXPECT(intact(ranks.at(1, offset_of(static_cast<uint64_t>(number))), kBytes, static_cast<uint64_t>(number)));
    }
  };
  for (const Deadline deadline(30 * kPatientUsec); book.num_arrived() < kWrites || book.num_ended() < kWrites;) {
    EXPECT(!deadline.over());
    // A place is used again when all before it are done and checked: simple, and keeps eight in flight.
    const bool round_over = book.num_ended() == posted && book.num_arrived() == posted;
    for (uint64_t i = 0; round_over && i < kInFlight && posted < kWrites; ++i, ++posted) {
      fill(ranks.at(0, offset_of(posted)), kBytes, posted);
      book.posted(posted, kBytes);
      EXPECT(post_patiently(ranks[0], write_of(posted, 1, offset_of(posted), offset_of(posted), kBytes), poll));
    }
    poll();
  }
  EXPECT_EQ(arrived_bytes, kWrites * kBytes);
  EXPECT(arrived_bytes > uint64_t{1} << 32);
}

}  // namespace
