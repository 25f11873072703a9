// Proxies over the transport: streams stay whole, what is old or doubled is dropped, and nothing is allocated.
#include <memory>

#include "allocations.h"
#include "broken.h"
#include "claims.h"
#include "stream.h"
#include "worlds.h"

using namespace conformance;

namespace {

constexpr uint64_t kChunkBytes = 2048;

struct Counts {
  uint64_t arrivals = 0, duplicates = 0;
};

// A stream between two ranks arrives whole; what its receiver has counted.
Counts expect_whole(World& world, uint64_t num_chunks, bool rewritten = false) {
  world.start();
  const StreamResult result =
      stream(world, num_chunks, kChunkBytes, suite().patient_usec(2 * kPatienceUsec), rewritten);
  for (auto& node : world.nodes)
    if (node.has_error()) throw std::logic_error(node.control().error.message);
  EXPECT_EQ(result.broken, uint64_t{0});
  EXPECT(result.complete);
  const ProxyStats stats = world.nodes[1].proxy->stats();
  EXPECT_EQ(stats.arrivals, num_chunks);
  EXPECT_EQ(stats.arrived_bytes, num_chunks * kChunkBytes);
  return {stats.arrivals, stats.duplicates_dropped};
}

CLAIM("a stream through a ring of two slots arrives whole at a slow reader") {
  for (const Variant& variant : variants()) {
    WorldOptions options = world_options();
    options.loop = variant.loop;
    World world(options);
    expect_whole(world, 1000);
  }
}

CLAIM("immediates of earlier laps and epochs are recognised and dropped") {
  for (const Variant& variant : variants()) {
    WorldOptions options = world_options();
    options.loop = variant.loop;
    options.wrap = [](int rank, std::unique_ptr<Transport> inner) -> std::unique_ptr<Transport> {
      return std::make_unique<Echo>(std::move(inner), static_cast<uint64_t>(rank) + 1);
    };
    World world(options);
    EXPECT(expect_whole(world, 1000).duplicates > 100);
  }
}

CLAIM("writes that come twice with their payload do no harm") {
  for (const Variant& variant : variants()) {
    WorldOptions options = world_options();
    options.loop = variant.loop;
    options.wrap = [](int, std::unique_ptr<Transport> inner) -> std::unique_ptr<Transport> {
      return std::make_unique<Twice>(std::move(inner));
    };
    World world(options);
    EXPECT(expect_whole(world, 1000, true).duplicates >= 900);  // the last copies may still be on their way
  }
}

CLAIM("the reader of those streams notices a chunk whose bytes are lost") {
  WorldOptions options = world_options();
  options.wrap = [](int, std::unique_ptr<Transport> inner) -> std::unique_ptr<Transport> {
    return std::make_unique<Breaching>(std::move(inner), Breach::kLosesBytes, 100);
  };
  World world(options);
  world.start();
  EXPECT_EQ(stream(world, 1000, kChunkBytes, suite().patient_usec(kPatienceUsec)).broken, uint64_t{10});
}

// ---- allocations ----------------------------------------------------------------------------------------------------
// Commands through both ranks' proxies, in this thread; how often a pass allocated.
uint64_t allocations_of(World& world, uint64_t num_commands) {
  struct Way {
    Source source;
    Sink sink;
  };
  auto way = [&](size_t from) {
    const uint32_t channel = out_channel(world.nodes[from], RingKind::kRows, 1 - static_cast<int>(from));
    return Way{Source(world.nodes[from], channel),
               Sink(world.nodes[1 - from], world.nodes[from].channels.out[channel].peer_channel, 0)};
  };
  Way ways[2] = {way(0), way(1)};
  const uint64_t warm = num_commands / 5;
  uint64_t allocations = 0;
  const Deadline deadline(4 * kPatientUsec);
  while (ways[0].sink.serial() < warm + num_commands || ways[1].sink.serial() < warm + num_commands) {
    if (deadline.over()) throw std::logic_error("the commands took too long");
    for (Way& w : ways)
      while (w.source.free() && w.source.push(64)) continue;
    {
      const AllocationCount count;
      world.step();
      if (ways[0].sink.serial() >= warm && ways[1].sink.serial() >= warm) allocations += count.value();
    }
    for (Way& w : ways)
      while (w.sink.ready()) w.sink.release();
  }
  for (auto& node : world.nodes)
    if (node.has_error()) throw std::logic_error(node.control().error.message);
  return allocations;
}

WorldOptions allocation_options() {
  WorldOptions options = world_options();
  options.rings = {64, 64, 64, 16};
  return options;
}

CLAIM("after a warm-up proxy and transport allocate nothing for 100,000 commands in each direction") {
  World world(allocation_options());
  EXPECT_EQ(allocations_of(world, 100'000), uint64_t{0});
}

CLAIM("that count notices one allocation in a thousand polls") {
  class Allocating final : public Wrapped {
   public:
    using Wrapped::Wrapped;
    size_t poll(std::span<Completion> out) override {
      if (++polls_ % 1000 == 0) kept_ = std::make_unique<uint64_t>(polls_);
      return inner_->poll(out);
    }

   private:
    uint64_t polls_ = 0;
    std::unique_ptr<uint64_t> kept_;
  };
  WorldOptions options = allocation_options();
  options.wrap = [](int, std::unique_ptr<Transport> inner) -> std::unique_ptr<Transport> {
    return std::make_unique<Allocating>(std::move(inner));
  };
  World world(options);
  EXPECT(allocations_of(world, 100'000) > 0);
}

}  // namespace
