// Messages over datagrams: repeated until they are acknowledged, taken once, and nothing of strangers is taken at all.
#include <algorithm>
#include <map>
#include <set>

#include "claims.h"
#include "message_net.h"

using namespace uccl_ep;

namespace {

constexpr uint64_t kSecond = 1'000'000;

// ---- getting through ------------------------------------------------------------------------------------------------
// Every rank tells all others of an error, and every one gets it once, whole, within a second.
void expect_all_told(int num_ranks, const Weather& weather, uint64_t seed) {
  MessageNet net(num_ranks, weather, seed);
  const uint64_t started = net.now_usec;
  for (int rank = 0; rank < num_ranks; ++rank) net.tell(rank, MessageKind::kError, error_payload(rank));
  EXPECT(net.run_until([&] { return net.num_owed(MessageKind::kError) == 0; }, 5 * kSecond));
  std::set<std::pair<int, int>> pairs;
  for (const auto& taken : net.taken) {
    EXPECT(taken.kind == MessageKind::kError && taken.payload == error_payload(taken.sender));
    EXPECT(pairs.emplace(taken.sender, taken.receiver).second);  // once
    EXPECT(taken.when_usec - started <= kSecond);
  }
  EXPECT_EQ(pairs.size(), static_cast<size_t>(num_ranks * (num_ranks - 1)));
}

CLAIM("a message that is lost, doubled, late or overtaken reaches every rank once, within a second") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    expect_all_told(8, {}, seed);
    expect_all_told(8, {0.3, 0, 0, false, SIZE_MAX}, seed);
    expect_all_told(8, {0.3, 0.3, 50'000, false, SIZE_MAX}, seed);
    expect_all_told(8, {0, 1, 200'000, false, SIZE_MAX}, seed);
  }
}

CLAIM("without acknowledgements a message is sent again and again, and is taken once") {
  MessageNet net(2, {0, 0, 0, true, SIZE_MAX});
  net.tell(0, MessageKind::kError, error_payload(0));
  EXPECT(!net.run_until([&] { return net.num_owed(MessageKind::kError) == 0; }, 5 * kSecond));
  EXPECT_EQ(net.taken.size(), size_t{1});
  const MessageStats sender = net.ranks[0]->stats(), receiver = net.ranks[1]->stats();
  EXPECT(sender.repeated > 40 && sender.repeated < 60);  // ten a second
  EXPECT_EQ(sender.sent, sender.repeated + 1);
  EXPECT(receiver.duplicates >= sender.repeated - 1 && receiver.duplicates <= sender.repeated);
}

CLAIM("a network without faults has one datagram for a message and one for its acknowledgement") {
  MessageNet net(8, {});
  for (int rank = 0; rank < 8; ++rank) net.tell(rank, MessageKind::kBye, {});
  net.run_until([] { return false; }, kSecond);
  EXPECT_EQ(net.num_datagrams, size_t{2 * 8 * 7});
  for (auto& rank : net.ranks) {
    EXPECT_EQ(rank->stats().repeated, uint64_t{0});
    EXPECT_EQ(rank->next_usec(), UINT64_MAX);  // its thread may sleep
  }
}

CLAIM("errors, byes and their acknowledgements wake their receiver, heartbeats and theirs do not") {
  for (const MessageKind kind : {MessageKind::kError, MessageKind::kBye, MessageKind::kHeartbeat}) {
    MessageNet net(2, {});
    const bool urgent = kind != MessageKind::kHeartbeat;
    net.tell(0, kind, kind == MessageKind::kError ? error_payload(0) : urgent ? DatagramBytes() : heartbeat_payload(1));
    EXPECT(net.run_until([&] { return net.num_owed(kind) == 0; }, kSecond));
    EXPECT((net.woken == (urgent ? std::vector{1, 0} : std::vector<int>())));
  }
}

CLAIM("of heartbeats that overtake each other the newest counts, and old acknowledgements are not its own") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    MessageNet net(2, {0.3, 0.3, 400'000, false, SIZE_MAX}, seed);
    for (uint64_t i = 1; i <= 20; ++i) {
      net.tell(0, MessageKind::kHeartbeat, heartbeat_payload(i));
      for (int tick = 0; tick < 100; ++tick) net.tick();
    }
    for (uint64_t tick = 0; net.ranks[0]->num_owed(MessageKind::kHeartbeat) != 0; net.tick(), ++tick) {
      EXPECT(tick < 10'000);
      if (tick % 500 == 0) net.tell(1, MessageKind::kHeartbeat, heartbeat_payload(tick));  // its own: it is heard
    }
    uint64_t last = 0;
    for (const auto& taken : net.taken) {
      if (taken.receiver != 1) continue;
      Heartbeat said;
      std::memcpy(&said, taken.payload.data(), sizeof(said));
      EXPECT(said.moved_usec > last);
      last = said.moved_usec;
    }
    EXPECT_EQ(last, uint64_t{20});
  }
}

CLAIM("2048 ranks get a message in passes of 32 datagrams, also where a queue takes fewer") {
  for (size_t room : {SIZE_MAX, size_t{5}}) {
    MessageNet net(2048, {0, 0, 0, false, room});
    net.tell(0, MessageKind::kHeartbeat, heartbeat_payload(1));
    net.tick();
    EXPECT_EQ(net.num_datagrams, std::min<size_t>(room, Messages::kMostSends));
    EXPECT_EQ(net.ranks[0]->refused(), room == 5);
    EXPECT(net.run_until([&] { return net.taken.size() == 2047; }, 2 * kSecond));
    EXPECT(net.run_until([&] { return net.num_owed(MessageKind::kHeartbeat) == 0; }, 2 * kSecond));
  }
}

CLAIM("who is stopped for a minute finds a dozen heartbeats in its queue, and is told the next when it is heard") {
  MessageNet net(2, {});
  net.stopped = 1;
  uint64_t told = 0;
  const auto run = [&](uint64_t seconds) {
    for (uint64_t tick = 0; tick < seconds * 1000; ++tick) {
      if (tick % 500 == 0)
        for (int rank : {0, 1})
          if (rank != net.stopped) net.tell(rank, MessageKind::kHeartbeat, heartbeat_payload(++told));
      net.tick();
    }
  };
  run(60);
  EXPECT(net.ends[1]->inbox.size() >= 8 && net.ends[1]->inbox.size() <= 16);
  net.tell(0, MessageKind::kError, error_payload(0));
  for (int tick = 0; tick < 500; ++tick) net.tick();
  net.stopped = 0;  // it has left; rank 1 goes on
  net.tick();
  EXPECT_EQ(std::count_if(net.taken.begin(), net.taken.end(), [](auto& t) { return t.kind == MessageKind::kError; }),
            1);
  net.stopped = -1;
  run(1);
  EXPECT_EQ(net.num_owed(MessageKind::kHeartbeat), 0u);
  EXPECT_EQ(net.num_owed(MessageKind::kError), 0u);
  const size_t before = net.num_datagrams;
  run(2);
  EXPECT_EQ(net.num_datagrams - before, size_t{4 * 4});  // as if nothing had been
}

// ---- leaving --------------------------------------------------------------------------------------------------------
CLAIM("who leaves is told twelve times at most, who stays until it acknowledges, who is gone never again") {
  MessageNet net(2, {1, 0, 0, false, SIZE_MAX});
  net.tell(0, MessageKind::kBye, {});
  EXPECT(!net.run_until([&] { return net.num_owed(MessageKind::kBye) == 0; }, 3 * kSecond));
  const uint64_t before = net.ranks[0]->stats().sent, started = net.now_usec;
  net.ranks[0]->part(1);
  EXPECT(net.run_until([&] { return net.num_owed(MessageKind::kBye) == 0; }, 2 * kSecond));
  EXPECT_EQ(net.ranks[0]->stats().sent - before, uint64_t{Messages::kMostParting});
  EXPECT(net.now_usec - started > 900'000 && net.now_usec - started < 1'100'000);

  net.tell(0, MessageKind::kError, error_payload(0));
  net.ranks[0]->forget(1);
  EXPECT_EQ(net.num_owed(MessageKind::kError), 0u);
  const uint64_t silent = net.ranks[0]->stats().sent;
  for (int tick = 0; tick < 500; ++tick) net.tick();
  EXPECT_EQ(net.ranks[0]->stats().sent, silent);
}

CLAIM("a bye comes after the error of its sender, whatever the network loses") {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    MessageNet net(4, {0.5, 0.2, 100'000, false, SIZE_MAX}, seed);
    net.tell(0, MessageKind::kBye, {});
    net.tell(0, MessageKind::kError, error_payload(0));
    EXPECT(net.run_until([&] { return net.num_owed(MessageKind::kBye) == 0; }, 20 * kSecond));
    std::map<int, std::vector<MessageKind>> order;
    for (const auto& taken : net.taken) order[taken.receiver].push_back(taken.kind);
    for (int rank : {1, 2, 3}) EXPECT((order[rank] == std::vector{MessageKind::kError, MessageKind::kBye}));
  }
}

// ---- strangers ------------------------------------------------------------------------------------------------------
Datagram valid(const std::function<void(DatagramHeader&)>& change = [](DatagramHeader&) {}) {
  DatagramHeader header;
  header.nonce = MessageNet::kNonce;
  header.serial = 1;
  header.sender = 1;
  header.receiver = 0;
  header.kind = static_cast<uint32_t>(MessageKind::kError);
  change(header);
  const DatagramBytes payload = error_payload(1);
  return encode_datagram(header, std::span(payload).first(header.acknowledges != 0 || header.kind >= kNumMessageKinds
                                                              ? 0
                                                              : payload_bytes(static_cast<MessageKind>(header.kind))));
}
DatagramBytes bytes_of(const Datagram& datagram) { return {datagram.bytes().begin(), datagram.bytes().end()}; }

struct Receiver {
  MessageNet net{3, {}};
  // What rank 0 makes of it: how many messages it takes.
  size_t take(const DatagramBytes& bytes) {
    const size_t before = net.taken.size();
    net.ends[0]->inbox.push_back(bytes);
    net.tick();
    return net.taken.size() - before;
  }
  uint64_t num_strangers() const { return net.ranks[0]->stats().strangers; }
};

CLAIM("what another job, an old one, or nobody of this group can have sent is dropped, counted, and not acknowledged") {
  Receiver receiver;
  uint64_t expected = 0;
  const auto refuses = [&](const DatagramBytes& bytes) {
    EXPECT_EQ(receiver.take(bytes), size_t{0});
    EXPECT_EQ(receiver.num_strangers(), ++expected);
  };
  refuses(bytes_of(valid([](auto& h) { h.nonce = 78; })));
  refuses(bytes_of(valid([](auto& h) { h.receiver = 2; })));
  refuses(bytes_of(valid([](auto& h) { h.sender = 0; })));
  refuses(bytes_of(valid([](auto& h) { h.sender = 3; })));
  refuses(bytes_of(valid([](auto& h) { h.sender = UINT32_MAX; })));
  refuses(bytes_of(valid([](auto& h) { h.kind = kNumMessageKinds; })));
  refuses(bytes_of(valid([](auto& h) { h.acknowledges = 2; })));
  refuses(bytes_of(valid([](auto& h) { h.serial = 0; })));
  const DatagramBytes whole = bytes_of(valid());
  for (size_t length = 1; length < whole.size(); ++length)
    refuses({whole.begin(), whole.begin() + static_cast<ptrdiff_t>(length)});
  DatagramBytes longer = whole;
  longer.push_back(0);
  refuses(longer);
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    DatagramBytes flipped = whole;
    flipped[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    refuses(flipped);
  }
  EXPECT_EQ(receiver.net.num_datagrams, size_t{0});
  // Negative control.
  EXPECT_EQ(receiver.take(whole), size_t{1});
  EXPECT_EQ(receiver.num_strangers(), expected);
  EXPECT_EQ(receiver.net.num_datagrams, size_t{1});
}

CLAIM("random bytes are dropped, of any length") {
  Receiver receiver;
  std::mt19937_64 random(5);
  for (uint64_t i = 1; i <= 20'000; ++i) {
    DatagramBytes bytes(1 + random() % kMaxDatagramBytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    EXPECT_EQ(receiver.take(bytes), size_t{0});
    EXPECT_EQ(receiver.num_strangers(), i);
  }
}

CLAIM("a rank of the own domain sends no datagrams: what names one is a stranger's") {
  MessageNet net(3, {});
  Messages alone(*net.ends[0], {MessageNet::kNonce, 0, 3}, {2});
  net.ends[0]->inbox.push_back(bytes_of(valid()));
  EXPECT(alone.receive([](int) {}) == nullptr);
  EXPECT_EQ(alone.stats().strangers, uint64_t{1});
  net.ends[0]->inbox.push_back(bytes_of(valid([](auto& h) { h.sender = 2; })));
  EXPECT(alone.receive([](int) {}) != nullptr);
}

CLAIM("a serial that comes again, or an older one, is acknowledged and not taken") {
  Receiver receiver;
  const auto with_serial = [](uint64_t serial) { return bytes_of(valid([=](auto& h) { h.serial = serial; })); };
  EXPECT_EQ(receiver.take(with_serial(7)), size_t{1});
  for (uint64_t serial : {7, 6, 1, 7}) EXPECT_EQ(receiver.take(with_serial(serial)), size_t{0});
  EXPECT_EQ(receiver.net.ranks[0]->stats().duplicates, uint64_t{4});
  EXPECT_EQ(receiver.net.num_datagrams, size_t{5});
  EXPECT_EQ(receiver.take(with_serial(8)), size_t{1});
}

CLAIM("an acknowledgement of what was never sent changes nothing") {
  Receiver receiver;
  for (uint64_t serial : {1, 2, 99})
    EXPECT_EQ(receiver.take(bytes_of(valid([=](auto& h) {
      h.serial = serial;
      h.acknowledges = 1;
    }))),
              size_t{0});
  receiver.net.ranks[0]->compose(MessageKind::kError, error_payload(0));
  receiver.net.ranks[0]->owe(1, MessageKind::kError);
  receiver.net.ends[0]->inbox.push_back(bytes_of(valid([](auto& h) {
    h.serial = 2;
    h.acknowledges = 1;
  })));
  receiver.net.ranks[0]->receive([](int) {});
  EXPECT_EQ(receiver.net.ranks[0]->num_owed(MessageKind::kError), 1u);
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
