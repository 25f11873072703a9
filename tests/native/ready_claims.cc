// The loop transport finds what has come without a look at every rank, and ranks of one process share its maps.
#include <algorithm>
#include <thread>
#include <vector>

#include "claims.h"
#include "common/clock.h"
#include "common/units.h"
#include "fixture.h"
#include "sync/marks.h"
#include "transport/loop/loop.h"

using namespace uccl_ep;

namespace {

constexpr uint64_t kRegionBytes = 64 << 10;
constexpr uint64_t kData = kPageBytes;  // where payloads lie

std::vector<Completion> poll_once(Transport& transport) {
  std::vector<Completion> out(64);
  out.resize(transport.poll(out));
  return out;
}

CLAIM("every mark is taken once, with what its writer published before, and queues beyond the last mark share them") {
  MarkLine marks;
  std::vector<uint32_t> taken;
  const auto take = [&] {
    taken.clear();
    marks.take([&](uint32_t mark) { taken.push_back(mark); });
    return taken;
  };
  EXPECT(take().empty());
  for (uint32_t queue : {63u, 0u, 511u, 64u, 63u, 512u + 7}) marks.set(queue);
  EXPECT((take() == std::vector<uint32_t>{0, 7, 63, 64, 511}));
  EXPECT(take().empty());

  constexpr uint64_t kCount = 20'000;
  Flag published[2];
  std::vector<std::thread> writers;
  for (uint32_t writer = 0; writer < 2; ++writer)
    writers.emplace_back([&, writer] {
      for (uint64_t i = 1; i <= kCount; ++i) {
        published[writer].publish(i);
        marks.set(writer);
      }
    });
  uint64_t seen[2] = {0, 0};
  const uint64_t deadline = now_usec() + 20'000'000;
  while (seen[0] + seen[1] < 2 * kCount && now_usec() < deadline)
    marks.take([&](uint32_t mark) { seen[mark] = published[mark].read(); });
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(seen[0] + seen[1], 2 * kCount);
}

CLAIM("arrivals and datagrams of every sender are found, also where senders share a mark") {
  constexpr int kRanks = 2 * static_cast<int>(MarkLine::kMarks) + 3;
  const std::vector<int> senders = {1, 2, 513, 514, 1025};
  std::vector<std::unique_ptr<TestRegion>> regions;
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<std::string> addresses(kRanks);
  std::vector<int> ranks = senders;
  ranks.insert(ranks.begin(), 0);
  for (int rank : ranks) {
    regions.push_back(std::make_unique<TestRegion>(kRegionBytes));
    TransportSetup setup = setup_of(rank, kRanks, regions.back()->registered());
    setup.rails = setup.all = rank == 0 ? senders : std::vector<int>{0};
    transports.push_back(transport_named("loop").make(setup, {}));
    addresses[static_cast<size_t>(rank)] = transports.back()->address();
  }
  for (auto& transport : transports) transport->connect(addresses);
  std::vector<int> arrived, told;
  for (int round = 0; round < 3; ++round)
    for (size_t i = 1; i < transports.size(); ++i) {
      EXPECT(transports[i]->post_write({0, kData, kData, 8, 1, 1}) == PostResult::kPosted);
      poll_once(*transports[i]);
      const uint8_t byte = static_cast<uint8_t>(i);
      EXPECT(transports[i]->send_datagram(0, {&byte, 1}) == PostResult::kPosted);
    }
  for (auto& c : poll_once(*transports[0])) arrived.push_back(c.peer);
  std::vector<uint8_t> out(kMaxDatagramBytes);
  while (transports[0]->receive_datagram(out) != 0) told.push_back(senders[out[0] - 1u]);
  for (auto* found : {&arrived, &told})
    for (int sender : senders) EXPECT_EQ(std::count(found->begin(), found->end(), sender), 3);
}

CLAIM("ranks of one process share a map until the last one leaves, and only who asks for it") {
  Mapping owner = Mapping::create();
  owner.grow(2 * kPageBytes);
  Mapping shared = Mapping::open_shared(owner.name(), 2 * kPageBytes), own = Mapping::open(owner.name(), kPageBytes);
  EXPECT(shared.base() == owner.base() && own.base() != owner.base());
  EXPECT_THROWS(CommunicationFailure, Mapping::open_shared(owner.name(), 3 * kPageBytes));
  owner = Mapping();
  shared.base()[kPageBytes] = 7;  // still mapped
  EXPECT_EQ(own.base()[0], 0);
  Mapping other = Mapping::create();  // sized by its user first
  Mapping user = Mapping::open_and_grow(other.name(), kPageBytes);
  other.grow(kPageBytes);
  EXPECT(user.base() == other.base());
}

CLAIM("a datagram wakes nobody, who is to look at once is woken") {
  std::vector<std::unique_ptr<TestRegion>> regions;
  for (int rank = 0; rank < 2; ++rank) regions.push_back(std::make_unique<TestRegion>(kRegionBytes));
  const auto transports = connect_all(regions, {{}, {}});
  const auto ticket = [&] { return regions[1]->control->proxy_bell.ticket(); };
  const uint32_t before = ticket();
  const uint8_t byte = 1;
  EXPECT(transports[0]->send_datagram(1, {&byte, 1}) == PostResult::kPosted);
  EXPECT_EQ(ticket(), before);
  transports[0]->wake(1);
  EXPECT(ticket() != before);
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
