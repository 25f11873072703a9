// Folding by bulk copies, for sm_90. A warp's rows are on their way into shared memory from the start on, while weights
// are told and waited for: which rows are needed follows from the dispatch.
#pragma once

#include "backend/gpu/low_latency_sum.cuh"
#include "backend/gpu/pipeline.cuh"

namespace uccl_ep::gpu {

constexpr uint32_t kFoldVectors = 4;  // 16 bytes of a lane in a segment
constexpr uint32_t kFoldStages = 6;
constexpr uint32_t kFoldSegment = kFoldVectors * kWarp * 16;
constexpr uint32_t kFoldWarpBytes = kFoldStages * kFoldSegment;
constexpr uint32_t kFoldBytes = kSlotWarps * kFoldWarpBytes;

// In shared memory.
struct FoldBarriers {
  uint64_t of[kSlotWarps][kFoldStages];
};

// The bits of a weight of another rank, or of ours.
template <typename Combine>
__device__ __forceinline__ uint32_t weight_of(const Combine& k, uint32_t source, uint32_t place) {
  if (source == k.g.rank) return own_weight(k, place);
  if (k.args.routed != nullptr) return k.args.routed[uint64_t{source} * k.map().tokens * k.args.width + place];
  return device::load_past_l1(k.weights(k.g.rank, source) + place);
}

// Segments of the sum of a token of `source`; a warp adds them.
struct FoldItem {
  uint32_t count = 0;  // rows; 0: there is no item
  uint32_t source = 0, token = 0;
  uint32_t segment = 0, end = 0;
  // Of lane i < count: the slot of the i-th row, and which of the token's experts has it.
  uint32_t slot = kNoSlot, column = 0;
};

// By every warp of a crew. Its items are of our own tokens first. Two are known at a time, and rows of both are loaded.
template <typename Combine>
class BulkFold {
 public:
  __device__ BulkFold(const Combine& combine, uint8_t* memory, FoldBarriers& barriers)
      : k_(combine),
        lane_(combine.crew.lane()),
        segments_((2 * combine.args.hidden + kFoldSegment - 1) / kFoldSegment),
        pipeline_{shared_address(memory + combine.crew.warp() * kFoldWarpBytes),
                  shared_address(barriers.of[combine.crew.warp()]), kFoldSegment},
        next_(combine.warp()) {
    init_stages<kFoldStages>(barriers.of[combine.crew.warp()], lane_);
#pragma unroll 1
    for (uint32_t i = 0; i < 2; ++i) advance();
  }
  // Sums what is next of our own tokens, or of others, whose weights are here.
  __device__ void sum(bool own) {
#pragma unroll 1
    while (now_.count > 0 && (now_.source == k_.g.rank) == own) {
      sum_item();
      advance();
    }
  }
  // After an error: waits for what is loaded.
  __device__ void drain() {
    for (; loaded_ > 0; --loaded_) {
      pipeline_.wait();
      pipeline_.release();
    }
  }

 private:
  __device__ FoldItem find() {
#pragma unroll 1
    for (;;) {
      const uint32_t sources = own_ ? 1 : k_.members() - 1, tokens = own_ ? k_.args.num_tokens : k_.map().tokens;
      const uint32_t at_once = max((sources * tokens * segments_ + k_.warps() - 1) / k_.warps(), 1);
      const uint32_t shares = (segments_ + at_once - 1) / at_once, i = next_;
      if (i >= sources * tokens * shares) {
        if (!own_) return {};
        own_ = false;
        next_ = k_.warp();
        continue;
      }
      next_ += k_.warps();
      FoldItem item;
      item.source = own_ ? k_.g.rank : k_.member_after(i / shares % sources);
      item.token = i / shares / sources;
      const uint32_t width = k_.args.width;
      uint32_t slot = kNoSlot;
      if (lane_ < width) slot = k_.args.pairs[(uint64_t{item.source} * k_.map().tokens + item.token) * width + lane_];
      item.count = static_cast<uint32_t>(__popcll(ballot(slot != kNoSlot)));
      if (item.count == 0) continue;
      item.column = in_order(static_cast<int32_t>(slot), width, lane_) % kWarp;
      item.slot = __shfl_sync(kFullWarp, slot, item.column);
      item.segment = i % shares * at_once;
      item.end = min(item.segment + at_once, segments_);
      return item;
    }
  }
  __device__ __forceinline__ void advance() {
    now_ = ahead_;
    if (!is_ahead_) segment_ = now_.segment;
    is_ahead_ = false;
    ahead_ = find();
    load();
  }
  // Fills the stages that are empty.
  __device__ __forceinline__ void load() {
#pragma unroll 1
    while (loaded_ < kFoldStages) {
      if (segment_ == (is_ahead_ ? ahead_.end : now_.end)) {
        if (is_ahead_ || ahead_.count == 0) return;
        is_ahead_ = true;
        segment_ = ahead_.segment;
        row_ = 0;
      }
      const uint64_t slot = __shfl_sync(kFullWarp, is_ahead_ ? ahead_.slot : now_.slot, row_);
      const uint32_t row_bytes = 2 * k_.args.hidden, at = segment_ * kFoldSegment;
      if (elect()) pipeline_.load(k_.args.rows + slot * row_bytes + at, min(kFoldSegment, row_bytes - at));
      pipeline_.loading();
      ++loaded_;
      if (++row_ < (is_ahead_ ? ahead_.count : now_.count)) continue;
      row_ = 0;
      ++segment_;
    }
  }
  __device__ __forceinline__ void sum_item() {
    const uint32_t width = k_.args.width, place = now_.token * width;
    uint32_t bits = kNoWeight;
    if (lane_ < width) bits = weight_of(k_, now_.source, place + lane_);
    bits = __shfl_sync(kFullWarp, bits, now_.column);
    const LaneMask adds = ballot(lane_ < now_.count && bits != kNoWeight);
    uint8_t* out = nullptr;
    if (adds != 0) out = k_.pair(now_.source, 0, place + __shfl_sync(kFullWarp, now_.column, lowest_lane(adds)));
#pragma unroll 1
    for (uint32_t segment = now_.segment; segment < now_.end; ++segment) {
      float sum[8 * kFoldVectors] = {};
#pragma unroll 1
      for (uint32_t row = 0; row < now_.count; ++row) {
        const uint32_t from = pipeline_.address() + lane_ * 16;
        pipeline_.wait();
        uint4 raw[kFoldVectors];
#pragma unroll
        for (uint32_t v = 0; v < kFoldVectors; ++v) raw[v] = load_shared(from + v * kWarp * 16);
        const float weight = __uint_as_float(__shfl_sync(kFullWarp, bits, row));
        if ((adds >> row & 1) != 0) add_weighted(sum, raw, weight);
        pipeline_.release();
        --loaded_;
        __syncwarp();
        load();
      }
      if (adds == 0) continue;
#pragma unroll
      for (uint32_t v = 0; v < kFoldVectors; ++v) {
        const uint32_t vector = (segment * kFoldVectors + v) * kWarp + lane_;
        const float* const of = sum + v * 8;
        // A NaN may have any bits, because it is added to others.
        if (vector < k_.args.hidden / 8)
          reinterpret_cast<uint4*>(out)[vector] =
              make_uint4(pack_finite_bf16(of[0], of[1]), pack_finite_bf16(of[2], of[3]), pack_finite_bf16(of[4], of[5]),
                         pack_finite_bf16(of[6], of[7]));
      }
    }
  }

  const Combine& k_;
  const uint32_t lane_, segments_;
  Pipeline<kFoldStages> pipeline_;
  uint32_t next_;  // item
  bool own_ = true;  // it is of our own tokens
  FoldItem now_, ahead_;
  // What is loaded next, of `ahead_` or of `now_`; and what is loaded and not summed.
  uint32_t segment_ = 0, row_ = 0, loaded_ = 0;
  bool is_ahead_ = false;
};

}  // namespace uccl_ep::gpu
