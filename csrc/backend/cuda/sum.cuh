// Sums of rows in fp32, in the order given, from +0.0; rounded once.
#pragma once

#include "backend/cuda/bulk.cuh"
#include "backend/cuda/device.cuh"
#include "backend/cuda/numerics.cuh"

namespace uccl_ep::cuda {

// 8 values.
__device__ __forceinline__ void add_values(float (&sum)[8], const uint4& raw) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w) {
    sum[2 * w] += __uint_as_float(words[w] << 16);
    sum[2 * w + 1] += __uint_as_float(words[w] & 0xFFFF0000u);
  }
}
__device__ __forceinline__ void add_values(float (&sum)[8], const uint16_t* from) {
  add_values(sum, *reinterpret_cast<const uint4*>(from));
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

// A sum, as the lane sees it that looked it up.
struct Sum {
  uint32_t count = 0;   // addends; 0: there is none
  uint32_t first = 0;   // Work::addend(first + i) is the i-th
  uint32_t tag = 0;     // for Work
  uint8_t* out = nullptr;
  // One of the addends may itself be a sum that is made here, and rounded to the addends' dtype.
  uint32_t inner_at = kNoRow;                  // which one; kNoRow: none
  uint32_t inner_count = 0, inner_first = 0;   // its addends: Work::inner_place(inner_first + i). None: it is zero

  template <bool kHasInner>
  __device__ __forceinline__ Sum of(uint32_t lane) const {
    const auto from = [&](uint32_t value) { return __shfl_sync(kFullWarp, value, lane); };
    Sum sum{from(count), from(first), from(tag),
            reinterpret_cast<uint8_t*>(__shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(out), lane))};
    if constexpr (kHasInner) {
      sum.inner_at = from(inner_at);
      sum.inner_count = from(inner_count);
      sum.inner_first = from(inner_first);
    }
    return sum;
  }
  // Addends that are loaded for it.
  __device__ __forceinline__ uint32_t loads() const { return inner_count + count - (inner_at == kNoRow ? 0 : 1); }
};

// The sums that are a warp's turn, 32 at a time, looked up by a lane each. Work has, for sums 0 .. end():
//   Sum look_up(n, acts)       by one lane; count 0: there is nothing to sum. `acts`: what is to be done then is done;
//                              sums may be looked up twice, and one of the times it is true
//   uint32_t place(k)          where addend k lies, in rows
//   const uint8_t* base()      of the addends
//   kHasInner                  sums may have an inner one, whose addends lie at inner_place(k) from inner_base()
//   bool wait(tag)             by the warp: the addends have arrived; false: an error is known
//   bool reports()             complete() is to be called
//   void complete(tag)         by one lane: the sum is visible to the GPU
template <typename Work>
struct Turns {
  const Work& work;
  const uint32_t end, step, lane;
  const bool acts;
  uint32_t begin, left = 0;
  Sum batch;

  __device__ Turns(const Work& w, const Crew& crew, bool a)
      : work(w), end(w.end()), step(gridDim.x * crew.warps()), lane(crew.lane()), acts(a) {
    begin = crew.warp() * gridDim.x + blockIdx.x;
    look();
  }
  __device__ __forceinline__ void look() {
    batch = Sum{};
    if (begin + lane * step < end) batch = work.look_up(begin + lane * step, acts);
    left = __ballot_sync(kFullWarp, batch.count > 0);
  }
  // The next sum, in every lane; count 0: no more.
  __device__ __forceinline__ Sum next() {
    while (left == 0) {
      begin += kWarp * step;
      if (begin >= end) return {};
      look();
    }
    const uint32_t i = __ffs(left) - 1;
    left &= left - 1;
    return batch.template of<Work::kHasInner>(i);
  }
};

// Plain loads: for every architecture and every dtype.
template <typename In, typename Out, typename Work>
__device__ void sum_rows(const Crew& crew, const Domain& d, const Work& work, uint32_t hidden) {
  Turns<Work> turns(work, crew, true);
  for (Sum sum = turns.next(); sum.count > 0; sum = turns.next()) {
    if (!work.wait(sum.tag)) return;
    for (uint32_t i = crew.lane() * 8; i < hidden; i += kWarp * 8) {
      float total[8] = {};
      for (uint32_t k = 0; k < sum.count; ++k) {
        if constexpr (Work::kHasInner) {
          if (k == sum.inner_at) {
            float inner[8] = {};
            for (uint32_t a = 0; a < sum.inner_count; ++a)
              add_values(inner, reinterpret_cast<const Out*>(work.inner_base()) +
                                    uint64_t{work.inner_place(sum.inner_first + a)} * hidden + i);
            alignas(16) In rounded[8];
            put_values(inner, rounded);
            add_values(total, rounded);
            continue;
          }
        }
        add_values(total, reinterpret_cast<const In*>(work.base()) + uint64_t{work.place(sum.first + k)} * hidden + i);
      }
      put_values(total, reinterpret_cast<Out*>(sum.out) + i);
    }
    if (!work.reports()) continue;
    __threadfence_system();
    __syncwarp();
    if (crew.lane() == 0) work.complete(sum.tag);
  }
}

// ---- BF16 sums by bulk copies (sm_90) -------------------------------------------------------------------------------
// A warp walks over (sum, segment, addend), a step each. A ring of segments in shared memory is filled ahead; a sum
// leaves from the place of its last addend, which is filled again kLag steps later: by then the sum has been read. What
// limits it is the number of instructions of a step.
constexpr uint32_t kMostVectors = 7;  // 16 bytes of a lane in a segment
constexpr uint32_t kRing = 5;
constexpr uint32_t kLag = 2;
constexpr uint32_t kHeldBytes = kMostVectors * kWarp * 16;  // a segment of an inner sum
constexpr uint32_t kSumWarpBytes = kRing * kHeldBytes;
constexpr uint32_t kReport = 4;  // rows that are reported together, a lane each: it costs a round trip

// Rows go in whole segments of 7 or of 4 vectors; the last may be cut.
__host__ __device__ constexpr bool long_segments(uint32_t row_bytes) { return row_bytes % (7 * kWarp * 16) == 0; }

// 8 sums as BF16. NaN is looked for once: zero times anything finite adds nothing.
__device__ __forceinline__ uint4 pack_sums(const float (&sum)[8]) {
  float probe = 0.0f;
#pragma unroll
  for (float s : sum) probe = __fmaf_rn(s, 0.0f, probe);
  if (probe != probe)  // or infinite
    return make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                      pack_bf16(sum[6], sum[7]));
  return make_uint4(pack_finite_bf16(sum[0], sum[1]), pack_finite_bf16(sum[2], sum[3]),
                    pack_finite_bf16(sum[4], sum[5]), pack_finite_bf16(sum[6], sum[7]));
}

#if __CUDA_ARCH__ >= 900
template <uint32_t kVectors, typename Work>
struct BulkSums {
  static constexpr uint32_t kSegment = kVectors * kWarp * 16;
  const Domain& d;
  const Work& work;
  const uint32_t lane, row_bytes;
  const uint32_t ring, full, held;  // addresses in shared memory
  // Where the loads are.
  Turns<Work> ahead;
  Sum load, pending;                   // the sum that is loaded, and the next one
  uint32_t load_place, pending_place;  // lane i: where addend i lies
  uint32_t load_inner = 0, pending_inner = 0;  // the same of the inner sum
  uint32_t load_at = 0, load_addend = 0, loaded = 0, load_slot = 0;
  bool good;

  __device__ BulkSums(const Crew& crew, const Domain& domain, const Work& w, uint32_t bytes, uint8_t* shared,
                      uint8_t* held_memory, uint64_t* barriers)
      : d(domain),
        work(w),
        lane(crew.lane()),
        row_bytes(bytes),
        ring(shared_address(shared + crew.warp() * kSumWarpBytes)),
        full(shared_address(barriers + crew.warp() * kRing)),
        held(shared_address(held_memory + crew.warp() * kHeldBytes) + crew.lane() * 16),
        ahead(w, crew, false),
        good(__all_sync(kFullWarp, !stopped(domain))) {
    if (lane == 0) {
      for (uint32_t i = 0; i < kRing; ++i) init_barrier(barriers + crew.warp() * kRing + i);
      fence_barriers();
    }
    __syncwarp();
    look_ahead();
    next_load();
  }
  // Bytes of the segment that begins at `at`.
  __device__ __forceinline__ uint32_t part(uint32_t at) const {
    return kVectors == kMostVectors ? kSegment : min(kSegment, row_bytes - at);
  }
  __device__ __forceinline__ void look_ahead() {
    pending = ahead.next();
    pending_place = lane < pending.count ? work.place(pending.first + lane) : 0;
    if constexpr (Work::kHasInner)
      pending_inner = lane < pending.inner_count ? work.inner_place(pending.inner_first + lane) : 0;
  }
  __device__ __forceinline__ void next_load() {
    load = pending;
    load_place = pending_place;
    load_inner = pending_inner;
    load_at = load_addend = 0;
    if (load.count == 0) return;
    look_ahead();
    if (!Work::kHasInner || load.inner_count == 0) good = good && work.wait(load.tag);
  }
  // A group of stores a step, most of them empty, so that steps are what is counted.
  __device__ __forceinline__ void load_segment() {
    if (load.count == 0 || !good) {
      if (lane == 0) commit_stores();
      return;
    }
    uint32_t addend = load_addend, place = 0;
    const uint8_t* base = work.base();
    bool inner = false;
    if constexpr (Work::kHasInner) {
      inner = load_addend < load.inner_count;
      if (inner) {
        base = work.inner_base();
        place = __shfl_sync(kFullWarp, load_inner, addend % kWarp);
        if (addend >= kWarp) place = work.inner_place(load.inner_first + addend);
      } else {
        if (load_at == 0 && addend > 0 && addend == load.inner_count) good = work.wait(load.tag);
        addend -= load.inner_count;
        if (addend >= load.inner_at) ++addend;
      }
      if (!good) {
        if (lane == 0) commit_stores();
        return;
      }
    }
    if (!inner) {
      place = __shfl_sync(kFullWarp, load_place, addend % kWarp);
      if (addend >= kWarp) place = work.place(load.first + addend);
    }
    if (lane == 0) {
      commit_stores();
      wait_stores_read<kLag>();
      load_bulk(ring + load_slot * kSegment, base + uint64_t{place} * row_bytes + load_at, part(load_at),
                full + load_slot * 8);
    }
    ++loaded;
    load_slot = load_slot + 1 == kRing ? 0 : load_slot + 1;
    if (++load_addend < load.loads()) return;
    load_addend = 0;
    load_at += kSegment;
    if (load_at >= row_bytes) next_load();
  }

  __device__ void run(const Crew& crew) {
    for (uint32_t i = 0; i < kRing - kLag; ++i) load_segment();
    Turns<Work> turns(work, crew, true);
    uint32_t summed = 0, slot = 0, parity = 0, unreported = 0, reported_tag = 0;
    const auto report_rows = [&] {  // lane i: the i-th row since the last report
      if (lane == 0) wait_stores<0>();
      __syncwarp();
      proxy_fence();  // what bulk stores wrote is published by ordinary ones
      if (lane < unreported) work.complete(reported_tag);
      unreported = 0;
    };
    for (Sum now = turns.next(); now.count > 0; now = turns.next()) {
      for (uint32_t begin = 0; begin < row_bytes; begin += kSegment) {
        float sum[kVectors][8] = {};
        const uint32_t loads = now.loads();
        for (uint32_t done = 0; done < loads;) {
          if (summed == loaded) {  // an error is known
            if (lane == 0) wait_stores<0>();
            return;
          }
          const uint32_t from = ring + slot * kSegment + lane * 16;
          wait_barrier(full + slot * 8, parity);
          uint4 raw[kVectors];
#pragma unroll
          for (uint32_t v = 0; v < kVectors; ++v) raw[v] = load_shared(from + v * kWarp * 16);
#pragma unroll
          for (uint32_t v = 0; v < kVectors; ++v) add_values(sum[v], raw[v]);
          ++summed;
          ++done;
          if constexpr (Work::kHasInner) {
            if (done == now.inner_count) {  // never 0
#pragma unroll
              for (uint32_t v = 0; v < kVectors; ++v) {
                store_shared(held + v * kWarp * 16, pack_sums(sum[v]));
#pragma unroll
                for (float& value : sum[v]) value = 0.0f;
              }
            }
            if (now.inner_count > 0 && done == now.inner_count + now.inner_at) {
#pragma unroll
              for (uint32_t v = 0; v < kVectors; ++v) add_values(sum[v], load_shared(held + v * kWarp * 16));
            }
          }
          if (done == loads) {
#pragma unroll
            for (uint32_t v = 0; v < kVectors; ++v) store_shared(from + v * kWarp * 16, pack_sums(sum[v]));
            fence_shared();
            __syncwarp();
            if (lane == 0) store_bulk(now.out + begin, ring + slot * kSegment, part(begin));
          }
          slot = slot + 1 == kRing ? 0 : slot + 1;
          parity ^= slot == 0;
          __syncwarp();
          load_segment();
        }
      }
      if (!work.reports()) continue;
      if (lane == unreported) reported_tag = now.tag;
      if (++unreported == kReport) report_rows();
    }
    if (unreported > 0) report_rows();
    if (lane == 0) wait_stores<0>();
    proxy_fence();
  }
};

template <typename Work>
__device__ __forceinline__ void sum_rows_bulk(const Crew& crew, const Domain& d, const Work& work, uint32_t row_bytes,
                                              uint8_t* shared, uint8_t* held, uint64_t* barriers) {
  if (long_segments(row_bytes))
    BulkSums<7, Work>(crew, d, work, row_bytes, shared, held, barriers).run(crew);
  else
    BulkSums<4, Work>(crew, d, work, row_bytes, shared, held, barriers).run(crew);
}
#endif

}  // namespace uccl_ep::cuda
