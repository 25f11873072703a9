// The role that serves the others of a dispatch. With a known plan it writes what peers wait for. With a new plan it
// counts, and writes what placing warps do not plan. Then it writes padding, and the weights and experts of rows.
#pragma once

#include "backend/gpu/place_weights.cuh"
#include "backend/gpu/plan.cuh"
#include "backend/gpu/roles.cuh"
#include "backend/gpu/stage.cuh"

namespace uccl_ep::gpu {

// kPlacing: warps of a block that place rows.
template <PlanState kState, bool kNet, uint32_t kPlacing>
struct ServeRole {
  static constexpr uint32_t kWarps = 2;
  struct Shared {};

  static __device__ void run(const DispatchKernel& k, Staged& staged) {
    constexpr bool kFresh = kState != PlanState::kKnown;
    if constexpr (kFresh) {
      if (blockIdx.x >= k.args.num_blocks) return;
      // Counts go ahead of the lists, so that all that follows from counts is known when the lists are there.
      if (kState == PlanState::kNew && blockIdx.x == 0) {
        if (!k.crew.all(k.crew.thread != 0 || wait_shared(k.g, &staged.totals))) return;
        publish_packet(k, k.g.map.header_full);
        count_received(k);
      }
      if (!wait_plan(k) || !has_memory<kState>(k.g, k.args) || !wait_lists(k)) return;
      const StepClock clock(k, Step::kPlan);
      if (kNet && has_tails(k.g)) {
        if (!plan_with_tails(k)) return;
      } else {
        plan_rows(k, k.args.num_blocks, k.args.num_blocks * (k.args.bulk_warps < 2 ? kPlacing : k.args.bulk_warps),
                  num_windows<kFresh>(k) == 1);
      }
      plan_heads(k, k.args.num_blocks);
      clock.stop();
    } else {
      const bool with_weights = k.args.routing.weights != nullptr;
      if (!wait_packets_gone(k)) return;
      if (blockIdx.x == 0) {
        place_packets(k, with_weights);
        write_headers(k, k.args.signature, k.args.stage.num_tokens);
        k.crew.sync();
        publish_packet(k, k.g.map.header_full);
        if (!with_weights) publish_packed(k);
      }
      if (with_weights) {
        if (!wait_members(k, k.g.map.read, k.op.free_after(0))) return;
        if (stage_weights(k, k.args.routing.weights) && going(k)) {
          publish_packet(k, k.g.map.weights_full);
          publish_packed(k);
        }
      }
      if (blockIdx.x == 0 && !all_alike(k, k.args.signature)) return;
    }
    if (blockIdx.x >= k.args.num_blocks) return;
    if (k.plan.compact_width == 0) fill_padding(k, PlanReader<kFresh>(k).padding());
    if (k.args.row_weights != nullptr) {
      bool good = true;
      for (uint32_t r = k.crew.thread; r < k.g.map.num_ranks; r += k.crew.size)
        good &= wait_peer(k, {own_part(k.g, k.g.map.weights_full) + r, k.op.epoch, r});
      if (!k.crew.all(good)) return;
    }
    if (k.args.row_experts != nullptr)
      place_experts<kFresh>(k);
    else if (k.args.row_weights != nullptr)
      place_weights<kFresh>(k);
    if constexpr (kNet && !kFresh)
      if (k.args.signature.with_weights != 0) unpack_weights(k);
  }
};

}  // namespace uccl_ep::gpu
