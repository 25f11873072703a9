// Place: pulls the rows that come here from their sources' regions, straight into the output.
#pragma once

#include "backend/cuda/bulk.cuh"
#include "backend/cuda/device.cuh"
#include "backend/cuda/net.cuh"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/plan.cuh"
#include "backend/cuda/shares.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {

// The rows that a window brings, by source; in shared memory.
struct Arrivals {
  uint32_t begin[kMaxCudaRanks], end[kMaxCudaRanks];  // rows of the window
  uint32_t all_end[kMaxCudaRanks];                    // of a new plan: rows of all windows
  uint32_t position[kMaxCudaRanks];                   // in its stream, of the window's first row of it
  uint32_t slot[kMaxCudaRanks];                       // of another domain: where its first chunk lies in the ring
  uint64_t chunks[kMaxCudaRanks];                     // and how many there were before
  MostRows most;
};

// By a crew. Later windows of a new plan are planned, too, and not placed yet.
template <bool kFresh>
__device__ inline void find_arrivals(const Crew& crew, const Group& g, const PlanView& plan, const PlaceArgs& args,
                                     Arrivals& out) {
  const uint32_t per_window = args.window_tokens / kTokenBlock, entries = plan.num_token_blocks + 1;
  const uint32_t first_token_block = args.window * per_window;
  const bool whole = plan.num_token_blocks <= per_window;
  for (uint32_t s = crew.thread; s < g.map.num_ranks; s += crew.size) {
    const uint32_t base = (kFresh ? scratch(g).row_begin : plan.row_begin)[s];
    const uint32_t end = (kFresh ? scratch(g).row_end : plan.row_end)[s];
    out.begin[s] = base;
    out.end[s] = out.all_end[s] = end;
    out.position[s] = args.window * args.window_tokens;
    if (!in_domain(g, s)) {
      out.chunks[s] = net_state(g).received[s];
      out.slot[s] = static_cast<uint32_t>(out.chunks[s] % g.map.row_slots);
      if (args.window > 0)
        out.position[s] = plan.token_block_streams[s * entries + min(first_token_block, plan.num_token_blocks)];
    }
    if (whole) continue;
    if (kFresh) {
      const uint32_t token_blocks = (scratch(g).num_tokens[s] + kTokenBlock - 1) / kTokenBlock;
      out.end[s] = base + scratch(g).token_block_rows[s][min(per_window, token_blocks)];
    } else {
      const uint32_t* const rows_before = plan.token_block_rows + s * entries;
      out.begin[s] = base + rows_before[min(first_token_block, plan.num_token_blocks)];
      out.end[s] = out.all_end[s] = base + rows_before[min(first_token_block + per_window, plan.num_token_blocks)];
    }
  }
  crew.sync();
  if (crew.thread == 0) out.most.find(g, [&](uint32_t s) { return out.all_end[s] - out.begin[s]; });
  crew.sync();
}

// By a warp that places: whether its next batch of rows has been planned by others; of a new plan never the first one.
template <bool kFresh>
struct PlannedByOthers {
  bool first = true, planned = !kFresh;
  // By every lane, once for each batch.
  __device__ __forceinline__ bool look(const Group& g, const KernelOp& op) {
    if (!planned && !first) planned = read_flag(&local(g).rows_planned) >= op.epoch;
    first = false;
    return planned;
  }
};

// 32 rows, in the lanes of a warp: in turn of all sources, so that neighbours read different peers, those of our domain
// first: rows of others are still on their way.
template <bool kFresh>
struct RowBatch {
  uint32_t source = 0, position = 0, row = 0;  // position: in the window's part of the stream
  uint32_t first = 0, count = 0;               // `count` pairs from `first` on; 0: nothing to place
  bool ready = false;                          // its row group has been staged, or its chunk has arrived

  RowBatch() = default;
  // `planned`: all that is known of the rows is in the plan; else this puts it there.
  __device__ __forceinline__ RowBatch(const Group& g, const KernelOp& op, const PlanView& plan, const PlaceArgs& args,
                                      const Arrivals& arrivals, uint32_t n, bool planned) {
    const uint32_t near = arrivals.most.near_sum(g);
    const auto [s, number] = g.net == nullptr || n < near ? near_row(g, n) : far_row(g, n - near);
    row = arrivals.begin[s] + number;
    if (row >= arrivals.all_end[s]) return;
    source = s;
    PlannedRow known;
    if (kFresh && !planned) {
      known = plan_row(g, plan, s, row - arrivals.begin[s], row);
    } else {
      // Of a new plan, the next source's first row may not be planned.
      const bool last = kFresh && row + 1 == arrivals.all_end[s];
      known.position = (g.net != nullptr ? plan.row_position : plan.row_token)[row];
      known.first = plan.row_pair_begin[row];
      known.count = (last ? scratch(g).pair_end[s] : plan.row_pair_begin[row + 1]) - known.first;
    }
    first = known.first;
    count = kFresh && row >= arrivals.end[s] ? 0 : known.count;
    position = known.position - arrivals.position[s];
    look(g, op, args, arrivals);
  }
  // Its row group, or of another domain its chunk in the ring: what an error names as the chunk.
  __device__ __forceinline__ uint32_t unit(const Group& g, const PlaceArgs& args) const {
    return in_domain(g, source) ? position / kRowGroup : position / rows_per_chunk(g, row_bytes(args));
  }
  __device__ __forceinline__ static uint32_t row_bytes(const PlaceArgs& args) {
    return static_cast<uint32_t>(staged_row_bytes(args.stage.wire, args.stage.hidden));
  }
  // Where the row lies, in units of 16 bytes of its holder's region.
  __device__ __forceinline__ uint32_t where(const Group& g, const KernelOp& op, const PlaceArgs& args,
                                            const Arrivals& arrivals) const {
    const uint32_t stride = row_bytes(args);
    if (in_domain(g, source)) return (g.map.rows + op.half * g.map.half_bytes + uint64_t{position} * stride) / 16;
    const uint64_t offset = ring_offset(g, arrivals.slot[source], g.map.row_slots, position, stride);
    return (g.net->from[source].rows + offset) / 16;
  }
  __device__ __forceinline__ const uint64_t* flag(const Group& g) const {
    return in_domain(g, source) ? rows_full(g, g.rank, source) + position / kRowGroup
                                : &net_state(g).rows_there[source];
  }
  __device__ __forceinline__ uint64_t wanted(const Group& g, const KernelOp& op, const PlaceArgs& args,
                                             const Arrivals& arrivals) const {
    return in_domain(g, source) ? op.epoch : arrivals.chunks[source] + unit(g, args) + 1;
  }
  __device__ __forceinline__ void look(const Group& g, const KernelOp& op, const PlaceArgs& args,
                                       const Arrivals& arrivals) {
    if (count > 0) ready = read_flag(flag(g)) >= wanted(g, op, args, arrivals);
  }
  // By the warp: whether row `i` has been staged, or has arrived. What else has meanwhile is noted, too.
  __device__ __forceinline__ bool is_there(const Group& g, const KernelOp& op, const PlaceArgs& args,
                                           const Arrivals& arrivals, uint32_t i) {
    if (__shfl_sync(kFullWarp, ready, i)) return true;
    if (!ready) look(g, op, args, arrivals);
    return __shfl_sync(kFullWarp, ready, i);
  }
  // By the warp: waits until it has. False: an error is known.
  __device__ __forceinline__ bool wait(const Group& g, const KernelOp& op, const PlaceArgs& args,
                                       const Arrivals& arrivals, uint32_t i, uint32_t lane) {
    if (is_there(g, op, args, arrivals, i)) return true;
    bool good = true;
    if (lane == i) {
      good = wait_peer(g, flag(g), wanted(g, op, args, arrivals), op.epoch, Step::kPlace, source,
                       static_cast<int>(unit(g, args)));
      ready = true;
    }
    good = __all_sync(kFullWarp, good);
    __syncwarp();  // orders what the lanes have read before what any of them does next
    return good;
  }
  // By the warp: row `i`, whose turn it is.
  __device__ __forceinline__ const uint8_t* at_lane(const Group& g, const KernelOp& op, const PlaceArgs& args,
                                                    const Arrivals& arrivals, uint32_t i) const {
    const uint32_t holder = __shfl_sync(kFullWarp, count > 0 ? holder_of(g, source) : 0, i);
    const uint64_t units = __shfl_sync(kFullWarp, count > 0 ? where(g, op, args, arrivals) : 0, i);
    return g.base[holder] + units * 16;
  }
};

// ---- one row --------------------------------------------------------------------------------------------------------
// By a warp: values 16 i to 16 i + 15 of a row for `i` from `first` to `end`, a lane each: put(i, low, high). A block
// of 128 has one scale.
template <typename Put>
__device__ __forceinline__ void dequantise(const uint8_t* row, const StageArgs& args, uint32_t first, uint32_t end,
                                           uint32_t lane, Put put) {
  const float* const scales = reinterpret_cast<const float*>(row + args.hidden);
  for (uint32_t i = first + lane; i < end; i += kWarp) {
    const uint4 codes = reinterpret_cast<const uint4*>(row)[i];
    const float scale = scales[i / 8];
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t out[8];
    bool simple = args.fp8_pow2 && scale <= 0x1p7f;
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
__device__ __forceinline__ bool bulk_scales(const PlaceArgs& args) {
  return args.stage.hidden / kFp8Block * sizeof(float) % 16 == 0;
}
__device__ inline void copy_scales(const uint8_t* row, uint32_t out_row, const PlaceArgs& args, uint32_t lane) {
  const uint32_t blocks = args.stage.hidden / kFp8Block;
  const float* const scales = reinterpret_cast<const float*>(row + args.stage.hidden);
  float* const out = args.scales + uint64_t{out_row} * blocks;
  for (uint32_t i = lane; i < blocks; i += kWarp) out[i] = scales[i];
}

// ---- all rows -------------------------------------------------------------------------------------------------------
__device__ __forceinline__ Shares row_shares(const Crew& crew, const Group& g, const PlaceArgs& args,
                                             const Arrivals& arrivals) {
  return {g,
          SharedWork::kPlaced,
          arrivals.most.near_sum(g) + arrivals.most.far_sum(g),
          crew.warp() * args.num_blocks + blockIdx.x,
          args.num_blocks * crew.warps(),
          8};
}

// Plain loads: for every architecture and every row.
template <bool kFresh>
__device__ void place_rows(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan,
                           const PlaceArgs& args, const Arrivals& arrivals) {
  const uint32_t hidden = args.stage.hidden;
  const bool codes = args.scales != nullptr;
  const uint64_t out_bytes = codes ? hidden : uint64_t{hidden} * dtype_bytes(args.stage.dtype);
  const uint32_t lane = crew.lane();
  Shares shares = row_shares(crew, g, args, arrivals);
  PlannedByOthers<kFresh> planned;
  for (uint32_t n = 0; shares.next(n, lane);) {
    RowBatch<kFresh> batch(g, op, plan, args, arrivals, n, planned.look(g, op));
    __syncwarp();
    for (uint32_t i = 0; i < kWarp; ++i) {
      const uint32_t count = __shfl_sync(kFullWarp, batch.count, i);
      if (count == 0) continue;
      if (!batch.wait(g, op, args, arrivals, i, lane)) return;
      const uint32_t first = __shfl_sync(kFullWarp, batch.first, i);
      const uint8_t* const row = batch.at_lane(g, op, args, arrivals, i);
      const bool compact = plan.compact_width > 0;
      const uint32_t own_row = __shfl_sync(kFullWarp, batch.row, i);
      for (uint32_t s = 0; s < (compact ? 1 : count); ++s) {
        const uint32_t out_row = compact ? own_row : plan.out_rows[first + s];
        if (out_row >= plan.num_out_rows) continue;
        uint4* const to = reinterpret_cast<uint4*>(args.rows + out_row * out_bytes);
        if (args.stage.wire == Dtype::kFp8 && !codes)
          dequantise(row, args.stage, 0, hidden / 16, lane, [&](uint32_t v, const uint4& low, const uint4& high) {
            to[2 * v] = low;
            to[2 * v + 1] = high;
          });
        else
          for (uint32_t v = lane; v < out_bytes / 16; v += kWarp) to[v] = reinterpret_cast<const uint4*>(row)[v];
        if (codes) copy_scales(row, out_row, args, lane);
      }
    }
  }
}

// Bulk copies: a warp is a stream over its rows, through a pipeline of kPlaceStages rows in shared memory. Loads of the
// next rows are under way while one is stored. Where rows are dequantised they go out through one more row.
constexpr uint32_t kPlaceStages = 3;
constexpr uint32_t kPlaceWarps = 8;

__host__ __device__ inline uint32_t place_warp_bytes(const PlaceArgs& args) {
  const uint64_t wire = staged_row_bytes(args.stage.wire, args.stage.hidden);
  const bool decodes = args.stage.wire == Dtype::kFp8 && args.scales == nullptr;
  return static_cast<uint32_t>(kPlaceStages * wire + (decodes ? 2 * args.stage.hidden : 0));
}

#if __CUDA_ARCH__ >= 900
template <bool kFresh>
__device__ void place_rows_bulk(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan,
                                const PlaceArgs& args, const Arrivals& arrivals, uint8_t* shared) {
  __shared__ __align__(8) uint64_t barriers[kPlaceWarps * kPlaceStages];
  const uint32_t hidden = args.stage.hidden, stride = static_cast<uint32_t>(staged_row_bytes(args.stage.wire, hidden));
  const uint32_t wire_bytes = static_cast<uint32_t>(wire_row_bytes(args.stage.wire, hidden));
  const bool codes = args.scales != nullptr, decodes = args.stage.wire == Dtype::kFp8 && !codes;
  const uint32_t out_bytes = codes ? hidden : hidden * dtype_bytes(args.stage.dtype);
  const uint32_t part_bytes = decodes ? hidden : out_bytes;  // of a decoded row, a half
  const uint32_t lane = crew.lane();
  uint8_t* const pipeline = shared + crew.warp() * place_warp_bytes(args);
  uint8_t* const decoded = pipeline + kPlaceStages * stride;
  uint64_t* const full = barriers + crew.warp() * kPlaceStages;
  if (lane == 0) {
    for (uint32_t i = 0; i < kPlaceStages; ++i) init_barrier(full + i);
    fence_barriers();
  }
  __syncwarp();

  Shares shares = row_shares(crew, g, args, arrivals);
  PlannedByOthers<kFresh> planned;
  RowBatch<kFresh> batch;
  uint32_t left = 0;  // rows of the batch that are not loaded yet
  // A row under way, or being placed: its pairs, and lane i's row of the output.
  struct Row {
    uint32_t first = 0, count = 0, out_row = 0;
  };
  Row now, next;
  uint32_t under_way = 0, load_stage = 0, place_stage = 0, parity = 0;
  static_assert(kPlaceStages == 3);  // `now` and `next` are all that is under way
  // Everything is in one place, though `next` has to be moved for it: a copy for each stage is four times the code.
  bool more = __all_sync(kFullWarp, !stopped(g));
  while (true) {
    while (more && under_way < kPlaceStages - 1) {
      if (left == 0) {
        uint32_t n;
        more = shares.next(n, lane);
        if (!more) break;
        batch = RowBatch<kFresh>(g, op, plan, args, arrivals, n, planned.look(g, op));
        __syncwarp();
        left = __ballot_sync(kFullWarp, batch.count > 0);
        continue;
      }
      const uint32_t i = __ffs(left) - 1;
      // What is here is placed before the warp waits for what is not.
      if (under_way > 0 && !batch.is_there(g, op, args, arrivals, i)) break;
      left &= left - 1;
      Row row{__shfl_sync(kFullWarp, batch.first, i), __shfl_sync(kFullWarp, batch.count, i),
              __shfl_sync(kFullWarp, batch.row, i)};
      if (plan.compact_width > 0)
        row.count = 1;
      else if (lane < row.count)
        row.out_row = plan.out_rows[row.first + lane];
      more = batch.wait(g, op, args, arrivals, i, lane);
      if (!more) break;
      const uint8_t* const from = batch.at_lane(g, op, args, arrivals, i);
      if (lane == 0) {
        proxy_fence();  // flags were read by ordinary loads, the row is read by a bulk copy
        load_bulk(pipeline + load_stage * stride, from, wire_bytes, full + load_stage);
      }
      load_stage = load_stage + 1 == kPlaceStages ? 0 : load_stage + 1;
      (under_way++ == 0 ? now : next) = row;
    }
    if (under_way == 0) break;  // not before, even after an error: what is under way must land before the block ends
    wait_barrier(full + place_stage, parity);
    const uint8_t* const row = pipeline + place_stage * stride;
    // Decoded rows leave in halves: one is stored while the other is decoded.
    for (uint32_t part = 0; part < (decodes ? 2 : 1); ++part) {
      const uint8_t* from = row;
      if (decodes) {
        wait_stores_read<1>();
        __syncwarp();
        uint4* const half = reinterpret_cast<uint4*>(decoded + part * hidden);
        const uint32_t units = hidden / 32, first = part * units;  // of 16 values
        dequantise(row, args.stage, first, first + units, lane, [&](uint32_t v, const uint4& low, const uint4& high) {
          half[2 * (v - first)] = low;
          half[2 * (v - first) + 1] = high;
        });
        fence_shared();
        __syncwarp();
        from = decoded + part * hidden;
      }
      for (uint32_t s = 0; s < now.count; s += kWarp) {
        uint32_t out_row = now.out_row;
        if (s > 0 && s + lane < now.count) out_row = plan.out_rows[now.first + s + lane];
        const bool wanted = s + lane < now.count && out_row < plan.num_out_rows;
        if (wanted) store_bulk(args.rows + uint64_t{out_row} * out_bytes + part * hidden, from, part_bytes);
        if (wanted && codes && bulk_scales(args)) {
          const uint32_t bytes = hidden / kFp8Block * static_cast<uint32_t>(sizeof(float));
          store_bulk(reinterpret_cast<uint8_t*>(args.scales) + uint64_t{out_row} * bytes, row + hidden, bytes);
        }
        if (codes && !bulk_scales(args))
          for (uint32_t mask = __ballot_sync(kFullWarp, wanted); mask != 0; mask &= mask - 1)
            copy_scales(row, __shfl_sync(kFullWarp, out_row, __ffs(mask) - 1), args, lane);
      }
      commit_stores();
    }
    now = next;
    --under_way;
    place_stage = place_stage + 1 == kPlaceStages ? 0 : place_stage + 1;
    parity ^= place_stage == 0;
    if (!decodes) wait_stores_read<1>();  // the stage that is loaded next was stored one round ago
    __syncwarp();
  }
  wait_stores<0>();
}
#endif

}  // namespace uccl_ep::cuda
