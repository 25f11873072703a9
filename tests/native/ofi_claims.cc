// The libfabric transport keeps transport.h's contract over tcp, whichever way its arrivals are named.
#include "transport/ofi/ofi.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <random>

#include "ofi_ranks.h"

using namespace uccl_ep;
using ofi::Naming;

namespace {

thread_local uint64_t num_allocations = 0;

}  // namespace

__attribute__((noinline)) void* operator new(size_t size) {
  ++num_allocations;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

CLAIM("every write from 1 byte to 1 MiB at every alignment arrives once, its bytes before its immediate") {
  need_libfabric();
  for (Naming naming : kNamings) {
    OfiRanks all(2, naming);
    std::mt19937_64 random(5);
    for (uint64_t i = 0; i < kRegionBytes; ++i) all[0].region->base()[i] = static_cast<uint8_t>(random());
    for (uint32_t round = 0; round < 3 * 64; ++round) {
      const uint64_t local = kData + round % 64, remote = kData + random() % 64;
      const uint64_t num_bytes = round < 64 ? round + 1 : round == 64 ? 1 << 20 : 1 + random() % (1 << 20);
      std::memset(all[1].region->base() + kData, 0xee, kRegionBytes - kData);
      uint32_t arrivals = 0, done = 0, wrong = 0;
      auto seen = [&](size_t rank, const Completion& c) {
        wrong += c.kind == Completion::Kind::kFailure || c.num_bytes != num_bytes || c.peer != (rank == 0 ? 1 : 0);
        if (rank == 0) {
          ++done;
          wrong += c.cookie != 77;
          return;
        }
        ++arrivals;
        wrong += c.immediate != 0x80000000u + round;
        wrong += std::memcmp(all[1].region->base() + remote, all[0].region->base() + local, num_bytes) != 0;
        wrong += all[1].region->base()[remote - 1] != (remote == kData ? all[1].region->base()[kData - 1] : 0xee);
        wrong += all[1].region->base()[remote + num_bytes] != 0xee;
      };
      EXPECT(post(all, 0, {1, local, remote, num_bytes, 0x80000000u + round, 77}, seen));
      EXPECT(poll_until(all, [&] { return arrivals >= 1 && done >= 1; }, seen));
      EXPECT(arrivals == 1 && done == 1 && wrong == 0);
    }
  }
}

CLAIM("writes without bytes raise their immediate and write nothing") {
  need_libfabric();
  for (Naming naming : kNamings) {
    OfiRanks all(2, naming);
    std::memset(all[0].region->base() + kData, 1, kData);
    std::vector<uint32_t> arrived;
    uint32_t done = 0;
    auto seen = [&](size_t rank, const Completion& c) {
      EXPECT(c.num_bytes == 0 && c.kind != Completion::Kind::kFailure);
      rank == 1 ? arrived.push_back(c.immediate) : static_cast<void>(++done);
    };
    for (uint32_t i = 0; i < 100; ++i) EXPECT(post(all, 0, write_to(1, UINT64_MAX - i, 0, i), seen));
    EXPECT(poll_until(all, [&] { return arrived.size() >= 100 && done >= 100; }, seen));
    std::sort(arrived.begin(), arrived.end());
    for (uint32_t i = 0; i < 100; ++i) EXPECT_EQ(arrived[i], i);
    EXPECT(std::all_of(all[1].region->base() + kData, all[1].region->base() + 2 * kData,
                       [](uint8_t byte) { return byte == 0; }));
  }
}

CLAIM("thousands of writes in flight between 4 ranks arrive and are done exactly once each") {
  need_libfabric();
  constexpr uint32_t kCount = 3000;
  for (Naming naming : kNamings) {
    OfiRanks all(4, naming);
    std::map<uint64_t, int> arrived, done;  // by sender, receiver, number
    uint64_t refused = 0;
    auto key = [](size_t from, size_t to, uint64_t number) { return from << 48 | to << 40 | number; };
    auto seen = [&](size_t rank, const Completion& c) {
      const size_t peer = static_cast<size_t>(c.peer);
      if (c.kind == Completion::Kind::kArrival)
        ++arrived[key(peer, rank, c.immediate)];
      else if (c.kind == Completion::Kind::kWriteDone)
        ++done[key(rank, peer, c.cookie - 1000)];
    };
    std::vector<uint32_t> posted(16, 0);
    for (bool more = true; more;) {
      more = false;
      for (size_t from = 0; from < 4; ++from)
        for (size_t to = 0; to < 4; ++to) {
          uint32_t& next = posted[from * 4 + to];
          while (from != to && next < kCount) {
            const auto request = write_to(static_cast<int>(to), kData + next * 64, next % 64, next);
            if (all[from].transport->post_write(request) == PostResult::kAgain) {
              ++refused;
              break;
            }
            ++next;
          }
          more |= from != to && next < kCount;
        }
      for (size_t rank = 0; rank < 4; ++rank) {
        all[rank].transport->flush();
        for (const Completion& c : all[rank].poll()) seen(rank, c);
      }
    }
    EXPECT(refused != 0);  // connections are made when they are first used
    EXPECT(poll_until(all, [&] { return arrived.size() == 12 * kCount && done.size() == 12 * kCount; }, seen));
    for (auto* counts : {&arrived, &done})
      EXPECT(std::all_of(counts->begin(), counts->end(), [](auto& entry) { return entry.second == 1; }));
  }
}

CLAIM("a limit in bytes or operations closes for what is in flight, and one write always fits") {
  need_libfabric();
  NicOptions options = tcp();
  options.window_ops = 2;
  options.window_bytes = 1000;
  OfiRanks all(2, Naming::kTag, options);
  Transport& sender = *all[0].transport;
  EXPECT(sender.has_room(5000));
  WriteRequest request = write_to(1, kData, 600, 1);
  request.limited = true;
  EXPECT(sender.post_write(request) == PostResult::kPosted);
  EXPECT(!sender.has_room(600) && sender.has_room(400));
  request.num_bytes = 100;
  EXPECT(post(all, 0, request, [](size_t, const Completion&) {}));
  EXPECT(!sender.has_room(1));
  uint64_t done = 0;
  EXPECT(poll_until(all, [&] { return done == 2; }, [&](size_t rank, const Completion&) { done += rank == 0; }));
  EXPECT(sender.has_room(1000));
}

CLAIM("posting and polling allocate nothing once the ranks have spoken") {
  need_libfabric();
  for (Naming naming : kNamings) {
    OfiRanks all(2, naming);
    std::vector<Completion> out(64);
    uint64_t done = 0, posted = 0, before = 0;
    const uint64_t deadline = now_usec() + kPatienceUsec;
    while (done < 3000 && now_usec() < deadline) {
      if (done >= 1000 && before == 0) before = num_allocations;
      if (posted - done < 16 &&
          all[0].transport->post_write(write_to(1, kData, 100, static_cast<uint32_t>(posted))) == PostResult::kPosted)
        ++posted;
      all[0].transport->flush();
      done += all[0].transport->poll(out);
      all[1].transport->poll(out);
    }
    EXPECT(done >= 3000 && before != 0);
    EXPECT_EQ(num_allocations, before);
  }
}

CLAIM("a write that leaves a region is refused with an error, not written") {
  need_libfabric();
  OfiRanks all(2);
  auto post_one = [&](const WriteRequest& request) { all[0].transport->post_write(request); };
  EXPECT_THROWS(CommunicationFailure, post_one({1, kRegionBytes - 4, 0, 8, 0, 0}));
  EXPECT_THROWS(CommunicationFailure, post_one({1, 0, kRegionBytes - 4, 8, 0, 0}));
  EXPECT_THROWS(CommunicationFailure, post_one({1, 0, UINT64_MAX - 3, 8, 0, 0}));
  EXPECT_THROWS(CommunicationFailure, post_one({1, 0, 0, (1 << 21) + 1, 0, 0}));  // more than was announced
  EXPECT_THROWS(CommunicationFailure, post_one({0, kData, kData, 8, 0, 0}));
  EXPECT_THROWS(CommunicationFailure, post_one({7, kData, kData, 8, 0, 0}));
  WriteRequest device = write_to(1, 0, 8, 0);
  device.memory = Memory::kDevice;
  EXPECT_THROWS(CommunicationFailure, post_one(device));
  post_one({1, kRegionBytes - 8, kRegionBytes - 8, 8, 0, 0});  // negative control
}

CLAIM("device memory that the provider does not reach is an error that names it") {
  need_libfabric();
  auto rank = make_rank(0, 2);
  try {
    rank->transport->register_device(rank->region->registered());
  } catch (const CommunicationFailure& failure) {
    EXPECT(std::string(failure.what()).find("tcp") != std::string::npos &&
           std::string(failure.what()).find("FI_HMEM") != std::string::npos);
    return;
  }
  EXPECT(!"registered");
}

CLAIM("the probe says what there is, and what is missing; a provider that cannot work is an error") {
  need_libfabric();
  const TransportKind& kind = transport_named("ofi");
  EXPECT(kind.probe({{}, tcp()}).text.starts_with("tcp"));
  NicOptions wrong = tcp();
  wrong.interface = "nowhere0";
  for (const char* provider : {"tcp", "nonesuch"}) {
    wrong.provider = provider;
    const Probe found = kind.probe({{}, wrong});
    const std::string what = wrong.provider == "tcp" ? "nowhere0" : "nonesuch";
    EXPECT(!found.usable && found.text.find(what) != std::string::npos);
    TestRegion region(kRegionBytes);
    EXPECT_THROWS(UsageFailure, kind.make(setup_of(0, 2, region.registered()), {{}, wrong}));
  }
  NicOptions lo = tcp();
  lo.interface = "lo";
  EXPECT(kind.probe({{}, lo}).text.find("domain lo") != std::string::npos);
}

CLAIM("the proxy naps longer the longer nothing happens, and not while bytes of ours are under way") {
  need_libfabric();
  OfiRanks all(2);
  EXPECT(all[0].transport->idle_usec() <= 1000);
  usleep(60'000);
  EXPECT_EQ(all[0].transport->idle_usec(), uint64_t{1000});
  uint64_t done = 0;
  auto seen = [&](size_t, const Completion& c) { done += c.kind == Completion::Kind::kWriteDone; };
  EXPECT(post(all, 0, write_to(1, kData, 8, 1), seen));
  all[0].transport->flush();
  EXPECT(all[0].transport->idle_usec() <= 50);  // parked: connecting
  EXPECT(poll_until(all, [&] { return done == 1; }, seen));
  const uint64_t nap = all[0].transport->idle_usec();
  EXPECT(nap >= 20 && nap < 1000);
}

CLAIM("data of a tag come back as they were, and most that nobody told name no rank") {
  std::mt19937_64 random(3);
  for (uint64_t largest : {uint64_t{0}, uint64_t{255}, uint64_t{1} << 20, (uint64_t{1} << 22) - 1})
    for (int i = 0; i < 200; ++i) {
      const ofi::Tags tags(ofi::Tags::size_bits_for(largest), random());
      const ofi::Arrival sent = {static_cast<uint32_t>(random() % 256), static_cast<uint32_t>(random()),
                                 random() % (largest + 1)};
      EXPECT(ofi::Tags::suffice(largest, 256));
      const ofi::Arrival got = tags.decode(tags.encode(sent));
      EXPECT(got.rank == sent.rank && got.immediate == sent.immediate && got.num_bytes == sent.num_bytes);
    }
  const ofi::Tags tags(20, random());
  uint64_t named = 0;
  for (int i = 0; i < 10'000; ++i) named += tags.decode(random()).rank < 256;
  EXPECT(named > 300 && named < 1000);  // 256 of 4096
  EXPECT(!ofi::Tags::suffice(uint64_t{1} << 32, 2) && !ofi::Tags::suffice(1 << 24, 256));
}

CLAIM("pieces overlap so that every write lies in one") {
  for (uint64_t bytes : {uint64_t{1} << 14, (uint64_t{1} << 16) + 5, uint64_t{100'000}})
    for (uint64_t largest : {uint64_t{1}, uint64_t{4000}, uint64_t{8192}}) {
      constexpr uint64_t kPiece = 1 << 14;
      const uint64_t stride = ofi::piece_stride_bytes(bytes, largest, kPiece);
      for (uint64_t start = 0; start + largest <= bytes; ++start) {
        const uint64_t piece = start / stride * stride;
        EXPECT(start + largest <= std::min(piece + kPiece, bytes));
      }
    }
  EXPECT_EQ(ofi::piece_stride_bytes(uint64_t{3} << 30, uint64_t{1} << 30), uint64_t{0});
  EXPECT_EQ(ofi::piece_stride_bytes(1 << 30, uint64_t{1} << 40), uint64_t{1} << 30);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
