// BF16 sums by bulk copies, for sm_90. A warp walks over (sum, segment, addend), a step each. It fills a pipeline of
// segments in shared memory in advance. A sum leaves from the stage of its last addend, which is filled again kLag
// steps later: by then the sum has been read. The speed is limited by the number of instructions of a step.
#pragma once

#include "backend/gpu/pipeline.cuh"
#include "backend/gpu/sum.cuh"

namespace uccl_ep::gpu {

constexpr uint32_t kMostVectors = 7;  // 16 bytes of a lane in a segment
constexpr uint32_t kSumStages = 5;
constexpr uint32_t kLag = 2;
constexpr uint32_t kSumWarpBytes = kSumStages * kMostVectors * kWarp * 16;
constexpr uint32_t kTold = 4;  // rows that are told together, a lane each
constexpr uint32_t kStoreSteps = 10;  // after which a step's stores are complete

// Rows go in whole segments of 7 or of 4 vectors; the last may be cut.
__host__ __device__ constexpr bool long_segments(uint32_t row_bytes) { return row_bytes % (7 * kWarp * 16) == 0; }
__device__ __forceinline__ uint32_t segments_of(uint32_t row_bytes) {
  const uint32_t segment = (long_segments(row_bytes) ? 7 : 4) * kWarp * 16;
  return (row_bytes + segment - 1) / segment;
}

// Sums as BF16. The conversion turns NaN into 0x7FFF, the largest signed half, so one test of the maximum finds it.
template <uint32_t kVectors>
__device__ __forceinline__ void pack_sums(const float (&sums)[kVectors][8], uint4 (&packed)[kVectors]) {
  uint32_t most = 0x80008000u;
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    const float (&sum)[8] = sums[v];
    packed[v] = make_uint4(pack_finite_bf16(sum[0], sum[1]), pack_finite_bf16(sum[2], sum[3]),
                           pack_finite_bf16(sum[4], sum[5]), pack_finite_bf16(sum[6], sum[7]));
    most =
        device::max_signed_halves(most, device::max_signed_halves(device::max_signed_halves(packed[v].x, packed[v].y),
                                                                  device::max_signed_halves(packed[v].z, packed[v].w)));
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
  uint32_t memory;     // addresses in shared memory: of kSumWarpBytes,
  uint32_t barriers;   // and of kSumStages, one for every segment: filled
  PipelineTurn& turn;  // the lane's own, in shared memory, because no registers are left
};

template <uint32_t kVectors, SumWork Work>
struct BulkSums {
  static constexpr uint32_t kSegment = kVectors * kWarp * 16;
  static constexpr bool kSegments = Work::kSplits || Work::kRehearses;  // a sum may be of one
  static_assert(!Work::kCopies || !Work::kRehearses, "nobody gets the sum of a rehearsal");
  const Group& g;
  const Work& work;
  const uint32_t lane, row_bytes;
  SumPipeline& state;
  Pipeline<kSumStages> pipeline;
  // Where the loads are.
  WarpSums<Work> ahead;
  Sum load, pending;  // the sum that is loaded, and the next one
  uint32_t load_place, pending_place = 0;  // lane i: where addend i lies
  uint32_t load_at = 0, load_addend = 0;
  // Sums whose loads have begun: lane n % kWarp has the n-th. Only those in the pipeline are asked for.
  Sum begun;
  uint32_t num_begun = 0;
  uint32_t num_loads = 0;  // that have begun
  bool is_here = false;  // all that `load` needs
  bool good;
  uint32_t summed = 0;  // steps
  // Sums that are written and not told, a lane each: those that wait for their stores, and later ones. A warp checks
  // them when it has written another sum, and waits for stores only at the end.
  uint32_t waiting = 0, waiting_tag = 0, waits_since = 0, later = 0, later_tag = 0;

  __device__ BulkSums(const Summers& by, const Group& group, const Work& w, uint32_t bytes, SumPipeline& s)
      : g(group),
        work(w),
        lane(by.crew.lane()),
        row_bytes(bytes),
        state(s),
        // Shuffled, because the compiler would otherwise work them out from the thread's number at every use.
        pipeline{__shfl_sync(kFullWarp, s.memory, 0), __shfl_sync(kFullWarp, s.barriers, 0), kSegment, s.turn.stage,
                 s.turn.parity},
        ahead(group, w, by),
        good(!stopped(group)) {
    if (Work::kRehearses && by.rehearse())
      pending = {1, 0, kRehearsal, 1, nullptr};
    else
      look_ahead();
    good = __all_sync(kFullWarp, good);  // what it needs and what has been looked up come at the same time
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
  // Called only when all that is here has been summed and told, because the warp may wait for what is not here.
  __device__ __forceinline__ void wait_for_load() {
    if (is_here || load.count == 0) return;
    is_here = good = work.template came<false>(load.tag);
    if (!good) load.count = 0;
  }
  // After `summed` steps: keeps the pipeline filled. Every step commits a group of stores, most of them empty, so that
  // groups count steps.
  __device__ __forceinline__ void load_ahead(uint32_t summed) {
    if constexpr (Work::kSumsFirst) {
      if (elect()) commit_stores();
      while (load.count != 0 && num_loads - summed < kSumStages - kLag &&
             (is_here || work.template came<true>(load.tag))) {
        is_here = true;
        load_segment<false>();
      }
    } else if (load.count != 0) {
      load_segment<true>();
    } else if (elect()) {
      commit_stores();
    }
  }
  template <bool kCommits>
  __device__ __forceinline__ void load_segment() {
    uint32_t place = __shfl_sync(kFullWarp, load_place, load_addend % kWarp);
    if (load_addend >= kWarp) place = work.place(load, load.first + load_addend);
    if (elect()) {
      if (kCommits) commit_stores();
      wait_stores_read<kLag>();
      pipeline.load(work.base() + uint64_t{place} * 16 + load_at, part(load_at));
    }
    pipeline.loading();
    ++num_loads;
    if (++load_addend < load.count) return;
    load_addend = 0;
    load_at += kSegment;
    if (load_at >= end_of(load)) next_load();
  }

  __device__ void run() {
    if constexpr (!Work::kSumsFirst)
#pragma unroll 1
      for (uint32_t i = 0; i < kSumStages - kLag; ++i) load_ahead(0);
    for (uint32_t n = 0; n < num_begun; ++n) {
      if (Work::kSumsFirst && num_loads == summed) {
        wait_for_load();
        load_ahead(summed);
      }
      if (!good && n + 1 == num_begun) {  // an error is known: nothing of this sum has been loaded
        if (elect()) wait_stores<0>();
        return;
      }
      const Sum now = begun.of(n % kWarp);
      for (uint32_t begin = begin_of(now), end = end_of(now); begin < end; begin += kSegment) sum_segment(now, begin);
      if (work.tells() && is_for_somebody(now)) sum_written(now.tag, Work::kSplits && now.part > 0);
    }
    if (elect()) wait_stores<0>();
    __syncwarp();
    state.turn = {pipeline.stage, pipeline.parity};
    tell_sums(waiting, waiting_tag);
    tell_sums(later, later_tag);
  }
  static __device__ __forceinline__ bool is_for_somebody(const Sum& sum) {
    return !Work::kRehearses || sum.tag != kRehearsal;
  }
  // The addends of a segment, a step each.
  __device__ __forceinline__ void sum_segment(const Sum& now, uint32_t begin) {
    if (Work::kCopies && now.count == 1) return copy_segment(now, begin);
    float sum[kVectors][8] = {};
    if constexpr (Work::kBegins)
      if (is_for_somebody(now)) begin_segment(now, begin, sum);
    for (uint32_t left = now.count; left > 0;) {
      const uint32_t from = pipeline.address() + lane * 16;
      pipeline.wait();
      uint4 raw[kVectors];
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) raw[v] = load_shared(from + v * kWarp * 16);
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) add_values(sum[v], raw[v]);
      ++summed;
      if (--left == 0) store_segment(now, begin, sum);
      pipeline.release();
      __syncwarp();
      load_ahead(summed);
    }
  }
  __device__ __forceinline__ void begin_segment(const Sum& now, uint32_t begin, float (&sum)[kVectors][8]) const {
    if (!work.has_begin()) return;
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      const uint32_t at = begin + (v * kWarp + lane) * 16;
      if (kVectors == kMostVectors || at < row_bytes) work.template begin<uint16_t>(sum[v], now.out + at);
    }
  }
  // The segment of a sum's only addend.
  __device__ __forceinline__ void copy_segment(const Sum& now, uint32_t begin) {
    pipeline.wait();
    ++summed;
    if (elect()) store_bulk(now.out + begin, pipeline.address(), part(begin));
    pipeline.release();
    __syncwarp();
    load_ahead(summed);
  }
  // Stores a segment of a sum from the stage of its last addend.
  __device__ __forceinline__ void store_segment(const Sum& now, uint32_t begin, const float (&sum)[kVectors][8]) {
    uint4 packed[kVectors];
    pack_sums(sum, packed);
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) store_shared(pipeline.address() + lane * 16 + v * kWarp * 16, packed[v]);
    fence_shared();
    __syncwarp();
    if (elect() && is_for_somebody(now)) store_bulk(now.out + begin, pipeline.address(), part(begin));
  }
  __device__ __forceinline__ void sum_written(uint32_t tag, bool is_part) {
    if (work.at_once(tag)) {
      if (elect()) wait_stores<0>();
      __syncwarp();
      proxy_fence();
      work.tell_at_once(lane, tag, is_part);
      return;
    }
    if (waiting > 0 && summed - waits_since >= kStoreSteps) {
      if (elect()) wait_stores<kStoreSteps>();
      tell_sums(waiting, waiting_tag);
      waiting = 0;
    }
    if (lane == later) later_tag = tag;
    if (++later < kTold || waiting > 0) return;
    waiting = later;
    waiting_tag = later_tag;
    waits_since = summed;
    later = 0;
  }
  __device__ __forceinline__ void tell_sums(uint32_t count, uint32_t tag) const {
    if (count == 0) return;
    __syncwarp();
    proxy_fence();  // what bulk stores wrote is published by ordinary ones
    work.tell(lane, count, tag);
  }
};

template <SumWork Work>
__device__ __forceinline__ void sum_rows_bulk(const Summers& by, const Group& g, const Work& work, uint32_t row_bytes,
                                              SumPipeline& pipeline) {
  if (long_segments(row_bytes))
    BulkSums<7, Work>(by, g, work, row_bytes, pipeline).run();
  else
    BulkSums<4, Work>(by, g, work, row_bytes, pipeline).run();
}

// By a warp, once.
template <bool kBulk>
__device__ __forceinline__ void begin_sums(SumPipeline& pipeline, uint64_t* barriers) {
  pipeline.turn = {};
  if constexpr (kBulk && kArch.bulk_copies) init_stages<kSumStages>(barriers, threadIdx.x % kWarp);
}
// By a crew. In: dtype of the addends, Out: of the sums.
template <bool kBulk, typename In, typename Out, SumWork Work>
__device__ void sum_all(const Summers& by, const Group& g, const Work& work, uint32_t hidden, SumPipeline& pipeline) {
  if constexpr (!kBulk)
    sum_rows<In, Out>(by, g, work, hidden);
  else if constexpr (kArch.bulk_copies)
    sum_rows_bulk(by, g, work, hidden * 2, pipeline);
}

}  // namespace uccl_ep::gpu
