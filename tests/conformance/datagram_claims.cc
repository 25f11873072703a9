// Datagrams: whole or not at all, also between ranks that are no rails; and the messages that proxies send by them.
#include <algorithm>
#include <array>
#include <map>

#include "allocations.h"
#include "broken.h"
#include "ranks.h"
#include "suite.h"
#include "worlds.h"

using namespace conformance;

namespace {

using Bytes = std::vector<uint8_t>;

// A datagram says who sent it and its number, and is as long as that says.
constexpr size_t kLeastBytes = 16;
Bytes datagram_of(uint64_t sender, uint64_t number) {
  Bytes bytes(kLeastBytes + number % (kMaxDatagramBytes - kLeastBytes + 1));
  fill(bytes.data() + kLeastBytes, bytes.size() - kLeastBytes, number * 64 + sender);
  std::memcpy(bytes.data(), &sender, sizeof(sender));
  std::memcpy(bytes.data() + sizeof(sender), &number, sizeof(number));
  return bytes;
}

// By sender and number: how often it came.
using Seen = std::map<std::pair<uint64_t, uint64_t>, int>;

void take_all(Ranks& ranks, std::vector<Seen>& seen) {
  seen.resize(ranks.transports.size());
  for (size_t rank = 0; rank < ranks.transports.size(); ++rank) {
    if (ranks.transports[rank] == nullptr) continue;
    EXPECT(poll_once(ranks[rank]).empty());
    Bytes out(kMaxDatagramBytes);
    while (const size_t num_bytes = ranks[rank].receive_datagram(out)) {
      EXPECT(num_bytes >= kLeastBytes);
      uint64_t sender, number;
      std::memcpy(&sender, out.data(), sizeof(sender));
      std::memcpy(&number, out.data() + sizeof(sender), sizeof(number));
      EXPECT((Bytes(out.begin(), out.begin() + static_cast<ptrdiff_t>(num_bytes)) == datagram_of(sender, number)));
      ++seen[rank][{sender, number}];
    }
  }
}

// Each of `numbers` again and again from rank to rank until it has come.
void expect_through(Ranks& ranks, std::vector<Seen>& seen, size_t from, size_t to, uint64_t first, uint64_t last) {
  const Deadline deadline;
  seen.resize(ranks.transports.size());
  for (uint64_t number = first; number < last; ++number)
    while (!seen[to].contains({from, number})) {
      EXPECT(!deadline.over());
      ranks[from].send_datagram(static_cast<int>(to), datagram_of(from, number));
      const Deadline pause(2'000);
      while (!seen[to].contains({from, number}) && !pause.over()) take_all(ranks, seen);
    }
}

CLAIM("datagrams of every length come whole or not at all, and a lost one comes when it is sent again") {
  for (const Variant& variant : variants()) {
    RanksOptions options;
    options.loop = variant.loop;
    options.loop.loss_rate = options.loop.seed != 0 ? 0.3 : 0;
    Ranks ranks(options);
    std::vector<Seen> seen;
    expect_through(ranks, seen, 0, 1, 0, kMaxDatagramBytes - kLeastBytes + 1);
    expect_through(ranks, seen, 1, 0, 0, 50);
    EXPECT_EQ(seen[0].size(), size_t{50});
  }
}

CLAIM("ranks that are no rails of each other get datagrams, and writes to them are typed errors") {
  RanksOptions options;
  options.num_ranks = 6;
  options.labels = {0, 0, 1, 1, 2, 2};
  Ranks ranks(options);
  std::vector<Seen> seen;
  for (size_t to : {2, 3, 4, 5}) expect_through(ranks, seen, 0, to, 0, 20);
  for (int peer : {3, 5}) EXPECT_THROWS(CommunicationFailure, ranks[0].post_write(write_of(1, peer, kData, kData, 8)));
  for (int peer : {0, 1, -1, 6}) EXPECT_THROWS(CommunicationFailure, ranks[0].send_datagram(peer, datagram_of(0, 1)));
  Book book(0, 2);  // negative control: its rail
  post(book, ranks[0], ranks[2], write_of(1, 2, kData, kData, 8));
  settle(book, ranks[0], ranks[2]);
  book.expect_complete();
}

CLAIM("a datagram that is too long, or has no bytes, is a typed error") {
  Ranks ranks;
  const Bytes bytes(kMaxDatagramBytes + 1);
  EXPECT_THROWS(CommunicationFailure, ranks[0].send_datagram(1, bytes));
  EXPECT_THROWS(CommunicationFailure, ranks[0].send_datagram(1, {}));
}

CLAIM("datagrams to a rank that went away harm nobody: the others get theirs") {
  RanksOptions options;
  options.num_ranks = 3;
  Ranks ranks(options);
  std::vector<Seen> seen;
  expect_through(ranks, seen, 0, 1, 0, 3);
  ranks.transports[1].reset();
  for (uint64_t number = 0; number < 300; ++number) {
    ranks[0].send_datagram(1, datagram_of(0, number));
    if (number % 10 == 0) expect_through(ranks, seen, 0, 2, number, number + 1);
  }
  EXPECT_EQ(seen[2].size(), size_t{30});
}

CLAIM("datagrams that come at once are taken without an allocation") {
  Ranks ranks;
  Bytes out(kMaxDatagramBytes);
  std::array<Completion, 8> completions;
  const Deadline deadline;
  for (uint64_t taken = 0, sent = 0; taken < 4;) {
    EXPECT(!deadline.over());
    for (const uint64_t end = sent + 2; sent < end; ++sent) ranks[0].send_datagram(1, datagram_of(0, sent));
    poll_once(ranks[0]);
    for (const Deadline pause(2'000); !pause.over();) {
      const AllocationCount count;
      ranks[1].poll(completions);
      if (ranks[1].receive_datagram(out) != 0) ++taken;
      EXPECT_EQ(count.value(), uint64_t{0});
    }
  }
}
CLAIM("a burst that nobody takes is lost in part, not an error, and later datagrams come") {
  Ranks ranks;
  std::vector<Seen> seen;
  for (uint64_t number = 1000; number < 6000; ++number)
    if (ranks[0].send_datagram(1, datagram_of(0, number)) == PostResult::kAgain) poll_once(ranks[0]);
  expect_through(ranks, seen, 0, 1, 0, 10);
}

// ---- with proxies ---------------------------------------------------------------------------------------------------
// Loses a share of what is to be sent, before the transport gets it.
class Lossy final : public Wrapped {
 public:
  Lossy(std::unique_ptr<Transport> inner, uint64_t lost_of_ten, int rank)
      : Wrapped(std::move(inner)), lost_of_ten_(lost_of_ten), random_(static_cast<uint64_t>(rank) + 1) {}
  PostResult send_datagram(int peer, std::span<const uint8_t> bytes) override {
    return random_() % 10 < lost_of_ten_ ? PostResult::kPosted : inner_->send_datagram(peer, bytes);
  }

 private:
  const uint64_t lost_of_ten_;
  std::mt19937_64 random_;
};

WorldOptions lossy_world(uint64_t lost_of_ten) {
  WorldOptions options = world_options();
  options.labels = {0, 0, 1, 1, 2, 2};
  options.wrap = [=](int rank, std::unique_ptr<Transport> inner) -> std::unique_ptr<Transport> {
    return std::make_unique<Lossy>(std::move(inner), lost_of_ten, rank);
  };
  return options;
}

bool all_know_within(World& world, uint64_t usec) {
  ErrorRecord record;
  record.kind = ErrorKind::kPeerFailed;
  record.rank = 3;
  record.set_message("it was I");
  post_error(world.nodes[3].control(), record);
  return eventually(
      [&] {
        return std::all_of(world.nodes.begin(), world.nodes.end(), [](const Node& node) { return node.has_error(); });
      },
      usec);
}

CLAIM("an error reaches all ranks, rails or not, while 30 percent of the datagrams are lost") {
  World world(lossy_world(3));
  world.start();
  EXPECT(all_know_within(world, suite().patient_usec(3'000'000)));
  for (auto& node : world.nodes) EXPECT(std::string(node.control().error.message) == "it was I");
  EXPECT(eventually([&] { return world.nodes[3].proxy->error_delivered(); }, suite().patient_usec(5'000'000)));
}

CLAIM("that check notices datagrams that are all lost") {
  World world(lossy_world(10));
  world.start();
  EXPECT(!all_know_within(world, 500'000));
  EXPECT(!world.nodes[3].proxy->error_delivered());
}

CLAIM("ranks of several domains all leave, with and without losses") {
  for (uint64_t lost_of_ten : {0, 3}) {
    World world(lossy_world(lost_of_ten));
    world.start();
    for (auto& node : world.nodes) node.proxy->announce_close();
    for (auto& node : world.nodes)
      EXPECT(eventually([&] { return node.proxy->all_closed(); }, suite().patient_usec(5'000'000)));
    for (auto& node : world.nodes) EXPECT(!node.has_error());
  }
}

}  // namespace
