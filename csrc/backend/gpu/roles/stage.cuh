// The roles that stage our rows. One copies or quantises them; the other, a single warp, tells the ranks that wait.
#pragma once

#include "backend/gpu/plan.cuh"
#include "backend/gpu/roles.cuh"
#include "backend/gpu/stage.cuh"

namespace uccl_ep::gpu {

// What this block stages. Blocks that do not place stage alone if there are enough of them.
constexpr uint32_t kNothing = 0x0FFFFFFFu;  // row groups that nobody has
__device__ __forceinline__ StageShare stage_share(const DispatchKernel& k) {
  const uint32_t others = workers(k.g) - k.args.num_blocks,
                 first_block = others >= k.args.num_blocks ? k.args.num_blocks : 0;
  const uint32_t begin = k.args.window * k.args.window_tokens;
  const uint32_t end = min(begin + k.args.window_tokens, k.args.stage.num_tokens);
  return {begin, end, blockIdx.x < first_block ? kNothing : blockIdx.x - first_block, workers(k.g) - first_block};
}

template <PlanState kState, bool kBulk, bool kNet>
struct StageRole {
  static constexpr uint32_t kWarps = kStageWarps;
  using Shared = Staged;

  static __device__ void run(const DispatchKernel& k, Staged& staged, uint8_t* shared) {
    constexpr bool kFresh = kState != PlanState::kKnown;
    // All members must have read what the half held before.
    if (!wait_members(k, k.g.map.read, k.op.free_after)) return;
    const StageShare share = stage_share(k);
    if (kState == PlanState::kNew && !kNet && k.args.stage.quantises() && share.row_groups() >= kManyRowGroups &&
        !k.crew.all(k.crew.thread != 0 || wait_shared(k.g, &staged.routed)))
      return;
    const StepClock clock(k, Step::kStage, workers(k.g) - share.count);
    // Where rows for other domains go depends on the tiles of all blocks.
    if (kFresh && kNet && !k.crew.all(k.crew.thread != 0 || wait_block(k.g, &local(k.g).packed, k.op.epoch))) return;
    bool done = false;
    if constexpr (kBulk && kArch.bulk_copies) {
      done = k.args.copy_pipeline > 0;
      if (done) stage_rows_bulk(k, share, staged, shared + k.args.copy_pipeline);
    }
    if (!done) stage_rows<kFresh, kNet>(k, share, staged);
    clock.stop();
    if constexpr (!kFresh)
      if (k.args.routing_compared && k.args.window == 0) compare_routing(k, k.args.routing, k.args.signature.plan_id);
  }
};

template <PlanState kState>
struct TellStagedRole {
  static constexpr uint32_t kWarps = 1;
  struct Shared {};

  static __device__ __forceinline__ void run(const DispatchKernel& k, Staged& staged) {
    tell_staged(k, stage_share(k), staged);
  }
};

}  // namespace uccl_ep::gpu
