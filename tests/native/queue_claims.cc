// The command ring, immediates, and the flags and bells below them.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "claims.h"
#include "common/process.h"
#include "layout/wire.h"
#include "layout/words.h"
#include "proxy/post.h"
#include "queue/ring.h"
#include "sync/control.h"
#include "victim.h"

using namespace uccl_ep;

namespace {

struct Ring {
  explicit Ring(uint32_t capacity)
      : memory(static_cast<uint8_t*>(
            std::aligned_alloc(kLineBytes, round_up(CommandRing::bytes_for(capacity), kLineBytes)))) {
    std::memset(memory.get(), 0, CommandRing::bytes_for(capacity));
    ring = std::make_unique<CommandRing>(memory.get(), capacity);
  }
  CommandRingMemory::Slot& slot(uint32_t i) { return reinterpret_cast<CommandRingMemory*>(memory.get())->slots()[i]; }
  uint64_t published() { return reinterpret_cast<CommandRingMemory*>(memory.get())->taken.flag.read(); }

  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> memory;
  std::unique_ptr<CommandRing> ring;
};

bool same(const Command& a, const Command& b) {
  return a.channel == b.channel && a.num_bytes == b.num_bytes && a.serial == b.serial && a.unit == b.unit;
}

// What a careless consumer would do: trust a command whose first word is new.
bool first_word_is_new(const Ring&, CommandRingMemory::Slot& slot, bool phase) {
  return ((slot.word[0].load() & kCommandPhase) != 0) == phase;
}

CLAIM("a command survives the ring at the limits of its fields") {
  const Command edges[] = {{0, 0, 0},
                           {kCommandMaxChannel, kCommandMaxBytes, kCommandMaxSerial, kCommandMaxUnit},
                           {kCommandMaxChannel, 0, 1, kCommandMaxUnit},
                           {0, kCommandMaxBytes, kCommandMaxSerial - 1},
                           {1, uint64_t{1} << 32, uint64_t{1} << 33}};
  Ring r(2);
  for (int lap = 0; lap < 5; ++lap)
    for (const Command& c : edges) {
      Command out{};
      EXPECT(r.ring->push(c));
      EXPECT(r.ring->pop(out));
      EXPECT(same(c, out));
    }
}

CLAIM("limits of a command are refused at set-up, not cut off") {
  const uint64_t most_shared = uint64_t{kCommandMaxUnit} * kSharedUnitBytes;
  CommandRing::check_limits(uint64_t{kCommandMaxChannel} + 1, kCommandMaxBytes, most_shared);
  EXPECT_THROWS(UsageFailure, CommandRing::check_limits(uint64_t{kCommandMaxChannel} + 2, 1, 0));
  EXPECT_THROWS(UsageFailure, CommandRing::check_limits(1, kCommandMaxBytes + 1, 0));
  EXPECT_THROWS(UsageFailure, CommandRing::check_limits(1, 1, most_shared + 1));
  EXPECT_THROWS(UsageFailure, Ring(3));
  EXPECT_THROWS(UsageFailure, Ring(0));
  // Negative control: one more than the limit really is cut off, so somebody has to look.
  const Command cut = decode_command(encode_command({kCommandMaxChannel + 1, 1, 1}, false));
  EXPECT_EQ(cut.channel, 0u);
}

CLAIM("a full ring refuses and takes again once commands were taken") {
  for (uint32_t capacity : {1u, 2u, 8u}) {
    Ring r(capacity);
    for (uint32_t i = 0; i < capacity; ++i) EXPECT(r.ring->push({1, 2, i}));
    EXPECT(!r.ring->push({1, 2, 99}));
    Command c{};
    for (uint32_t i = 0; i < capacity; ++i) {
      EXPECT(r.ring->pop(c));
      EXPECT_EQ(c.serial, uint64_t{i});
    }
    EXPECT(!r.ring->pop(c));
    for (uint32_t i = 0; i < capacity; ++i) EXPECT(r.ring->push({1, 2, i}));
    EXPECT(!r.ring->push({1, 2, 99}));
  }
}

CLAIM("commands keep their order across many lap boundaries") {
  Ring r(4);
  uint64_t pushed = 0, popped = 0;
  for (int round = 0; round < 1000; ++round) {
    for (int i = 0; i < round % 5; ++i) pushed += r.ring->push({7, pushed, pushed});
    Command c{};
    while (r.ring->pop(c)) {
      EXPECT_EQ(c.serial, popped);
      EXPECT_EQ(c.num_bytes, popped);
      ++popped;
    }
  }
  EXPECT_EQ(pushed, popped);
  EXPECT(pushed > 1000);
}

CLAIM("a torn command is never taken, on any lap") {
  Ring r(2);
  Command c{};
  for (uint64_t serial = 0; serial < 8; ++serial) {
    const bool phase = serial / 2 % 2 == 0;
    const CommandWords words = encode_command({3, 4, serial}, phase);
    CommandRingMemory::Slot& slot = r.slot(serial % 2);
    const uint64_t old_word = slot.word[0].load();
    // Only the first word has arrived. Negative control: a consumer that looks at one word takes it.
    slot.word[0].store(words.word[0]);
    EXPECT(first_word_is_new(r, slot, phase));
    EXPECT(!r.ring->pop(c));
    // Only the second.
    slot.word[0].store(old_word);
    slot.word[1].store(words.word[1]);
    EXPECT(!r.ring->pop(c));
    slot.word[0].store(words.word[0]);
    EXPECT(r.ring->pop(c));
    EXPECT(same(c, Command{3, 4, serial}));
  }
}

CLAIM("the consumer index is published in batches and whenever the ring runs empty") {
  Ring r(16);
  Command c{};
  for (uint64_t i = 0; i < 16; ++i) EXPECT(r.ring->push({0, 0, i}));
  for (int i = 0; i < 3; ++i) EXPECT(r.ring->pop(c));
  EXPECT_EQ(r.published(), uint64_t{0});
  EXPECT(r.ring->pop(c));
  EXPECT_EQ(r.published(), uint64_t{4});
  for (int i = 0; i < 2; ++i) EXPECT(r.ring->pop(c));
  EXPECT_EQ(r.published(), uint64_t{4});
  while (r.ring->pop(c)) continue;
  EXPECT_EQ(r.published(), uint64_t{16});
}

CLAIM("a ring of its capacity is never full, however far the consumer's batches lag") {
  // Negative control: with room for the pending ones alone, bit_ceil(15 + 1), the last push is refused.
  for (uint32_t most_pending = 1; most_pending <= 200; ++most_pending) {
    const uint32_t capacity = command_capacity(most_pending);
    Ring r(capacity);
    Command c{};
    uint64_t pushed = 0, popped = 0;
    while (pushed < 4 * capacity) {
      while (pushed - popped < most_pending) EXPECT(r.ring->push({0, 0, pushed++}));
      EXPECT(r.ring->pop(c));
      EXPECT_EQ(c.serial, popped++);
    }
  }
}

CLAIM("two threads pass commands and the bytes written before them") {
  Ring r(8);
  constexpr uint64_t kCount = 100000;
  std::vector<uint64_t> payload(kCount);
  std::thread producer([&] {
    for (uint64_t i = 0; i < kCount; ++i) {
      payload[i] = i * 3;
      while (!r.ring->push({static_cast<uint32_t>(i & kCommandMaxChannel), i * 7 & kCommandMaxBytes, i})) sched_yield();
    }
  });
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < kCount;) {
    Command c{};
    if (!r.ring->pop(c)) {
      sched_yield();
      continue;
    }
    wrong += c.serial != i || c.num_bytes != (i * 7 & kCommandMaxBytes) || c.channel != (i & kCommandMaxChannel) ||
             payload[i] != i * 3;
    ++i;
  }
  producer.join();
  EXPECT_EQ(wrong, uint64_t{0});
}

CLAIM("an immediate survives at the limits of its fields") {
  for (ImmType type : {ImmType::kData, ImmType::kCredit, ImmType::kProbe})
    for (uint32_t channel : {0u, 1u, kMaxChannels - 1})
      for (uint32_t serial : {0u, 1u, (1u << kImmSerialBits) - 1}) {
        const Imm imm = decode_imm(encode_imm(type, channel, serial));
        EXPECT(imm.type == type);
        EXPECT_EQ(imm.channel, channel);
        EXPECT_EQ(imm.serial, serial);
      }
  EXPECT_EQ(decode_imm(encode_imm(ImmType::kData, 5, (uint64_t{1} << 40) + 9)).serial, 9u);
}

CLAIM("a cookie survives at the limits of its fields") {
  for (PostKind kind : {PostKind::kData, PostKind::kProbe})
    for (uint32_t index : {0u, kMaxCookieIndex})
      for (uint32_t slot : {0u, kMaxRingSlots, UINT32_MAX}) {
        const Cookie c = decode_cookie(encode_cookie({kind, index, slot}));
        EXPECT(c.kind == kind && c.index == index && c.slot == slot);
      }
}

CLAIM("a serial within two rings of the expected one is widened exactly, also where its bits wrap") {
  const uint64_t span = uint64_t{1} << kImmSerialBits;
  for (uint64_t near :
       {uint64_t{0}, uint64_t{5}, span - 1, span, span + 1, 5 * span + span / 2, (uint64_t{1} << 50) + 3})
    for (int64_t diff : {int64_t{0}, int64_t{1}, int64_t{-1}, int64_t{kMaxRingSlots}, -int64_t{kMaxRingSlots},
                         2 * int64_t{kMaxRingSlots} - 1, -2 * int64_t{kMaxRingSlots}}) {
      if (diff < 0 && near < static_cast<uint64_t>(-diff)) continue;
      const uint64_t serial = near + static_cast<uint64_t>(diff);
      EXPECT_EQ(widen_serial(static_cast<uint32_t>(serial & (span - 1)), near), serial);
    }
  // Negative control: further away it is mistaken, so the limit on windows is needed.
  const uint64_t far = 3 * span + span / 2 + 1;
  EXPECT(widen_serial(static_cast<uint32_t>(far & (span - 1)), 3 * span) != far);
}

CLAIM("no serial within reach is mistaken for another: tried for every distance, and around every wrap") {
  const int64_t span = int64_t{1} << kImmSerialBits;
  uint64_t wrong = 0, tried = 0;
  auto attempt = [&](int64_t near, int64_t distance) {
    const uint64_t serial = static_cast<uint64_t>(near + distance);
    if (near + distance < 0) return;
    wrong +=
        widen_serial(decode_imm(encode_imm(ImmType::kData, 0, serial)).serial, static_cast<uint64_t>(near)) != serial;
    ++tried;
  };
  for (int64_t near : {int64_t{0}, int64_t{1}, span / 2 - 1, span / 2, span - 1, span, 7 * span + 3, int64_t{1} << 60})
    for (int64_t distance = -kImmSerialReach; distance < kImmSerialReach; ++distance) attempt(near, distance);
  for (int64_t near = 0; near < 2 * span; ++near)  // every value of the low bits, without and with a lap behind
    for (int64_t distance : {int64_t{1}, int64_t{kMaxRingSlots}, kImmSerialReach - 1})
      for (int64_t sign : {1, -1}) attempt(near, sign * distance);
  EXPECT_EQ(wrong, uint64_t{0});
  EXPECT(tried > 18 * static_cast<uint64_t>(span));
  // Negative control: one further is mistaken, to either side.
  attempt(3 * span, kImmSerialReach);
  attempt(3 * span, -kImmSerialReach - 1);
  EXPECT_EQ(wrong, uint64_t{2});
}

CLAIM("a bell never loses a wake-up") {
  Bell bells[2];
  Flag turn;
  constexpr uint64_t kRounds = 20000;
  const uint64_t started = now_usec();
  auto play = [&](uint64_t side) {
    for (uint64_t round = side; round < kRounds; round += 2) {
      while (true) {
        const uint32_t ticket = bells[side].ticket();
        if (turn.read() == round) break;
        bells[side].wait(ticket, 60'000'000);  // a lost wake-up would cost a minute
      }
      turn.publish(round + 1);
      bells[1 - side].ring();
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  EXPECT(now_usec() - started < 50'000'000);
}

CLAIM("a ticket taken before the look at the flag ends the sleep, one taken after it does not") {
  Bell bell;
  const uint32_t before = bell.ticket();
  // Here the sleeper looks at its flag and finds nothing; then the flag is published.
  bell.ring();
  const uint32_t after = bell.ticket();
  uint64_t started = now_usec();
  bell.wait(before, 10'000'000);
  EXPECT(now_usec() - started < 5'000'000);
  started = now_usec();  // negative control: the wrong order sleeps until the deadline
  bell.wait(after, 50'000);
  EXPECT(now_usec() - started >= 49'000);
}

CLAIM("of many who post an error the first wins, and readers see all of it") {
  ControlBlock control;
  std::vector<std::thread> posters;
  uint64_t winners[8] = {};
  for (int i = 0; i < 8; ++i)
    posters.emplace_back([&, i] {
      ErrorRecord record;
      record.kind = ErrorKind::kTransport;
      record.rank = record.peer = i;
      record.set_message(std::string(200, static_cast<char>('a' + i)));
      winners[i] = post_error(control, record);
    });
  while (!control.error_claim.published()) sched_yield();
  const ErrorRecord seen = control.error;
  for (auto& poster : posters) poster.join();
  uint64_t num_winners = 0;
  for (uint64_t won : winners) num_winners += won;
  EXPECT_EQ(num_winners, uint64_t{1});
  EXPECT(winners[seen.rank] == 1 && seen.peer == seen.rank);
  EXPECT(std::string(seen.message) == std::string(200, static_cast<char>('a' + seen.rank)));
}

CLAIM("an error that is being written is waited for, and one whose writer died in between is an error all the same") {
  ControlBlock control, abandoned;
  control.rank = abandoned.rank = 3;
  EXPECT(control.error_claim.take() && abandoned.error_claim.take());
  std::thread writer([&] {
    usleep(20'000);
    control.error.kind = ErrorKind::kTransport;
    control.error_claim.publish();
  });
  EXPECT(posted_error(control).kind == ErrorKind::kTransport);
  writer.join();
  const ErrorRecord unknown = posted_error(abandoned);
  EXPECT(unknown.kind == ErrorKind::kPeerFailed && unknown.rank == 3 && unknown.peer == -1);
}

CLAIM("a process is alive until it ends, a zombie is gone, and we ourselves always live") {
  Victim victim;
  const ProcessWatch watch(victim.pid());
  EXPECT(watch.alive());
  EXPECT(ProcessWatch(getpid()).alive());
  EXPECT(ProcessWatch().alive());
  victim.end();
  const uint64_t deadline = now_usec() + 5'000'000;
  while (watch.alive() && now_usec() < deadline) usleep(1000);  // nobody has reaped it: it is a zombie
  EXPECT(!watch.alive());
  EXPECT(!ProcessWatch(victim.pid()).alive());
  EXPECT_EQ(victim.reap(), 0);
  EXPECT(!ProcessWatch(victim.pid()).alive());
  // Of another pid namespace the number says nothing.
  EXPECT(ProcessWatch(victim.pid(), pid_namespace() + 1).alive());
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
