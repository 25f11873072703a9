// Routing, which the role that places does before its own work. With several domains the role that stages helps.
#pragma once

#include "backend/gpu/exchange.cuh"
#include "backend/gpu/roles.cuh"
#include "backend/gpu/stage.cuh"

namespace uccl_ep::gpu {

// What came of the routing.
struct Routed {
  bool good = true;    // no error is known
  bool placed = true;  // this kernel has the memory to place rows
};

// By a crew of each block: routes its tiles of a new plan. False: an error is known.
template <typename Tile>
__device__ inline bool exchange_tiles(const DispatchKernel& k, Staged& staged, uint8_t* shared) {
  const StepClock clock(k, Step::kExchange);
  const bool good = route<Tile>(k, shared, &staged.totals);
  clock.stop();
  return good;
}

// By the crew that will place, when its block's tiles are routed: completes the exchange. False: an error is known.
__device__ inline bool finish_exchange(const DispatchKernel& k, Staged& staged) {
  if (k.crew.thread == 0) count_shared(&staged.routed);
  if (last_block(k, Phase::kRouted, workers(k.g))) {
    if (k.crew.thread == 0) {
      if (!has_net(k.g))
        keep_epoch(k.g, k.op);  // all blocks have entered
      else
        publish(&local(k.g).packed, k.op.epoch);
    }
    // Two warps publish, because a release is slow.
    const bool with_weights = k.args.routing.weights != nullptr;
    for (uint32_t r = k.g.first + k.crew.lane(); r < k.g.end; r += kWarp) {
      if (k.crew.warp() == 0) publish(member_flag(k.g, r, k.g.map.lists_full, k.g.rank), k.op.epoch);
      if (k.crew.warp() == 1 && with_weights) publish(at(k.g, r, k.g.map.weights_full) + k.g.rank, k.op.epoch);
    }
    uint64_t hash = 0;
    for (uint32_t b = k.crew.thread; b < workers(k.g); b += k.crew.size)
      hash += device::load_past_l1(&local(k.g).block_hash[b]);
    hash = crew_sum(k.crew, hash);
    if (k.crew.thread == 0) {
      header(k.g, k.g.rank, k.op.epoch).routing_hash = hash;  // no other rank reads it
      publish(&local(k.g).hashed, k.op.epoch);
    }
  }
  return blockIdx.x >= k.args.num_blocks || wait_plan(k);  // blocks that do not place have nothing left to do
}

}  // namespace uccl_ep::gpu
