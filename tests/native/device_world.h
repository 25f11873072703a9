// Ranks of GPU buffers with ordinary memory in place of the GPUs': their rings, and how a claim sends through one.
#pragma once

#include <utility>
#include <vector>

#include "common/units.h"
#include "proxy_world.h"

namespace uccl_ep {

inline const DeviceRings kDeviceRings = {
    {{1, 1024 + 16}, {2, 4096 + 16}, {3, 6144 + 16}}, 2048, 4, 1024, 3, {512, 768, 1024, 2048, 3}};
constexpr uint64_t kBytes = 2048;

inline WorldOptions device_options(std::vector<int> labels = {0, 1}) {
  WorldOptions options;
  options.labels = std::move(labels);
  options.device = kDeviceRings;
  return options;
}

struct Ends {
  Source source;
  uint32_t in;
};
// The channel of `kind` from rank 0 to its rail in domain 1.
inline Ends ends_of(World& world, RingKind kind) {
  const uint32_t channel = out_channel(world.nodes[0], kind, world.topo.rail(0, 1));
  return {Source(world.nodes[0], channel), world.nodes[0].channels.out[channel].peer_channel};
}

}  // namespace uccl_ep
