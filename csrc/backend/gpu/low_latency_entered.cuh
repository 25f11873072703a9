// What a low-latency combine in one domain knows of ranks that have entered: who folds, tokens, weights.
#pragma once

#include "backend/gpu/low_latency_net.cuh"
#include "backend/gpu/numerics.cuh"

namespace uccl_ep::gpu {

// In a launch that also receives, and does not fold, the rows stay where they are until it ends. This rank sums its own
// rows from there, and memory for a pair holds the slot.
template <typename Combine>
__device__ __forceinline__ bool stays(const Combine& k, uint32_t from, uint32_t holder) {
  return k.args.phase == SlotPhase::kBoth && !folds(k) && from == k.g.rank && holder == k.g.rank;
}

// In shared memory, where there is one domain: what a block knows of the ranks that have entered.
struct EnteredRanks {
  uint32_t tokens[kMaxMembers];  // of the others
  uint32_t blocks[kMaxMembers];  // of its kernel
  uint32_t folds[kMaxMembers / 32];  // a bit each

  __device__ __forceinline__ bool any_folded() const {
    uint32_t any = 0;
    for (const uint32_t word : folds) any |= word;
    return any != 0;
  }
  __device__ __forceinline__ bool folded(uint32_t rank) const { return (folds[rank / 32] >> rank % 32 & 1) != 0; }
};
// By one thread, when a rank has entered.
template <typename Combine>
__device__ __forceinline__ void note_folds(const Combine& k, EnteredRanks& entered, uint32_t rank) {
  if (k.header(k.g.rank, rank).folds != 0) or_shared(&entered.folds[rank / 32], 1u << rank % 32);
}
// By a crew that folds and does not know the weights: waits until all have entered, and notes that. False: an error is
// known.
template <typename Combine>
__device__ inline bool note_entered(const Combine& k, EnteredRanks& entered) {
  const bool good = wait_entries(k, k.map().pairs_entered, k.crew.thread, k.crew.size);
#pragma unroll 1
  for (uint32_t r = k.crew.thread; good && r < k.g.map.num_ranks; r += k.crew.size) {
    const SlotHeader& header = k.header(k.g.rank, r);
    if (r != k.g.rank) entered.tokens[r] = min(header.num_tokens, k.map().tokens);
    entered.blocks[r] = header.num_blocks;
    note_folds(k, entered, r);
  }
  return k.crew.all(good);
}
// By a crew, where there is one domain: waits for what all blocks of all ranks have sent. A rank may not have entered
// yet, unless it is noted. The crew has to combine the results.
template <typename Combine>
__device__ inline bool wait_pairs(const Combine& k, EnteredRanks& entered, bool noted) {
  constexpr uint32_t kWarps = kMaxSlotBlocks / kWarp;  // for a rank
  bool good = !stopped(k.g);
#pragma unroll 1
  for (uint32_t i = k.crew.warp(); i < k.members() * kWarps; i += k.crew.warps()) {
    const uint32_t r = i / kWarps, block = i % kWarps * kWarp + k.crew.lane();
    if (k.is_masked(r)) continue;
    if (!noted) {
      good &= wait_for(k.g, {own_part(k.g, k.map().pairs_entered) + r, k.number, r});
      if (good && k.crew.lane() == 0) note_folds(k, entered, r);
    }
    if (!good || block >= (noted ? entered.blocks[r] : k.header(k.g.rank, r).num_blocks)) continue;
    good &= wait_for(
        k.g, {own_part(k.g, k.map().pairs_full) + r * kMaxSlotBlocks + block, k.number, r, static_cast<int>(block)});
  }
  return good;
}

}  // namespace uccl_ep::gpu
