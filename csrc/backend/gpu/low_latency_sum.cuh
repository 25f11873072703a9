// The sums of a low-latency combine, at the token's rank: what is added for a token, from where.
#pragma once

#include "backend/gpu/low_latency_add.cuh"
#include "backend/gpu/low_latency_entered.cuh"

namespace uccl_ep::gpu {

// Of a pair of an expert of rank `from`. Where the row stays, memory for the pair will hold its slot.
constexpr uint32_t kOwnPair = 1u << 30;
template <typename Combine>
__device__ __forceinline__ uint32_t pair_row(const Combine& k, uint32_t from, uint32_t stream, uint32_t place) {
  const uint32_t row = row_at(k.g, k.pair(k.g.rank, stream, place));
  return stays(k, from, k.g.rank) ? kOwnPair | row : row;
}

// Where the addends of our tokens come from.
struct Sources {
  const EnteredRanks& entered;  // where there is one domain
  const Streams& streams;  // ours, by domain; rings of what other domains return
};

// By a warp: the lane that has the `lane`-th of the values of all lanes that are not below 0, ascending; else kWarp.
__device__ __forceinline__ uint32_t in_order(int32_t value, uint32_t width, uint32_t lane) {
  uint32_t position = 0, from = kWarp;
#pragma unroll 4
  for (uint32_t i = 0; i < width; ++i) {
    const int32_t other = __shfl_sync(kFullWarp, value, i);
    position += other >= 0 && other < value;
  }
#pragma unroll 4
  for (uint32_t i = 0; i < width; ++i)
    if (__shfl_sync(kFullWarp, value < 0 ? kWarp : position, i) == lane) from = i;
  return from;
}

// By a warp: the lanes below `count` after which the rank is another.
__device__ __forceinline__ LaneMask last_of_ranks(uint32_t rank, uint32_t count, uint32_t lane) {
  const bool other = __shfl_sync(kFullWarp, rank, (lane + 1) % kWarp) != rank;
  return ballot(lane + 1 == count || (lane < count && other));
}

// What lane k < width knows of a token's k-th expert: its number, below 0 if there is none.
struct Named {
  int32_t expert;
  float weight;
};
// By a warp: the pairs of a token of `stream` that experts of our domain have. They need not have come yet.
template <typename Combine>
__device__ __forceinline__ Addends find_pairs(const Combine& k, uint32_t stream, uint32_t token, const Named& named) {
  const uint32_t lane = threadIdx.x % kWarp, width = k.args.width;
  const auto [expert, weight] = named;
  const uint32_t from = in_order(expert, width, lane);
  const int32_t its = __shfl_sync(kFullWarp, expert, from % kWarp);
  Addends out;
  out.count = static_cast<uint32_t>(__popcll(ballot(expert >= 0)));
  out.weight = __shfl_sync(kFullWarp, weight, from % kWarp);
  const uint32_t rank = lane < out.count ? static_cast<uint32_t>(its) / k.g.experts_per_rank : kNobody;
  out.ends = last_of_ranks(rank, out.count, lane);
  if (lane < out.count) out.row = pair_row(k, rank, stream, token * width + from);
  return out;
}

// By a warp: as find_pairs(), of our own token. Of each rank that folds only the pair of its lowest expert stays, with
// the weight 1.
template <typename Combine>
__device__ __forceinline__ Addends find_sums(const Combine& k, const EnteredRanks& entered, uint32_t token,
                                             Named named) {
  const uint32_t rank = named.expert < 0 ? kNobody : static_cast<uint32_t>(named.expert) / k.g.experts_per_rank;
  bool lowest = true;
#pragma unroll 1
  for (uint32_t i = 0; i < k.args.width; ++i) {
    const int32_t other = __shfl_sync(kFullWarp, named.expert, i);
    lowest &= __shfl_sync(kFullWarp, rank, i) != rank || other >= named.expert;
  }
  const bool adds = named.expert >= 0, folded = adds && entered.folded(rank);
  if (folded) named = {lowest ? named.expert : -1, 1.0f};
  Addends out = find_pairs(k, 0, token, named);
  out.folded = ballot(adds && !folded) == 0;
  return out;
}

// As find_pairs(), of our own token: with the rows that other domains return.
__device__ __forceinline__ Addends find_returned(const NetCombine& k, const Sources& sources, uint32_t token,
                                                 const Named& named) {
  const uint32_t lane = threadIdx.x % kWarp, width = k.args.width;
  const auto [expert, weight] = named;
  // Of each other domain only the pair of the lowest expert stays.
  const uint32_t its_rank = expert < 0 ? 0 : static_cast<uint32_t>(expert) / k.g.experts_per_rank;
  const uint32_t its_domain = expert < 0 ? kNobody : k.domain_of(its_rank);
  bool lowest = true;
#pragma unroll 1
  for (uint32_t i = 0; i < width; ++i) {
    const int32_t other = __shfl_sync(kFullWarp, expert, i);
    lowest &= __shfl_sync(kFullWarp, its_domain, i) != its_domain || other < 0 || other >= expert;
  }
  const bool stays = expert >= 0 && (its_domain == own_domain(k.g) || lowest);
  const uint32_t from = in_order(stays ? expert : -1, width, lane);
  Addends out;
  out.count = static_cast<uint32_t>(__popcll(ballot(stays)));
  const uint32_t rank = __shfl_sync(kFullWarp, its_rank, from % kWarp);
  out.domain = __shfl_sync(kFullWarp, its_domain, from % kWarp);
  const bool mine = lane < out.count, returned = mine && out.domain != own_domain(k.g);
  out.weight = __shfl_sync(kFullWarp, weight, from % kWarp);
  if (returned) out.weight = 1.0f;
  out.returned = ballot(returned);
  out.ends = last_of_ranks(rank, out.count, lane);
  if (returned)
    out.row = row_at(k.g, sources.streams.rings[out.domain].row(k.map(), sources.streams.masks.row(out.domain, token)));
  else if (mine)
    out.row = pair_row(k, rank, 0, token * width + from);
  return out;
}

// By one thread: waits for what another domain returns, which any of its ranks may keep waiting.
__device__ __forceinline__ bool wait_returned(const NetCombine& k, uint32_t domain, const Awaited& what) {
  if (has_come(what)) return true;
  for (uint32_t r = k.first_of(domain); r < k.first_of(domain + 1); ++r)
    if (!wait_for(k.g, {own_part(k.g, k.map().pairs_entered) + r, k.number, r})) return false;
  return wait_for(k.g, what);
}
// By a warp, when the pairs have come: waits for what other domains return, and finds the rows that stay. False: an
// error is known.
template <typename Combine>
__device__ __forceinline__ bool wait_rows(const Combine& k, const Sources& sources, uint32_t token, Addends& addends) {
  const uint32_t lane = threadIdx.x % kWarp;
  if (addends.row >> 30 == kOwnPair >> 30) {
    const uint8_t* const pair = k.g.own + uint64_t{addends.row & ~kOwnPair} * kRowUnit;
    addends.row = kOwnSlot | device::load_past_l1(reinterpret_cast<const uint32_t*>(pair));
  }
  if constexpr (Combine::kNet) {
    bool good = true;
    if ((addends.returned >> lane & 1) != 0) {
      const SlotRing& ring = sources.streams.rings[addends.domain];
      const uint32_t row = sources.streams.masks.row(addends.domain, token);
      good = wait_returned(k, addends.domain,
                           {k.g.slot_net_state.sums_there + addends.domain, ring.arrived(k.map(), row),
                            k.first_of(addends.domain), static_cast<int>(token)});
    }
    if (!__all_sync(kFullWarp, good)) return false;
  }
  __syncwarp();  // orders what the lanes have read before what any of them reads next
  return true;
}

// By a warp: the experts of our own token. `counts`: also counts those that are dropped.
template <typename Combine>
__device__ __forceinline__ Named name_experts(const Combine& k, uint32_t token, bool counts) {
  const uint32_t lane = threadIdx.x % kWarp, width = k.args.width;
  const uint64_t index = uint64_t{token} * width + lane;
  int32_t expert = lane < width ? k.numbered(k.args.topk_idx[index]) : -1;
  float weight = expert < 0 ? 0.0f : k.args.weights[index];
  if (expert >= 0 && k.is_masked(static_cast<uint32_t>(expert) / k.g.experts_per_rank)) {
    expert = -1;
    if (counts) add_global(&k.state().dropped_pairs, 1);
  }
  return {expert, weight};
}
// By a warp: all addends of the token, if no rank folds.
template <typename Combine>
__device__ __forceinline__ Addends find_addends(const Combine& k, const Sources& sources, uint32_t token,
                                                const Named& named) {
  if constexpr (Combine::kNet)
    return find_returned(k, sources, token, named);
  else
    return find_pairs(k, 0, token, named);
}

// By a crew: sums its share, after wait(), by all threads. What can be looked up before is looked up before. False: an
// error is known.
template <typename Combine, typename Wait>
__device__ inline bool merge_tokens(const Combine& k, const Sources& sources, Wait wait) {
  const uint32_t parts = parts_of(k);
  // A warp takes several parts of a token, so that it looks up the token's pairs once.
  const uint32_t at_once = max((k.args.num_tokens * parts + k.warps() - 1) / k.warps(), 1);
  const uint32_t shares = (parts + at_once - 1) / at_once;
  const uint32_t end = k.args.num_tokens * shares;
  const auto name = [&](uint32_t i) {
    return i < end ? name_experts(k, i / shares, i % shares == 0) : Named{-1, 0.0f};
  };
  uint32_t i = k.warp();
  Named named = name(i);
  Addends addends;
  if (!folds(k)) addends = find_addends(k, sources, i / shares, named);
  if (!wait()) return false;
  const bool any_folded = !Combine::kNet && sources.entered.any_folded();
#pragma unroll 1
  while (i < end) {
    const uint32_t token = i / shares, first = i % shares * at_once;
    if constexpr (!Combine::kNet)
      if (any_folded) addends = find_sums(k, sources.entered, token, named);
    if (!wait_rows(k, sources, token, addends)) return false;
    const uint32_t last = min(first + at_once, parts);
    if (!Combine::kNet && addends.folded)
      sum_rows(k.g, k.args, {addends.count, addends.row, addends.weight}, sum_at(k.g, k.args, kOwnToken | token), first,
               last);
#pragma unroll 1
    for (uint32_t part = first; part < last && (Combine::kNet || !addends.folded); ++part)
      sum_part(k, addends, {kOwnToken | token, false}, part);
    i += k.warps();
    named = name(i);
    if (!any_folded) addends = find_addends(k, sources, i / shares, named);
  }
  return true;
}

}  // namespace uccl_ep::gpu
