// The whole engine, ranks as threads of one process, under sanitizers: windows of two slots, every fault of the loop
// transport, several operations queued at once.
#include <algorithm>
#include <barrier>
#include <functional>
#include <random>
#include <thread>

#include "backend/host/ports.h"
#include "chunk_place.h"
#include "claims.h"
#include "engine/group/control_plane.h"
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
  std::vector<std::unique_ptr<HostEngine>> engines;
  std::vector<std::string> handles;
  for (int rank : {0, 1}) {
    EngineConfig config = config_of(rank, {0, 1}, {});
    over_libfabric(config);
    config.generation += static_cast<uint64_t>(rank);
    engines.push_back(std::make_unique<HostEngine>(config));
    handles.push_back(engines.back()->export_handle());
  }
  for (auto& engine : engines) EXPECT_THROWS(CommunicationFailure, engine->connect(handles));
}

namespace {

// Control planes of CUDA buffers, and this program in place of their kernels; ordinary memory is their device memory.
const DeviceRings kDeviceRings{{{1, 512}, {2, 512}}, 256, 3, 256, 2, {}};

struct DevicePlanes {
  explicit DevicePlanes(const std::vector<int>& domain_of) {
    std::vector<Mapping> owned;
    std::vector<std::string> handles;
    for (int rank = 0; rank < static_cast<int>(domain_of.size()); ++rank) {
      EngineConfig config = config_of(rank, domain_of, {});
      config.budget_bytes = config.chunk_bytes = 0;  // not looked at
      configs.push_back(config);
      planes.push_back(std::make_unique<ControlPlane>(config, kDeviceRings));
      handles.push_back(planes.back()->export_handle());
      owned.push_back(Mapping::create());
      owned.back().grow(planes.back()->layout().device_bytes);
    }
    for (size_t rank = 0; rank < planes.size(); ++rank) {
      planes[rank]->connect(handles);
      devices.push_back(map_devices(owned));
      copies.push_back(std::make_unique<FakeCopies>());
      planes[rank]->attach_device(device_regions(devices.back(), copies.back().get()));
    }
    for (auto& plane : planes) {
      plane->start();
      plane->note_launched();
      rings.push_back(
          std::make_unique<CommandRing>(own(*plane) + plane->layout().commands_offset, plane->layout().num_commands));
    }
  }
  static uint8_t* own(ControlPlane& plane) { return plane.region_base(plane.layout().rank); }
  static uint64_t word(ControlPlane& plane, size_t idx) {
    return reinterpret_cast<const Flag*>(own(plane) + plane.layout().board_offset)[idx].read();
  }
  bool all(const std::function<bool(ControlPlane&)>& holds) const {
    const uint64_t deadline = now_usec() + kPatienceUsec;
    while (!std::all_of(planes.begin(), planes.end(), [&](auto& plane) { return holds(*plane); }))
      if (now_usec() > deadline) return false;
    return true;
  }
  // Chunk `serial` of every channel: is filled with the number of its landing channel.
  void send(uint64_t serial) {
    for (size_t rank = 0; rank < planes.size(); ++rank)
      for (uint32_t c = 0; c < planes[rank]->channels().out.size(); ++c) {
        const OutChannel& out = planes[rank]->channels().out[c];
        std::fill_n(devices[rank][rank].base() + chunk_offset(planes[rank]->channels(), c, serial), 128,
                    static_cast<uint8_t>(chunk_key(out.send.kind, out.peer_channel) + 1));
        EXPECT(rings[rank]->push({c, 128, serial, chunk_unit(planes[rank]->channels(), c, serial)}));
      }
  }
  // Looks at it where it landed, and takes it as every reader of the domain does.
  void take(ControlPlane& plane, uint64_t serial) {
    const size_t rank = static_cast<size_t>(plane.layout().rank);
    for (uint32_t c = 0; c < plane.channels().in.size(); ++c) {
      const RingLayout& landing = plane.channels().in[c].landing;
      const uint8_t* slot = devices[rank][rank].base() + landing.slot_offset(serial);
      EXPECT(std::all_of(slot, slot + 128, [&](uint8_t byte) { return byte == chunk_key(landing.kind, c) + 1; }));
      FlagLine* taken = reinterpret_cast<FlagLine*>(own(plane) + landing.consumed_offset);
      for (uint32_t reader = 0; reader < landing.num_readers; ++reader) taken[reader].flag.publish(serial + 1);
    }
  }
  void close() {
    std::vector<std::thread> threads;
    for (auto& plane : planes) threads.emplace_back([&] { plane->close(false); });
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<std::vector<Mapping>> devices;  // [rank][of]
  std::vector<std::unique_ptr<FakeCopies>> copies;
  std::vector<EngineConfig> configs;
  std::vector<std::unique_ptr<ControlPlane>> planes;
  std::vector<std::unique_ptr<CommandRing>> rings;
};

}  // namespace

CLAIM("engines of a GPU buffer ship what its kernels push, say what came, and close without an operation") {
  DevicePlanes all({0, 1, 0, 2});
  for (uint64_t serial = 0; serial < 20; ++serial) {
    all.send(serial);
    EXPECT(all.all([&](ControlPlane& plane) {
      const size_t num_words = plane.channels().in.size() + plane.channels().out.size();
      for (size_t i = 0; i < num_words; ++i)
        if (DevicePlanes::word(plane, i) != serial + 1) return false;
      return true;
    }));
    for (auto& plane : all.planes) all.take(*plane, serial);
  }
  for (auto& plane : all.planes) {
    plane->check();
    uint64_t bytes = 0;
    for (auto& [name, of] : memory_entries(all.configs[static_cast<size_t>(plane->layout().rank)], kDeviceRings))
      bytes += of;
    EXPECT(bytes >= plane->layout().total_bytes &&
           plane->region_bytes(plane->layout().rank) == plane->layout().total_bytes);
    for (auto& [name, value] : plane->stats())
      if (name == "proxy.arrivals") EXPECT_EQ(value, static_cast<double>(20 * plane->channels().in.size()));
  }
  EXPECT(all.planes[0]->region_base(2) != nullptr && all.planes[0]->region_base(1) == nullptr);
  for (auto& plane : all.planes)
    reinterpret_cast<Flag*>(DevicePlanes::own(*plane) + plane->layout().ended_offset)->publish(1);
  const uint64_t started = now_usec();
  all.close();
  EXPECT(now_usec() - started < 5'000'000);
  for (auto& plane : all.planes) EXPECT(!plane->failed());
}

CLAIM("an error of a GPU buffer reaches the engines of every domain, and all close with operations under way") {
  DevicePlanes all({0, 0, 1});
  all.planes[1]->fail("gave up");
  EXPECT(all.all([](ControlPlane& plane) { return plane.failed(); }));
  for (auto& plane : all.planes) EXPECT_THROWS(CommunicationFailure, plane->check());
  all.close();
}

CLAIM("rings without a size are refused, but within one domain, where nothing is shipped") {
  const EngineConfig config = config_of(0, {0, 1}, {});
  EXPECT_THROWS(UsageFailure, ControlPlane(config, DeviceRings{{{1, 512}}, 256, 0, 256, 2, {}}));
  EXPECT_THROWS(UsageFailure, ControlPlane(config, DeviceRings{{{1, 512}}, 24, 2, 256, 2, {}}));
  EXPECT_THROWS(UsageFailure, ControlPlane(config, DeviceRings{{{2, 512}}, 256, 2, 256, 2, {}}));
  const ControlPlane alone(config_of(0, {0, 0}, {}), DeviceRings{});
  EXPECT(alone.channels().out.empty() && alone.layout().device_bytes == 0);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }

CLAIM("a step rings a bell once for all its short chunks, at its end, and for a long chunk at once") {
  Bell first, second;
  const uint32_t before = first.ticket();
  host::DueBells bells;
  host::DueBell* const due = bells.of(&first);
  EXPECT(bells.of(&first) == due && bells.of(&second) != due);
  RingLayout ring;
  ring.kind = RingKind::kRows;
  ring.slot_bytes = host::DueBells::kLongChunkBytes - 1;
  for (int chunk = 0; chunk < 100; ++chunk) bells.add(*due, ring);
  EXPECT_EQ(first.ticket(), before);
  bells.ring();
  EXPECT_EQ(first.ticket(), before + 1);
  bells.ring();  // nothing is due any more
  EXPECT_EQ(first.ticket(), before + 1);
  ring.slot_bytes = host::DueBells::kLongChunkBytes;
  for (int chunk = 0; chunk < 3; ++chunk) bells.add(*due, ring);
  EXPECT_EQ(first.ticket(), before + 4);
  EXPECT_EQ(second.ticket(), 0u);
}
