// The sums of a low-latency combine: what is added for a token, and adding it.
#pragma once

#include "backend/gpu/low_latency_net.cuh"
#include "backend/gpu/numerics.cuh"
#include "backend/gpu/words.h"

namespace uccl_ep::gpu {

// In a launch that also receives, the rows stay where they are until it ends. This rank sums its own rows from there,
// and memory for a pair holds the slot.
template <typename Combine>
__device__ __forceinline__ bool stays(const Combine& k, uint32_t from, uint32_t holder) {
  return k.args.phase == SlotPhase::kBoth && from == k.g.rank && holder == k.g.rank;
}

constexpr uint32_t kVectors = 2;  // of a lane, that a warp sums at a time
constexpr uint32_t kPartBytes = kVectors * kWarp * 16;  // of a row
constexpr uint32_t kValues = kVectors * 8;
constexpr uint32_t kAhead = 4;  // rows that are loaded at a time

// What is added to a token's sum, one for each lane below `count`: pairs, by ascending number of the expert. Where a
// token's own rank sums, a domain that returns a row has the place of its first pair.
struct Addends {
  uint32_t count = 0;
  uint32_t row = 0;  // kOwnSlot with a slot, or where it is in our region
  float weight = 0;
  LaneMask ends = 0;  // those after which a rank's sum is complete
  LaneMask returned = 0;  // by other domains
  uint32_t domain = 0;  // that returns it
};
constexpr uint32_t kOwnSlot = 1u << 31;
constexpr uint32_t kRowUnit = 128;  // rows begin at multiples of it
static_assert(kRowUnit == 128);
__device__ __forceinline__ uint32_t row_at(const Group& g, const uint8_t* row) {
  return static_cast<uint32_t>(static_cast<uint64_t>(row - g.own) / kRowUnit);
}
__device__ __forceinline__ const uint8_t* row_of(const Group& g, const SlotCombineArgs& args, uint32_t row) {
  return (row & kOwnSlot) != 0 ? args.rows + uint64_t{row & ~kOwnSlot} * 2 * args.hidden
                               : g.own + uint64_t{row} * kRowUnit;
}
// Where a sum goes: kOwnToken with a token of ours, or a row of our region.
constexpr uint32_t kOwnToken = kOwnSlot;
__device__ __forceinline__ uint8_t* sum_at(const Group& g, const SlotCombineArgs& args, uint32_t sum) {
  return (sum & kOwnToken) != 0 ? args.out + uint64_t{sum & ~kOwnToken} * 2 * args.hidden
                                : g.own + uint64_t{sum} * kRowUnit;
}
// Of a pair of an expert of rank `from`. Where the row stays, memory for the pair will hold its slot.
constexpr uint32_t kOwnPair = 1u << 30;
template <typename Combine>
__device__ __forceinline__ uint32_t pair_row(const Combine& k, uint32_t from, uint32_t stream, uint32_t place) {
  const uint32_t row = row_at(k.g, k.pair(k.g.rank, stream, place));
  return stays(k, from, k.g.rank) ? kOwnPair | row : row;
}

// What other domains return of our tokens.
struct Sources {
  const StreamMasks& streams;  // ours, by domain
  const SlotRing* rings;
};

// By a warp: the lane that has the `lane`-th of the values of all lanes that are not below 0, ascending; else kWarp.
__device__ __forceinline__ uint32_t in_order(int32_t value, uint32_t width, uint32_t lane) {
  uint32_t position = 0, from = kWarp;
  for (uint32_t i = 0; i < width; ++i) {
    const int32_t other = __shfl_sync(kFullWarp, value, i);
    position += other >= 0 && other < value;
  }
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
  const uint32_t rank = lane < out.count ? static_cast<uint32_t>(its) / k.g.experts_per_rank : kMaxSlotRanks;
  out.ends = last_of_ranks(rank, out.count, lane);
  if (lane < out.count) out.row = pair_row(k, rank, stream, token * width + from);
  return out;
}

// As find_pairs(), of our own token: with the rows that other domains return.
__device__ __forceinline__ Addends find_returned(const NetCombine& k, const Sources& sources, uint32_t token,
                                                 const Named& named) {
  const uint32_t lane = threadIdx.x % kWarp, width = k.args.width;
  const auto [expert, weight] = named;
  // Of each other domain only the pair of the lowest expert stays.
  const uint32_t its_rank = expert < 0 ? 0 : static_cast<uint32_t>(expert) / k.g.experts_per_rank;
  const uint32_t its_domain = expert < 0 ? kMaxSlotDomains : k.domain_of(its_rank);
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
    out.row = row_at(k.g, sources.rings[out.domain].row(k.map(), sources.streams.row(out.domain, token)));
  else if (mine)
    out.row = pair_row(k, rank, 0, token * width + from);
  return out;
}

// By one thread: waits for what another domain returns, which any of its ranks may keep waiting.
__device__ __forceinline__ bool wait_returned(const NetCombine& k, uint32_t domain, const Awaited& what) {
  if (has_come(what)) return true;
  for (uint32_t r = k.first_of(domain); r < k.first_of(domain + 1); ++r)
    if (!wait_for(k, {own_part(k.g, k.map().pairs_entered) + r, k.number, r})) return false;
  return wait_for(k, what);
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
      const SlotRing& ring = sources.rings[addends.domain];
      const uint32_t row = sources.streams.row(addends.domain, token);
      good = wait_returned(k, addends.domain,
                           {k.g.slot_net_state.sums_there + addends.domain, ring.arrived(k.map(), row),
                            k.first_of(addends.domain), static_cast<int>(token)});
    }
    if (!__all_sync(kFullWarp, good)) return false;
  }
  __syncwarp();  // orders what the lanes have read before what any of them reads next
  return true;
}

// By a warp: all addends of our own token.
template <typename Combine>
__device__ __forceinline__ Addends find_addends(const Combine& k, const Sources& sources, uint32_t token, bool counts) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t width = k.args.width;
  const uint64_t index = uint64_t{token} * width + lane;
  int32_t expert = lane < width ? k.numbered(k.args.topk_idx[index]) : -1;
  float weight = expert < 0 ? 0.0f : k.args.weights[index];
  if (expert >= 0 && k.is_masked(static_cast<uint32_t>(expert) / k.g.experts_per_rank)) {
    expert = -1;
    if (counts) add_global(&k.state().dropped_pairs, 1);
  }
  if constexpr (Combine::kNet)
    return find_returned(k, sources, token, {expert, weight});
  else
    return find_pairs(k, 0, token, {expert, weight});
}

__device__ __forceinline__ void add_weighted(float (&sum)[kValues], const uint4 (&row)[kVectors], float weight) {
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    const uint32_t words[4] = {row[v].x, row[v].y, row[v].z, row[v].w};
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      sum[v * 8 + 2 * w] += weight * __uint_as_float(words[w] << 16);
      sum[v * 8 + 2 * w + 1] += weight * __uint_as_float(words[w] & 0xFFFF0000u);
    }
  }
}
// The same of a returned row of fp32.
__device__ __forceinline__ void add_fp32(float (&sum)[kValues], const uint8_t* row, uint32_t vector, uint32_t vectors) {
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    if (vector + v * kWarp >= vectors) continue;
    const float* const values = reinterpret_cast<const float*>(row) + uint64_t{vector + v * kWarp} * 8;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) sum[v * 8 + i] += device::load_once(values + i);
  }
}

// By a warp: a part of a sum, to where sum_at() says. Experts of a rank are summed first, then ranks and what other
// domains return. `out_wide`: the sum is fp32, else BF16.
template <typename Combine>
__device__ inline void sum_part(const Combine& k, const Addends& addends, uint32_t sum, bool out_wide, uint32_t part,
                                uint32_t lane) {
  const SlotCombineArgs& args = k.args;
  const uint32_t begin = part * kVectors * kWarp;
  const uint32_t vectors = args.hidden / 8;
  const bool wide = Combine::kNet && args.signature.wire == Dtype::kFp32;
  float of_rank[kValues] = {}, total[kValues] = {};
  const auto end_rank = [&] {
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) {
      total[i] += of_rank[i];
      of_rank[i] = 0.0f;
    }
  };
  for (uint32_t first = 0; first < addends.count; first += kAhead) {
    uint4 rows[kAhead][kVectors];
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u) {
      const uint32_t its = __shfl_sync(kFullWarp, addends.row, min(first + u, addends.count - 1));
      const uint4* const row = reinterpret_cast<const uint4*>(row_of(k.g, args, its)) + begin + lane;
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v)
        rows[u][v] = first + u < addends.count && begin + v * kWarp + lane < vectors
                         ? device::load_once(row + v * kWarp)
                         : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u) {
      const uint32_t from = min(first + u, addends.count - 1);
      const float weight = __shfl_sync(kFullWarp, addends.weight, from);
      const uint32_t row = wide ? __shfl_sync(kFullWarp, addends.row, from) : 0;
      if (first + u >= addends.count) continue;
      if (wide && (addends.returned >> from & 1) != 0)
        add_fp32(of_rank, row_of(k.g, args, row), begin + lane, vectors);
      else
        add_weighted(of_rank, rows[u], weight);
      if ((addends.ends >> from & 1) != 0) end_rank();
    }
  }
  uint8_t* const out = sum_at(k.g, args, sum);
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    const uint32_t vector = begin + v * kWarp + lane;
    if (vector >= vectors) continue;
    const float* const of = total + v * 8;
    if (out_wide) {
      float4* const to = reinterpret_cast<float4*>(out) + uint64_t{vector} * 2;
      to[0] = make_float4(of[0], of[1], of[2], of[3]);
      to[1] = make_float4(of[4], of[5], of[6], of[7]);
    } else {
      reinterpret_cast<uint4*>(out)[vector] = make_uint4(pack_bf16(of[0], of[1]), pack_bf16(of[2], of[3]),
                                                         pack_bf16(of[4], of[5]), pack_bf16(of[6], of[7]));
    }
  }
}
// Parts of a row, each of kPartBytes of BF16.
template <typename Combine>
__device__ __forceinline__ uint32_t parts_of(const Combine& k) {
  return (2 * k.args.hidden + kPartBytes - 1) / kPartBytes;
}

// By a crew: sums its share, after wait(), by all threads. What can be looked up before is looked up before. False: an
// error is known.
template <typename Combine, typename Wait>
__device__ inline bool merge_tokens(const Combine& k, const Sources& sources, Wait wait) {
  const uint32_t lane = threadIdx.x % kWarp, parts = parts_of(k);
  // A warp takes several parts of a token, so that it looks up the token's pairs once.
  const uint32_t at_once = max((k.args.num_tokens * parts + k.warps() - 1) / k.warps(), 1);
  const uint32_t shares = (parts + at_once - 1) / at_once;
  const uint32_t end = k.args.num_tokens * shares;
  const auto find = [&](uint32_t i) {
    return i < end ? find_addends(k, sources, i / shares, i % shares == 0) : Addends{};
  };
  uint32_t i = k.warp();
  Addends addends = find(i);
  if (!wait()) return false;
#pragma unroll 1
  while (i < end) {
    const uint32_t token = i / shares, first = i % shares * at_once;
    if (!wait_rows(k, sources, token, addends)) return false;
    for (uint32_t part = first; part < min(first + at_once, parts); ++part)
      sum_part(k, addends, kOwnToken | token, false, part, lane);
    i += k.warps();
    addends = find(i);
  }
  return true;
}

}  // namespace uccl_ep::gpu
