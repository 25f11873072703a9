// Place: pulls the rows that come here from their sources' regions, straight into the output.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/net.cuh"
#include "backend/gpu/numerics.cuh"
#include "backend/gpu/plan_reader.cuh"
#include "backend/gpu/shares.cuh"
#include "backend/gpu/steps.h"

namespace uccl_ep::gpu {

// By a crew: what comes in a window, whose predecessors it has been called for.
template <bool kFresh>
__device__ inline void find_arrivals(const DispatchKernel& k, uint32_t window, Arrivals& out) {
  const PlanReader<kFresh> plan(k);
  const uint32_t earlier = first_block_of<kFresh>(k.g, k.args, window),
                 later = first_block_of<kFresh>(k.g, k.args, window + 1);
  const uint32_t windows = window == 0 ? num_windows<kFresh>(k) : out.num_windows;
  if (window > 0) k.crew.sync();  // all have read what the table says of the last window
  if (k.crew.thread == 0) {
    out.window = window;
    out.num_windows = windows;
  }
  for (uint32_t s = k.crew.thread; s < k.g.map.num_ranks; s += k.crew.size) {
    const uint32_t base = plan.row_begin(s), end = plan.row_end(s);
    SourceRows& its = out.of(k.g, s);
    its.begin = base;
    its.end = its.all_end = end;
    if (in_domain(k.g, s)) {
      its.position = earlier * kTokenBlock;
    } else {
      const uint32_t position =
          window == 0 ? 0 : BlockRows::rows_before(plan.stream_rows_of(s), min(earlier, plan.token_blocks(s)));
      its.chunks = window == 0 ? k.g.net_state.received[s]
                               : its.chunks + part_of(k.g, its.position, position, k.args.stage.stride).chunks;
      its.position = position;
      its.slot = static_cast<uint32_t>(its.chunks % k.g.map.row_slots);
    }
    if (windows == 1) continue;
    const uint32_t token_blocks = plan.token_blocks(s);
    const BlockRows* const rows = plan.rows_of(s);
    its.begin = base + BlockRows::rows_before(rows, min(earlier, token_blocks));
    its.end = base + BlockRows::rows_before(rows, min(later, token_blocks));
  }
  k.crew.sync();
  if (k.crew.warp() == 0) out.most.find(k.g, [&](uint32_t s) { return out.of(k.g, s).end - out.of(k.g, s).begin; });
  k.crew.sync();
}

// By a warp, when all rows of a window have been read: counts the chunks that brought them, and lends their slots
// again.
template <bool kFresh>
__device__ inline void note_received(const DispatchKernel& k, uint32_t window) {
  const PlanReader<kFresh> plan(k);
  const uint32_t begin = first_block_of<kFresh>(k.g, k.args, window),
                 next = first_block_of<kFresh>(k.g, k.args, window + 1);
  for (uint32_t s = threadIdx.x % kWarp; s < k.g.map.num_ranks; s += kWarp) {
    if (in_domain(k.g, s)) continue;
    const uint32_t token_blocks = plan.token_blocks(s);
    const BlockRows* const stream = plan.stream_rows_of(s);
    const uint32_t first = min(begin, token_blocks), end = min(next, token_blocks);
    uint64_t& received = k.g.net_state.received[s];
    received +=
        part_of(k.g, BlockRows::rows_before(stream, first), BlockRows::rows_before(stream, end), k.args.stage.stride)
            .chunks;
    publish_flag(k.g.net.from[s].rows_consumed, received);
  }
}

// Rows, one for each lane of a warp. Sources take turns, so that neighbouring lanes read different peers. Sources of
// our domain come first, because rows of other domains are still on their way.
template <bool kFresh>
struct RowBatch {
  uint32_t source = 0, position = 0, row = 0;  // position: in the window's part of the stream
  uint32_t first = 0, count = 0;               // `count` pairs from `first` on; 0: nothing to place
  bool ready = false;                          // its row group has been staged, or its chunk has arrived

  RowBatch() = default;
  // `planned`: others have already planned the row; otherwise this plans it.
  __device__ __forceinline__ RowBatch(const DispatchKernel& k, const Arrivals& arrivals, uint32_t n, bool planned) {
    const uint32_t near = arrivals.most.near_sum(k.g);
    const auto [s, number] = !has_net(k.g) || n < near ? near_row(k.g, n) : far_row(k.g, n - near);
    row = arrivals.of(k.g, s).begin + number;
    if (row >= arrivals.of(k.g, s).end) return;
    source = s;
    const PlannedRow known = PlanReader<kFresh>(k).row(s, row, row + 1 == arrivals.of(k.g, s).all_end, planned);
    first = known.first;
    count = known.count;
    position = known.position - arrivals.of(k.g, s).position;
    look(k, arrivals);
  }
  // Its row group, or its chunk in the ring if the source is in another domain. An error names this number as the
  // chunk.
  __device__ __forceinline__ uint32_t unit(const DispatchKernel& k) const {
    return in_domain(k.g, source) ? position / kRowGroup : position / rows_per_chunk(k.g, row_bytes(k));
  }
  __device__ __forceinline__ static uint32_t row_bytes(const DispatchKernel& k) { return k.args.stage.stride; }
  // Where the row lies, in units of 16 bytes of its holder's region.
  __device__ __forceinline__ uint32_t where(const DispatchKernel& k, const Arrivals& arrivals) const {
    const uint32_t stride = row_bytes(k);
    if (in_domain(k.g, source))
      return (k.g.map.rows.offset + k.op.half(arrivals.window) * k.g.map.half_bytes + uint64_t{position} * stride) / 16;
    const uint64_t offset = ring_offset(k.g, arrivals.of(k.g, source).slot, k.g.map.row_slots, position, stride);
    return (k.g.net.from[source].rows + offset) / 16;
  }
  __device__ __forceinline__ Awaited awaited(const DispatchKernel& k, const Arrivals& arrivals) const {
    const uint32_t of = unit(k);
    if (in_domain(k.g, source))
      return {rows_full(k.g, k.g.rank, source) + of, k.op.window(arrivals.window), source, static_cast<int>(of)};
    return {k.g.net_state.rows_there + source, arrivals.of(k.g, source).chunks + of + 1, source, static_cast<int>(of)};
  }
  __device__ __forceinline__ void look(const DispatchKernel& k, const Arrivals& arrivals) {
    if (count > 0) ready = has_come(awaited(k, arrivals));
  }
  // By the warp: whether row `i` has been staged or has arrived. Other lanes note the same for their rows.
  __device__ __forceinline__ bool is_there(const DispatchKernel& k, const Arrivals& arrivals, uint32_t i) {
    if (__shfl_sync(kFullWarp, ready, i)) return true;
    if (!ready) look(k, arrivals);
    return __shfl_sync(kFullWarp, ready, i);
  }
  // By the warp: waits until row `i` is there. False: an error is known.
  __device__ __forceinline__ bool wait(const DispatchKernel& k, const Arrivals& arrivals, uint32_t i, uint32_t lane) {
    if (is_there(k, arrivals, i)) return true;
    bool good = true;
    if (lane == i) {
      good = wait_peer(k, awaited(k, arrivals));
      ready = true;
    }
    good = __all_sync(kFullWarp, good);
    __syncwarp();  // orders what the lanes have read before what any of them does next
    return good;
  }
  // By the warp: the address of row `i`.
  __device__ __forceinline__ const uint8_t* at_lane(const DispatchKernel& k, const Arrivals& arrivals,
                                                    uint32_t i) const {
    const uint32_t holder = __shfl_sync(kFullWarp, count > 0 ? holder_of(k.g, source) : k.g.first, i);
    const uint64_t units = __shfl_sync(kFullWarp, count > 0 ? where(k, arrivals) : 0, i);
    return at(k.g, holder, units * 16);
  }
};

// ---- one row --------------------------------------------------------------------------------------------------------
// By a warp, for `i` from `first` to `end`, one per lane: dequantises values 16 i to 16 i + 15 of a row and calls
// put(i, low, high). An FP8 block of 128 values has one scale.
template <typename Put>
__device__ __forceinline__ void dequantise(const uint8_t* row, const StageArgs& args, uint32_t first, uint32_t end,
                                           uint32_t lane, Put put) {
  static_assert(kFp8Block == 16 * 8, "the scale of values 16 i is number i / 8");
  const float* const scales = reinterpret_cast<const float*>(row + args.row.code_bytes);
  for (uint32_t i = first + lane; i < end; i += kWarp) {
    const uint4 codes = reinterpret_cast<const uint4*>(row)[i];
    const float scale = scales[i / 8];
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t out[8];
    bool simple = AllScaleRules::has_pow2(args.wire) && scale <= 0x1p7f;
#pragma unroll
    for (uint32_t word : words) simple = simple && !has_nan_code(word);
    if (simple) {
      const uint32_t high = (__float_as_uint(scale) + (120u << 23)) >> 16, factor = high << 16 | high;
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) {
        const uint2 four = decode_four(words[w], factor);
        out[2 * w] = four.x;
        out[2 * w + 1] = four.y;
      }
    } else {
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) {
        out[2 * w] = decode_two(words[w] & 0xFFFF, scale);
        out[2 * w + 1] = decode_two(words[w] >> 16, scale);
      }
    }
    put(i, make_uint4(out[0], out[1], out[2], out[3]), make_uint4(out[4], out[5], out[6], out[7]));
  }
}

// Bulk copies need multiples of 16 bytes.
__device__ __forceinline__ bool bulk_scales(const PlaceArgs& args) { return args.stage.row.scale_bytes() % 16 == 0; }
__device__ inline void copy_scales(const uint8_t* row, uint32_t out_row, const PlaceArgs& args, uint32_t lane) {
  const uint32_t blocks = args.stage.row.num_scales;
  const float* const scales = reinterpret_cast<const float*>(row + args.stage.row.code_bytes);
  float* const out = args.scales + uint64_t{out_row} * blocks;
  for (uint32_t i = lane; i < blocks; i += kWarp) out[i] = scales[i];
}

// By a warp: the metadata of a row of ours.
__device__ inline void copy_metadata(const uint8_t* row, uint32_t out_row, const PlaceArgs& args, uint32_t lane) {
  const uint32_t count = args.stage.row.num_metadata;
  const uint32_t* const metadata = reinterpret_cast<const uint32_t*>(row + args.stage.row.metadata_begin());
  for (uint32_t i = lane; i < count; i += kWarp) args.metadata[uint64_t{out_row} * count + i] = metadata[i];
}

// ---- all rows -------------------------------------------------------------------------------------------------------
__device__ __forceinline__ Shares row_shares(const DispatchKernel& k, const Arrivals& arrivals) {
  return {share_counter(k.g, SharedWork::kPlaced, k.op.half(arrivals.window)),
          arrivals.most.near_sum(k.g) + arrivals.most.far_sum(k.g),
          turn_of(k.crew.warp(), k.args.num_blocks),
          k.args.num_blocks * k.crew.warps(),
          {8}};
}

// Plain loads: for every architecture and every row.
template <bool kFresh>
__device__ void place_rows(const DispatchKernel& k, const Arrivals& arrivals) {
  const uint32_t hidden = k.args.stage.hidden;
  const bool codes = k.args.scales != nullptr;
  const uint64_t out_bytes = codes ? hidden : uint64_t{hidden} * dtype_bytes(k.args.stage.dtype);
  const uint32_t lane = k.crew.lane();
  Shares shares = row_shares(k, arrivals);
  PlannedByOthers<kFresh> planned(k.g);
  for (uint32_t n = 0; shares.next(n, lane);) {
    RowBatch<kFresh> batch(k, arrivals, n, planned.look(k));
    __syncwarp();
    for (uint32_t i = 0; i < kWarp; ++i) {
      const uint32_t count = __shfl_sync(kFullWarp, batch.count, i);
      if (count == 0) continue;
      if (!batch.wait(k, arrivals, i, lane)) return;
      const uint32_t first = __shfl_sync(kFullWarp, batch.first, i);
      const uint8_t* const row = batch.at_lane(k, arrivals, i);
      const bool compact = k.plan.compact_width > 0;
      const uint32_t own_row = __shfl_sync(kFullWarp, batch.row, i);
      for (uint32_t s = 0; s < (compact ? 1 : count); ++s) {
        const uint32_t out_row = compact ? own_row : k.plan.out_rows[first + s];
        if (out_row >= k.plan.num_out_rows) continue;
        uint4* const to = reinterpret_cast<uint4*>(k.args.rows + out_row * out_bytes);
        if (k.args.stage.row.num_scales > 0 && !codes)
          dequantise(row, k.args.stage, 0, hidden / 16, lane, [&](uint32_t v, const uint4& low, const uint4& high) {
            to[2 * v] = low;
            to[2 * v + 1] = high;
          });
        else
          for (uint32_t v = lane; v < out_bytes / 16; v += kWarp) to[v] = reinterpret_cast<const uint4*>(row)[v];
        if (codes) copy_scales(row, out_row, k.args, lane);
        if (k.args.metadata != nullptr) copy_metadata(row, out_row, k.args, lane);
      }
    }
  }
}

}  // namespace uccl_ep::gpu
