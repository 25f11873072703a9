// Sums of rows in fp32, in the order given, from +0.0; rounded once.
#pragma once

#include <concepts>

#include "backend/gpu/device.cuh"
#include "backend/gpu/numerics.cuh"
#include "backend/gpu/shares.cuh"

namespace uccl_ep::gpu {

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

// A sum, as the lane that looked it up sees it.
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

// A policy of sums 0 .. end(): what is summed, and who is told of it.
template <typename W>
concept SumWork = requires(const W& work, const Sum& sum, uint32_t n) {
  // A warp sums and tells what is here before it waits for the next sum's addends. This costs instructions in every
  // step.
  { W::kSumsFirst } -> std::convertible_to<bool>;
  // Some sums are of a segment.
  { W::kSplits } -> std::convertible_to<bool>;
  // The first crew begins with a sum of arbitrary data that nobody gets. That fetches the code, which takes as long as
  // ten sums, while the first addends are on their way.
  { W::kRehearses } -> std::convertible_to<bool>;
  // A sum of one addend is that addend, bit for bit; else -0.0 would become +0.0 and NaN the canonical one.
  { W::kCopies } -> std::convertible_to<bool>;
  // Sums may begin with other values than +0.0: work.begin(values, place of them in the sum) adds those.
  { W::kBegins } -> std::convertible_to<bool>;
  // Which shares of which window the sums are, and how they are dealt out.
  { work.window() } -> std::same_as<uint32_t>;
  { work.shared_work() } -> std::same_as<SharedWork>;
  { work.dealing() } -> std::same_as<Dealing>;
  { work.end() } -> std::same_as<uint32_t>;
  // Sum n. Called once, by one lane. Count 0: there is nothing to sum.
  { work.look_up(n) } -> std::same_as<Sum>;
  // Where addend n lies, in units of 16 bytes from base().
  { work.place(sum, n) } -> std::same_as<uint32_t>;
  { work.base() } -> std::same_as<const uint8_t*>;
  // By the warp: whether the addends of a sum with tag n are here. came<true> only looks. came<false> waits for them;
  // if it returns false, an error is known.
  { work.template came<false>(n) } -> std::same_as<bool>;
  { work.template came<true>(n) } -> std::same_as<bool>;
  // tells(): other ranks wait for the sums. When sums are written, the warp calls tell() for several, one per lane.
  // Where at_once(tag), it calls tell_at_once() for one, which may be a part. After an error nobody is told.
  { work.tells() } -> std::same_as<bool>;
  { work.at_once(n) } -> std::same_as<bool>;
  { work.tell(n, n, n) } -> std::same_as<void>;
  { work.tell_at_once(n, n, true) } -> std::same_as<void>;
};

// Who sums: a crew, alone or beside another one.
struct Summers {
  const Crew& crew;
  uint32_t first;  // number of its first warp among those of the block that begin together
  uint32_t warps;  // that do
  bool join;       // it begins later, and takes what is not dealt out

  __device__ __forceinline__ bool rehearse() const { return !join && first == 0; }
};
// The sums of one warp. It looks up some at a time, one per lane.
template <SumWork Work>
struct WarpSums {
  const Work& work;
  const uint32_t lane;
  Shares shares;
  LaneMask left = 0;
  Sum batch;

  __device__ WarpSums(const Group& g, const Work& w, const Summers& by)
      : work(w),
        lane(by.crew.lane()),
        shares(share_counter(g, w.shared_work(), w.window() % kHalves), w.end(),
               by.join ? Shares::kJoins : turn_of(by.first + by.crew.warp(), workers(g)), by.warps * workers(g),
               w.dealing()) {}
  // The next sum, in every lane; count 0: no more.
  __device__ __forceinline__ Sum next() {
    while (left == 0) {
      uint32_t n;
      if (!shares.next(n, lane)) return {};
      batch = n < work.end() ? work.look_up(n) : Sum{};
      left = ballot(batch.count > 0);
    }
    const uint32_t i = lowest_lane(left);
    left &= left - 1;
    return batch.of(i);
  }
};

// Plain loads: for every architecture and every dtype.
template <typename In, typename Out, SumWork Work>
__device__ void sum_rows(const Summers& by, const Group& g, const Work& work, uint32_t hidden) {
  const Crew& crew = by.crew;
  WarpSums<Work> sums(g, work, by);
  for (Sum sum = sums.next(); sum.count > 0; sum = sums.next()) {
    if (!work.template came<false>(sum.tag)) return;
    for (uint32_t i = crew.lane() * 8; i < hidden; i += kWarp * 8) {
      float total[8] = {};
      if constexpr (Work::kBegins) work.template begin<Out>(total, sum.out + i * sizeof(Out));
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

}  // namespace uccl_ep::gpu
