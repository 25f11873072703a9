// Merge: sums the pieces that the domain's ranks put into our memory into the output, ranks ascending. Our own piece is
// summed from the experts' rows, and rounded as if it had been put there.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/fold.cuh"
#include "backend/cuda/steps.h"
#include "backend/cuda/sum.cuh"

namespace uccl_ep::cuda {

// Our tokens of a window, as sums of the pieces that come back.
struct Merge {
  const Domain& d;
  const Op& op;
  const PlanView& plan;
  const CombineArgs& args;
  uint32_t first_token, end_token;
  mutable uint32_t arrived = 0;  // chunks that have; a warp's sums come in the order of tokens

  __device__ Merge(const Domain& domain, const Op& o, const PlanView& p, const CombineArgs& a)
      : d(domain), op(o), plan(p), args(a), first_token(0), end_token(p.num_tokens) {
    if (args.window == 0 && args.is_last) return;
    const uint64_t first = uint64_t{args.window} * args.window_pieces;
    first_token = token_with(first);
    if (!args.is_last) end_token = token_with(first + args.window_pieces);
    arrived = first_token / kChunkTokens;
  }
  // The first token of the first chunk that has `pieces` before it, or more.
  __device__ uint32_t token_with(uint64_t pieces) const {
    uint32_t low = 0, high = (plan.num_tokens + kChunkTokens - 1) / kChunkTokens;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (plan.piece_begin[middle * kChunkTokens] < pieces)
        low = middle + 1;
      else
        high = middle;
    }
    return min(low * kChunkTokens, plan.num_tokens);
  }

  static constexpr bool kHasInner = true;
  __device__ uint32_t end() const { return end_token - first_token; }
  __device__ Sum look_up(uint32_t n, bool) const {
    const uint32_t token = first_token + n;
    Sum sum;
    sum.first = plan.piece_begin[token];
    sum.count = plan.piece_begin[token + 1] - sum.first;
    sum.tag = token / kChunkTokens;
    sum.out = args.out + uint64_t{token} * args.hidden * dtype_bytes(args.dtype);
    const uint32_t row = plan.own_row[token];
    if (row == kNoRow) return sum;
    sum.inner_at = plan.row_piece[row] - sum.first;
    sum.inner_first = plan.compact_width > 0 ? row : plan.row_slot[row];
    sum.inner_count = plan.compact_width > 0 ? 1 : plan.row_slot[row + 1] - sum.inner_first;
    if (args.may_drop)  // slots that the caller's rows do not have; they are the row's last ones
      while (sum.inner_count > 0 && inner_place(sum.inner_first + sum.inner_count - 1) >= plan.num_slots)
        --sum.inner_count;
    if (sum.inner_count == 0 && sum.count == 1) sum.count = 0;
    return sum;
  }
  __device__ uint32_t inner_place(uint32_t k) const { return plan.compact_width > 0 ? k : plan.slots[k]; }
  __device__ const uint8_t* inner_base() const { return args.rows; }
  __device__ uint32_t place(uint32_t k) const { return k - args.window * args.window_pieces; }
  __device__ const uint8_t* base() const { return at<uint8_t>(d, d.rank, d.at.pieces); }
  // By a warp: the chunk's pieces have arrived, a rank a lane.
  __device__ bool wait(uint32_t chunk) const {
    if (chunk < arrived) return true;
    bool good = true;
    for (uint32_t r = threadIdx.x % kWarp; r < d.at.num_ranks; r += kWarp)
      good &= r == d.rank ||
              wait_peer(d, folded(d, d.rank, r) + chunk, op.epoch, Step::kMerge, r, static_cast<int>(chunk));
    good = __all_sync(kFullWarp, good);
    __syncwarp();  // orders what the lanes have read before the loads that one of them issues
    proxy_fence();
    if (good) arrived = chunk + 1;
    return good;
  }
  __device__ bool reports() const { return false; }
  __device__ void complete(uint32_t) const {}

  // By crews of all blocks: tokens that no expert got, or whose rows have all been dropped.
  __device__ void fill_empty(const Crew& crew) const {
    const uint64_t vectors = uint64_t{args.hidden} * dtype_bytes(args.dtype) / 16;
    for (uint32_t t = first_token + blockIdx.x * crew.warps() + crew.warp(); t < end_token;
         t += gridDim.x * crew.warps()) {
      if (look_up(t - first_token, false).count > 0) continue;
      for (uint64_t i = crew.lane(); i < vectors; i += kWarp)
        reinterpret_cast<uint4*>(args.out)[t * vectors + i] = make_uint4(0, 0, 0, 0);
    }
  }
};

// By crews of all blocks, with nothing left to do but the weights' gradients.
__device__ inline void finish_merge(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                    const CombineArgs& args) {
  bool good = true;
  for (uint32_t r = crew.thread; r < d.at.num_ranks; r += crew.size)
    good &= wait_peer(d, at<uint64_t>(d, d.rank, d.at.folded_all) + r, op.epoch, Step::kMerge, r, -1);
  if (!crew.all(good) || args.values == nullptr || args.window != 0) return;
  const uint32_t sent = plan.pair_begin[d.at.num_ranks];
  for (uint32_t p = blockIdx.x * crew.size + crew.thread; p < sent; p += gridDim.x * crew.size)
    args.values[plan.pair_place[p]] = __ldcg(at<float>(d, d.rank, d.at.piece_values) + p);
}

}  // namespace uccl_ep::cuda
