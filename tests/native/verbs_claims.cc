// The verbs transport against a stand-in for libibverbs, for what soft-RoCE cannot show: EFA's datagrams, many peers,
// registration that fails, the order of teardown. Real verbs run in tests/conformance.
#include <errno.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>

#include "claims.h"
#include "sync/flag.h"
#include "transport/nics.h"
#include "transport/verbs/address.h"
#include "transport/verbs/nic.h"
#include "verbs_net.h"

using namespace uccl_ep;

namespace {

// A write's number is its place: nobody else uses it, so order does not matter.
void expect_everything_arrives(size_t num_ranks, const NicOptions& nic, uint32_t writes_each) {
  Net net(num_ranks, nic);
  constexpr uint64_t kBytes = 96;
  auto place = [](uint32_t number, size_t from) { return kPageBytes + (number * 4 + from) * kBytes; };
  std::map<std::pair<int, uint32_t>, int> arrivals;  // by sender and number
  std::map<uint64_t, int> done;
  size_t posted = 0;
  const uint64_t deadline = now_usec() + 30'000'000;
  for (size_t from = 0; from < num_ranks; ++from)
    for (uint32_t i = 0; i < writes_each; ++i) {
      const uint32_t number = static_cast<uint32_t>(from) << 16 | i;
      const int peer = static_cast<int>((from + 1 + i % (num_ranks - 1)) % num_ranks);
      const uint64_t at = place(i, from), num_bytes = i % 5 == 0 ? 0 : kBytes;
      std::memset(net.regions[from]->base() + at, static_cast<int>(1 + number % 255), kBytes);
      while (net[from].post_write({peer, at, at, num_bytes, number, number, Memory::kHost, true}) ==
             PostResult::kAgain) {
        EXPECT(now_usec() < deadline);
        net[from].flush();
        for (size_t r = 0; r < num_ranks; ++r)
          for (const Completion& c : net.poll(r)) {
            if (c.kind == Completion::Kind::kArrival)
              ++arrivals[{c.peer, c.immediate}];
            else
              ++done[c.cookie];
          }
      }
      ++posted;
      if (i % 7 == 0) net[from].flush();
    }
  for (size_t from = 0; from < num_ranks; ++from) net[from].flush();
  while ((arrivals.size() < posted || done.size() < posted) && now_usec() < deadline)
    for (size_t r = 0; r < num_ranks; ++r)
      for (const Completion& c : net.poll(r)) {
        EXPECT(c.kind != Completion::Kind::kFailure);
        if (c.kind == Completion::Kind::kWriteDone) {
          ++done[c.cookie];
          continue;
        }
        ++arrivals[{c.peer, c.immediate}];
        const size_t from = c.immediate >> 16;
        EXPECT_EQ(static_cast<size_t>(c.peer), from);
        const uint8_t* const bytes = net.regions[r]->base() + place(c.immediate & 0xFFFF, from);
        for (uint64_t b = 0; b < c.num_bytes; ++b) EXPECT_EQ(int{bytes[b]}, static_cast<int>(1 + c.immediate % 255));
      }
  EXPECT_EQ(arrivals.size(), posted);
  EXPECT_EQ(done.size(), posted);
  for (auto& [key, count] : arrivals) EXPECT_EQ(count, 1);
  for (auto& [cookie, count] : done) EXPECT_EQ(count, 1);
  EXPECT_EQ(fake_verbs().outside, uint64_t{0});
}

CLAIM("connections bring every write once with its bytes, over one NIC and over two") {
  expect_everything_arrives(3, {}, 2000);
  NicOptions two;
  two.devices = {"fake0", "fake1"};
  expect_everything_arrives(3, two, 2000);
}

CLAIM("EFA's datagrams in any order bring every write once with its bytes and its sender") {
  fake_verbs().is_efa = true;
  for (uint64_t seed : {0, 5, 6, 7})
    for (bool unsolicited : {true, false}) {
      fake_verbs().seed = seed;
      fake_verbs().can_receive_unsolicited = unsolicited;
      const uint32_t before = fake_verbs().receives;
      expect_everything_arrives(4, {}, 1500);
      // Receives are posted only where writes use them up.
      EXPECT_EQ(fake_verbs().receives == before, unsolicited);
    }
}

CLAIM("one doorbell hands over a batch, and one completion stands for at most 16 writes") {
  Net net(2);
  const uint64_t doorbells = fake_verbs().doorbells, signalled = fake_verbs().signalled;
  for (uint32_t i = 0; i < 40; ++i) EXPECT(net[0].post_write(small(1, i)) == PostResult::kPosted);
  EXPECT_EQ(fake_verbs().writes, uint64_t{0});
  net[0].flush();
  EXPECT_EQ(fake_verbs().writes, uint64_t{40});
  EXPECT_EQ(fake_verbs().doorbells - doorbells, uint64_t{1});
  EXPECT_EQ(fake_verbs().signalled - signalled, uint64_t{3});  // the 16th, the 32nd, the last
  EXPECT_EQ(net.poll(0).size(), size_t{40});
  net[0].flush();
  EXPECT_EQ(fake_verbs().doorbells - doorbells, uint64_t{1});
}

CLAIM("memory beyond a piece is registered in pieces, and every write lies within one") {
  constexpr uint64_t kPiece = 1 << 16, kBytes = 5 * kPiece + 777;
  std::vector<uint8_t> bytes(kBytes);
  const verbs::Nic nic("fake0", {}, {});
  const uint32_t before = fake_verbs().registrations;
  for (uint64_t largest : {uint64_t{1}, uint64_t{4096}, kPiece / 2, kPiece - 1}) {
    const RegisteredRegion region{bytes.data(), kBytes, "x"};
    const verbs::RegisteredMemory memory(nic.pd(), Memory::kHost, region, largest, 0, kPiece);
    EXPECT(fake_verbs().largest_registration_bytes <= kPiece);
    const verbs::MemoryAddress address = memory.address();
    EXPECT_EQ(address.keys.size(), size_t{fake_verbs().registrations - before});
    const uint64_t step = std::max<uint64_t>(1, largest / 3);
    for (uint64_t offset = 0; offset + largest <= kBytes; offset += step) {
      const uint64_t piece = std::min<uint64_t>(offset / address.stride, address.keys.size() - 1);
      EXPECT_EQ(address.key_of(offset), address.keys[piece]);
      EXPECT(offset >= piece * address.stride);
      EXPECT(offset + largest <= std::min(piece * address.stride + kPiece, kBytes));
    }
  }
  EXPECT_EQ(fake_verbs().registrations, before);
  EXPECT_THROWS(UsageFailure,
                verbs::RegisteredMemory(nic.pd(), Memory::kHost, {bytes.data(), kBytes, "x"}, kPiece, 0, kPiece));
}

CLAIM("a registration that fails says what to do") {
  std::vector<uint8_t> bytes(1 << 16);
  const verbs::Nic nic("fake0", {}, {});
  auto attempt = [&](Memory kind, int error, int fd) {
    fake_verbs().registration_error = error;
    return message_of<CommunicationFailure>(
        [&] { verbs::RegisteredMemory(nic.pd(), kind, {bytes.data(), bytes.size(), "", fd}, 16, 3); });
  };
  EXPECT(says(attempt(Memory::kHost, ENOMEM, -1), "ulimit -l"));
  EXPECT(says(attempt(Memory::kDevice, EINVAL, -1), "nvidia_peermem"));
  EXPECT(says(attempt(Memory::kDevice, EINVAL, 7), "dmabuf"));
  EXPECT(says(attempt(Memory::kDevice, 0, -1), "nothing was thrown"));  // negative control
  EXPECT_EQ(fake_verbs().dmabuf_registrations, 0u);
  attempt(Memory::kDevice, 0, 7);
  EXPECT_EQ(fake_verbs().dmabuf_registrations, 1u);
}

CLAIM("GPU memory is written like any other once both ends have registered it") {
  std::vector<std::vector<uint8_t>> gpus(2, std::vector<uint8_t>(1 << 16));
  std::vector<std::unique_ptr<TestRegion>> regions;
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<std::string> addresses;
  TransportOptions options;
  options.nic.devices = {"fake0"};
  for (int r = 0; r < 2; ++r) {
    regions.push_back(std::make_unique<TestRegion>(kRegionBytes));
    TransportSetup setup = setup_of(r, 2, regions.back()->registered());
    setup.largest_write_bytes = kLargestWrite;
    transports.push_back(transport_named("verbs").make(setup, options));
    EXPECT_THROWS(CommunicationFailure, transports.back()->attach_device({}));
    transports.back()->register_device({gpus[static_cast<size_t>(r)].data(), 1 << 16, ""});
    addresses.push_back(transports.back()->address());
  }
  for (auto& transport : transports) transport->connect(addresses);
  // Before an arrival is told, all GPUs are made to see it.
  struct Flush final : DeviceFlush {
    const std::vector<uint8_t>* gpu;
    int flushes = 0;
    void flush() override {
      ++flushes;
      EXPECT(gpu->at(200) == 9);
    }
  } flush;
  flush.gpu = &gpus[1];
  transports[0]->attach_device({});
  transports[1]->attach_device({{}, nullptr, &flush});
  std::fill(gpus[0].begin(), gpus[0].end(), uint8_t{9});
  EXPECT(transports[0]->post_write({1, 100, 200, 5000, 1, 1, Memory::kDevice, true}) == PostResult::kPosted);
  EXPECT_THROWS(CommunicationFailure,
                transports[0]->post_write({1, 0, (1 << 16) - 10, 11, 1, 1, Memory::kDevice, true}));
  transports[0]->flush();
  std::vector<Completion> out(8);
  EXPECT_EQ(flush.flushes, 0);
  EXPECT_EQ(transports[1]->poll(out), size_t{1});
  EXPECT_EQ(flush.flushes, 1);
  EXPECT_EQ(transports[1]->poll(out), size_t{0});
  EXPECT_EQ(flush.flushes, 1);
  EXPECT(gpus[1][199] == 0 && gpus[1][200] == 9 && gpus[1][5199] == 9 && gpus[1][5200] == 0);
}

CLAIM("a cut link fails every write on it once, later ones too, and nobody else's") {
  for (bool is_efa : {false, true}) {
    fake_verbs().is_efa = is_efa;
    Net net(3);
    fake_verbs().holds = true;
    for (uint32_t i = 0; i < 30; ++i) {
      EXPECT(net[0].post_write(small(1, i)) == PostResult::kPosted);
      EXPECT(net[2].post_write(small(1, 100 + i)) == PostResult::kPosted);
    }
    net[0].flush();
    net[2].flush();
    const verbs::Address own = verbs::decode_address(net.addresses[0]);
    fake_verbs().cut_qp = own.nics[0].pair_of(1)->number;
    fake_verbs().holds = false;
    std::map<uint64_t, int> failed;
    for (int pass = 0; pass < 100; ++pass)
      for (const Completion& c : net.poll(0)) {
        EXPECT(c.kind == Completion::Kind::kFailure);
        EXPECT(says(c.reason, is_efa || c.cookie == 15 ? "retry counter" : ""));
        ++failed[c.cookie];
      }
    EXPECT_EQ(failed.size(), size_t{30});
    for (auto& [cookie, count] : failed) EXPECT_EQ(count, 1);
    EXPECT(net[0].post_write(small(1, 50)) == PostResult::kPosted);
    net[0].flush();
    const auto later = net.poll(0);
    EXPECT(later.size() == 1 && later[0].kind == Completion::Kind::kFailure && later[0].cookie == 50);
    size_t done = 0;
    for (int pass = 0; pass < 10; ++pass) done += net.poll(2).size();
    EXPECT_EQ(done, size_t{30});
    if (!is_efa) {  // the others of rank 0 have queue pairs of their own
      EXPECT(net[0].post_write(small(2, 60)) == PostResult::kPosted);
      net[0].flush();
      EXPECT_EQ(net.poll(0).at(0).cookie, uint64_t{60});
    }
    EXPECT_EQ(fake_verbs().to_cut_ones, uint64_t{0});
    fake_verbs().cut_qp = 0;
  }
}

CLAIM("with two NICs chunks are spread, and go on over the other one when a link breaks") {
  NicOptions two;
  two.devices = {"fake0", "fake1"};
  Net net(2, two);
  const verbs::Address own = verbs::decode_address(net.addresses[0]);
  fake_verbs().cut_qp = own.nics[1].pair_of(1)->number;
  std::map<Completion::Kind, int> ends;
  for (uint32_t i = 0; i < 20; ++i) {
    EXPECT(net[0].post_write(small(1, i)) == PostResult::kPosted);
    net[0].flush();
    for (const Completion& c : net.poll(0)) ++ends[c.kind];
  }
  EXPECT_EQ(ends[Completion::Kind::kFailure], 1);
  EXPECT_EQ(ends[Completion::Kind::kWriteDone], 19);
}

CLAIM("limits hold per NIC, in operations and in bytes, and what carries no data passes") {
  NicOptions nic;
  nic.devices = {"fake0", "fake1"};
  nic.window_ops = 3;
  nic.window_bytes = 1000;
  Net net(2, nic);
  fake_verbs().holds = true;
  auto limited = [&](uint64_t num_bytes) {
    return net[0].post_write({1, kPageBytes, kPageBytes, num_bytes, 1, 1, Memory::kHost, true});
  };
  for (int i = 0; i < 4; ++i) {  // two on each NIC
    EXPECT(net[0].has_room(400));
    EXPECT(limited(400) == PostResult::kPosted);
  }
  EXPECT(!net[0].has_room(400) && net[0].has_room(200));
  EXPECT(limited(400) == PostResult::kAgain);
  EXPECT(limited(100) == PostResult::kPosted && limited(100) == PostResult::kPosted);
  EXPECT(!net[0].has_room(1));  // three operations on each
  EXPECT(net[0].post_write(small(1, 9, 0)) == PostResult::kPosted);
  fake_verbs().holds = false;
  net[0].flush();
  EXPECT_EQ(net.poll(0).size(), size_t{7});
  EXPECT(net[0].has_room(5000));  // one may always be in flight
}

CLAIM("a queue that is full refuses, and takes again after a poll") {
  Net net(2);
  fake_verbs().holds = true;
  uint32_t posted = 0;
  while (posted < 100000 && net[0].post_write(small(1, posted)) == PostResult::kPosted) ++posted;
  EXPECT(posted >= 8 && posted < 100000);
  net[0].flush();
  fake_verbs().holds = false;
  size_t done = 0;
  while (done < posted) {
    const size_t before = done;
    done += net.poll(0).size();
    EXPECT(done > before);
  }
  EXPECT(net[0].post_write(small(1, 1)) == PostResult::kPosted);
}

CLAIM("what cannot be connected is a typed error that says why") {
  Net net(2);
  const verbs::Address good = verbs::decode_address(net.addresses[1]);
  auto connect = [&](const std::function<void(verbs::Address&)>& change) {
    verbs::Address bad = good;
    change(bad);
    TransportOptions options;
    options.nic.devices = {"fake0"};
    return message_of<CommunicationFailure>([&] {
      transport_named("verbs").make(net.setups[0], options)->connect({net.addresses[0], verbs::encode_address(bad)});
    });
  };
  EXPECT(says(connect([](auto&) {}), "nothing was thrown"));
  EXPECT(says(connect([](auto& a) { a.generation = 77; }), "another engine"));
  EXPECT(says(connect([](auto& a) { a.rank = 0; }), "names rank 0"));
  EXPECT(says(connect([](auto& a) { a.policy = "srd"; }), "speaks srd"));
  EXPECT(says(connect([](auto& a) { a.nics.push_back(a.nics[0]); }), "has 2 NICs"));
  EXPECT(says(connect([](auto& a) { a.nics[0].is_ethernet = false; }), "different networks"));
  EXPECT(says(connect([](auto& a) { a.nics[0].pairs.clear(); }), "no queue pair"));
  const std::string whole = verbs::encode_address(good);
  for (size_t size = 0; size < whole.size(); ++size)
    EXPECT_THROWS(CommunicationFailure, verbs::decode_address(whole.substr(0, size)));
}

CLAIM("a NIC that cannot be used is a typed error that names it and what there is") {
  auto open = [](const NicOptions& options) {
    return message_of<UsageFailure>([&] {
      TestRegion region(kRegionBytes);
      TransportSetup setup = setup_of(0, 2, region.registered());
      setup.largest_write_bytes = kLargestWrite;
      transport_named("verbs").make(setup, {{}, options});
    });
  };
  NicOptions options;
  options.devices = {"mlx5_7"};
  EXPECT(says(open(options), "nics = mlx5_7: there is no such NIC; this host has fake0"));
  options.devices = {"fake0"};
  options.gid_index = 9;
  EXPECT(says(open(options), "no GID of index 9; its indices: 0, 1, 2"));
  options.gid_index = -1;
  fake_verbs().port_active = false;
  EXPECT(says(open(options), "not active"));
  EXPECT(!transport_named("verbs").probe({}).usable);
  fake_verbs().port_active = true;
  EXPECT(transport_named("verbs").probe({}).usable);
  EXPECT(transport_named("verbs").probe({}).link == LinkKind::kRdma);
  // All that were asked for have to work.
  options.devices = {"fake1", "fake0"};
  EXPECT(transport_named("verbs").probe({{}, options}).usable);
  options.devices = {"fake1", "mlx5_7"};
  EXPECT(!transport_named("verbs").probe({{}, options}).usable);
  options.devices = {"fake0"};
  fake_verbs().is_efa = true;
  EXPECT(transport_named("verbs").probe({}).link == LinkKind::kEfa);
  fake_verbs().can_write = false;
  EXPECT(says(open(options), "no RDMA write"));
  fake_verbs().num_devices = 0;
  const std::string why = transport_named("verbs").probe({}).text;
  EXPECT(says(why, "no RDMA NIC") || (!host_nics().empty() && says(why, "apt-get install ibverbs-providers")));
}

CLAIM("service level, traffic class and a timeout that outlasts the deadline reach the connection") {
  NicOptions nic;
  nic.service_level = 5;
  nic.traffic_class = 96;
  Net net(2, nic);
  EXPECT_EQ(int{fake_verbs().service_level}, 5);
  EXPECT_EQ(int{fake_verbs().traffic_class}, 96);
  // The defaults of a NIC that sysfs does not know.
  const Net open(2);
  EXPECT_EQ(int{fake_verbs().service_level}, 3);
  EXPECT_EQ(int{fake_verbs().traffic_class}, 104);
  // 7 timeouts of 4.096 us * 2^n each, for 20 s.
  EXPECT(7 * 4.096 * static_cast<double>(1u << fake_verbs().timeout) >= 20e6);
  EXPECT(7 * 4.096 * static_cast<double>(1u << (fake_verbs().timeout - 1)) < 20e6);
}

CLAIM("teardown with writes under way takes queue pairs first, memory after them") {
  for (bool is_efa : {false, true}) {
    fake_verbs().is_efa = is_efa;
    fake_verbs().holds = true;
    {
      Net net(3);
      for (uint32_t i = 0; i < 50; ++i)
        EXPECT(net[0].post_write(small(1 + static_cast<int>(i % 2), i)) == PostResult::kPosted);
      net[0].flush();
      EXPECT(net[1].post_write(small(0, 1)) == PostResult::kPosted);  // not even handed over
    }
    EXPECT_EQ(fake_verbs().queue_pairs, 0u);
    EXPECT_EQ(fake_verbs().registrations, 0u);
    EXPECT_EQ(fake_verbs().wrong_order, uint64_t{0});
  }
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
