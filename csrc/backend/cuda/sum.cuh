// Sums of rows in fp32, in the order given, from +0.0; rounded once.
#pragma once

#include "backend/cuda/bulk.cuh"
#include "backend/cuda/device.cuh"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/shares.cuh"

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

constexpr uint32_t kRehearsal = 0xFFFFFFFFu;  // a tag

// A sum, as the lane sees it that looked it up.
struct Sum {
  uint32_t count = 0;   // addends; 0: there is none
  uint32_t first = 0;   // Work::place(sum, first + i) is the i-th
  uint32_t tag = 0;     // for Work
  uint32_t part = 0;    // 0: of all of the row; else of its part-th segment only
  uint8_t* out = nullptr;  // the row's

  __device__ __forceinline__ Sum of(uint32_t lane) const {
    return {__shfl_sync(kFullWarp, count, lane), __shfl_sync(kFullWarp, first, lane), __shfl_sync(kFullWarp, tag, lane),
            __shfl_sync(kFullWarp, part, lane),
            reinterpret_cast<uint8_t*>(__shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(out), lane))};
  }
};

// A policy of sums. Work has, for sums 0 .. end():
//   SharedWork shared_work()   whose shares they are
//   uint32_t least()           sums for each warp with fewer of which all are dealt out
//   Sum look_up(n)             once, by one lane; count 0: there is nothing to sum
//   uint32_t place(sum, k)     where addend k lies, in units of 16 bytes from base()
//   const uint8_t* base()
//   bool kSumsFirst            what is here is summed and told before a warp waits for the next sum's addends; costs
//                              instructions of every step
//   bool came<kLooks>(tag)     by the warp: they are; waits for it, or only looks. False of one that waits: an error is
//                              known
//   bool kRehearses            a warp's first sum is of anything and for nobody, unless it joins others: it fetches the
//                              code, which takes as long as ten sums, while the first addends are on their way
//   bool kSplits               some sums are of a segment
//   bool tells()               tell() is to be called, or where at_once(tag) tell_at_once(), when a sum is written:
//                              somebody far away waits for it
//   void tell(lane, count, tag) by the warp: so many sums are written, a lane each; after an error nobody is told
//   void tell_at_once(lane, tag, is_part)
// Who sums: all warps of a crew, or warps that join those.
struct Summers {
  const Crew& crew;
  uint32_t warps;  // of a block, that begin together
  bool join;
};
// The sums of one warp. It looks up some at a time, one per lane.
template <typename Work>
struct WarpSums {
  const Work& work;
  const uint32_t lane;
  Shares shares;
  uint32_t left = 0;
  Sum batch;

  __device__ WarpSums(const Group& g, const Work& w, const Summers& by)
      : work(w),
        lane(by.crew.lane()),
        shares(g, w.shared_work(), w.end(), by.join ? Shares::kJoins : by.crew.warp() * workers(g) + blockIdx.x,
               by.warps * workers(g), w.least()) {}
  // The next sum, in every lane; count 0: no more.
  __device__ __forceinline__ Sum next() {
    while (left == 0) {
      uint32_t n;
      if (!shares.next(n, lane)) return {};
      batch = n < work.end() ? work.look_up(n) : Sum{};
      left = __ballot_sync(kFullWarp, batch.count > 0);
    }
    const uint32_t i = __ffs(left) - 1;
    left &= left - 1;
    return batch.of(i);
  }
};

// Plain loads: for every architecture and every dtype.
template <typename In, typename Out, typename Work>
__device__ void sum_rows(const Summers& by, const Group& g, const Work& work, uint32_t hidden) {
  const Crew& crew = by.crew;
  WarpSums<Work> sums(g, work, by);
  for (Sum sum = sums.next(); sum.count > 0; sum = sums.next()) {
    if (!work.template came<false>(sum.tag)) return;
    for (uint32_t i = crew.lane() * 8; i < hidden; i += kWarp * 8) {
      float total[8] = {};
      for (uint32_t k = 0; k < sum.count; ++k)
        add_values(total, reinterpret_cast<const In*>(work.base() + uint64_t{work.place(sum, sum.first + k)} * 16) + i);
      put_values(total, reinterpret_cast<Out*>(sum.out) + i);
    }
    if (!work.tells()) continue;
    __syncwarp();
    if (work.at_once(sum.tag))
      work.tell_at_once(crew.lane(), sum.tag, false);
    else
      work.tell(crew.lane(), 1, sum.tag);
  }
}

// ---- BF16 sums by bulk copies (sm_90) -------------------------------------------------------------------------------
// A warp walks over (sum, segment, addend), a step each. A pipeline of segments in shared memory is filled ahead; a sum
// leaves from the place of its last addend, which is filled again kLag steps later: by then the sum has been read. What
// limits it is the number of instructions of a step.
constexpr uint32_t kMostVectors = 7;  // 16 bytes of a lane in a segment
constexpr uint32_t kSumStages = 5;
constexpr uint32_t kLag = 2;
constexpr uint32_t kSumWarpBytes = kSumStages * kMostVectors * kWarp * 16;
constexpr uint32_t kTold = 4;         // rows that are told together, a lane each
constexpr uint32_t kStoreSteps = 10;  // after which a step's stores are complete

// Rows go in whole segments of 7 or of 4 vectors; the last may be cut.
__host__ __device__ constexpr bool long_segments(uint32_t row_bytes) { return row_bytes % (7 * kWarp * 16) == 0; }
__device__ __forceinline__ uint32_t segments_of(uint32_t row_bytes) {
  const uint32_t segment = (long_segments(row_bytes) ? 7 : 4) * kWarp * 16;
  return (row_bytes + segment - 1) / segment;
}

// Sums as BF16. NaN, of which the conversion makes 0x7FFF, is looked for once: it is the largest signed half.
template <uint32_t kVectors>
__device__ __forceinline__ void pack_sums(const float (&sums)[kVectors][8], uint4 (&packed)[kVectors]) {
  uint32_t most = 0x80008000u;
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    const float (&sum)[8] = sums[v];
    packed[v] = make_uint4(pack_finite_bf16(sum[0], sum[1]), pack_finite_bf16(sum[2], sum[3]),
                           pack_finite_bf16(sum[4], sum[5]), pack_finite_bf16(sum[6], sum[7]));
    most = __vmaxs2(most, __vmaxs2(__vmaxs2(packed[v].x, packed[v].y), __vmaxs2(packed[v].z, packed[v].w)));
  }
  if ((most & 0xFFFF) != 0x7FFF && most >> 16 != 0x7FFF) return;
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    const float (&sum)[8] = sums[v];
    packed[v] = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                           pack_bf16(sum[6], sum[7]));
  }
}

// A warp's pipeline, between one use of it and the next.
struct SumPipeline {
  uint8_t* memory = nullptr;     // kSumWarpBytes
  uint64_t* barriers = nullptr;  // kSumStages, one for every segment: filled
  uint32_t stage = 0, parity = 0;
};

#if __CUDA_ARCH__ >= 900
// By a warp, once.
__device__ __forceinline__ void begin_pipeline(const SumPipeline& pipeline, uint32_t lane) {
  if (lane == 0) {
    for (uint32_t i = 0; i < kSumStages; ++i) init_barrier(pipeline.barriers + i);
    fence_barriers();
  }
  __syncwarp();
}

template <uint32_t kVectors, typename Work>
struct BulkSums {
  static constexpr uint32_t kSegment = kVectors * kWarp * 16;
  static constexpr bool kSegments = Work::kSplits || Work::kRehearses;  // a sum may be of one
  const Group& g;
  const Work& work;
  const uint32_t lane, row_bytes;
  SumPipeline& state;
  const uint32_t pipeline, full;  // addresses in shared memory
  // Where the loads are.
  WarpSums<Work> ahead;
  Sum load, pending;                   // the sum that is loaded, and the next one
  uint32_t load_place, pending_place = 0;  // lane i: where addend i lies
  uint32_t load_at = 0, load_addend = 0, load_stage;
  // Sums whose loads have begun, by their number: lane n % 32 has the n-th. Of more than the pipeline holds none is
  // asked for.
  Sum begun;
  uint32_t num_begun = 0;
  uint32_t num_loads = 0;  // that have begun
  bool is_here = false;    // all that `load` needs
  bool good;

  __device__ BulkSums(const Summers& by, const Group& group, const Work& w, uint32_t bytes, SumPipeline& s)
      : g(group),
        work(w),
        lane(by.crew.lane()),
        row_bytes(bytes),
        state(s),
        // Shuffled, or the compiler works them out from the thread's number wherever they are used.
        pipeline(__shfl_sync(kFullWarp, shared_address(s.memory), 0)),
        full(__shfl_sync(kFullWarp, shared_address(s.barriers), 0)),
        ahead(group, w, by),
        load_stage(s.stage),
        good(__all_sync(kFullWarp, !stopped(group))) {
    if (Work::kRehearses && !by.join)
      pending = {1, 0, kRehearsal, 1, nullptr};
    else
      look_ahead();
    next_load();
  }
  // Bytes of the segment that begins at `at`.
  __device__ __forceinline__ uint32_t part(uint32_t at) const {
    return kVectors == kMostVectors ? kSegment : min(kSegment, row_bytes - at);
  }
  __device__ __forceinline__ uint32_t begin_of(const Sum& sum) const {
    return kSegments && sum.part > 0 ? (sum.part - 1) * kSegment : 0;
  }
  __device__ __forceinline__ uint32_t end_of(const Sum& sum) const {
    return kSegments && sum.part > 0 ? min(sum.part * kSegment, row_bytes) : row_bytes;
  }
  __device__ __forceinline__ void look_ahead() {
    pending = ahead.next();
    pending_place = lane < pending.count ? work.place(pending, pending.first + lane) : 0;
  }
  __device__ __forceinline__ void next_load() {
    load = pending;
    load_place = pending_place;
    load_at = begin_of(load);
    load_addend = 0;
    if (load.count == 0) return;
    if (lane == num_begun % kWarp) begun = load;
    ++num_begun;
    look_ahead();
    if constexpr (Work::kSumsFirst)
      is_here = false;
    else
      good = good && work.template came<false>(load.tag);
    if (!good) load.count = 0;
  }
  // When all that is here has been summed and told, and not before: a warp may wait for what is not.
  __device__ __forceinline__ void wait_for_load() {
    if (is_here || load.count == 0) return;
    is_here = good = work.template came<false>(load.tag);
    if (!good) load.count = 0;
  }
  // After `summed` steps: keeps the pipeline filled. A group of stores a step, most of them empty, so that steps are
  // what is counted.
  __device__ __forceinline__ void load_ahead(uint32_t summed) {
    if constexpr (Work::kSumsFirst) {
      if (ptx::elect()) commit_stores();
      while (load.count != 0 && num_loads - summed < kSumStages - kLag &&
             (is_here || work.template came<true>(load.tag))) {
        is_here = true;
        load_segment<false>();
      }
    } else if (load.count != 0) {
      load_segment<true>();
    } else if (ptx::elect()) {
      commit_stores();
    }
  }
  template <bool kCommits>
  __device__ __forceinline__ void load_segment() {
    uint32_t place = __shfl_sync(kFullWarp, load_place, load_addend % kWarp);
    if (load_addend >= kWarp) place = work.place(load, load.first + load_addend);
    if (ptx::elect()) {
      if (kCommits) commit_stores();
      wait_stores_read<kLag>();
      load_bulk(pipeline + load_stage * kSegment, work.base() + uint64_t{place} * 16 + load_at, part(load_at),
                full + load_stage * 8);
    }
    load_stage = load_stage + 1 == kSumStages ? 0 : load_stage + 1;
    ++num_loads;
    if (++load_addend < load.count) return;
    load_addend = 0;
    load_at += kSegment;
    if (load_at >= end_of(load)) next_load();
  }

  __device__ void run() {
    if constexpr (!Work::kSumsFirst)
      for (uint32_t i = 0; i < kSumStages - kLag; ++i) load_ahead(0);
    uint32_t summed = 0, stage = state.stage, parity = state.parity;
    // Rows that are written and not told, a lane each: those that wait for their stores, and later ones. A warp looks
    // again when it has another row: it waits for stores at the end only.
    uint32_t waiting = 0, waiting_tag = 0, waits_since = 0, later = 0, later_tag = 0;
    const auto tell_rows = [&](uint32_t count, uint32_t tag) {
      if (count == 0) return;
      __syncwarp();
      proxy_fence();  // what bulk stores wrote is published by ordinary ones
      work.tell(lane, count, tag);
    };
    const auto row_written = [&](uint32_t tag, bool is_part) {
      if (work.at_once(tag)) {
        if (ptx::elect()) wait_stores<0>();
        __syncwarp();
        proxy_fence();
        work.tell_at_once(lane, tag, is_part);
        return;
      }
      if (waiting > 0 && summed - waits_since >= kStoreSteps) {
        if (ptx::elect()) wait_stores<kStoreSteps>();
        tell_rows(waiting, waiting_tag);
        waiting = 0;
      }
      if (lane == later) later_tag = tag;
      if (++later < kTold || waiting > 0) return;
      waiting = later;
      waiting_tag = later_tag;
      waits_since = summed;
      later = 0;
    };
    for (uint32_t n = 0; n < num_begun; ++n) {
      if (Work::kSumsFirst && num_loads == summed) {
        wait_for_load();
        load_ahead(summed);
      }
      if (!good && n + 1 == num_begun) {  // an error is known: nothing of this sum has been loaded
        if (ptx::elect()) wait_stores<0>();
        return;
      }
      const Sum now = begun.of(n % kWarp);
      for (uint32_t begin = begin_of(now), end = end_of(now); begin < end; begin += kSegment) {
        float sum[kVectors][8] = {};
        for (uint32_t left = now.count; left > 0;) {
          const uint32_t from = pipeline + stage * kSegment + lane * 16;
          wait_barrier(full + stage * 8, parity);
          uint4 raw[kVectors];
#pragma unroll
          for (uint32_t v = 0; v < kVectors; ++v) raw[v] = load_shared(from + v * kWarp * 16);
#pragma unroll
          for (uint32_t v = 0; v < kVectors; ++v) add_values(sum[v], raw[v]);
          ++summed;
          if (--left == 0) {
            uint4 packed[kVectors];
            pack_sums(sum, packed);
#pragma unroll
            for (uint32_t v = 0; v < kVectors; ++v) store_shared(from + v * kWarp * 16, packed[v]);
            fence_shared();
            __syncwarp();
            if (ptx::elect() && (!Work::kRehearses || now.tag != kRehearsal))
              store_bulk(now.out + begin, pipeline + stage * kSegment, part(begin));
          }
          stage = stage + 1 == kSumStages ? 0 : stage + 1;
          parity ^= stage == 0;
          __syncwarp();
          load_ahead(summed);
        }
      }
      if (work.tells() && (!Work::kRehearses || now.tag != kRehearsal))
        row_written(now.tag, Work::kSplits && now.part > 0);
    }
    if (ptx::elect()) wait_stores<0>();
    __syncwarp();
    state.stage = stage;
    state.parity = parity;
    tell_rows(waiting, waiting_tag);
    tell_rows(later, later_tag);
  }
};

template <typename Work>
__device__ __forceinline__ void sum_rows_bulk(const Summers& by, const Group& g, const Work& work, uint32_t row_bytes,
                                              SumPipeline& pipeline) {
  if (long_segments(row_bytes))
    BulkSums<7, Work>(by, g, work, row_bytes, pipeline).run();
  else
    BulkSums<4, Work>(by, g, work, row_bytes, pipeline).run();
}
#endif

}  // namespace uccl_ep::cuda
