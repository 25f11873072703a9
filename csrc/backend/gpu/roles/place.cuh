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

  // By its whole crew. `tiles` and `pipelines` are in shared memory.
  static __device__ __forceinline__ void run(const DispatchKernel& k, Staged& staged, Arrivals& arrivals,
                                             uint8_t* tiles, uint8_t* pipelines, Routed& routed) {
    const bool has_rows = blockIdx.x < k.args.num_blocks;
    if constexpr (kState == PlanState::kNew) {
      if constexpr (!kNet) routed.good = exchange_tiles<TableTile>(k, staged, tiles);
      routed.good = routed.good && finish_exchange(k, staged);
      routed.placed = !routed.good || !has_rows || has_memory<kState>(k.g, k.args);
      if constexpr (kBulk && kArch.bulk_copies) fence_shared();  // pipelines take the place of tiles
      k.crew.sync();
    }
    if (routed.good && routed.placed && has_rows) place_all(k, arrivals, pipelines);
  }

  // By a crew, when all rows of all windows are in the output, or (not good) after an error.
  static __device__ void finish(const DispatchKernel& k, bool good) {
    const uint32_t last = num_windows<kState != PlanState::kKnown>(k) - 1;
    if (k.crew.thread == 0) {
      reset_shares(k.g, SharedWork::kPlaced, k.op.half(last));
      keep_windows(k.g, k.op, OpKind::kDispatch, last + 1);
    }
    if (good) {
      publish_to_members(k, k.g.map.read, k.op.window(last));
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
  static constexpr bool kFresh = kState != PlanState::kKnown;

  // Places the rows of all windows, when the plan is there.
  static __device__ void place_all(const DispatchKernel& k, Arrivals& arrivals, uint8_t* shared) {
    const StepClock clock(k, Step::kPlace);
    // With several windows find_arrivals() reads what is complete only with the lists.
    const bool several = kFresh && num_windows<kFresh>(k) > 1;
    if (several && !wait_lists(k)) return;
    if (kFresh && kNet && has_tails(k.g) && !wait_rows_planned(k)) return;
#pragma unroll 1
    for (uint32_t w = 0;; ++w) {
      find_arrivals<kFresh>(k, w, arrivals);
      if (kFresh && !several && !wait_lists(k)) return;
      place_window(k, arrivals, shared);
      if (w + 1 >= arrivals.num_windows) break;
      if (!going(k) || !end_window(k, w)) return;
    }
    clock.stop();
  }
  // Places the rows of a window.
  static __device__ __forceinline__ void place_window(const DispatchKernel& k, const Arrivals& arrivals,
                                                      uint8_t* shared) {
    if constexpr (!kBulk) {
      place_rows<kFresh>(k, arrivals);
    } else if constexpr (kArch.bulk_copies) {
      if (k.crew.warp() < k.args.bulk_warps) {
        const Crew warps{k.crew.id, k.args.bulk_warps * kWarp, k.crew.thread};
        place_rows_bulk<kFresh>(k.by(warps), arrivals, shared);
      }
    }
    k.crew.sync();
  }
  // By the crews of all blocks that place, at the end of a window that is not the last: the last of them says that its
  // rows have been read. False: an error is known. Not inlined, because its caller has no registers to spare.
  static __device__ __noinline__ bool end_window(const DispatchKernel k, uint32_t w) {
    if (last_block(k, k.op.half(w) == 0 ? Phase::kEvenWindow : Phase::kOddWindow, k.args.num_blocks)) {
      if (k.crew.thread == 0) reset_shares(k.g, SharedWork::kPlaced, k.op.half(w));
      if (kNet && k.crew.warp() == 1) note_received<kFresh>(k, w);
      k.crew.sync();
      publish_to_members(k, k.g.map.read, k.op.window(w));
    }
    // The window before this one had the shares that the next one has: our own flag says that they are all taken.
    const Awaited ended{member_flag(k.g, k.g.rank, k.g.map.read, k.g.rank), k.op.free_after(w + 1), k.g.rank};
    return k.crew.all(k.crew.thread != 0 || wait_flag(k.g, ended));
  }
};

}  // namespace uccl_ep::gpu
