// Merge: weights' gradients on their way back to the sources.
#pragma once

#include "backend/gpu/merge.cuh"

namespace uccl_ep::gpu {

// Offset in a ring of `slots` slots of weight `p` of a window's of a stream, behind its rows.
__device__ __forceinline__ uint64_t weight_offset(const Group& g, uint32_t slot, uint32_t slots, uint32_t row_chunks,
                                                  uint32_t p) {
  const uint32_t per_chunk = g.map.slot_weights, chunk = row_chunks + p / per_chunk;
  return slot_after(slot, chunk, slots) * g.map.slot_bytes + uint64_t{p % per_chunk} * 4;
}

// By crews of all blocks: waits until all members have folded a window's weights, and what came before.
__device__ inline bool wait_all_folded(const CombineKernel& k, uint32_t window) {
  bool good = true;
  for (uint32_t r = k.g.first + k.crew.thread; r < k.g.end; r += k.crew.size)
    good &= wait_peer(k, {member_flag(k.g, k.g.rank, k.g.map.folded_all, r), k.op.window(window), r});
  return k.crew.all(good);
}
// By crews of all blocks, with several domains: writes a window's weights' gradients into the rings to their sources.
__device__ inline void relay_weights(const CombineKernel& k, const MergeRange& range) {
  Spread::over(k.crew, workers(k.g)).each(k.g.net.num_relayed, [&](uint32_t i, uint32_t first, uint32_t step) {
    const uint32_t stream = i + 1;
    const float* const from = weights_at(k.g, k.g.rank, stream, range.window);
    const uint32_t slot = range.stream(k.g, stream).slot, slots = k.g.map.return_slots;
    const uint32_t chunks = relayed_part(k, range.window, stream).chunks;
    const PairRange its = weights_of(k, range.window, k.plan.relayed_pairs[stream]);
    uint8_t* const to = at(k.g, k.g.rank, k.g.net.relayed[stream].returns);
    for (uint32_t p = first; p < its.end - its.begin; p += step)
      *reinterpret_cast<float*>(to + weight_offset(k.g, slot, slots, chunks, p)) = device::load_past_l1(from + p);
  });
  const Phase phase = range.window % kHalves == 0 ? Phase::kEvenRelayed : Phase::kOddRelayed;
  if (last_block(k, phase, workers(k.g)) && k.crew.thread == 0)
    publish(&local(k.g).weights_relayed, k.op.window(range.window));
}
// By crews of all blocks, before a window's sums are written into the rings: waits for their slots. If the window has
// weights instead of rows, and is not the last, one crew of each block (`relays`) writes those. Not inlined, because
// its caller has no registers to spare.
__device__ __noinline__ bool begin_returns(const CombineKernel k, const MergeRange& range, bool relays) {
  if (!wait_returns_gone(k, range)) return false;
  if (relays && has_weights(k.args, range.window) && !is_last(k.args, range.window)) {
    if (!wait_all_folded(k, range.window)) return false;
    relay_weights(k, range);
  }
  return true;
}

// By crews of all blocks: writes a window's weights' gradients that came back into the caller's output.
__device__ inline void merge_weights(const CombineKernel& k, const MergeRange& range) {
  Spread::over(k.crew, workers(k.g)).each(k.g.map.num_domains, [&](uint32_t to, uint32_t first, uint32_t step) {
    const uint32_t first_pair = k.plan.pair_begin[first_of(k.g, to)];
    const PairRange its = weights_of(k, range.window, k.plan.pair_begin[first_of(k.g, to + 1)] - first_pair);
    const uint32_t begin = first_pair + its.begin, end = first_pair + its.end;
    const bool own = to == own_domain(k.g);
    const uint8_t* from = own ? reinterpret_cast<const uint8_t*>(weights_at(k.g, k.g.rank, 0, range.window))
                              : at(k.g, k.g.rank, k.g.net.to[to].returns);
    uint32_t chunks = 0, slot = 0, slots = 0;
    if (!own) {
      slot = range.domain(k.g, to).slot;
      slots = k.g.net.to[to].return_slots;
      chunks = returned_part(k, range.window, to).chunks;
      const uint64_t all = range.domain(k.g, to).chunks + returned_chunks(k, range.window, to);
      const bool good = k.crew.lane() != 0 || wait_peer(k, {k.g.net_state.returns_there + to, all, rail_of(k.g, to)});
      if (!__all_sync(kFullWarp, good)) return;
      __syncwarp();  // votes order no memory
    }
    for (uint32_t p = begin + first; p < end; p += step) {
      const uint64_t offset = own ? uint64_t{p - begin} * 4 : weight_offset(k.g, slot, slots, chunks, p - begin);
      k.args.weights[k.plan.pair_place[p]] = device::load_past_l1(reinterpret_cast<const float*>(from + offset));
    }
  });
}

// By crews of all blocks, when the rows of all windows are merged and only the last weights' gradients are left. Not
// inlined, because its caller has no registers to spare.
__device__ __noinline__ void finish_merge(const CombineKernel k, const MergeRange& range) {
  if (!wait_all_folded(k, range.window) || k.args.signature.with_weights == 0) return;
  if (has_net(k.g)) relay_weights(k, range);
  if (k.args.weights != nullptr) merge_weights(k, range);
}

}  // namespace uccl_ep::gpu
