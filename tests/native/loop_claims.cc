// The loop transport keeps transport.h's contract, and its faults are the ones that were asked for.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "claims.h"
#include "common/clock.h"
#include "common/units.h"
#include "fixture.h"
#include "transport/loop/loop.h"
#include "victim.h"

using namespace uccl_ep;

namespace {

constexpr uint64_t kRegionBytes = 4 << 20;
constexpr uint64_t kData = kPageBytes;  // where payloads lie

// Two connected ranks; rank 0 sends unless said otherwise.
struct Pair {
  explicit Pair(const LoopOptions& sender, const LoopOptions& receiver = {}) {
    for (int rank = 0; rank < 2; ++rank) regions.push_back(std::make_unique<TestRegion>(kRegionBytes));
    transports = connect_all(regions, {{sender, {}}, {receiver, {}}});
  }
  Transport& sender() { return *transports[0]; }
  Transport& receiver() { return *transports[1]; }

  // One 8-byte payload per write, at its own place, that says the write's number.
  PostResult post(uint64_t number, uint64_t num_bytes = 8) {
    const uint64_t offset = kData + number * num_bytes % (kRegionBytes - kData - num_bytes);
    std::memcpy(regions[0]->base() + offset, &number, sizeof(number));
    return sender().post_write({1, offset, offset, num_bytes, static_cast<uint32_t>(number), number});
  }
  uint64_t landed(uint64_t number, uint64_t num_bytes = 8) {
    uint64_t value;
    std::memcpy(&value, regions[1]->base() + kData + number * num_bytes % (kRegionBytes - kData - num_bytes),
                sizeof(value));
    return value;
  }

  std::vector<std::unique_ptr<TestRegion>> regions;
  std::vector<std::unique_ptr<Transport>> transports;
};

// Of two ranks.
std::unique_ptr<Transport> make(int rank, const TestRegion& region) {
  return transport_named("loop").make(setup_of(rank, 2, region.registered()), {});
}

std::vector<Completion> poll_once(Transport& transport) {
  std::vector<Completion> out(64);
  out.resize(transport.poll(out));
  return out;
}

// Polls both until `num_arrivals` came and `num_done` writes are flushed. What else comes is added too.
struct Seen {
  std::vector<uint32_t> arrivals;
  std::vector<uint64_t> done;
};
Seen poll_until(Pair& pair, size_t num_arrivals, size_t num_done, uint64_t limit_usec = 10'000'000) {
  Seen seen;
  const uint64_t deadline = now_usec() + limit_usec;
  while ((seen.arrivals.size() < num_arrivals || seen.done.size() < num_done) && now_usec() < deadline) {
    for (auto& c : poll_once(pair.sender())) seen.done.push_back(c.cookie);
    for (auto& c : poll_once(pair.receiver())) seen.arrivals.push_back(c.immediate);
  }
  return seen;
}

template <typename T>
bool ascending(const std::vector<T>& v) {
  return std::is_sorted(v.begin(), v.end());
}

CLAIM("writes arrive in order with their bytes, and each is flushed once") {
  Pair pair({});
  for (uint64_t i = 0; i < 500; ++i) EXPECT(pair.post(i + 1) == PostResult::kPosted);
  const Seen seen = poll_until(pair, 500, 500);
  EXPECT_EQ(seen.arrivals.size(), size_t{500});
  EXPECT_EQ(seen.done.size(), size_t{500});
  EXPECT(ascending(seen.arrivals) && ascending(seen.done));
  for (uint64_t i = 1; i <= 500; ++i) EXPECT_EQ(pair.landed(i), i);
}

CLAIM("nothing arrives before it was polled out by the sender, and the data is there before its immediate") {
  for (uint64_t seed : {0, 7}) {
    LoopOptions options;
    options.seed = seed;
    Pair pair(options);
    constexpr uint64_t kCount = 2000;
    uint64_t wrong = 0;
    std::thread receiver([&] {
      for (uint64_t n = 0; n < kCount;)
        for (auto& c : poll_once(pair.receiver())) {
          wrong += pair.landed(c.immediate, 1024) != c.immediate || c.num_bytes != 1024;
          ++n;
        }
    });
    uint64_t posted = 0, done = 0;
    while (done < kCount) {
      while (posted < kCount && posted - done < 32 && pair.post(posted + 1, 1024) == PostResult::kPosted) ++posted;
      done += poll_once(pair.sender()).size();
    }
    receiver.join();
    EXPECT_EQ(wrong, uint64_t{0});
  }
}

CLAIM("a sender that reports an arrival before its data would be noticed") {
  Pair pair({});
  loop::Address address = loop::decode_address(pair.receiver().address());
  // Its name is gone: use an inbox of our own, as a broken sender would use a real one.
  Mapping inbox = Mapping::create();
  inbox.grow(loop::inbox_bytes(address.inbox_slots, 2));
  uint8_t* const queue = inbox.base() + loop::inbox_queue_offset(address.inbox_slots, 0);
  loop::ArrivalWriter writer(queue, address.inbox_slots);
  loop::ArrivalReader reader(queue, address.inbox_slots);
  writer.put({8, 5, 0});
  EXPECT_EQ(reader.available(), uint64_t{1});
  EXPECT(pair.landed(reader.take().immediate) != 5);
}

CLAIM("a seed brings arrivals and completions out of order, each exactly once") {
  LoopOptions options;
  options.seed = 3;
  Pair pair(options);
  for (uint64_t i = 0; i < 300; ++i) EXPECT(pair.post(i) == PostResult::kPosted);
  Seen seen = poll_until(pair, 300, 300);
  EXPECT(!ascending(seen.arrivals) && !ascending(seen.done));
  std::sort(seen.arrivals.begin(), seen.arrivals.end());
  std::sort(seen.done.begin(), seen.done.end());
  for (uint32_t i = 0; i < 300; ++i) EXPECT(seen.arrivals[i] == i && seen.done[i] == i);
}

CLAIM("duplicates come as often as asked, and never after the write was flushed") {
  LoopOptions options;
  options.duplicate_rate = 0.5;
  options.seed = 11;
  Pair pair(options);
  constexpr uint64_t kCount = 400;
  std::map<uint64_t, int> arrivals;
  std::vector<bool> flushed(kCount, false);
  uint64_t posted = 0, num_done = 0, late = 0;
  while (num_done < kCount) {
    while (posted < kCount && posted - num_done < 40 && pair.post(posted) == PostResult::kPosted) ++posted;
    const auto done = poll_once(pair.sender());
    // Everything delivered before these were flushed is in the inbox by now.
    for (auto batch = poll_once(pair.receiver()); !batch.empty(); batch = poll_once(pair.receiver()))
      for (auto& c : batch) {
        late += flushed[c.immediate];
        ++arrivals[c.immediate];
      }
    for (auto& c : done) {
      flushed[c.cookie] = true;
      ++num_done;
    }
  }
  EXPECT_EQ(late, uint64_t{0});
  EXPECT(poll_once(pair.receiver()).empty());
  EXPECT_EQ(arrivals.size(), size_t{kCount});
  uint64_t twice = 0;
  for (auto& [number, times] : arrivals) {
    EXPECT(times == 1 || times == 2);
    twice += times == 2;
  }
  EXPECT(twice > kCount / 3 && twice < 2 * kCount / 3);
}

CLAIM("refused writes are refused as often as asked and leave no trace") {
  LoopOptions options;
  options.refuse_rate = 0.3;
  Pair pair(options);
  size_t posted = 0;
  for (uint64_t i = 0; i < 1000; ++i) posted += pair.post(i) == PostResult::kPosted;
  EXPECT(posted > 600 && posted < 800);
  const Seen seen = poll_until(pair, posted, posted);
  EXPECT_EQ(seen.arrivals.size(), posted);
  EXPECT(poll_until(pair, 1, 1, 10'000).arrivals.empty());
}

CLAIM("a link serialises bytes at its rate and saves nothing up while idle") {
  loop::EgressLink link(2.0);  // 2 bytes per nanosecond
  EXPECT_EQ(link.send(1000, 1000), uint64_t{1500});
  EXPECT_EQ(link.send(1000, 1000), uint64_t{2000});  // behind the first
  EXPECT_EQ(link.send(1'000'000, 1000), uint64_t{1'000'500});  // after a pause: no credit
  EXPECT_EQ(link.send(1'000'000, 1000), uint64_t{1'001'000});
  EXPECT_EQ(link.send(1'000'000, 100), uint64_t{1'000'050});  // small: not behind the data
  EXPECT_EQ(link.send(1'000'000, 1000), uint64_t{1'001'550});  // but its bytes count
  loop::EgressLink odd(3.0);  // a third of a nanosecond per byte is not lost to rounding
  uint64_t last = 0;
  for (int i = 0; i < 3000; ++i) last = odd.send(0, 1000);
  EXPECT(last == 999'999 || last == 1'000'000);
  loop::EgressLink open(0);
  EXPECT_EQ(open.send(5, 1 << 30), uint64_t{5});
}

CLAIM("a rate-limited stream runs at 98 to 100 percent of the cap, and no byte is early") {
  double best = 0;
  for (int attempt = 0; attempt < 3 && best < 0.98;
       ++attempt) {  // the lower bound needs a processor, which others use too
    LoopOptions options;
    options.gbytes_per_s = 0.1;
    Pair pair(options);
    constexpr uint64_t kChunk = 64 << 10, kCount = 1000;
    const uint64_t started = now_nsec();
    uint64_t posted = 0, done = 0, arrived = 0, last = started;
    while (done < kCount) {
      while (posted < kCount && pair.post(posted, kChunk) == PostResult::kPosted) ++posted;
      done += poll_once(pair.sender()).size();
      for (auto& c : poll_once(pair.receiver())) arrived += c.num_bytes;
      last = now_nsec();
      // The envelope: what arrived since the start had its time on the link. No burst can hide in it.
      EXPECT(static_cast<double>(arrived) <= static_cast<double>(last - started) * options.gbytes_per_s);
    }
    best = std::max(best,
                    static_cast<double>(kCount * kChunk) / static_cast<double>(last - started) / options.gbytes_per_s);
  }
  if (best < 0.98 || best > 1.0) throw std::logic_error("ran at " + std::to_string(best) + " of the cap");
}

CLAIM("after an idle time chunks still leave one by one, and latency is added to each") {
  LoopOptions options;
  options.gbytes_per_s = 0.1;
  options.latency_usec = 3000;
  Pair pair(options);
  EXPECT(pair.post(0, 100'000) == PostResult::kPosted);
  EXPECT_EQ(poll_until(pair, 1, 1).arrivals.size(), size_t{1});
  usleep(20'000);
  const uint64_t started = now_usec();
  for (uint64_t i = 1; i <= 4; ++i) EXPECT(pair.post(i, 100'000) == PostResult::kPosted);
  for (uint64_t arrived = 0; arrived < 4;) {
    arrived += poll_until(pair, 1, 0).arrivals.size();
    EXPECT(now_usec() - started >= 3000 + arrived * 1000 - 1);  // a burst would bring the later ones early
  }
}

CLAIM("writes to a lost peer are swallowed until its queue is full, other peers are served") {
  std::vector<std::unique_ptr<TestRegion>> regions;
  for (int rank = 0; rank < 3; ++rank) regions.push_back(std::make_unique<TestRegion>(kRegionBytes));
  LoopOptions options;
  options.drop_peer = 1;
  options.queue_depth = 8;
  auto transports = connect_all(regions, {{options, {}}, {options, {}}, {options, {}}});
  for (uint32_t i = 0; i < 8; ++i) EXPECT(transports[0]->post_write({1, kData, kData, 8, i, i}) == PostResult::kPosted);
  EXPECT(transports[0]->post_write({1, kData, kData, 8, 9, 9}) == PostResult::kAgain);
  EXPECT(transports[0]->post_write({2, kData, kData, 8, 42, 42}) == PostResult::kPosted);
  EXPECT(transports[1]->post_write({2, kData, kData, 8, 43, 43}) == PostResult::kPosted);
  std::vector<Completion> all;
  for (int i = 0; i < 100; ++i)
    for (auto& transport : transports)
      for (auto& c : poll_once(*transport)) all.push_back(c);
  EXPECT_EQ(all.size(), size_t{2});  // flushed at 0, arrived at 2
  for (auto& c : all) EXPECT(c.peer != 1 && (c.kind == Completion::Kind::kArrival ? c.immediate : c.cookie) == 42);
  EXPECT(transports[0]->peer_alive(1));  // it lives, it just cannot be reached
}

CLAIM("more writes than an inbox holds wait for room and come in order") {
  LoopOptions small;
  small.queue_depth = 4;
  LoopOptions deep;
  deep.queue_depth = 64;
  Pair pair(deep, small);
  for (uint64_t i = 0; i < 50; ++i) EXPECT(pair.post(i) == PostResult::kPosted);
  size_t done = 0;
  for (int i = 0; i < 100; ++i) done += poll_once(pair.sender()).size();
  EXPECT_EQ(done, size_t{4});
  EXPECT(pair.sender().idle_usec() <= 1000);  // it will look again by itself
  const Seen seen = poll_until(pair, 50, 46);
  EXPECT_EQ(seen.arrivals.size(), size_t{50});
  EXPECT_EQ(seen.done.size(), size_t{46});
  EXPECT(ascending(seen.arrivals));
}

CLAIM("a queue is full at its depth and takes again after a flush") {
  LoopOptions options;
  options.queue_depth = 3;
  Pair pair(options);
  for (uint64_t i = 0; i < 3; ++i) EXPECT(pair.post(i) == PostResult::kPosted);
  EXPECT(pair.post(3) == PostResult::kAgain);
  EXPECT_EQ(poll_until(pair, 3, 3).done.size(), size_t{3});
  EXPECT(pair.post(3) == PostResult::kPosted);
}

CLAIM("a delivery rings the receiver's proxy") {
  Pair pair({});
  const uint32_t ticket = pair.regions[1]->control->proxy_bell.ticket();
  EXPECT(pair.post(1) == PostResult::kPosted);
  poll_once(pair.sender());
  EXPECT(pair.regions[1]->control->proxy_bell.ticket() != ticket);
  EXPECT_EQ(pair.receiver().idle_usec(), UINT64_MAX);
}

CLAIM("idle_usec says when the next delivery is due") {
  LoopOptions options;
  options.latency_usec = 50'000;
  Pair pair(options);
  EXPECT_EQ(pair.sender().idle_usec(), UINT64_MAX);
  EXPECT(pair.post(1) == PostResult::kPosted);
  EXPECT(pair.sender().idle_usec() <= 50'000);
  EXPECT(poll_once(pair.sender()).empty());
  usleep(51'000);
  EXPECT_EQ(pair.sender().idle_usec(), uint64_t{0});
}

CLAIM("a write that leaves a region is refused with an error, not written") {
  Pair pair({});
  EXPECT_THROWS(CommunicationFailure, pair.sender().post_write({1, kRegionBytes - 4, 0, 8, 0, 0}));
  EXPECT_THROWS(CommunicationFailure, pair.sender().post_write({1, 0, kRegionBytes - 4, 8, 0, 0}));
  EXPECT_THROWS(CommunicationFailure, pair.sender().post_write({1, 0, UINT64_MAX - 3, 8, 0, 0}));
  EXPECT_THROWS(CommunicationFailure, pair.sender().post_write({0, kData, kData, 8, 0, 0}));
  EXPECT_THROWS(CommunicationFailure, pair.sender().post_write({7, kData, kData, 8, 0, 0}));
  EXPECT(pair.sender().post_write({1, kRegionBytes - 8, kRegionBytes - 8, 8, 0, 0}) == PostResult::kPosted);
}

CLAIM("no name is left once the ranks are connected, and none of one that never was") {
  std::string inbox_name;
  {
    TestRegion region(kRegionBytes);
    auto lonely = make(0, region);
    inbox_name = loop::decode_address(lonely->address()).inbox_name;
    EXPECT(name_exists(inbox_name));
  }
  EXPECT(!name_exists(inbox_name));
  Pair pair({});
  EXPECT(!name_exists(loop::decode_address(pair.sender().address()).inbox_name));
  EXPECT(pair.post(1) == PostResult::kPosted);
  EXPECT_EQ(poll_until(pair, 1, 1).arrivals.size(), size_t{1});
}

CLAIM("what cannot be connected is a typed error: a vanished region, another host, no address, a wrong rank") {
  TestRegion region(kRegionBytes), other(kRegionBytes);
  auto transport = make(0, region);
  auto peer = make(1, other);
  const loop::Address good = loop::decode_address(peer->address());
  loop::Address bad = good;
  auto connect = [&](const std::string& text) { make(0, region)->connect({transport->address(), text}); };
  bad.region_name = "/uccl_ep.vanished";
  EXPECT_THROWS(CommunicationFailure, connect(loop::encode_address(bad)));
  bad = good;
  bad.region_bytes *= 2;  // touching the missing half would be SIGBUS
  EXPECT_THROWS(CommunicationFailure, connect(loop::encode_address(bad)));
  bad = good;
  bad.boot_id = "elsewhere";
  EXPECT_THROWS(CommunicationFailure, connect(loop::encode_address(bad)));
  bad = good;
  bad.rank = 5;
  EXPECT_THROWS(CommunicationFailure, connect(loop::encode_address(bad)));
  EXPECT_THROWS(CommunicationFailure, connect(""));
  EXPECT_THROWS(CommunicationFailure, connect("verbs 1 2 3"));
  connect(loop::encode_address(good));  // negative control
}

CLAIM("the death of a peer's process is seen, writes to it do no harm") {
  Victim victim;
  TestRegion region(kRegionBytes), other(kRegionBytes);
  auto transport = make(0, region);
  auto peer = make(1, other);
  loop::Address address = loop::decode_address(peer->address());
  address.pid = victim.pid();  // as if it were that process's
  transport->connect({transport->address(), loop::encode_address(address)});
  EXPECT(transport->peer_alive(1));
  victim.end();
  const uint64_t deadline = now_usec() + 5'000'000;
  while (transport->peer_alive(1) && now_usec() < deadline) usleep(1000);
  EXPECT(!transport->peer_alive(1));
  EXPECT(transport->post_write({1, kData, kData, 8, 0, 0}) == PostResult::kPosted);
  poll_once(*transport);
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
