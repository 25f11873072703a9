// Proxies over the loop transport: streams of chunks arrive whole under every fault.
#include <unistd.h>

#include <thread>

#include "claims.h"
#include "common/clock.h"
#include "layout/words.h"
#include "proxy_world.h"
#include "stream.h"

using namespace uccl_ep;

namespace {

void expect_stream(const LoopOptions& loop, std::vector<int> labels = {0, 1}, uint64_t num_chunks = 1000) {
  WorldOptions options;
  options.labels = std::move(labels);
  options.loop = loop;
  World world(options);
  world.start();
  const StreamResult result = stream(world, num_chunks, 2048);
  if (world.nodes[0].has_error()) throw std::logic_error(world.nodes[0].control().error.message);
  EXPECT_EQ(result.broken, uint64_t{0});
  EXPECT(result.complete);
  EXPECT(eventually([&] {  // the last flush may come after the last reader
    const ProxyStats sent = world.nodes[0].proxy->stats();
    uint64_t chunks = 0;
    for (auto& ship : sent.ships) chunks += ship.kind == RingKind::kRows ? ship.chunks : 0;
    return chunks == num_chunks;
  }));
  const ProxyStats landed = world.nodes[static_cast<size_t>(world.topo.rail(0, 1))].proxy->stats();
  EXPECT_EQ(landed.arrivals, num_chunks);
  EXPECT_EQ(landed.arrived_bytes, num_chunks * 2048);
  EXPECT(loop.duplicate_rate == 0 ? landed.duplicates_dropped == 0 : landed.duplicates_dropped > 0);
  EXPECT(loop.refuse_rate == 0 ? world.nodes[0].proxy->stats().refused_posts == 0
                               : world.nodes[0].proxy->stats().refused_posts > 0);
}

CLAIM("1,000 chunks through a ring of 2 arrive intact at a slow reader") { expect_stream({}); }

CLAIM("1,000 chunks through a ring of 2 arrive intact out of order and delayed") {
  LoopOptions loop;
  loop.seed = 5;
  expect_stream(loop);
}

CLAIM("1,000 chunks through a ring of 2 arrive intact when posts are refused") {
  LoopOptions loop;
  loop.refuse_rate = 0.3;
  expect_stream(loop);
}

CLAIM("1,000 chunks through a ring of 2 arrive intact when writes are duplicated") {
  LoopOptions loop;
  loop.duplicate_rate = 0.3;
  expect_stream(loop);
}

CLAIM("1,000 chunks through a ring of 2 arrive intact over a slow link with latency") {
  LoopOptions loop;
  loop.gbytes_per_s = 0.05;
  loop.latency_usec = 30;
  expect_stream(loop);
}

CLAIM("1,000 chunks through a ring of 2 arrive intact with a queue of one write") {
  LoopOptions loop;
  loop.queue_depth = 1;
  WorldOptions options;
  options.loop = loop;
  World world(options);
  world.start();
  const StreamResult result = stream(world, 1000, 2048);
  EXPECT(result.complete && result.broken == 0);
}

CLAIM("1,000 chunks through a ring of 2 arrive intact under all faults at once, with three readers") {
  LoopOptions loop;
  loop.seed = 9;
  loop.refuse_rate = 0.2;
  loop.duplicate_rate = 0.2;
  loop.gbytes_per_s = 0.2;
  loop.latency_usec = 5;
  expect_stream(loop, {0, 1, 1, 1});
}

CLAIM("a sender that ignores credits is stopped by the receiver, with an error on both sides") {
  WorldOptions options;
  options.change_channels = [](int rank, Channels& channels) {
    if (rank == 0)
      for (auto& out : channels.out) out.credited = false;
  };
  World world(options);
  world.start();
  stream(world, 1000, 2048);
  EXPECT(eventually([&] { return world.nodes[0].has_error() && world.nodes[1].has_error(); }));
  EXPECT(world.nodes[1].control().error.kind == ErrorKind::kTransport);
  EXPECT_EQ(world.nodes[0].control().error.rank, 1);
}

CLAIM("without credits on both sides the slow reader would find overwritten chunks") {
  WorldOptions options;
  options.change_channels = [](int, Channels& channels) {
    for (auto& out : channels.out) out.credited = false;
    for (auto& in : channels.in) in.credited = false;
  };
  World world(options);
  world.start();
  EXPECT(stream(world, 1000, 2048).broken > 0);
}

CLAIM("all channels of all ranks stream at once") {
  WorldOptions options;
  options.labels = {0, 1, 0, 2};
  options.loop.seed = 21;
  World world(options);
  world.start();
  constexpr uint64_t kChunks = 150, kBytes = 512;
  std::vector<std::thread> threads;
  std::vector<uint64_t> missing(world.nodes.size(), 0);
  for (size_t rank = 0; rank < world.nodes.size(); ++rank)
    threads.emplace_back([&, rank] {  // one worker per rank, as in the product: never blocks on one channel
      Node& node = world.nodes[rank];
      std::vector<Source> sources;
      std::vector<std::pair<size_t, Sink>> sinks;
      for (uint32_t c = 0; c < node.channels.out.size(); ++c)
        if (node.channels.out[c].credited) sources.emplace_back(node, c);
      for (size_t owner = 0; owner < world.nodes.size(); ++owner) {
        if (world.topo.domain_of[owner] != world.topo.domain_of[rank]) continue;
        Node& rail = world.nodes[owner];
        for (uint32_t c = 0; c < rail.channels.in.size(); ++c) {
          const InChannel& in = rail.channels.in[c];
          if (!in.credited || (in.landing.num_readers == 1 && owner != rank)) continue;
          const uint32_t reader = in.landing.num_readers == 1 ? 0 : static_cast<uint32_t>(world.topo.local_of[rank]);
          sinks.emplace_back(owner, Sink(rail, c, reader));
        }
      }
      const uint64_t deadline = now_usec() + kPatienceUsec;
      bool done = false;
      while (!done && now_usec() < deadline) {
        done = true;
        for (auto& source : sources) {
          if (source.serial() < kChunks) source.try_send(kBytes);
          done &= source.serial() == kChunks;
        }
        for (auto& [owner, sink] : sinks) {
          if (sink.serial() < kChunks && sink.ready()) {
            missing[rank] += !sink.intact(kBytes);
            sink.release();
          }
          done &= sink.serial() == kChunks;
        }
        sched_yield();
      }
      missing[rank] += !done;
    });
  for (auto& thread : threads) thread.join();
  for (uint64_t count : missing) EXPECT_EQ(count, uint64_t{0});
}

CLAIM("a stream goes on where the bits of its serial wrap, twice") {
  WorldOptions options;
  options.rings = {64, 64, 8, 16};
  World world(options);
  const uint32_t channel = out_channel(world.nodes[0], RingKind::kRows, 1);
  Source source(world.nodes[0], channel);
  Sink sink(world.nodes[1], world.nodes[0].channels.out[channel].peer_channel, 0);
  constexpr uint64_t kChunks = (uint64_t{2} << kImmSerialBits) + 100;
  uint64_t passes = 0;
  while (sink.serial() < kChunks && ++passes < 20 * kChunks) {
    while (source.serial() < kChunks && source.try_send(64)) continue;
    world.step();
    while (sink.ready()) {
      EXPECT(sink.intact(64));
      sink.release();
    }
  }
  EXPECT_EQ(sink.serial(), kChunks);
}

CLAIM("never more data is in flight than the ring allows, but one chunk always is") {
  for (auto [ops, bytes, most] : {std::tuple<uint64_t, uint64_t, uint64_t>{2, 0, 2}, {0, 3 * 2048, 3}, {0, 1, 1}}) {
    WorldOptions options;
    options.rings = {4096, 1024, 8, 16};
    options.nic.window_ops = ops;
    options.nic.window_bytes = bytes;
    options.loop.latency_usec = 20;
    World world(options);
    world.start();
    const StreamResult result = stream(world, 200, 2048);
    EXPECT(result.complete && result.broken == 0);
    const ProxyStats stats = world.nodes[0].proxy->stats();
    EXPECT_EQ(stats.peak_in_flight_ops, most);
    EXPECT_EQ(stats.peak_in_flight_bytes, most * 2048);
  }
}

CLAIM("a chunk that waits for its credit is counted once, with its time") {
  World world{WorldOptions{}};
  const uint32_t channel = out_channel(world.nodes[0], RingKind::kRows, 1);
  Source source(world.nodes[0], channel);
  Sink sink(world.nodes[1], world.nodes[0].channels.out[channel].peer_channel, 0);
  for (int i = 0; i < 3; ++i) {
    while (!source.try_send(64)) world.step();
  }
  for (int i = 0; i < 50; ++i) world.step();
  EXPECT_EQ(world.nodes[0].proxy->stats().credit_waits, uint64_t{1});
  usleep(2000);
  EXPECT(!source.flushed(2));
  while (sink.ready()) sink.release();
  EXPECT(eventually([&] {
    world.step();
    return source.flushed(2);
  }));
  const ProxyStats stats = world.nodes[0].proxy->stats();
  EXPECT_EQ(stats.credit_waits, uint64_t{1});
  EXPECT(stats.credit_wait_usec >= 2000);
}

CLAIM("headers need no credit") {
  World world{WorldOptions{}};
  const uint32_t channel = out_channel(world.nodes[0], RingKind::kHeader, 1);
  Source source(world.nodes[0], channel);
  for (int i = 0; i < 10; ++i)
    EXPECT(eventually([&] {
      world.step();
      return source.try_send(64);
    }));
  EXPECT_EQ(world.nodes[0].proxy->stats().credit_waits, uint64_t{0});
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
