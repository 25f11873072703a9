// Sums of rows in fp32, in the order given, from +0.0; rounded once.
#pragma once

#include "backend/cuda/bulk.cuh"
#include "backend/cuda/device.cuh"
#include "backend/cuda/numerics.cuh"

namespace uccl_ep::cuda {

// 8 values.
__device__ __forceinline__ void add_values(float (&sum)[8], const uint16_t* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w) {
    sum[2 * w] += __uint_as_float(words[w] << 16);
    sum[2 * w + 1] += __uint_as_float(words[w] & 0xFFFF0000u);
  }
}
__device__ __forceinline__ void add_values(float (&sum)[8], const float* from) {
#pragma unroll
  for (uint32_t v = 0; v < 2; ++v) {
    const float4 four = reinterpret_cast<const float4*>(from)[v];
    sum[4 * v] += four.x;
    sum[4 * v + 1] += four.y;
    sum[4 * v + 2] += four.z;
    sum[4 * v + 3] += four.w;
  }
}
__device__ __forceinline__ void put_values(const float (&sum)[8], uint16_t* to) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                             pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
}
__device__ __forceinline__ void put_values(const float (&sum)[8], float* to) {
#pragma unroll
  for (uint32_t v = 0; v < 2; ++v)
    reinterpret_cast<float4*>(to)[v] = make_float4(canonical(sum[4 * v]), canonical(sum[4 * v + 1]),
                                                   canonical(sum[4 * v + 2]), canonical(sum[4 * v + 3]));
}

// By a warp. `row(i)`: the i-th of `num_rows` rows.
template <typename Row, typename Out>
__device__ __forceinline__ void sum_row(uint32_t hidden, uint32_t lane, uint32_t num_rows, Row row, Out* out) {
  for (uint32_t i = lane * 8; i < hidden; i += 32 * 8) {
    float sum[8] = {};
    for (uint32_t r = 0; r < num_rows; ++r) add_values(sum, row(r) + i);
    put_values(sum, out + i);
  }
}

// ---- BF16 sums by bulk copies (sm_90) -------------------------------------------------------------------------------
// A warp walks over (row, segment, addend). A ring of segments in shared memory is filled ahead of the sums, which go
// out through two more.
constexpr uint32_t kSegment = 2048;  // bytes
constexpr uint32_t kRing = 6;
constexpr uint32_t kSumWarps = 12;
constexpr uint32_t kVectors = kSegment / 16 / kWarp;
constexpr uint32_t kSumBytes = kSumWarps * (kRing + 2) * kSegment;
constexpr uint32_t kReport = 4;      // rows that are reported together, a lane each: it costs a round trip

// Work has, for rows 0 .. end():
//   bool find(n)              the row exists; makes it the current one of this object
//   bool wait(n)              by the warp: its addends have arrived; false: an error is known
//   uint32_t count            its addends
//   const uint8_t* addend(i), uint8_t* out()
//   bool reports              complete() is to be called
//   void complete(n)          by one lane: the sum is visible to the GPU
// Rows are taken by warps in turn: `first_block` of `num_blocks` blocks.
#if __CUDA_ARCH__ >= 900
template <typename Work>
__device__ void sum_rows_bulk(const Work& work, uint32_t row_bytes, uint32_t block, uint32_t num_blocks,
                              uint8_t* shared) {
  __shared__ __align__(8) uint64_t barriers[kSumWarps * kRing];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint8_t* const ring = shared + warp * (kRing + 2) * kSegment;
  uint8_t* const sums = ring + kRing * kSegment;
  uint64_t* const full = barriers + warp * kRing;
  if (lane == 0) {
    for (uint32_t i = 0; i < kRing; ++i) init_barrier(full + i);
    fence_barriers();
  }
  __syncwarp();

  const uint32_t end = work.end(), step = num_blocks * kSumWarps, first = warp * num_blocks + block;
  // Where the loads are: a row, a segment, an addend.
  Work ahead = work;
  uint32_t load_n = first, load_at = 0, load_addend = 0, loaded = 0;
  bool good = !stopped(work.d);
  const auto find_row = [&] {
    while (load_n < end && !(ahead.find(load_n) && ahead.count > 0)) load_n += step;
    if (load_n < end) good = ahead.wait(load_n);
  };
  const auto load_next = [&] {
    if (load_n >= end || !good) return;
    if (lane == 0)
      load_bulk(ring + loaded % kRing * kSegment, ahead.addend(load_addend) + load_at,
                min(kSegment, row_bytes - load_at), full + loaded % kRing);
    ++loaded;
    if (++load_addend < ahead.count) return;
    load_addend = 0;
    load_at += kSegment;
    if (load_at < row_bytes) return;
    load_at = 0;
    load_n += step;
    find_row();
  };
  if (good) find_row();
  for (uint32_t i = 0; i < kRing - 1; ++i) load_next();

  Work now = work;
  uint32_t summed = 0, stored = 0, unreported = 0, reported_n = 0;
  const auto report_rows = [&] {  // lane i: the i-th row since the last report
    if (lane == 0) wait_stores<0>();
    __syncwarp();
    proxy_fence();  // what bulk stores wrote is published by ordinary ones
    if (lane < unreported) work.complete(reported_n);
    unreported = 0;
  };
  for (uint32_t n = first; n < end; n += step) {
    if (!now.find(n)) continue;
    if (!good && summed == loaded) break;
    uint8_t* const out = now.out();
    for (uint32_t begin = 0; begin < row_bytes && (good || summed < loaded); begin += kSegment) {
      float sum[kVectors][8] = {};
      for (uint32_t i = 0; i < now.count && (good || summed < loaded); ++i) {
        wait_barrier(full + summed % kRing, summed / kRing);
        const uint16_t* const from = reinterpret_cast<const uint16_t*>(ring + summed % kRing * kSegment);
#pragma unroll
        for (uint32_t v = 0; v < kVectors; ++v) add_values(sum[v], from + (v * kWarp + lane) * 8);
        __syncwarp();
        ++summed;
        load_next();
      }
      uint16_t* const to = reinterpret_cast<uint16_t*>(sums + stored % 2 * kSegment);
      if (lane == 0) wait_stores_read<1>();  // of the sums before the last
      __syncwarp();
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) put_values(sum[v], to + (v * kWarp + lane) * 8);
      fence_shared();
      __syncwarp();
      if (lane == 0) {
        store_bulk(out + begin, to, min(kSegment, row_bytes - begin));
        commit_stores();
      }
      ++stored;
    }
    if (!work.reports) continue;
    if (lane == unreported) reported_n = n;
    if (++unreported == kReport) report_rows();
  }
  if (good && unreported > 0) report_rows();
  if (lane == 0) wait_stores<0>();
  proxy_fence();
}
#endif

}  // namespace uccl_ep::cuda
