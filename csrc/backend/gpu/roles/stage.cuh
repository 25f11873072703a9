// The roles that stage our rows. One copies or quantises them; the other, a single warp, tells the ranks that wait.
#pragma once

#include "backend/gpu/plan.cuh"
#include "backend/gpu/roles.cuh"
#include "backend/gpu/stage.cuh"

namespace uccl_ep::gpu {

// What this block stages. Blocks that do not place stage alone if there are enough of them.
constexpr uint32_t kNothing = 0x0FFFFFFFu;  // row groups that nobody has
template <PlanState kState>
__device__ __forceinline__ StageShare stage_share(const DispatchKernel& k, uint32_t window) {
  const uint32_t others = workers(k.g) - k.args.num_blocks,
                 first_block = others >= k.args.num_blocks ? k.args.num_blocks : 0;
  constexpr bool kFresh = kState != PlanState::kKnown;
  const uint32_t end = min(window_begin<kFresh>(k.g, k.args, window + 1), k.args.stage.num_tokens);
  return {window_begin<kFresh>(k.g, k.args, window), end,
          blockIdx.x < first_block ? kNothing : blockIdx.x - first_block, workers(k.g) - first_block};
}

template <PlanState kState, bool kBulk, bool kNet>
struct StageRole {
  static constexpr uint32_t kWarps = kStageWarps;
  using Shared = Staged;

  static __device__ void run(const DispatchKernel& k, Staged& staged, uint8_t* shared) {
    PipelineTurn turn{0, 0};
    for (uint32_t w = kFirstStaged<kState>; has_window<kState>(k, w); ++w)
      if (!stage_window(k, w, staged, shared, turn)) return;
    if constexpr (kState == PlanState::kKnown)
      if (k.args.routing_compared) compare_routing(k, k.args.routing, k.args.signature.plan_id);
  }

 private:
  // False: later windows are not staged.
  static __device__ __forceinline__ bool stage_window(const DispatchKernel& k, uint32_t w, Staged& staged,
                                                      uint8_t* shared, PipelineTurn& turn) {
    if (w > 0 && !k.crew.all(k.crew.thread != 0 || stages_window<kState>(k, w))) return false;
    // All members must have read what the half held before.
    if (!wait_members(k, k.g.map.read, k.op.free_after(w))) return false;
    const StageShare share = stage_share<kState>(k, w);
    if (kState == PlanState::kNew && !kNet && w == 0 && k.args.stage.quantises() &&
        share.row_groups() >= kManyRowGroups && !k.crew.all(k.crew.thread != 0 || wait_shared(k.g, &staged.routed)))
      return false;
    const StepClock clock(k, Step::kStage, workers(k.g) - share.count);
    // Where rows for other domains go depends on the tiles of all blocks.
    if (kState == PlanState::kNew && kNet &&
        !k.crew.all(k.crew.thread != 0 || wait_block(k.g, &local(k.g).packed, k.op.epoch)))
      return false;
    if constexpr (kNet) find_sent<kState>(k, w);
    bool done = false;
    if constexpr (kBulk && kArch.bulk_copies && kState != PlanState::kExchanged) {
      done = k.args.copy_pipeline > 0;
      if (done) stage_rows_bulk(k, w, share, staged, shared + k.args.copy_pipeline, turn);
    }
    if (!done) stage_rows<kState, kNet>(k, w, share, staged);
    clock.stop();
    return true;
  }
};

template <PlanState kState>
struct TellStagedRole {
  static constexpr uint32_t kWarps = 1;
  struct Shared {};

  static __device__ __forceinline__ void run(const DispatchKernel& k, Staged& staged) {
    uint32_t earlier = 0;
    for (uint32_t w = kFirstStaged<kState>; has_window<kState>(k, w); ++w) {
      if (w > 0 && !__all_sync(kFullWarp, threadIdx.x % kWarp != 0 || stages_window<kState>(k, w))) return;
      __syncwarp();  // votes order no memory, and every lane reads the plan
      const StageShare share = stage_share<kState>(k, w);
      tell_staged(k, w, share, earlier, staged);
      earlier += share.row_groups();
    }
  }
};

}  // namespace uccl_ep::gpu
