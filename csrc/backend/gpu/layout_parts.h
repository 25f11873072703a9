// What a region consists of, once it is known how much has to fit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/gpu/layout.h"

namespace uccl_ep::gpu {

// Of the ranks of domains of one size: domains, and the most streams that a rank merges (its own tokens are one).
struct Shape {
  uint32_t ranks, domains, members, streams = 1;
  uint32_t most_members = 0;  // of the largest domain
  uint32_t most_relayed = 0;  // by any rank
  Shape(const Topology& topo, int size)
      : ranks(static_cast<uint32_t>(topo.num_ranks)),
        domains(static_cast<uint32_t>(topo.num_domains())),
        members(static_cast<uint32_t>(size)) {
    for (const auto& [other, number] : topo.domains_of_size)
      most_members = std::max(most_members, static_cast<uint32_t>(other));
    for (int rank : topo.classes()) {
      const uint32_t relayed = topo.num_relayed(rank);
      most_relayed = std::max(most_relayed, relayed);
      if (topo.size_of(topo.domain_of[rank]) == size) streams = std::max(streams, 1 + relayed);
    }
  }
};

// What there is room for at once.
struct Room {
  // Token blocks in a ring back. One: the next window of a combine waits for the network, and weights for the last one.
  uint32_t returned_blocks;
  uint32_t full_tokens;  // with as many pairs as any token has; further ones have fewer
  uint32_t batch_streams, stream_batches;
  // `relayed`: streams that go in batches of at most `most`.
  Room(uint32_t blocks, uint32_t full, uint32_t relayed, uint32_t most)
      : returned_blocks(blocks), full_tokens(full), batch_streams(relayed), stream_batches(1) {
    if (most >= relayed) return;
    stream_batches = (relayed + most - 1) / most;
    batch_streams = (relayed + stream_batches - 1) / stream_batches;
  }
};

// Tokens of a window, whatever their experts are, and tokens that are staged at once, at least as many.
struct WindowRoom {
  uint32_t tokens, staged;
};
// A region with memory for the routing of `num_tokens` tokens, and for rows and pieces of a window.
DeviceRegionLayout layout_for(const Topology& topo, const Shape& shape, const RegionNeeds& needs, uint32_t num_tokens,
                              const WindowRoom& window, const Room& room);

}  // namespace uccl_ep::gpu
