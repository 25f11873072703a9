// The whole engine, ranks as threads of one process, under sanitizers: windows of two slots, every fault of the loop
// transport, several operations queued at once.
#include <algorithm>
#include <barrier>
#include <functional>
#include <random>
#include <thread>

#include "claims.h"
#include "engine/engine.h"
#include "engine_runs.h"
#include "fake_copies.h"
#include "transport/registry.h"

using namespace uccl_ep;

namespace {

// Skips where this machine has no libfabric.
void over_libfabric(EngineConfig& config) {
  config.transport = "ofi";
  config.nic.provider = "tcp";
  const Probe found = transport_named("ofi").probe({{}, config.nic});
  if (!found.usable) throw claims::Skip{found.text};
}

LoopOptions faulty() {
  LoopOptions loop;
  loop.seed = 17;
  loop.refuse_rate = 0.2;
  loop.duplicate_rate = 0.2;
  loop.latency_usec = 50;
  return loop;
}

}  // namespace

CLAIM("one domain of 4 ranks gives every token back, rings of two slots") { run({0, 0, 0, 0}, {}, 8); }
CLAIM("2 domains of 2 ranks give every token back, rings of two slots") { run({0, 0, 1, 1}, {}, 8); }
CLAIM("interleaved domains of 3 and 1 ranks give every token back under every fault") {
  run({0, 1, 0, 0}, faulty(), 4);
}
CLAIM("4 domains of 1 rank give every token back under every fault") { run({0, 1, 2, 3}, faulty(), 4); }
CLAIM("2 domains of 2 ranks give every token back over libfabric") { run({0, 0, 1, 1}, {}, 8, over_libfabric); }
CLAIM("3 domains of unequal size give every token back over libfabric with a limit of 2 writes and 4 KiB") {
  run({0, 1, 1, 2}, {}, 4, [](EngineConfig& config) {
    over_libfabric(config);
    config.nic.window_ops = 2;
    config.nic.window_bytes = 4096;
  });
}
CLAIM("an engine over libfabric refuses the handle of another engine") {
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::string> handles;
  for (int rank : {0, 1}) {
    EngineConfig config = config_of(rank, {0, 1}, {});
    over_libfabric(config);
    config.generation += static_cast<uint64_t>(rank);
    engines.push_back(std::make_unique<Engine>(config));
    handles.push_back(engines.back()->export_handle());
  }
  for (auto& engine : engines) EXPECT_THROWS(CommunicationFailure, engine->connect(handles));
}

namespace {

// Engines without operations, and this program in place of their kernels; ordinary memory is their device memory.
struct DeviceEngines {
  explicit DeviceEngines(const std::vector<int>& domain_of) {
    std::vector<Mapping> owned;
    std::vector<std::string> handles;
    for (int rank = 0; rank < static_cast<int>(domain_of.size()); ++rank) {
      EngineConfig config = config_of(rank, domain_of, {});
      config.device_rings = DeviceRings{512, 256, 3, 256, 2};
      config.budget_bytes = config.chunk_bytes = 0;  // not looked at
      configs.push_back(config);
      engines.push_back(std::make_unique<Engine>(config));
      handles.push_back(engines.back()->export_handle());
      owned.push_back(Mapping::create());
      owned.back().grow(engines.back()->layout().device_bytes);
    }
    for (size_t rank = 0; rank < engines.size(); ++rank) {
      engines[rank]->connect(handles);
      devices.push_back(map_devices(owned));
      copies.push_back(std::make_unique<FakeCopies>());
      engines[rank]->attach_device(device_regions(devices.back(), copies.back().get()));
    }
    for (auto& engine : engines) {
      engine->start();
      engine->note_launched();
      rings.push_back(std::make_unique<CommandRing>(own(*engine) + engine->layout().commands_offset,
                                                    engine->layout().num_commands));
    }
  }
  static uint8_t* own(Engine& engine) { return engine.region_base(engine.layout().rank); }
  static uint64_t word(Engine& engine, size_t idx) {
    return reinterpret_cast<const Flag*>(own(engine) + engine.layout().board_offset)[idx].read();
  }
  bool all(const std::function<bool(Engine&)>& holds) const {
    const uint64_t deadline = now_usec() + kPatienceUsec;
    while (!std::all_of(engines.begin(), engines.end(), [&](auto& engine) { return holds(*engine); }))
      if (now_usec() > deadline) return false;
    return true;
  }
  // Chunk `serial` of every channel: is filled with the number of its landing channel.
  void send(uint64_t serial) {
    for (size_t rank = 0; rank < engines.size(); ++rank)
      for (uint32_t c = 0; c < engines[rank]->channels().out.size(); ++c) {
        const OutChannel& out = engines[rank]->channels().out[c];
        std::fill_n(devices[rank][rank].base() + out.send.slot_offset(serial), 128,
                    static_cast<uint8_t>(out.peer_channel + 1));
        EXPECT(rings[rank]->push({c, 128, serial}));
      }
  }
  // Looks at it where it landed, and takes it as every reader of the domain does.
  void take(Engine& engine, uint64_t serial) {
    const size_t rank = static_cast<size_t>(engine.layout().rank);
    for (uint32_t c = 0; c < engine.channels().in.size(); ++c) {
      const RingLayout& landing = engine.channels().in[c].landing;
      const uint8_t* slot = devices[rank][rank].base() + landing.slot_offset(serial);
      EXPECT(std::all_of(slot, slot + 128, [&](uint8_t byte) { return byte == c + 1; }));
      FlagLine* taken = reinterpret_cast<FlagLine*>(own(engine) + landing.consumed_offset);
      for (uint32_t reader = 0; reader < landing.num_readers; ++reader) taken[reader].flag.publish(serial + 1);
    }
  }
  void close() {
    std::vector<std::thread> threads;
    for (auto& engine : engines) threads.emplace_back([&] { engine->close(false); });
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<std::vector<Mapping>> devices;  // [rank][of]
  std::vector<std::unique_ptr<FakeCopies>> copies;
  std::vector<EngineConfig> configs;
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::unique_ptr<CommandRing>> rings;
};

}  // namespace

CLAIM("engines of a CUDA buffer ship what its kernels push, say what came, and close without an operation") {
  DeviceEngines all({0, 1, 0, 2});
  for (uint64_t serial = 0; serial < 20; ++serial) {
    all.send(serial);
    EXPECT(all.all([&](Engine& engine) {
      const size_t num_words = engine.channels().in.size() + engine.channels().out.size();
      for (size_t i = 0; i < num_words; ++i)
        if (DeviceEngines::word(engine, i) != serial + 1) return false;
      return true;
    }));
    for (auto& engine : all.engines) all.take(*engine, serial);
  }
  for (auto& engine : all.engines) {
    engine->check();
    EXPECT_THROWS(std::logic_error, engine->dispatch({}));
    uint64_t bytes = 0;
    for (auto& [name, of] : memory_entries(all.configs[static_cast<size_t>(engine->layout().rank)])) bytes += of;
    EXPECT(bytes >= engine->layout().total_bytes &&
           engine->region_bytes(engine->layout().rank) == engine->layout().total_bytes);
    for (auto& [name, value] : engine->stats())
      if (name == "proxy.arrivals") EXPECT_EQ(value, static_cast<double>(20 * engine->channels().in.size()));
  }
  EXPECT(all.engines[0]->region_base(2) != nullptr && all.engines[0]->region_base(1) == nullptr);
  for (auto& engine : all.engines)
    reinterpret_cast<Flag*>(DeviceEngines::own(*engine) + engine->layout().ended_offset)->publish(1);
  const uint64_t started = now_usec();
  all.close();
  EXPECT(now_usec() - started < 5'000'000);
  for (auto& engine : all.engines) EXPECT(!engine->failed());
}

CLAIM("an error of a CUDA buffer reaches the engines of every domain, and all close with operations under way") {
  DeviceEngines all({0, 0, 1});
  all.engines[1]->fail("gave up");
  EXPECT(all.all([](Engine& engine) { return engine.failed(); }));
  for (auto& engine : all.engines) EXPECT_THROWS(CommunicationFailure, engine->check());
  all.close();
}

CLAIM("rings without a size are refused") {
  EngineConfig config = config_of(0, {0, 1}, {});
  config.device_rings = DeviceRings{512, 256, 0, 256, 2};
  EXPECT_THROWS(UsageFailure, Engine{config});
  config.device_rings = DeviceRings{512, 24, 2, 256, 2};
  EXPECT_THROWS(UsageFailure, Engine{config});
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
