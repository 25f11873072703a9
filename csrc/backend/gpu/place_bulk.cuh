// Bulk copies, for sm_90: a warp moves its rows through a pipeline of kPlaceStages rows in shared memory. Loads of the
// next rows are under way while one is stored. Dequantised rows are stored from the space of one more output row.
#pragma once

#include "backend/gpu/pipeline.cuh"
#include "backend/gpu/place.cuh"

namespace uccl_ep::gpu {

constexpr uint32_t kPlaceStages = 3;
constexpr uint32_t kPlaceWarps = warps_by_lanes(8, 5);

__host__ __device__ inline uint32_t place_warp_bytes(const PlaceArgs& args) {
  const uint64_t wire = args.stage.stride;
  const bool decodes = args.stage.row.num_scales > 0 && args.scales == nullptr;
  return static_cast<uint32_t>(kPlaceStages * wire + (decodes ? 2 * args.stage.hidden : 0));
}

template <bool kFresh>
struct BulkRows {
  // A row under way, or being placed: its pairs, and in lane i the output row of pair i.
  struct Row {
    uint32_t first = 0, count = 0, out_row = 0;
  };
  const DispatchKernel& k;
  const Arrivals& arrivals;
  const uint32_t lane;
  uint8_t* const memory;  // of this warp
  Pipeline<kPlaceStages> pipeline;
  Shares shares;
  PlannedByOthers<kFresh> planned;
  RowBatch<kFresh> batch;
  LaneMask left = 0;  // rows of the batch that are not loaded yet
  // The code exists once, although `next` has to be moved for that: a copy for each stage would be four times as long.
  Row now, next;
  uint32_t under_way = 0;
  static_assert(kPlaceStages == 3);  // `now` and `next` are all that is under way
  bool more;

  __device__ __forceinline__ BulkRows(const DispatchKernel& kernel, const Arrivals& rows, uint8_t* shared,
                                      const uint64_t* barriers, PipelineTurn turn)
      : k(kernel),
        arrivals(rows),
        lane(kernel.crew.lane()),
        memory(shared),
        pipeline{shared_address(shared), shared_address(barriers), RowBatch<kFresh>::row_bytes(kernel), turn.stage,
                 turn.parity},
        shares(row_shares(kernel, rows)),
        planned(kernel.g),
        more(__all_sync(kFullWarp, !stopped(kernel.g))) {}

  __device__ __forceinline__ bool codes() const { return k.args.scales != nullptr; }
  __device__ __forceinline__ bool decodes() const { return k.args.stage.row.num_scales > 0 && !codes(); }

  // `turn`: gets where the pipeline ends, if windows follow.
  __device__ __forceinline__ void run(PipelineTurn& turn) {
    while (true) {
      load_rows();
      if (under_way == 0) break;  // not earlier, even after an error: loads must land before the block ends
      pipeline.wait();
      // Decoded rows leave in halves: one is stored while the other is decoded.
      for (uint32_t part = 0; part < (decodes() ? 2 : 1); ++part) {
        store_row(decodes() ? decode(part) : memory + pipeline.offset(), part);
        commit_stores();
      }
      now = next;
      --under_way;
      pipeline.release();
      if (!decodes()) wait_stores_read<1>();  // the stage that is loaded next was stored one round ago
      __syncwarp();
    }
    wait_stores<0>();
    if (arrivals.num_windows == 1) return;
    __syncwarp();  // all lanes have read the last turn
    if (lane == 0) turn = {pipeline.stage, pipeline.parity};
    __syncwarp();
  }

 private:
  // Begins as many loads as there is room for. After an error it begins none.
  __device__ __forceinline__ void load_rows() {
    while (more && under_way < kPlaceStages - 1) {
      if (left == 0) {
        uint32_t n;
        more = shares.next(n, lane);
        if (!more) break;
        batch = RowBatch<kFresh>(k, arrivals, n, planned.look(k));
        __syncwarp();
        left = ballot(batch.count > 0);
        continue;
      }
      const uint32_t i = lowest_lane(left);
      // Rows that are here are placed before the warp waits for others.
      if (under_way > 0 && !batch.is_there(k, arrivals, i)) break;
      left &= left - 1;
      Row row{__shfl_sync(kFullWarp, batch.first, i), __shfl_sync(kFullWarp, batch.count, i),
              __shfl_sync(kFullWarp, batch.row, i)};
      if (k.plan.compact_width > 0)
        row.count = 1;
      else if (lane < row.count)
        row.out_row = k.plan.out_rows[row.first + lane];
      more = batch.wait(k, arrivals, i, lane);
      if (!more) break;
      const uint8_t* const from = batch.at_lane(k, arrivals, i);
      if (lane == 0) {
        proxy_fence();  // flags were read by ordinary loads, the row is read by a bulk copy
        pipeline.load(from, k.args.stage.row.bytes);
      }
      pipeline.loading();
      (under_way++ == 0 ? now : next) = row;
    }
  }
  // Decodes half of the row, when the half that was there before has been stored.
  __device__ __forceinline__ const uint8_t* decode(uint32_t part) {
    const uint32_t hidden = k.args.stage.hidden, units = hidden / 32, first = part * units;  // of 16 values
    uint8_t* const to = memory + kPlaceStages * pipeline.stage_bytes + part * hidden;
    uint4* const half = reinterpret_cast<uint4*>(to);
    wait_stores_read<1>();
    __syncwarp();
    dequantise(memory + pipeline.offset(), k.args.stage, first, first + units, lane,
               [&](uint32_t v, const uint4& low, const uint4& high) {
                 half[2 * (v - first)] = low;
                 half[2 * (v - first) + 1] = high;
               });
    fence_shared();
    __syncwarp();
    return to;
  }
  // Stores what lies at `from` to all its output rows.
  __device__ __forceinline__ void store_row(const uint8_t* from, uint32_t part) {
    const uint32_t hidden = k.args.stage.hidden;
    const uint32_t out_bytes = codes() ? hidden : hidden * dtype_bytes(k.args.stage.dtype);
    const uint8_t* const scales = memory + pipeline.offset() + k.args.stage.row.code_bytes;
    for (uint32_t s = 0; s < now.count; s += kWarp) {
      uint32_t out_row = now.out_row;
      if (s > 0 && s + lane < now.count) out_row = k.plan.out_rows[now.first + s + lane];
      const bool wanted = s + lane < now.count && out_row < k.plan.num_out_rows;
      if (wanted)
        store_bulk(k.args.rows + uint64_t{out_row} * out_bytes + part * hidden, from, decodes() ? hidden : out_bytes);
      if (wanted && codes() && bulk_scales(k.args)) {
        const uint32_t bytes = k.args.stage.row.scale_bytes();
        store_bulk(reinterpret_cast<uint8_t*>(k.args.scales) + uint64_t{out_row} * bytes, scales, bytes);
      }
      if (codes() && !bulk_scales(k.args))
        for (LaneMask mask = ballot(wanted); mask != 0; mask &= mask - 1)
          copy_scales(memory + pipeline.offset(), __shfl_sync(kFullWarp, out_row, lowest_lane(mask)), k.args, lane);
      if (part == 0 && k.args.metadata != nullptr)
        for (LaneMask mask = ballot(wanted); mask != 0; mask &= mask - 1)
          copy_metadata(memory + pipeline.offset(), __shfl_sync(kFullWarp, out_row, lowest_lane(mask)), k.args, lane);
    }
  }
};

template <bool kFresh>
__device__ __forceinline__ void place_rows_bulk(const DispatchKernel& k, const Arrivals& arrivals, uint8_t* shared) {
  __shared__ __align__(8) uint64_t barriers[kPlaceWarps][kPlaceStages];
  __shared__ PipelineTurn turns[kPlaceWarps];  // at the end of a window
  const uint32_t warp = k.crew.warp();
  if (arrivals.window == 0) {
    init_stages<kPlaceStages>(barriers[warp], k.crew.lane());
    if (k.crew.lane() == 0) turns[warp] = {0, 0};
    __syncwarp();
  }
  uint8_t* const memory = shared + warp * place_warp_bytes(k.args);
  BulkRows<kFresh>(k, arrivals, memory, barriers[warp], turns[warp]).run(turns[warp]);
}

}  // namespace uccl_ep::gpu
