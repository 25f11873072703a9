// The host side of several domains on GPUs, with ordinary memory in place of the GPUs' and memcpy in place of their
// copy engines: layouts, what the board says, and the proxy's sleep.
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "claims.h"
#include "device_world.h"
#include "layout_checks.h"

using namespace uccl_ep;

namespace {

const uint64_t kPacketBytes = kDeviceRings.packet_bytes.at(1);

std::vector<Topology> topologies() {
  const std::vector<std::vector<int>> labels = {{0, 0},       {0, 0, 1, 1},       {0, 1, 2, 3},       {0, 0, 0, 1},
                                                {0, 1, 0, 1}, {0, 0, 0, 1, 1, 1}, {0, 0, 1, 1, 2, 2}, {2, 0, 1, 0, 2}};
  std::vector<Topology> all;
  for (auto& l : labels) all.push_back(Topology::from_labels(l));
  return all;
}

void step(World& world, int passes = 50) {
  for (int i = 0; i < passes; ++i) world.step();
}

CLAIM("the rings, flags and words of a device layout never overlap, in the region and in the device region") {
  for (const Topology& topo : topologies())
    for (int rank = 0; rank < topo.num_ranks; ++rank) {
      const RegionLayout layout = make_device_layout(topo, kDeviceRings, rank);
      const Channels channels = make_device_channels(topo, kDeviceRings, rank);
      std::vector<Span> host = {control_span(layout)}, device;
      for (const RingLayout* ring : rings_of(layout)) {
        add_flags(host, *ring);
        add_slots(device, *ring);
        EXPECT_EQ(ring->slots_offset % kDeviceRingAlignBytes, uint64_t{0});
      }
      // Packets for other domains share memory; so do low latency's routing, and its weights.
      const size_t others = static_cast<size_t>(topo.num_domains()) - 1;
      EXPECT_EQ(device.size(), channels.in.size() + channels.out.size() - 3 * (others - std::min<size_t>(others, 1)));
      EXPECT_EQ(layout.board_offset % kLineBytes, uint64_t{0});
      EXPECT_EQ(layout.ended_offset % kLineBytes, uint64_t{0});
      host.push_back({layout.board_offset, layout.board_offset + 8 * (channels.in.size() + channels.out.size())});
      for (const RegionLayout::Events& events : layout.events)
        host.push_back({events.offset, events.offset + 8 * uint64_t{events.capacity}});
      host.push_back({layout.ended_offset, layout.ended_offset + kLineBytes});
      host.push_back({layout.commands_offset, layout.commands_offset + CommandRing::bytes_for(layout.num_commands)});
      EXPECT(overlap_free(host, layout.total_bytes));
      EXPECT(device.empty() || overlap_free(device, layout.device_bytes));
      const int size = topo.size_of(topo.domain_of[static_cast<size_t>(rank)]);
      EXPECT(layout.device_bytes <= device_ring_bytes(topo, kDeviceRings, size));
      uint64_t sum = 0;
      for (auto& [name, bytes] : layout.entries) sum += bytes;
      EXPECT_EQ(sum, layout.total_bytes);
      // Negative control: a word too far is noticed.
      host.push_back({layout.ended_offset - 8, layout.ended_offset + 8});
      EXPECT(!overlap_free(host, layout.total_bytes));
    }
}

CLAIM("a device layout has exactly the rings that a transport carries, with the slots and readers they need") {
  for (const Topology& topo : topologies())
    for (int rank = 0; rank < topo.num_ranks; ++rank) {
      const RegionLayout layout = make_device_layout(topo, kDeviceRings, rank);
      const uint32_t members = static_cast<uint32_t>(topo.size_of(topo.domain_of[static_cast<size_t>(rank)]));
      const size_t others = static_cast<size_t>(topo.num_domains()) - 1;
      EXPECT_EQ(rings_of(layout).size(), 7 * others + 7 * layout.incoming.size());
      for (const RingLayout& ring : layout.slots.routing_landing)
        EXPECT(ring.num_slots == 2 && ring.slot_bytes == kDeviceRings.slots.routing_bytes &&
               ring.num_readers == members);
      for (const auto* sent : {&layout.slots.routing_send, &layout.slots.weights_send})
        for (const RingLayout& ring : *sent)
          EXPECT(ring.num_slots == 0 || ring.shared_bytes == ring.num_slots * ring.slot_bytes);
      for (const RingLayout& ring : layout.slots.sums_landing)
        EXPECT(ring.num_slots == 0 || (ring.num_slots == 6 && ring.slot_bytes == 2048 && ring.num_readers == 1));
      EXPECT(layout.meta_send.empty() && layout.meta_landing.empty() && layout.pieces.empty());
      for (const RingLayout& ring : layout.header_landing)
        EXPECT(ring.num_slots == 2 && ring.slot_bytes == kDeviceRings.packet_bytes.at(static_cast<int>(members)) &&
               ring.num_readers == members);
      // A packet is as long as the other domain's number of ranks makes it.
      for (int domain = 0; domain < topo.num_domains(); ++domain)
        if (const RingLayout& ring = layout.header_send[static_cast<size_t>(domain)]; ring.num_slots > 0)
          EXPECT_EQ(ring.slot_bytes, kDeviceRings.packet_bytes.at(topo.size_of(domain)));
      for (const RingLayout& ring : layout.rows_landing)
        EXPECT(ring.num_slots == 4 && ring.slot_bytes == kDeviceRings.rows_slot_bytes && ring.num_readers == members);
      for (const RingLayout& ring : layout.return_landing)
        EXPECT(ring.num_slots == 0 || (ring.num_slots == 3 && ring.slot_bytes == 1024 && ring.num_readers == 1));
      EXPECT_EQ(make_region_layout(topo, {4096, 1024, 2, 16}, rank).board_offset, uint64_t{0});
    }
}

CLAIM("device channels end in the landing rings meant for them, for every pair of ranks") {
  for (const Topology& topo : topologies()) {
    std::vector<Channels> channels;
    for (int rank = 0; rank < topo.num_ranks; ++rank)
      channels.push_back(make_device_channels(topo, kDeviceRings, rank));
    for (int a = 0; a < topo.num_ranks; ++a)
      for (int b = 0; b < topo.num_ranks; ++b)
        EXPECT(connected(a, channels[static_cast<size_t>(a)], b, channels[static_cast<size_t>(b)]));
    for (auto& of : channels)
      for (uint32_t c = 0; c < of.out.size(); ++c) {
        EXPECT_EQ(of.out_of(of.out[c].send), c);
        EXPECT(of.out[c].send.kind != RingKind::kMeta &&
               of.out[c].credited == (of.out[c].send.kind != RingKind::kHeader));
      }
  }
}

// Rows from rank 0, read by the members of domain 1; all of them trust the board alone.
struct Result {
  uint64_t arrived = 0;
  uint64_t broken = 0;
};
Result stream(World& world, uint64_t num_chunks) {
  Ends ends = ends_of(world, RingKind::kRows);
  Node& landing = world.nodes[static_cast<size_t>(world.topo.rail(0, 1))];
  std::vector<Sink> sinks;
  for (uint32_t reader = 0; reader < landing.channels.in[ends.in].landing.num_readers; ++reader)
    sinks.emplace_back(landing, ends.in, reader);
  Result result;
  world.nodes[0].launched->publish(1);
  landing.launched->publish(1);
  const uint64_t deadline = now_usec() + kPatienceUsec;
  const auto least = [&] {
    return std::min_element(sinks.begin(), sinks.end(), [](auto& a, auto& b) { return a.serial() < b.serial(); })
        ->serial();
  };
  while (least() < num_chunks && now_usec() < deadline && !landing.has_error()) {
    while (ends.source.serial() < num_chunks && ends.source.try_send(kBytes)) continue;
    for (Sink& sink : sinks)
      while (sink.ready()) {
        result.broken += !sink.intact(kBytes);
        sink.release();
      }
    sched_yield();
  }
  result.arrived = least();
  return result;
}

CLAIM("a chunk is there, whole, when the board says so, and is sent when the board says that it may be overwritten") {
  for (uint64_t copy_usec : {0, 300}) {
    WorldOptions options = device_options({0, 1, 1});
    options.copy_usec = copy_usec;
    World world(options);
    world.start();
    const Result result = stream(world, 500);
    EXPECT(result.arrived == 500 && result.broken == 0);
    EXPECT_EQ(world.nodes[0].copies->started.value(), uint64_t{500});
    EXPECT_EQ(world.nodes[0].copies->asked_again.value(), uint64_t{0});
  }
}

CLAIM("it holds under disorder, duplicates, refusals and copies that overtake each other") {
  WorldOptions options = device_options({0, 1, 1});
  options.copy_usec = 200;
  options.loop.seed = 5;
  options.loop.duplicate_rate = 0.3;
  options.loop.refuse_rate = 0.2;
  World world(options);
  world.start();
  const Result result = stream(world, 500);
  EXPECT(result.arrived == 500 && result.broken == 0);
  EXPECT(world.nodes[1].proxy->stats().duplicates_dropped > 50);
  EXPECT(world.nodes[0].copies->started.value() > 600);
  EXPECT_EQ(world.nodes[0].copies->asked_again.value(), uint64_t{0});
}

CLAIM("only data lies in device memory: a word of every channel is its own, and errors come home") {
  World world(device_options({0, 1, 0, 2}));
  uint64_t num_sent = 0;
  for (Node& node : world.nodes)
    for (uint32_t c = 0; c < node.channels.out.size(); ++c) {
      Source source(node, c);
      EXPECT(source.try_send(512));
      ++num_sent;
    }
  EXPECT(eventually([&] {
    step(world);
    return std::all_of(world.nodes.begin(), world.nodes.end(), [](Node& node) {
      for (uint32_t c = 0; c < node.channels.in.size(); ++c)
        if (node.arrived(c).read() != 1) return false;
      for (uint32_t c = 0; c < node.channels.out.size(); ++c)
        if (node.flushed(c).read() != 1) return false;
      return true;
    });
  }));
  for (Node& node : world.nodes)
    for (uint32_t c = 0; c < node.channels.in.size(); ++c) EXPECT(Sink(node, c, 0).intact(512));
  uint64_t num_copies = 0;
  for (Node& node : world.nodes) num_copies += node.copies->started.value();
  EXPECT_EQ(num_copies, num_sent);
  ErrorRecord record;
  record.kind = ErrorKind::kPeerFailed;
  record.rank = 3;
  post_error(world.nodes[3].control(), record);
  EXPECT(eventually([&] {
    step(world);
    return world.nodes[0].has_error() && world.nodes[1].has_error();
  }));
  EXPECT_EQ(world.nodes[0].control().error.rank, 3);
}

CLAIM("a chunk in memory that rings share is shipped from where its command says, and not from beyond") {
  const auto ship = [](uint32_t more_units) {
    World world(device_options({0, 1, 2}));
    Node& node = world.nodes[0];
    const uint32_t channel = out_channel(node, RingKind::kHeader, 1);
    const RingLayout& ring = node.channels.out[channel].send;
    const uint64_t begin = (ring.shared_bytes - 512) / kSharedUnitBytes * kSharedUnitBytes;
    const uint32_t peer_channel = node.channels.out[channel].peer_channel;
    fill_chunk(node.slots() + ring.slots_offset + begin, 512, peer_channel, 0);
    const auto unit = static_cast<uint32_t>(begin / kSharedUnitBytes) + more_units;
    EXPECT(node.commands->push({channel, 512, 0, unit}));
    EXPECT(eventually([&] {
      step(world);
      return world.nodes[1].arrived(peer_channel).read() == 1;
    }));
    EXPECT(Sink(world.nodes[1], peer_channel, 0).intact(512));
  };
  ship(0);
  EXPECT_THROWS(CommunicationFailure, ship(1));
}

CLAIM("a sender gets no further than its receivers have taken, the slowest of them") {
  World world(device_options({0, 1, 1}));
  Ends ends = ends_of(world, RingKind::kRows);
  Node& landing = world.nodes[1];
  Sink fast(landing, ends.in, 0), slow(landing, ends.in, 1);
  const auto send_all = [&] {
    for (int i = 0; i < 200; ++i) {
      if (ends.source.serial() < 20) ends.source.try_send(kBytes);
      world.step();
    }
    return landing.arrived(ends.in).read();
  };
  EXPECT_EQ(send_all(), uint64_t{4});  // a ring
  while (fast.ready()) fast.release();
  EXPECT_EQ(send_all(), uint64_t{4});
  slow.release();
  slow.release();
  EXPECT_EQ(send_all(), uint64_t{6});
  EXPECT(world.nodes[0].proxy->stats().credit_waits > 0);
}

CLAIM("packets need no credit: two are under way at once, the third lands where the first was read") {
  World world(device_options());
  Ends ends = ends_of(world, RingKind::kHeader);
  Node& landing = world.nodes[1];
  Sink sink(landing, ends.in, 0);
  EXPECT(ends.source.try_send(kPacketBytes) && ends.source.try_send(kPacketBytes));
  EXPECT(!ends.source.free());
  step(world);
  EXPECT_EQ(landing.arrived(ends.in).read(), uint64_t{2});
  for (uint64_t epoch = 1; epoch <= 50; ++epoch) {
    EXPECT(sink.ready() && sink.intact(kPacketBytes));
    sink.release();
    EXPECT(ends.source.try_send(kPacketBytes));
    step(world);
    EXPECT_EQ(landing.arrived(ends.in).read(), epoch + 2);
  }
  EXPECT_EQ(world.nodes[0].proxy->stats().credit_waits, uint64_t{0});
  EXPECT_EQ(landing.proxy->stats().credits_sent, uint64_t{0});
}

CLAIM("a copy under way delays its arrival and no other, and somebody looks at it") {
  World world(device_options());
  Ends rows = ends_of(world, RingKind::kRows), packet = ends_of(world, RingKind::kHeader);
  Node &from = world.nodes[0], &to = world.nodes[1];
  from.copies->held.publish(1);  // the first
  EXPECT(rows.source.try_send(kBytes));
  step(world);
  EXPECT(packet.source.try_send(512));
  step(world);
  EXPECT_EQ(to.arrived(rows.in).read(), uint64_t{0});
  EXPECT_EQ(from.flushed(to.channels.in[rows.in].peer_channel).read(), uint64_t{0});
  EXPECT_EQ(to.arrived(packet.in).read(), uint64_t{1});
  EXPECT_EQ(from.transport->idle_usec(), uint64_t{0});
  from.copies->held.publish(0);
  step(world);
  EXPECT_EQ(to.arrived(rows.in).read(), uint64_t{1});
  EXPECT(Sink(to, rows.in, 0).intact(kBytes));
  EXPECT(from.transport->idle_usec() > 0);
}

CLAIM("a copy that is over early waits for the link's time") {
  WorldOptions options = device_options();
  options.loop.latency_usec = 20'000;
  World world(options);
  Ends ends = ends_of(world, RingKind::kRows);
  const uint64_t started = now_usec();
  EXPECT(ends.source.try_send(kBytes));
  while (world.nodes[1].arrived(ends.in).read() == 0 && now_usec() - started < kPatienceUsec) world.step();
  EXPECT(now_usec() - started >= 20'000);
}

CLAIM("a duplicate is a second copy, and the chunk is flushed when that one is over as well") {
  WorldOptions options = device_options();
  options.loop.duplicate_rate = 1;
  World world(options);
  Ends ends = ends_of(world, RingKind::kRows);
  Node &from = world.nodes[0], &to = world.nodes[1];
  const uint32_t channel = to.channels.in[ends.in].peer_channel;
  EXPECT(ends.source.try_send(kBytes));
  while (to.arrived(ends.in).read() == 0) world.step();  // the second is due some microseconds later
  from.copies->held.publish(2);
  usleep(1000);
  step(world);
  EXPECT_EQ(from.copies->started.value(), uint64_t{2});
  EXPECT_EQ(from.flushed(channel).read(), uint64_t{0});
  from.copies->held.publish(0);
  EXPECT(eventually([&] {
    step(world);
    return from.flushed(channel).read() == 1;
  }));
  EXPECT_EQ(to.proxy->stats().duplicates_dropped, uint64_t{1});
}

CLAIM("a write that leaves a device region, or before there is one, is refused with an error") {
  World world(device_options());
  Transport& transport = *world.nodes[0].transport;
  const uint64_t own = world.nodes[0].layout.device_bytes, theirs = world.nodes[1].layout.device_bytes;
  EXPECT_THROWS(CommunicationFailure, transport.post_write({1, own - 4, 0, 8, 0, 0, Memory::kDevice}));
  EXPECT_THROWS(CommunicationFailure, transport.post_write({1, 0, theirs - 4, 8, 0, 0, Memory::kDevice}));
  EXPECT_THROWS(CommunicationFailure, transport.post_write({1, 0, UINT64_MAX - 3, 8, 0, 0, Memory::kDevice}));
  EXPECT(transport.post_write({1, own - 8, theirs - 8, 8, 0, 0, Memory::kDevice}) == PostResult::kPosted);
  World host{WorldOptions{}};
  EXPECT_THROWS(CommunicationFailure, host.nodes[0].transport->post_write({1, 0, 0, 8, 0, 0, Memory::kDevice}));
}

CLAIM("copy engines that break are an error of both sides that names what broke") {
  enum class When { kStart, kDone, kWhileOthersWait };
  for (When when : {When::kStart, When::kDone, When::kWhileOthersWait}) {
    World world(device_options());
    Ends ends = ends_of(world, RingKind::kRows);
    FakeCopies& copies = *world.nodes[0].copies;
    if (when == When::kStart) copies.start_fails.publish(1);
    if (when == When::kDone) copies.fails.publish(1);
    if (when == When::kWhileOthersWait) copies.held.publish(4);
    world.start();
    for (int i = 0; i < 4; ++i) EXPECT(ends.source.try_send(kBytes));
    if (when == When::kWhileOthersWait) {
      EXPECT(eventually([&] { return copies.started.value() == 4; }));
      usleep(10'000);  // they are due
      copies.fails.publish(1);
    }
    EXPECT(eventually([&] { return world.nodes[0].has_error() && world.nodes[1].has_error(); }, 2'000'000));
    for (Node& node : world.nodes) {
      EXPECT(node.control().error.kind == ErrorKind::kTransport && node.control().error.rank >= 0);
      EXPECT(std::string(node.control().error.message).find("copy engine") != std::string::npos);
    }
  }
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
