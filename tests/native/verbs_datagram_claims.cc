// Datagrams of the verbs transport against the stand-in for libibverbs, and what its queues take.
#include <cstring>
#include <map>
#include <set>

#include "claims.h"
#include "fake_verbs.h"
#include "layout/topology.h"
#include "proxy_world.h"
#include "transport/verbs/address.h"
#include "transport/verbs/datagrams.h"
#include "transport/verbs/sizes.h"
#include "verbs_net.h"

using namespace uccl_ep;

namespace {

// A rank of `num_domains` domains of 8.
TransportSetup setup_in_domains(int num_domains, const TestRegion& region) {
  std::vector<int> labels;
  for (int rank = 0; rank < 8 * num_domains; ++rank) labels.push_back(rank / 8);
  const Topology topo = Topology::from_labels(labels);
  TransportSetup setup = setup_of(3, labels.size(), region.registered());
  setup.rails = topo.rails(3);
  setup.all = topo.others(3);
  setup.largest_write_bytes = kLargestWrite;
  return setup;
}

CLAIM("a NIC has a connection per rail and a queue pair for datagrams, however many ranks there are; EFA has two") {
  for (bool is_efa : {false, true})
    for (int num_domains : {2, 8, 256}) {
      fake_verbs().is_efa = is_efa;
      TestRegion region(kRegionBytes);
      const TransportSetup setup = setup_in_domains(num_domains, region);
      EXPECT_EQ(setup.all.size(), static_cast<size_t>(8 * num_domains - 8));
      TransportOptions options;
      options.nic.devices = {"fake0"};
      {
        const auto transport = transport_named("verbs").make(setup, options);
        EXPECT_EQ(fake_verbs().datagram_pairs, 1u);
        EXPECT_EQ(fake_verbs().queue_pairs, (is_efa ? 1u : static_cast<uint32_t>(num_domains) - 1) + 1);
        // A handle lists rails alone: three numbers of at most 10 digits.
        EXPECT(transport->address().size() < 500 + 33 * static_cast<size_t>(num_domains));
      }
      EXPECT_EQ(fake_verbs().queue_pairs, 0u);
    }
}

CLAIM("what the queues take is counted, with one NIC and with two, and grows by rails, not by ranks") {
  for (int num_domains : {2, 8, 64})
    for (size_t num_nics : {1, 2}) {
      TestRegion region(kRegionBytes);
      const TransportSetup setup = setup_in_domains(num_domains, region);
      TransportOptions options;
      options.nic.devices = {"fake0", "fake1"};
      options.nic.devices.resize(num_nics);
      const auto transport = transport_named("verbs").make(setup, options);
      const uint64_t counted = transport_named("verbs").memory_bytes(options, setup.rails.size(), setup.all.size());
      const uint64_t made = fake_verbs().queue_bytes;
      EXPECT(made > 0 && made <= counted);
      EXPECT(made > counted / 4);  // the rest is what we keep of writes and completions, and buffers
    }
  const auto bytes = [](size_t rails, size_t all) { return transport_named("verbs").memory_bytes({}, rails, all); };
  EXPECT(bytes(255, 2040) < 24 << 20);
  EXPECT(bytes(255, 2040) - bytes(254, 2040) > 32 << 10);
  EXPECT(bytes(255, 2040) - bytes(255, 2039) < 4096);
}

// ---- datagrams ------------------------------------------------------------------------------------------------------
std::vector<uint8_t> datagram_of(uint32_t from, uint32_t to, uint32_t number, size_t num_bytes) {
  std::vector<uint8_t> bytes(num_bytes);
  for (size_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<uint8_t>(number * 31 + i * 7 + from * 3 + to);
  std::memcpy(bytes.data(), &from, 4);
  std::memcpy(bytes.data() + 4, &to, 4);
  std::memcpy(bytes.data() + 8, &number, 4);
  return bytes;
}

// Takes what is there for `rank`; every datagram has to be one that was sent to it.
uint32_t take_all(Net& net, size_t rank, std::map<std::pair<uint32_t, uint32_t>, int>& seen) {
  std::vector<uint8_t> out(kMaxDatagramBytes);
  uint32_t count = 0;
  while (const size_t num_bytes = net[rank].receive_datagram(out)) {
    uint32_t from, to, number;
    EXPECT(num_bytes >= 12);
    std::memcpy(&from, out.data(), 4);
    std::memcpy(&to, out.data() + 4, 4);
    std::memcpy(&number, out.data() + 8, 4);
    EXPECT_EQ(to, static_cast<uint32_t>(rank));
    EXPECT((std::vector<uint8_t>(out.begin(), out.begin() + static_cast<ptrdiff_t>(num_bytes)) ==
            datagram_of(from, to, number, num_bytes)));
    ++seen[{from, number}];
    ++count;
  }
  return count;
}

CLAIM("datagrams of every length come whole to whom they were sent, over InfiniBand and EFA, one NIC and two") {
  for (bool is_efa : {false, true})
    for (size_t num_nics : {1, 2}) {
      fake_verbs().is_efa = is_efa;
      fake_verbs().seed = 3;
      NicOptions nic;
      nic.devices = {"fake0", "fake1"};
      nic.devices.resize(num_nics);
      Net net(3, nic);
      std::map<std::pair<uint32_t, uint32_t>, int> seen;
      uint32_t number = 0;
      for (size_t num_bytes = 12; num_bytes <= kMaxDatagramBytes; ++num_bytes)
        for (uint32_t to : {1u, 2u}) {
          const auto bytes = datagram_of(0, to, ++number, num_bytes);
          EXPECT(net[0].send_datagram(static_cast<int>(to), bytes) == PostResult::kPosted);
          for (size_t rank : {0, 1, 2}) take_all(net, rank, seen);
        }
      for (int i = 0; i < 1000 && seen.size() < number; ++i)
        for (size_t rank : {0, 1, 2}) take_all(net, rank, seen);
      EXPECT_EQ(seen.size(), size_t{number});
      for (auto& [key, count] : seen) EXPECT_EQ(count, 1);
      EXPECT_EQ(fake_verbs().outside, uint64_t{0});
    }
}

CLAIM("datagrams are lost and doubled, and a burst beyond the buffers is lost: no error, and later ones come") {
  Net net(2);
  std::map<std::pair<uint32_t, uint32_t>, int> seen;
  fake_verbs().datagram_loss = fake_verbs().datagram_duplicates = 0.3;
  uint32_t number = 0;
  for (; number < 1000; ++number) {
    EXPECT(net[0].send_datagram(1, datagram_of(0, 1, number, 100)) == PostResult::kPosted);
    take_all(net, 1, seen);
  }
  EXPECT(seen.size() > 600 && seen.size() < 900);
  fake_verbs().datagram_loss = fake_verbs().datagram_duplicates = 0;
  fake_verbs().holds = true;
  uint32_t refused = 0;
  for (; refused < 10; ++number)
    refused += net[0].send_datagram(1, datagram_of(0, 1, number, 100)) == PostResult::kAgain;
  fake_verbs().holds = false;
  std::vector<Completion> out(8);
  for (uint32_t lap = 0; lap < 10; ++lap)
    for (uint32_t i = 0; i < 64; ++i, ++number) {
      while (net[0].send_datagram(1, datagram_of(0, 1, number, 100)) == PostResult::kAgain) net[0].poll(out);
      net[0].poll(out);  // moves it
    }
  EXPECT(fake_verbs().lost_datagrams > 500);
  seen.clear();
  EXPECT(take_all(net, 1, seen) <= 256);
  EXPECT(net[0].send_datagram(1, datagram_of(0, 1, ++number, 100)) == PostResult::kPosted);
  for (int i = 0; i < 10; ++i) take_all(net, 1, seen);
  EXPECT_EQ((seen[{0, number}]), 1);
  EXPECT_EQ(fake_verbs().outside, uint64_t{0});
}

CLAIM("a datagram to nobody, or one that is too long, is a typed error") {
  Net net(2);
  const std::vector<uint8_t> bytes(kMaxDatagramBytes + 1);
  for (int peer : {-1, 0, 2})
    EXPECT_THROWS(CommunicationFailure, net[0].send_datagram(peer, std::span(bytes).first(8)));
  EXPECT_THROWS(CommunicationFailure, net[0].send_datagram(1, bytes));
  EXPECT_THROWS(CommunicationFailure, net[0].send_datagram(1, std::span(bytes).first(0)));
  EXPECT(net[0].send_datagram(1, std::span(bytes).first(kMaxDatagramBytes)) == PostResult::kPosted);
}

CLAIM("a queue pair of datagrams that fails leaves them to the other NIC; without one it is an error that says so") {
  NicOptions two;
  two.devices = {"fake0", "fake1"};
  for (const NicOptions& nic : {NicOptions{}, two}) {
    Net net(2, nic);
    fake_verbs().cut_qp = verbs::decode_address(net.addresses[0]).nics[0].datagram_pair;
    std::map<std::pair<uint32_t, uint32_t>, int> seen;
    const auto send_many = [&] {
      for (uint32_t number = 0; number < 200; ++number) {
        net[0].send_datagram(1, datagram_of(0, 1, number, 64));
        for (size_t rank : {0, 1}) take_all(net, rank, seen);
      }
    };
    if (nic.devices.empty()) {
      EXPECT(says(message_of<CommunicationFailure>(send_many), "no NIC sends datagrams any more"));
    } else {
      send_many();
      EXPECT(seen.size() > 190);
    }
    fake_verbs().cut_qp = 0;
  }
}

// ---- with proxies ---------------------------------------------------------------------------------------------------
WorldOptions world_options() {
  WorldOptions options;
  options.kind = "verbs";
  options.devices = {"fake0", "fake1"};
  options.labels = {0, 0, 1, 1, 2, 2};
  return options;
}

CLAIM("an error reaches all ranks over NICs within a second while 30 percent of the datagrams are lost") {
  for (bool is_efa : {false, true}) {
    fake_verbs().is_efa = is_efa;
    fake_verbs().seed = 4;
    fake_verbs().datagram_loss = fake_verbs().datagram_duplicates = 0.3;
    uint64_t best = UINT64_MAX;
    for (int attempt = 0; attempt < 3 && best > 1'000'000; ++attempt) {  // others may have the processors
      World world(world_options());
      EXPECT_EQ(fake_verbs().queue_pairs, (is_efa ? 6u : 6u * 2) + 6);
      world.start();
      ErrorRecord record;
      record.kind = ErrorKind::kPeerFailed;
      record.rank = 0;
      record.set_message("it was I");
      const uint64_t started = now_usec();
      post_error(world.nodes[0].control(), record);
      for (auto& node : world.nodes) EXPECT(eventually([&] { return node.has_error(); }));
      best = std::min(best, now_usec() - started);
      for (auto& node : world.nodes) EXPECT(std::string(node.control().error.message) == "it was I");
    }
    EXPECT(best <= 1'000'000);
  }
}

CLAIM("datagrams of another group at the same queue pair are dropped and counted") {
  World world(world_options());
  world.start();
  const verbs::Address address = verbs::decode_address(world.nodes[0].transport->address());
  TestRegion region(kRegionBytes);
  TransportSetup setup = setup_of(2, 6, region.registered());
  const NicOptions options;
  verbs::Nic nic("fake1", options, setup);
  verbs::Datagrams stranger(nic, options, setup, 1);
  stranger.connect(0, address.nics[0]);
  DatagramHeader header;
  header.nonce = world.nodes[0].control().generation + 1;
  header.serial = 1;
  header.sender = 2;
  header.kind = static_cast<uint32_t>(MessageKind::kError);
  const std::vector<uint8_t> payload(sizeof(ErrorRecord), 1);
  EXPECT(stranger.send(0, encode_datagram(header, payload).bytes()));
  EXPECT(stranger.send(0, std::vector<uint8_t>(33, 0xA5)));
  EXPECT(eventually([&] { return world.nodes[0].proxy->stats().messages.strangers == 2; }));
  EXPECT(!world.nodes[0].has_error());
  // Negative control.
  header.nonce = world.nodes[0].control().generation;
  EXPECT(stranger.send(0, encode_datagram(header, payload).bytes()));
  EXPECT(eventually([&] { return world.nodes[0].has_error(); }));
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
