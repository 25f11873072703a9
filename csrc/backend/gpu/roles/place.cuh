// The role that places the rows that come here. With a new plan it routes first.
#pragma once

#include "backend/gpu/place_bulk.cuh"
#include "backend/gpu/roles/route.cuh"

namespace uccl_ep::gpu {

// With several domains (kNet) a warp needs more registers, so there are fewer warps.
template <PlanState kState, bool kBulk, bool kNet>
struct PlaceRole {
  static constexpr uint32_t kWarps = kNet ? 5 : kPlaceWarps;
  using Shared = Arrivals;

  // By its whole crew.
  static __device__ __forceinline__ void run(const DispatchKernel& k, Staged& staged, Arrivals& arrivals,
                                             uint8_t* dynamic, Routed& routed) {
    const bool has_rows = blockIdx.x < k.args.num_blocks;
    if constexpr (kState == PlanState::kNew) {
      if constexpr (!kNet) routed.good = exchange_tiles<TableTile>(k, staged, dynamic);
      routed.good = routed.good && finish_exchange(k, staged);
      routed.placed = !routed.good || !has_rows || has_memory<kState>(k.g, k.args);
      if constexpr (kBulk && kArch.bulk_copies) fence_shared();  // pipelines take the place of the tile
      k.crew.sync();
    }
    if (routed.good && routed.placed && has_rows) place_all(k, arrivals, dynamic);
  }

  // By a crew, when all rows are in the output, or (not good) after an error.
  static __device__ void finish(const DispatchKernel& k, bool good) {
    if (k.crew.thread == 0) reset_shares(k.g, SharedWork::kPlaced);
    if (good) {
      publish_to_members(k, k.g.map.read);
      return;
    }
    const uint64_t rows = k.plan.num_out_rows, hidden = k.args.stage.hidden;
    const bool codes = k.args.scales != nullptr;
    if (k.args.rows != nullptr)
      fill_nan(k.crew, k.args.rows, rows * hidden * (codes ? 1 : dtype_bytes(k.args.stage.dtype)));
    if (codes) fill_nan(k.crew, k.args.scales, rows * k.args.stage.row.scale_bytes());
    if (k.args.metadata != nullptr) fill_nan(k.crew, k.args.metadata, rows * k.args.stage.row.metadata_bytes());
    const uint64_t width = k.plan.compact_width > 0 ? k.plan.compact_width : 1;
    if (k.args.row_weights != nullptr) fill_nan(k.crew, k.args.row_weights, rows * width * sizeof(float));
    if (k.args.row_experts != nullptr) fill_nan(k.crew, k.args.row_experts, rows * width * sizeof(int64_t));  // all -1
  }

 private:
  // Places the rows, when the plan is there.
  static __device__ void place_all(const DispatchKernel& k, Arrivals& arrivals, uint8_t* shared) {
    constexpr bool kFresh = kState != PlanState::kKnown;
    const StepClock clock(k, Step::kPlace);
    // With several windows find_arrivals() reads what is complete only with the lists.
    const bool windows = k.plan.num_token_blocks > k.args.window_tokens / kTokenBlock;
    if (kFresh && windows && !wait_lists(k)) return;
    find_arrivals<kFresh>(k, arrivals);
    if (kFresh && !windows && !wait_lists(k)) return;
    if constexpr (!kBulk) {
      place_rows<kFresh>(k, arrivals);
    } else if constexpr (kArch.bulk_copies) {
      if (k.crew.warp() < k.args.bulk_warps) {
        const Crew warps{k.crew.id, k.args.bulk_warps * kWarp, k.crew.thread};
        place_rows_bulk<kFresh>(k.by(warps), arrivals, shared);
      }
    }
    k.crew.sync();
    clock.stop();
  }
};

}  // namespace uccl_ep::gpu
