// A low-latency combine that sums before it sends: a rank adds what its experts give a token, and sends one row for it
// instead of one for each pair. For that it needs the weights of the token's rank. They came with the routing; or every
// combine writes them into the memory of all others, and a launch that only sends does not fold. Bits are equal,
// because who receives rows that are no sums rounds each rank's sum likewise.
#pragma once

#include "backend/gpu/low_latency_fold_bulk.cuh"

namespace uccl_ep::gpu {

// By a crew: our weights, for rank `to`.
template <typename Combine>
__device__ inline void put_weights(const Combine& k, uint32_t to) {
  uint32_t* const out = k.weights(to, k.g.rank);
  const uint32_t places = k.args.num_tokens * k.args.width;
#pragma unroll 4
  for (uint32_t i = k.crew.thread; i < places; i += k.crew.size) out[i] = own_weight(k, i);
}
// The same for some of its warps.
template <typename Combine>
__device__ __forceinline__ Combine with_warps(const Combine& k, uint32_t first, uint32_t count) {
  return {k.g, k.args, k.kind, Crew::of(2, first, count), k.number, k.masked};
}
// By the crews of all blocks.
template <typename Combine>
__device__ inline void tell_weights(const Combine& k) {
  send_headers(k, k.map().pairs_entered, [&](uint32_t to) {
    put_weights(k, to);
    return true;
  });
}

// By a crew: tells every member our call, by its last warps while the others begin.
template <typename Combine>
__device__ inline void tell_call(const Combine& k) {
  constexpr uint32_t kTell = kSlotWarps / 4;
  if (!may_fold(k.g, k.args) || k.args.routed != nullptr) {
    if (k.crew.is_last_warp()) tell_entered(k, k.map().pairs_entered);
  } else if (k.crew.warp() >= kSlotWarps - kTell) {
    tell_weights(with_warps(k, kSlotWarps - kTell, kTell));
  }
}

// By a crew: sums its share of the tokens of `count` members, from the `first` after this rank on, each into memory for
// the pair of its lowest expert here.
template <typename Combine>
__device__ inline void fold_tokens(const Combine& k, const EnteredRanks& entered, uint32_t first, uint32_t count) {
  const uint32_t lane = threadIdx.x % kWarp, width = k.args.width, parts = parts_of(k);
  uint32_t most = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < count; ++i) most = max(most, entered.tokens[k.member_after(first + i)]);
  // Few tokens are shared by several warps.
  const uint32_t at_once = max((count * most * parts + k.warps() - 1) / k.warps(), 1);
  const uint32_t shares = (parts + at_once - 1) / at_once, end = count * most * shares;
#pragma unroll 1
  for (uint32_t i = k.warp(); i < end; i += k.warps()) {
    const uint32_t source = k.member_after(first + i / shares % count), token = i / shares / count;
    if (token >= entered.tokens[source]) continue;
    const uint32_t place = token * width + lane;
    uint32_t weight = kNoWeight, slot = kNoSlot;
    if (lane < width) {
      slot = k.args.pairs[uint64_t{source} * k.map().tokens * width + place];
      weight = weight_of(k, source, place);
    }
    const bool adds = slot != kNoSlot && weight != kNoWeight;
    const auto of_token = static_cast<uint32_t>(__popcll(ballot(adds)));
    if (of_token == 0) continue;
    const uint32_t from = in_order(adds ? static_cast<int32_t>(slot) : -1, width, lane);
    const uint32_t row = kOwnSlot | __shfl_sync(kFullWarp, slot, from % kWarp), begin = i % shares * at_once;
    const float its = __uint_as_float(__shfl_sync(kFullWarp, weight, from % kWarp));
    sum_rows(k.g, k.args, {of_token, row, its}, k.pair(source, 0, token * width + __shfl_sync(kFullWarp, from, 0)),
             begin, min(begin + at_once, parts));
  }
}

// By every block: sums, and sends the sums. Our own tokens come first, while the weights of others are on their way.
// `memory`: of kFoldBytes, where rows are copied in bulk.
template <bool kBulk, typename Combine>
__device__ inline bool fold(Combine k, EnteredRanks& entered, uint8_t* memory, FoldBarriers* barriers) {
  __shared__ uint64_t began;
  if (!wait_free(k, k.map().pairs_read)) return false;
  begin_step(k, began);
  const bool knows = k.args.routed != nullptr;
  if constexpr (!kBulk) {
    const uint32_t others = k.members() - 1;
    // Of a rank that has not entered, what the dispatch left has no pairs behind its tokens.
#pragma unroll 1
    for (uint32_t r = k.crew.thread; r < k.members(); r += k.crew.size)
      entered.tokens[r] = r == k.g.rank ? k.args.num_tokens : k.map().tokens;
    tell_call(k);
    k.crew.sync();
    fold_tokens(k, entered, others, 1);
    if (!knows && !note_entered(k, entered)) return false;
    if (others > 0) fold_tokens(k, entered, 0, others);
  } else if constexpr (kArch.bulk_copies) {
    tell_call(k);
    BulkFold<Combine> bulk(k, memory, *barriers);
#pragma unroll 1
    for (bool own = true;; own = false) {  // so that there is one copy of the code
      bulk.sum(own);
      if (!own) break;
      if (knows || note_entered(k, entered)) continue;
      bulk.drain();
      return false;
    }
  }
  tell_sent(k, k.map().pairs_full);
  end_step(k, began, Step::kFold);
  if (k.args.phase == SlotPhase::kSend) end_send(k, Phase::kPairsSent);
  return true;
}

}  // namespace uccl_ep::gpu
