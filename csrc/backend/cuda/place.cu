// Place: pulls the rows that come here from their sources' regions, straight into their slots.
#include "backend/cuda/bulk.cuh"
#include "backend/cuda/device.cuh"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarp;

// Where a received row comes from. Warps take rows so that neighbours read different peers.
struct Source {
  uint32_t rank, row;  // row: number among all received rows
  bool exists;
};
__device__ __forceinline__ Source nth_row(const Domain& d, const PlanView& plan, uint32_t n) {
  const uint32_t rank = rotated(d, n % d.at.num_ranks);
  const uint32_t row = plan.row_begin[rank] + n / d.at.num_ranks;
  return {rank, row, row < plan.row_begin[rank + 1]};
}
__device__ uint32_t most_rows(const Domain& d, const PlanView& plan) {
  uint32_t most = 0;
  for (uint32_t r = 0; r < d.at.num_ranks; ++r) most = max(most, plan.row_begin[r + 1] - plan.row_begin[r]);
  return most * d.at.num_ranks;
}

// The slots of a row: `get(i)` of `count`.
template <typename Get>
struct Slots {
  uint32_t count;
  Get get;
};
template <typename Get>
Slots(uint32_t, Get) -> Slots<Get>;

// 16 values a lane; a block of 128 has one scale.
template <typename Get>
__device__ void dequantise(const uint8_t* row, uint32_t hidden, const Slots<Get>& slots, uint8_t* out, uint32_t lane) {
  const float* const scales = reinterpret_cast<const float*>(row + hidden);
  for (uint32_t i = lane; i < hidden / 16; i += kWarp) {
    const uint4 codes = reinterpret_cast<const uint4*>(row)[i];
    const float scale = scales[i / 8];
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t values[8];
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      values[2 * w] = decode_two(words[w] & 0xFFFF, scale);
      values[2 * w + 1] = decode_two(words[w] >> 16, scale);
    }
    for (uint32_t s = 0; s < slots.count; ++s) {
      uint4* const to = reinterpret_cast<uint4*>(out + uint64_t{slots.get(s)} * hidden * 2) + 2 * i;
      to[0] = make_uint4(values[0], values[1], values[2], values[3]);
      to[1] = make_uint4(values[4], values[5], values[6], values[7]);
    }
  }
}

template <typename Get>
__device__ void copy_out(const uint8_t* from, uint64_t bytes, const Slots<Get>& slots, uint8_t* out, uint32_t lane) {
  const uint4* const in = reinterpret_cast<const uint4*>(from);
#pragma unroll 4
  for (uint32_t i = lane; i < bytes / 16; i += kWarp) {
    const uint4 value = in[i];
    for (uint32_t s = 0; s < slots.count; ++s) reinterpret_cast<uint4*>(out + slots.get(s) * bytes)[i] = value;
  }
}

template <typename Get>
__device__ void copy_scales(const uint8_t* row, const Slots<Get>& slots, const PlaceArgs& args, uint32_t lane) {
  const uint32_t blocks = args.hidden / kFp8Block;
  const float* const scales = reinterpret_cast<const float*>(row + args.hidden);
  for (uint32_t s = 0; s < slots.count; ++s) {
    float* const out = args.scales + uint64_t{slots.get(s)} * blocks;
    for (uint32_t i = lane; i < blocks; i += kWarp) out[i] = scales[i];
  }
}

__device__ void fill_padding(const Domain& d, const PlanView& plan, const PlaceArgs& args, uint64_t out_bytes) {
  const uint32_t blocks = args.hidden / kFp8Block;
  for (uint32_t l = blockIdx.x; l < d.experts_per_rank; l += gridDim.x) {
    const uint64_t first = plan.padding[2 * l], end = plan.padding[2 * l + 1];
    uint4* const out = reinterpret_cast<uint4*>(args.rows);
    for (uint64_t i = first * out_bytes / 16 + threadIdx.x; i < end * out_bytes / 16; i += blockDim.x)
      out[i] = make_uint4(0, 0, 0, 0);
    if (args.scales != nullptr)
      for (uint64_t i = first * blocks + threadIdx.x; i < end * blocks; i += blockDim.x) args.scales[i] = 1.0f;
    if (args.row_values != nullptr)
      for (uint64_t i = first + threadIdx.x; i < end; i += blockDim.x) args.row_values[i] = 0.0f;
  }
}

__device__ void place_values(const Domain& d, const PlanView& plan, const OpState& op, const PlaceArgs& args) {
  for (uint32_t r = 0; r < d.at.num_ranks; ++r) {
    const uint32_t source = rotated(d, r);
    const float* const staged = values(d, source, op.half);
    const uint32_t begin = plan.row_begin[source], end = plan.row_begin[source + 1];
    for (uint32_t row = begin + blockIdx.x * blockDim.x + threadIdx.x; row < end; row += gridDim.x * blockDim.x) {
      const uint32_t first = plan.row_slot[row], last = plan.row_slot[row + 1];
      for (uint32_t s = first; s < last; ++s) args.row_values[plan.slots[s]] = staged[plan.row_pair[row] + s - first];
    }
  }
}

__device__ __forceinline__ bool wait_row(const Domain& d, const OpState& op, uint32_t source, uint32_t token,
                                         uint32_t lane) {
  const uint32_t chunk = token / kRowsPerChunk;
  bool good = true;
  if (lane == 0)
    good = wait_flag(d, rows_full(d, d.rank, source) + chunk, op.epoch, Step::kPlace, static_cast<int>(source),
                     static_cast<int>(chunk));
  return __shfl_sync(kFullWarp, good, 0);
}

// What is left when the rows are in their slots.
__device__ void finish_place(const Domain& d, const PlanView& plan, const OpState& op, const PlaceArgs& args) {
  if (args.row_values != nullptr && wait_all(d, at<uint64_t>(d, d.rank, d.at.values_full), op.epoch, Step::kPlace))
    place_values(d, plan, op, args);
  if (!last_block(d, Kernel::kPlace)) return;
  if (!stopped(d)) {
    publish_all(d, d.at.read, op.epoch);
    return;
  }
  const uint64_t num_rows = plan.num_rows;
  const bool codes = args.scales != nullptr;
  fill_nan(args.rows, num_rows * args.hidden * (codes ? 1 : dtype_bytes(args.dtype)));
  if (codes) fill_nan(args.scales, num_rows * args.hidden / kFp8Block * sizeof(float));
  if (args.row_values != nullptr) fill_nan(args.row_values, num_rows * sizeof(float));
}

// Plain loads: for every architecture and every row.
__global__ void __launch_bounds__(kThreads, 1)
    place(const __grid_constant__ Domain d, const PlanView plan, const PlaceArgs args) {
  const OpState op = local(d).op;
  const uint64_t stride = wire_row_bytes(args.wire, args.hidden);
  const bool codes = args.scales != nullptr;
  const uint64_t out_bytes = codes ? args.hidden : uint64_t{args.hidden} * dtype_bytes(args.dtype);
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t end = most_rows(d, plan);
  fill_padding(d, plan, args, out_bytes);
  bool good = !stopped(d);
  for (uint32_t n = threadIdx.x / kWarp * gridDim.x + blockIdx.x; n < end && good; n += gridDim.x * kWarps) {
    const Source from = nth_row(d, plan, n);
    if (!from.exists) continue;
    const uint32_t token = plan.row_token[from.row];
    good = wait_row(d, op, from.rank, token, lane);
    if (!good) break;
    const uint8_t* const row = rows(d, from.rank, op.half) + token * stride;
    const uint32_t first = plan.row_slot[from.row];
    const Slots slots{plan.row_slot[from.row + 1] - first, [&](uint32_t i) { return plan.slots[first + i]; }};
    if (args.wire == Dtype::kFp8 && !codes)
      dequantise(row, args.hidden, slots, args.rows, lane);
    else
      copy_out(row, out_bytes, slots, args.rows, lane);
    if (codes) copy_scales(row, slots, args, lane);
  }
  finish_place(d, plan, op, args);
}

// Bulk copies: a warp is a stream over its rows, through a ring of kStages rows in shared memory. Loads of the next
// rows are under way while one is stored. What is known of the rows is fetched for 32 of them at a time, a row a lane,
// so that its latency is paid once.
constexpr uint32_t kStages = 3;
constexpr uint32_t kMaxBulkWarps = 16;

// The next 32 rows of a warp, in its lanes.
struct RowBatch {
  uint32_t source, token, first, count;  // count 0: there is no such row
  bool ready;                            // its chunk has been staged

  __device__ RowBatch(const Domain& d, const PlanView& plan, const OpState& op, uint32_t n, uint32_t end) {
    source = token = first = count = 0;
    ready = false;
    if (n >= end) return;
    const Source from = nth_row(d, plan, n);
    if (!from.exists) return;
    source = from.rank;
    token = plan.row_token[from.row];
    first = plan.row_slot[from.row];
    count = plan.row_slot[from.row + 1] - first;
    ready = read_flag(rows_full(d, d.rank, source) + token / kRowsPerChunk) >= op.epoch;
  }
  // Lane `i`'s row, in every lane.
  __device__ RowBatch of(uint32_t i) const {
    RowBatch row = *this;
    row.source = __shfl_sync(kFullWarp, source, i);
    row.token = __shfl_sync(kFullWarp, token, i);
    row.first = __shfl_sync(kFullWarp, first, i);
    row.count = __shfl_sync(kFullWarp, count, i);
    row.ready = __shfl_sync(kFullWarp, ready, i);
    return row;
  }
};

__global__ void __launch_bounds__(kMaxBulkWarps* kWarp, 1)
    place_bulk(const __grid_constant__ Domain d, const PlanView plan, const PlaceArgs args) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) uint64_t barriers[kMaxBulkWarps * kStages];
  __shared__ uint32_t slot_ring[kMaxBulkWarps * kStages * kWarp];  // the first 32 slots of a stage's row
  const OpState op = local(d).op;
  const uint32_t stride = static_cast<uint32_t>(wire_row_bytes(args.wire, args.hidden));
  const bool codes = args.scales != nullptr;
  const uint32_t out_bytes = codes ? args.hidden : args.hidden * dtype_bytes(args.dtype);
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint8_t* const ring = shared + warp * kStages * stride;
  uint64_t* const full = barriers + warp * kStages;
  uint32_t* const stage_slots = slot_ring + warp * kStages * kWarp;
  if (lane == 0) {
    for (uint32_t i = 0; i < kStages; ++i) init_barrier(full + i);
    fence_barriers();
  }
  fill_padding(d, plan, args, out_bytes);
  __syncwarp();

  const uint32_t end = most_rows(d, plan), step = gridDim.x * (blockDim.x / kWarp);
  uint32_t batch_begin = warp * gridDim.x + blockIdx.x, next = 0;  // the row to load next: lane `next` of the batch
  RowBatch batch(d, plan, op, batch_begin + lane * step, end);
  uint32_t loaded = 0, placed = 0;
  bool good = !stopped(d);
  uint32_t stage_first[kStages], stage_count[kStages];
  const auto load_next = [&](uint32_t stage) {
    RowBatch row = batch;
    do {
      if (next == kWarp) {
        batch_begin += kWarp * step;
        if (batch_begin >= end) return;
        batch = RowBatch(d, plan, op, batch_begin + lane * step, end);
        next = 0;
      }
      row = batch.of(next++);
    } while (row.count == 0);
    __syncwarp();  // orders the flags that the lanes have read
    if (!row.ready) {
      good = wait_row(d, op, row.source, row.token, lane);
      if (!good) return;
    }
    stage_first[stage] = row.first;
    stage_count[stage] = row.count;
    if (lane < row.count) stage_slots[stage * kWarp + lane] = plan.slots[row.first + lane];
    if (lane == 0) {
      proxy_fence();  // flags were read by ordinary loads, the row is read by a bulk copy
      load_bulk(ring + stage * stride, rows(d, row.source, op.half) + uint64_t{row.token} * stride, stride,
                full + stage);
    }
    ++loaded;
  };
#pragma unroll
  for (uint32_t i = 0; i < kStages - 1; ++i)
    if (good) load_next(i);
  while (placed < loaded) {  // also after an error: what is under way must land before the block ends
#pragma unroll
    for (uint32_t stage = 0; stage < kStages; ++stage) {
      if (placed == loaded) break;
      wait_barrier(full + stage, placed / kStages);
      __syncwarp();
      const uint8_t* const row = ring + stage * stride;
      const Slots slots{stage_count[stage], [&](uint32_t i) {
                          return i < kWarp ? stage_slots[stage * kWarp + i] : plan.slots[stage_first[stage] + i];
                        }};
      if (args.wire == Dtype::kFp8 && !codes) {
        dequantise(row, args.hidden, slots, args.rows, lane);
      } else {
        for (uint32_t s = lane; s < slots.count; s += kWarp)
          store_bulk(args.rows + uint64_t{slots.get(s)} * out_bytes, row, out_bytes);
        commit_stores();
        if (codes) copy_scales(row, slots, args, lane);
      }
      ++placed;
      wait_stores_read<1>();  // the stage that is loaded next was stored one round ago
      __syncwarp();
      if (good) load_next((stage + kStages - 1) % kStages);
    }
  }
  wait_stores<0>();
  finish_place(d, plan, op, args);
#endif
}

}  // namespace

cudaError_t launch_place(const Domain& domain, const PlanView& plan, const PlaceArgs& args, uint32_t num_sms,
                         cudaStream_t stream) {
  const uint32_t row_bytes = static_cast<uint32_t>(wire_row_bytes(args.wire, args.hidden));
  const uint32_t warps = min(kMaxBulkWarps, domain.shared_bytes / (kStages * row_bytes));
  if (!domain.bulk_copies || warps < 2) {
    place<<<num_sms, kThreads, 0, stream>>>(domain, plan, args);
    return cudaGetLastError();
  }
  const uint32_t bytes = warps * kStages * row_bytes;
  const cudaError_t status =
      cudaFuncSetAttribute(place_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status != cudaSuccess) return status;
  place_bulk<<<num_sms, warps * kWarp, bytes, stream>>>(domain, plan, args);
  return cudaGetLastError();
}

cudaError_t load_place() { return load_all(place, place_bulk); }

}  // namespace uccl_ep::cuda
