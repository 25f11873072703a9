// Whole streams between proxies over loop, one per seed: everything that can vary is drawn from the seed, time too, so
// a seed that fails fails again.
#include <random>

#include "broken.h"
#include "worlds.h"

namespace conformance {
namespace {

constexpr uint64_t kChunks = 24;  // on each channel
constexpr uint64_t kSlotBytes = 512;
constexpr uint32_t kMostSlots = 8;
constexpr uint64_t kMostPasses = 200'000;
constexpr uint64_t kMostFailures = 10;  // to be told of

template <typename T>
T one_of(std::mt19937_64& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

uint64_t chunk_bytes(uint64_t key, uint64_t serial) { return 8 * (1 + pattern_word(key, serial) % (kSlotBytes / 8)); }

WorldOptions options_of(uint64_t seed, std::mt19937_64& random, const Flag& clock_nsec) {
  WorldOptions options;
  options.labels = one_of<std::vector<int>>(random, {{0, 1}, {0, 1}, {0, 0, 1}, {0, 1, 1, 1}, {0, 1, 2}, {0, 1, 0, 2}});
  options.rings = {kSlotBytes, kSlotBytes, one_of(random, {2u, 2u, 3u, kMostSlots}), 12};
  options.loop.seed = one_of<uint64_t>(random, {0, seed + 1, seed + 1, seed + 1});
  options.loop.refuse_rate = one_of(random, {0.0, 0.1, 0.5});
  options.loop.duplicate_rate = one_of(random, {0.0, 0.2, 1.0});
  options.loop.gbytes_per_s = one_of(random, {0.0, 0.02, 1.0});
  options.loop.latency_usec = one_of(random, {0.0, 2.0, 50.0});
  options.loop.queue_depth = one_of(random, {1u, 3u, 64u});
  options.nic.window_ops = one_of(random, {0u, 1u, 4u});
  options.loop.clock_nsec = &clock_nsec;
  return options;
}

struct Ends {
  std::vector<Source> sources;
  std::vector<Sink> sinks;
  std::vector<uint32_t> keys;  // of the sinks
};

Ends ends_of(World& world) {
  Ends ends;
  for (Node& node : world.nodes) {
    for (uint32_t c = 0; c < node.channels.out.size(); ++c)
      if (node.channels.out[c].credited) ends.sources.emplace_back(node, c);
    for (uint32_t c = 0; c < node.channels.in.size(); ++c)
      for (uint32_t r = 0; node.channels.in[c].credited && r < node.channels.in[c].landing.num_readers; ++r) {
        ends.sinks.emplace_back(node, c, r);
        ends.keys.push_back(c);
      }
  }
  return ends;
}

// One turn of everybody, each with a chance to be late. True once all have everything; throws for a broken chunk.
bool turn(World& world, Ends& ends, std::mt19937_64& random) {
  bool over = true;
  for (Source& source : ends.sources) {
    if (source.serial() < kChunks && random() % 2 == 0) source.try_send(chunk_bytes(source.key(), source.serial()));
    over &= source.serial() == kChunks;
    for (uint64_t serial = kChunks - kMostSlots; over && serial < kChunks; ++serial) over &= source.flushed(serial);
  }
  for (size_t i = 0; i < world.nodes.size(); ++i) world.nodes[random() % world.nodes.size()].proxy->step();
  for (size_t i = 0; i < ends.sinks.size(); ++i) {
    Sink& sink = ends.sinks[i];
    if (sink.serial() < kChunks && random() % 4 != 0 && sink.ready()) {
      if (!sink.intact(chunk_bytes(ends.keys[i], sink.serial())))
        throw std::logic_error("chunk " + std::to_string(sink.serial()) + " of channel " +
                               std::to_string(ends.keys[i]) + " is broken");
      sink.release();
    }
    over &= sink.serial() == kChunks;
  }
  return over;
}

void expect_each_counted_once(const World& world) {
  for (const Node& node : world.nodes) {
    uint64_t expected = 0;
    for (auto& in : node.channels.in) expected += in.credited ? kChunks : 0;
    const uint64_t arrivals = node.proxy->stats().arrivals;
    if (arrivals != expected)
      throw std::logic_error(std::to_string(arrivals) + " arrivals of " + std::to_string(expected) + " chunks");
  }
}

void run_seed(uint64_t seed, bool broken) {
  std::mt19937_64 random(seed);
  Flag clock_nsec;
  clock_nsec.publish(1);
  WorldOptions options = options_of(seed, random, clock_nsec);
  if (broken)
    options.wrap = [&](int, std::unique_ptr<Transport> inner) -> std::unique_ptr<Transport> {
      return std::make_unique<Breaching>(std::move(inner), Breach::kLosesBytes, 20 + random() % 1000);
    };
  World world(options);
  Ends ends = ends_of(world);
  for (uint64_t pass = 0; !turn(world, ends, random); ++pass) {
    clock_nsec.publish(clock_nsec.own() + random() % 20'000);
    for (Node& node : world.nodes)
      if (node.has_error()) throw std::logic_error(node.control().error.message);
    if (pass > kMostPasses) throw std::logic_error("not over after " + std::to_string(pass) + " turns");
  }
  expect_each_counted_once(world);
}

}  // namespace

bool run_seeds(uint64_t from, uint64_t to, bool broken) {
  uint64_t num_run = 0, num_failed = 0;
  for (uint64_t seed = from; seed <= to && num_failed < kMostFailures; ++seed) {
    ++num_run;
    try {
      run_seed(seed, broken);
    } catch (const std::exception& failure) {
      ++num_failed;
      std::printf("FAILED: seed %lu: %s; again: conformance loop --seed %lu%s\n", seed, failure.what(), seed,
                  broken ? " --broken" : "");
      std::fflush(stdout);
    }
  }
  std::printf("%s: %lu seeds, %lu failed\n", num_failed == 0 ? "ok" : "FAILED", num_run, num_failed);
  return num_failed == 0;
}

}  // namespace conformance
