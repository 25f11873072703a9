// Merge: sums the pieces that the domain's ranks put into our memory into the output, ranks ascending.
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

  __device__ Taken taken() const { return Taken::kMerged; }
  __device__ uint32_t least() const { return 0; }
  __device__ uint32_t end() const { return end_token - first_token; }
  __device__ Sum look_up(uint32_t n) const {
    const uint32_t token = first_token + n;
    Sum sum;
    sum.first = plan.piece_begin[token];
    sum.count = plan.piece_begin[token + 1] - sum.first;
    sum.tag = token / kChunkTokens;
    sum.out = args.out + uint64_t{token} * args.hidden * dtype_bytes(args.dtype);
    return sum;
  }
  __device__ uint32_t place(uint32_t k) const { return k - args.window * args.window_pieces; }
  __device__ const uint8_t* base() const { return at<uint8_t>(d, d.rank, d.at.pieces); }
  // By a warp: the chunk's pieces have arrived, a rank a lane.
  __device__ bool wait(uint32_t chunk) const {
    if (chunk < arrived) return true;
    bool good = true;
    for (uint32_t r = threadIdx.x % kWarp; r < d.at.num_ranks; r += kWarp)
      good &= wait_peer(d, folded(d, d.rank, r) + chunk, op.epoch, Step::kMerge, r, static_cast<int>(chunk));
    good = __all_sync(kFullWarp, good);
    __syncwarp();  // orders what the lanes have read before the loads that one of them issues
    proxy_fence();
    if (good) arrived = chunk + 1;
    return good;
  }
  __device__ bool reports() const { return false; }
  __device__ Counted count(uint32_t) const { return {}; }
  __device__ void finish(uint32_t, const Counted&) const {}

  // By crews of all blocks: tokens that no expert got.
  __device__ void fill_empty(const Crew& crew) const {
    const uint64_t vectors = uint64_t{args.hidden} * dtype_bytes(args.dtype) / 16;
    for (uint32_t t = first_token + blockIdx.x * crew.warps() + crew.warp(); t < end_token;
         t += gridDim.x * crew.warps()) {
      if (plan.piece_begin[t] != plan.piece_begin[t + 1]) continue;
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
