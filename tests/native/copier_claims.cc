// Copies that a thread hands to engines: none is lost, none is told of too early, and nobody waits for the engines.
#include <cstring>
#include <mutex>
#include <numeric>
#include <string>

#include "claims.h"
#include "common/clock.h"
#include "transport/copier.h"

using namespace uccl_ep;

namespace {

constexpr uint64_t kForever = ~0ull;

[[noreturn]] void fail(const char* text) {
  ErrorRecord record;
  record.kind = ErrorKind::kTransport;
  record.set_message(text);
  throw CommunicationFailure(record);
}

// What the test sees and says; outlives the engines.
struct Bench {
  Flag allowed;  // copies up to this ticket are made; the next call waits
  Flag fails_at, look_fails, silent;  // silent: nothing is said to be done
  Counter calls, looks;
  std::vector<std::pair<uint64_t, uint64_t>> groups;  // first and last ticket of a call; read when the copier is gone
};

class Engines final : public CopyEngines {
 public:
  explicit Engines(Bench& bench) : bench_(bench) {}

  void enter_thread() override { thread_ = std::this_thread::get_id(); }
  void hand_over(std::span<const Copy> copies, uint64_t last) override {
    EXPECT(std::this_thread::get_id() == thread_);
    bench_.groups.emplace_back(last - copies.size() + 1, last);
    bench_.calls.add(1);
    if (bench_.fails_at.read() != 0 && last >= bench_.fails_at.read()) fail("the engine would not start");
    while (bench_.allowed.read() < last) sched_yield();
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.num_bytes);
    done_.publish(last);
  }
  void look() override {
    bench_.looks.add(1);
    if (bench_.look_fails.read() != 0) fail("the engine broke");
  }
  bool done(uint64_t ticket) const override { return bench_.silent.read() == 0 && done_.read() >= ticket; }

 private:
  Bench& bench_;
  std::thread::id thread_;
  Flag done_;
};

// Numbers that are copied one by one.
struct Numbers {
  explicit Numbers(size_t count) : from(count), to(count, ~0ull) { std::iota(from.begin(), from.end(), 1); }
  uint64_t start(Copier& copier, size_t i) { return copier.start(&to[i], &from[i], sizeof(uint64_t)); }
  std::vector<uint64_t> from, to;
};

// Asks as a proxy does, for at most two seconds.
bool comes(Copier& copier, uint64_t ticket) {
  for (const uint64_t end = now_usec() + 2'000'000; now_usec() < end;) {
    copier.flush();
    if (copier.done(ticket)) return true;
  }
  return false;
}

// A copier of engines that make every copy at once.
struct Copying {
  explicit Copying(size_t count) : numbers(count) { bench.allowed.publish(kForever); }
  uint64_t start(size_t i) { return numbers.start(copier, i); }
  // The first copy, and nothing after it.
  void make_first() { EXPECT(comes(copier, start(0))); }
  Bench bench;
  Numbers numbers;
  Copier copier{std::make_unique<Engines>(bench)};
};

std::string error_of(Copier& copier, uint64_t ticket) {
  try {
    return comes(copier, ticket) ? "done" : "not done";
  } catch (const CommunicationFailure& failure) {
    return failure.what();
  }
}
bool soon(const std::function<bool()>& is_so, uint64_t within_usec = 2'000'000) {
  for (const uint64_t end = now_usec() + within_usec; now_usec() < end;)
    if (is_so()) return true;
  return false;
}

}  // namespace

CLAIM("every copy is made once, in order, in calls that never have two groups") {
  Bench bench;
  bench.allowed.publish(kForever);
  constexpr size_t kCopies = 5000;  // more than have room at once
  Numbers numbers(kCopies);
  {
    Copier copier(std::make_unique<Engines>(bench));
    for (size_t i = 0; i < kCopies; ++i) EXPECT_EQ(numbers.start(copier, i), i + 1);
    EXPECT(comes(copier, kCopies));
    EXPECT(numbers.to == numbers.from);
  }
  uint64_t before = 0;
  for (const auto& [first, last] : bench.groups) {
    EXPECT_EQ(first, before + 1);
    EXPECT_EQ((first - 1) / CopyEngines::kGroup, (last - 1) / CopyEngines::kGroup);
    before = last;
  }
  EXPECT_EQ(before, kCopies);
}

CLAIM("who starts copies and asks for them does not wait for an engine that hangs") {
  Bench bench;
  Numbers numbers(20);
  {
    Copier copier(std::make_unique<Engines>(bench));
    for (size_t i = 0; i < 20; ++i) numbers.start(copier, i);
    EXPECT(soon([&] { return bench.calls.value() == 1; }));
    for (uint64_t ticket = 1; ticket <= 20; ++ticket) EXPECT(!copier.done(ticket));
    bench.allowed.publish(kForever);
    EXPECT(comes(copier, 20));
  }
  EXPECT(numbers.to == numbers.from);
}

CLAIM("what was started is copied before the copier is gone") {
  for (int round = 0; round < 50; ++round) {
    Bench bench;
    bench.allowed.publish(kForever);
    Numbers numbers(13);
    {
      Copier copier(std::make_unique<Engines>(bench));
      numbers.start(copier, 0);
      EXPECT(soon([&] { return bench.calls.value() == 1; }));
      bench.silent.publish(round % 2);  // what follows is held back
      for (size_t i = 1; i < 13; ++i) numbers.start(copier, i);
    }
    EXPECT(numbers.to == numbers.from);
  }
}

CLAIM("the thread sleeps when its caller does, and comes at once for a copy") {
  Copying copying(2);
  auto& [bench, numbers, copier] = copying;
  copying.make_first();
  usleep(20'000);  // the thread falls asleep
  const uint64_t looks = bench.looks.value();
  for (int nap = 0; nap < 20; ++nap) {
    usleep(2000);
    for (int pass = 0; pass < 20; ++pass) copier.flush();
  }
  EXPECT(bench.looks.value() - looks <= 1);
  copying.start(1);
  EXPECT(soon([&] { return copier.done(2); }, 300'000));  // without flush()
  // A caller that is awake keeps the thread awake.
  usleep(20'000);
  const uint64_t asleep = bench.looks.value();
  const auto stays_awake = [&] {
    copier.flush();
    return bench.looks.value() - asleep > 10;
  };
  EXPECT(soon(stays_awake, 300'000));  // without a call it looks once a second
  // So does who says that copies are to come.
  usleep(20'000);
  const uint64_t told = bench.looks.value();
  copier.wake();
  EXPECT(soon([&] { return bench.looks.value() > told; }, 300'000));
}

CLAIM("an engine's error is an error of the copies that are not made, and of all that follow") {
  Copying copying(12);
  auto& [bench, numbers, copier] = copying;
  copying.make_first();
  bench.fails_at.publish(2);
  const uint64_t failed = copying.start(1);
  EXPECT(error_of(copier, failed).find("would not start") != std::string::npos);
  EXPECT(copier.done(1));
  for (size_t i = 2; i < 12; ++i) copying.start(i);
  for (uint64_t ticket = 3; ticket <= 12; ++ticket)
    EXPECT(error_of(copier, ticket).find("would not start") != std::string::npos);
  EXPECT_EQ(numbers.to[11], ~0ull);
}

CLAIM("an error that comes up while nothing is handed over is one of the next copy") {
  Copying copying(1);
  auto& [bench, numbers, copier] = copying;
  EXPECT(soon([&] { return bench.looks.value() > 0; }));
  const uint64_t looks = bench.looks.value();
  bench.look_fails.publish(1);
  EXPECT(soon([&] {
    copier.flush();
    return bench.looks.value() > looks;
  }));
  EXPECT(error_of(copier, copying.start(0)).find("broke") != std::string::npos);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
