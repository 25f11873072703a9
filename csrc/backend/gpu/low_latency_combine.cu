// The kernel of a low-latency combine. Every block sends its share of the slots' rows, and then, perhaps in a later
// launch, sums its share of the tokens. Side by side both took longer: few warps do not fill the links.
//
// `a ..> b`: b waits for a. `a --> b`: b is published when a is done.
//
// send     pairs_read (of two ago) ..> header --> pairs_entered | rows of slots --> pair_full, one by one
// receive  pairs_entered of all ..> pair_full of a token ..> the token's sum | last block --> pairs_read
#include "backend/gpu/low_latency.cuh"
#include "backend/gpu/numerics.cuh"
#include "backend/gpu/words.h"

namespace uccl_ep::gpu {
namespace {

using Combine = SlotKernel<SlotCombineArgs>;

// ---- send -----------------------------------------------------------------------------------------------------------
// In dynamic shared memory, by source, and for each source by expert: ranges of our slots. Sources come in the order of
// rotated(), so our own rows, which cross no link, are last.
struct PairRanges {
  uint32_t* first;  // [ranks * L + 1] pairs of earlier ranges
  uint32_t* begin;  // [ranks * L] slot of the expert

  static uint64_t bytes(uint32_t experts) { return sizeof(uint32_t) * (2 * uint64_t{experts} + 1); }
  __device__ PairRanges(const Group& g, uint8_t* shared)
      : first(reinterpret_cast<uint32_t*>(shared)), begin(first + g.map.num_experts + 1) {}
};

// By a crew.
__device__ inline void fill_ranges(const Combine& k, const PairRanges& ranges) {
  const uint32_t experts = k.g.experts_per_rank, all = k.g.map.num_experts, lane = threadIdx.x % kWarp;
  for (uint32_t i = k.crew.thread; i < all; i += k.crew.size) {
    const uint32_t source = rotated(k.g, i / experts);
    const auto range = static_cast<uint64_t>(k.args.ranges[i % experts * k.g.map.num_ranks + source]);
    ranges.begin[i] = static_cast<uint32_t>(range >> 32);
    ranges.first[i] = k.is_masked(source) ? 0 : static_cast<uint32_t>(range);  // for now their number
  }
  k.crew.sync();
  if (k.crew.warp() == 0) {
    uint32_t before = 0;
    for (uint32_t i = 0; i < all; i += kWarp) {
      const uint32_t count = i + lane < all ? ranges.first[i + lane] : 0;
      const uint32_t end = before + warp_prefix(count, lane);
      if (i + lane < all) ranges.first[i + lane] = end - count;
      before = __shfl_sync(kFullWarp, end, kWarp - 1);
    }
    if (lane == 0) ranges.first[all] = before;
  }
  k.crew.sync();
}

// By a crew: sends its share of the rows, with a flag each.
__device__ inline void send_pairs(const Combine& k, const PairRanges& ranges) {
  const uint32_t experts = k.g.experts_per_rank, all = k.g.map.num_experts, lane = threadIdx.x % kWarp;
  const uint32_t row_bytes = 2 * k.args.hidden;
  const uint64_t slots = uint64_t{k.g.map.num_ranks} * k.map().tokens;
  for (uint32_t i = k.warp(); i < ranges.first[all]; i += k.warps()) {
    uint32_t low = 0, high = all;  // first[low] <= i < first[high]
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (ranges.first[middle] <= i ? low : high) = middle;
    }
    const uint64_t slot = low % experts * slots + ranges.begin[low] + (i - ranges.first[low]);
    const uint32_t to = rotated(k.g, low / experts), place = SlotOrigin{k.args.origins[slot]}.place();
    const uint4* const row = reinterpret_cast<const uint4*>(k.args.rows + slot * row_bytes);
    copy_row<8>(row, {k.pair(to, place), 0, nullptr}, row_bytes / 16, lane);
    __syncwarp();
    if (lane == 0) publish(at(k.g, to, k.map().pair_full) + k.pair_index(place), k.number);
  }
}

__device__ inline bool send(Combine k, uint8_t* dynamic) {
  if (!wait_free(k, k.map().pairs_read)) return false;
  if (!send_headers(k, k.map().pairs_entered, [](uint32_t) { return true; })) return false;
  const PairRanges ranges(k.g, dynamic);
  fill_ranges(k, ranges);
  send_pairs(k, ranges);
  k.crew.sync();
  if (k.crew.thread == 0) end_slots(k, Phase::kPairsSent, k.state().sent);
  return true;
}

// ---- receive --------------------------------------------------------------------------------------------------------
constexpr uint32_t kVectors = 2;  // of a lane, that a warp sums at a time
constexpr uint32_t kPartBytes = kVectors * kWarp * 16;  // of a row
constexpr uint32_t kValues = kVectors * 8;
constexpr uint32_t kAhead = 4;  // rows that are loaded at a time

// A token's pairs, one for each lane below `count`, by ascending expert.
struct TokenPairs {
  uint32_t count;
  uint32_t place, rank;
  float weight;
};
// By a warp.
__device__ __forceinline__ TokenPairs pairs_of(const Combine& k, uint32_t token, bool counts, uint32_t lane) {
  const uint32_t width = k.args.width;
  const uint64_t index = uint64_t{token} * width + lane;
  int64_t expert = lane < width ? k.args.topk_idx[index] : -1;
  if (expert >= 0 && k.is_masked(static_cast<uint32_t>(expert / k.g.experts_per_rank))) {
    expert = -1;
    if (counts) add_global(&k.state().dropped_pairs, 1);
  }
  const float weight = expert < 0 ? 0.0f : k.args.weights[index];
  const LaneMask there = ballot(expert >= 0);
  uint32_t position = 0, from = 0;
  for (uint32_t i = 0; i < width; ++i) {
    const int64_t other = __shfl_sync(kFullWarp, expert, i);
    position += other >= 0 && other < expert;
  }
  for (uint32_t i = 0; i < width; ++i)
    if (__shfl_sync(kFullWarp, expert < 0 ? kWarp : position, i) == lane) from = i;
  const int64_t sorted = __shfl_sync(kFullWarp, expert, from);
  return {static_cast<uint32_t>(__popcll(there)), token * width + from,
          static_cast<uint32_t>(sorted < 0 ? 0 : sorted / k.g.experts_per_rank), __shfl_sync(kFullWarp, weight, from)};
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

// By a warp: the part of a token's sum that begins at vector `begin`. Experts of a rank are summed first, then ranks.
__device__ inline void sum_part(const Combine& k, const TokenPairs& pairs, uint32_t token, uint32_t begin,
                                uint32_t lane) {
  const uint32_t vectors = k.args.hidden / 8;
  float of_rank[kValues] = {}, total[kValues] = {};
  uint32_t rank = kMaxGpuRanks;
  const auto end_rank = [&] {
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) {
      total[i] += of_rank[i];
      of_rank[i] = 0.0f;
    }
  };
  for (uint32_t first = 0; first < pairs.count; first += kAhead) {
    uint4 rows[kAhead][kVectors];
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u) {
      const uint32_t place = __shfl_sync(kFullWarp, pairs.place, min(first + u, pairs.count - 1));
      const uint4* const row = reinterpret_cast<const uint4*>(k.pair(k.g.rank, place)) + begin + lane;
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v)
        rows[u][v] = first + u < pairs.count && begin + v * kWarp + lane < vectors ? device::load_once(row + v * kWarp)
                                                                                   : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u) {
      const uint32_t from = min(first + u, pairs.count - 1);
      const uint32_t its = __shfl_sync(kFullWarp, pairs.rank, from);
      const float weight = __shfl_sync(kFullWarp, pairs.weight, from);
      if (first + u >= pairs.count) continue;
      if (its != rank) end_rank();
      rank = its;
      add_weighted(of_rank, rows[u], weight);
    }
  }
  end_rank();
  uint4* const out = reinterpret_cast<uint4*>(k.args.out) + uint64_t{token} * vectors + begin + lane;
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    if (begin + v * kWarp + lane >= vectors) continue;
    const float* const of = total + v * 8;
    out[v * kWarp] =
        make_uint4(pack_bf16(of[0], of[1]), pack_bf16(of[2], of[3]), pack_bf16(of[4], of[5]), pack_bf16(of[6], of[7]));
  }
}

// By a crew: sums its share. False: an error is known.
__device__ inline bool merge_tokens(const Combine& k) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t parts = (2 * k.args.hidden + kPartBytes - 1) / kPartBytes;
  // A warp takes several parts of a token, so that it looks up the token's pairs once.
  const uint32_t at_once = max((k.args.num_tokens * parts + k.warps() - 1) / k.warps(), 1);
  const uint32_t shares = (parts + at_once - 1) / at_once;
  for (uint32_t i = k.warp(); i < k.args.num_tokens * shares; i += k.warps()) {
    const uint32_t token = i / shares, first = i % shares * at_once;
    const TokenPairs pairs = pairs_of(k, token, first == 0, lane);
    const bool good =
        lane >= pairs.count || wait_flag(k.g, {own_part(k.g, k.map().pair_full) + k.pair_index(pairs.place), k.number,
                                               pairs.rank, static_cast<int>(token)});
    if (!__all_sync(kFullWarp, good)) return false;
    __syncwarp();  // orders what the lanes have read before what any of them reads next
    for (uint32_t part = first; part < min(first + at_once, parts); ++part)
      sum_part(k, pairs, token, part * kVectors * kWarp, lane);
  }
  return true;
}

// By block 0, where ranks may be masked: waits for all that comes.
__device__ inline bool wait_pairs(const Combine& k, RankSet& gone) {
  bool good = true;
  for (uint32_t r = k.crew.thread; r < k.g.map.num_ranks; r += k.crew.size)
    if (!gone.has(r)) good &= note_missing(k, own_part(k.g, k.map().pairs_entered) + r, r, gone);
  if (!k.crew.all(good)) return false;
  for (uint32_t place = k.crew.thread; place < k.args.num_tokens * k.args.width; place += k.crew.size) {
    const int64_t expert = k.args.topk_idx[place];
    if (expert < 0) continue;
    const auto r = static_cast<uint32_t>(expert / k.g.experts_per_rank);
    if (!gone.has(r)) good &= note_missing(k, own_part(k.g, k.map().pair_full) + k.pair_index(place), r, gone);
  }
  return good;
}

__device__ inline bool receive(Combine k) {
  if (!settle(k, [&](RankSet& gone) { return wait_pairs(k, gone); })) return false;
  if (!wait_headers(k, k.map().pairs_entered)) return false;
  if (!k.crew.all(merge_tokens(k))) return false;
  end_receive(k, Phase::kPairsReceived, k.map().pairs_read);
  return true;
}

__global__ void __launch_bounds__(kSlotThreads, 1)
    low_latency_combine(const __grid_constant__ Group g, const __grid_constant__ SlotCombineArgs args) {
  UCCL_EP_DYNAMIC_SHARED(dynamic);
  constexpr SlotKind kKind = SlotKind::kCombine;
  const Crew crew = Crew::of(1, 0, kSlotWarps);
  bool good = true;
  if (args.phase != SlotPhase::kReceive) good = send(begin_slots(g, args, kKind, crew, true), dynamic);
  if (args.phase == SlotPhase::kSend) return;
  good = good && receive(begin_slots(g, args, kKind, crew, false));
  // After an error nothing is valid: neither here, nor in a block that is through before another finds one.
  if (!good || stopped(g)) fill_nan(crew, args.out, uint64_t{2} * args.num_tokens * args.hidden);
}

__global__ void tell_masks(const __grid_constant__ Group g, int32_t* out) {
  const uint64_t masked = local(g).low_latency.masked;
  for (uint32_t r = threadIdx.x; r < g.map.num_ranks; r += kMaxGpuRanks) out[r] = static_cast<int32_t>(masked >> r & 1);
}

}  // namespace

Status load_low_latency_combine(uint32_t shared_bytes) {
  return load_all(shared_bytes, low_latency_combine, tell_masks);
}

Status launch_masks(const Group& group, int32_t* out, StreamHandle stream) {
  launch_kernel(tell_masks, {1, kMaxGpuRanks, 0, stream}, group, out);
  return launch_status();
}

Status launch_low_latency(const Group& group, const SlotCombineArgs& args, uint32_t num_sms, StreamHandle stream) {
  const uint64_t shared_bytes = args.phase == SlotPhase::kReceive ? 0 : PairRanges::bytes(group.map.num_experts);
  launch_kernel(low_latency_combine, {num_sms, kSlotThreads, static_cast<uint32_t>(shared_bytes), stream}, group, args);
  return launch_status();
}

}  // namespace uccl_ep::gpu
