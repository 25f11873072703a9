// The receiving half of a low-latency dispatch: slots, from the routing of all ranks, and rows into slots.
#pragma once

#include "backend/gpu/low_latency_net.cuh"

namespace uccl_ep::gpu {

constexpr uint32_t kNoExpert = 0xFFFFFFFF;

// In dynamic shared memory: which tokens of a source an expert of ours gets, and where the source's slots begin.
struct SlotTable {
  uint32_t ranks, words;  // words of kTileTokens tokens
  Mask* tokens;  // [L][ranks][words]
  uint32_t* begin;  // [L][ranks]
  uint32_t *num_tokens, *num_blocks;  // [ranks]

  static __host__ __device__ uint64_t bytes(const DeviceMap& map) {
    const uint64_t of_experts = uint64_t{map.num_experts} * (mask_words(map) * sizeof(Mask) + sizeof(uint32_t));
    return round_up(of_experts + 2 * sizeof(uint32_t) * map.num_ranks, sizeof(Mask));
  }
  __device__ SlotTable(const Group& g, uint8_t* shared)
      : ranks(g.map.num_ranks),
        words(mask_words(g.map)),
        tokens(reinterpret_cast<Mask*>(shared)),
        begin(reinterpret_cast<uint32_t*>(tokens + uint64_t{g.map.num_experts} * words)),
        num_tokens(begin + g.map.num_experts),
        num_blocks(num_tokens + ranks) {}
  __device__ __forceinline__ Mask* of(uint32_t expert, uint32_t source) const {
    return tokens + (expert * ranks + source) * words;
  }
  __device__ __forceinline__ uint32_t count(uint32_t expert, uint32_t source) const {
    uint32_t sum = 0;
    for (uint32_t w = 0; w < words; ++w) sum += __popcll(of(expert, source)[w]);
    return sum;
  }
  // Slot of a token that the expert gets, among the expert's.
  __device__ __forceinline__ uint32_t slot(uint32_t expert, uint32_t source, uint32_t token) const {
    const Mask* const mine = of(expert, source);
    uint32_t before = begin[expert * ranks + source];
    for (uint32_t w = 0; w < token / kTileTokens; ++w) before += __popcll(mine[w]);
    return before + __popcll(mine[token / kTileTokens] & ((Mask{1} << token % kTileTokens) - 1));
  }
};

// Number among our experts; others are not below experts_per_rank.
__device__ __forceinline__ uint32_t local_expert(const Group& g, int32_t expert) {
  return static_cast<uint32_t>(expert) - g.rank * g.experts_per_rank;
}

// Dynamic shared memory of what receives: the table, and the streams of ranks in other domains, by source. Of what
// sends: our streams, by domain.
__host__ __device__ inline uint64_t received_bytes(const DeviceMap& map) {
  return SlotTable::bytes(map) + Streams::bytes(map, map.num_ranks);
}
__device__ __forceinline__ Streams received_streams(const DeviceMap& map, uint8_t* dynamic) {
  return Streams::in(map, dynamic + SlotTable::bytes(map), map.num_ranks);
}
__host__ __device__ inline uint64_t sent_bytes(const DeviceMap& map) { return Streams::bytes(map, map.num_domains); }
__device__ __forceinline__ Streams sent_streams(const DeviceMap& map, uint8_t* dynamic) {
  return Streams::in(map, dynamic, map.num_domains);
}

// By a crew, when all headers have come. `streams`: by source, of other domains.
template <typename Dispatch>
__device__ inline void fill_table(const Dispatch& k, const SlotTable& table, const StreamMasks& streams) {
  const uint32_t experts = k.g.experts_per_rank, ranks = table.ranks, width = k.args.width;
  const uint32_t first_of_domain = k.first() * experts, of_domain = k.members() * experts;
  for (uint32_t i = k.crew.thread; i < experts * ranks * table.words; i += k.crew.size) table.tokens[i] = 0;
  if (Dispatch::kNet) streams.clear(k.crew, ranks);
  for (uint32_t r = k.crew.thread; r < ranks; r += k.crew.size) {
    table.num_tokens[r] = k.is_masked(r) ? 0 : min(k.header(k.g.rank, r).num_tokens, k.map().tokens);
    table.num_blocks[r] = k.header(k.g.rank, r).num_blocks;
  }
  k.crew.sync();
  constexpr uint32_t kOfLane = 4;  // entries that a lane loads at once
  const uint32_t most = k.map().tokens * width, lane_first = kOfLane * k.crew.lane();
  const uint32_t parts = (most + kOfLane * kWarp - 1) / (kOfLane * kWarp);  // of a source's entries, a warp each
  for (uint32_t i = k.crew.warp(); i < ranks * parts; i += k.crew.warps()) {
    const uint32_t source = i / parts, first = i % parts * kOfLane * kWarp + lane_first;
    const uint32_t end = table.num_tokens[source] * width;
    if (first >= end) continue;
    const uint4 found = *reinterpret_cast<const uint4*>(k.routing(k.g.rank, source) + first);
    const uint32_t entries[kOfLane] = {found.x, found.y, found.z, found.w};
#pragma unroll
    for (uint32_t u = 0; u < kOfLane; ++u) {
      if (first + u >= end) break;
      const uint32_t expert = local_expert(k.g, static_cast<int32_t>(entries[u])), token = (first + u) / width;
      if (Dispatch::kNet && entries[u] - first_of_domain < of_domain && !k.is_near(source)) streams.add(source, token);
      if (expert >= experts) continue;
      or_shared(reinterpret_cast<uint32_t*>(table.of(expert, source)) + token / 32, 1u << token % 32);
    }
  }
  k.crew.sync();
  // Many ranks are counted by a warp, few by a thread.
  const bool by_warps = ranks > kWarp;
  const uint32_t lane = by_warps ? k.crew.lane() : 0, lanes = by_warps ? kWarp : 1;
  for (uint32_t expert = k.crew.thread / lanes; expert < experts; expert += k.crew.size / lanes) {
    uint32_t before = 0;
    for (uint32_t first = 0; first < ranks; first += lanes) {
      const uint32_t rank = first + lane, s = rank < ranks ? k.number_of(rank) : 0;
      const uint32_t count = rank < ranks ? table.count(expert, s) : 0;
      const uint32_t end = before + (by_warps ? warp_prefix(count, lane) : count), begin = end - count;
      if (rank < ranks) table.begin[expert * ranks + s] = begin;
      if (rank < ranks && blockIdx.x == 0)
        k.args.ranges[expert * ranks + rank] = static_cast<int64_t>(uint64_t{begin} << 32 | count);
      before = by_warps ? __shfl_sync(kFullWarp, end, kWarp - 1) : end;
    }
    if (blockIdx.x != 0 || lane != 0) continue;
    k.args.counts[expert] = static_cast<int32_t>(before);
    if (k.args.total_counts != nullptr) k.args.total_counts[expert] += static_cast<int32_t>(before);
  }
  k.crew.sync();
}

// By a warp: the scales of a row, for one slot of an expert. Neighbouring slots lie beside each other.
template <typename Dispatch>
__device__ __forceinline__ void put_scales(const Dispatch& k, const uint8_t* row, uint32_t expert, uint32_t slot,
                                           uint32_t lane) {
  const uint32_t blocks = k.args.stage.row.num_scales, slots = k.g.map.num_ranks * k.map().tokens;
  const uint32_t* const scales = reinterpret_cast<const uint32_t*>(row + k.args.stage.row.code_bytes);
  const uint32_t words = k.args.ue8m0 ? (blocks + 3) / 4 : blocks;
  uint32_t* const out = reinterpret_cast<uint32_t*>(k.args.scales) + uint64_t{expert} * words * slots + slot;
  for (uint32_t w = lane; w < words; w += kWarp) {
    uint32_t word = 0;
    if (!k.args.ue8m0)
      word = scales[w];
    else
      for (uint32_t i = 0; i < 4 && 4 * w + i < blocks; ++i) word |= (scales[4 * w + i] >> 23 & 0xFF) << 8 * i;
    out[uint64_t{w} * slots] = word;
  }
}

constexpr uint32_t kPlaceParts = 2;  // of a row, as kRowParts
// By a crew: copies its share of the rows into their slots. False: an error is known.
template <typename Dispatch>
__device__ inline bool place_slots(const Dispatch& k, const SlotTable& table, SlotPlaces& shared,
                                   const Streams& streams) {
  const uint32_t lane = threadIdx.x % kWarp, width = k.args.width, ranks = table.ranks, members = k.members();
  const uint32_t slots = ranks * k.map().tokens, out_bytes = k.args.stage.row.code_bytes;
  uint8_t** const places = shared.of[threadIdx.x / kWarp];
  for (uint32_t i = k.warp(); i < slots * kPlaceParts; i += k.warps()) {
    const uint32_t part = i / slots, nth = i % slots % ranks, token = i % slots / ranks;
    // Other domains' rows come last.
    const uint32_t source = nth < members ? k.member_after(nth) : nth - members < k.first() ? nth - members : nth;
    const uint32_t place = token * width + lane;
    const uint64_t pair = uint64_t{source} * k.map().tokens * width + place;
    const bool keeps = part == 0 && lane < width, knows = keeps && k.args.routed != nullptr;
    const bool names = keeps && (!Dispatch::kNet || knows);
    if (token >= table.num_tokens[source]) {
      if (names) k.args.pairs[pair] = kNoSlot;
      continue;
    }
    const int32_t number = lane < width ? k.routing(k.g.rank, source)[place] : -1;
    const uint32_t expert = lane < width ? local_expert(k.g, number) : kNoExpert;
    if (knows) k.args.routed[pair] = k.routed(k.g.rank, source)[place];
    const bool mine = expert < k.g.experts_per_rank;
    const LaneMask wants = ballot(mine);
    uint64_t slot = kNoSlot;
    if (mine) slot = uint64_t{expert} * slots + table.slot(expert, source, token);
    if (names) k.args.pairs[pair] = Dispatch::kNet ? static_cast<uint32_t>(number) : static_cast<uint32_t>(slot);
    if (wants == 0) continue;
    if (mine) {
      if (part == 0) {
        k.args.source_tokens[slot] = static_cast<int32_t>(token);
        k.args.origins[slot] = SlotOrigin::of(source, place).word;
      }
      places[__popcll(wants & ((LaneMask{1} << lane) - 1))] = k.args.rows + slot * out_bytes;
    }
    const uint8_t* row = nullptr;
    bool good = true;
    if (k.is_near(source)) {
      const uint32_t block = token % table.num_blocks[source];
      const DeviceFlag<SlotRowsFull>* const full =
          own_part(k.g, k.map().rows_full) + (source - k.first()) * kMaxSlotBlocks + block;
      good = lane != 0 || wait_for(k.g, {full, k.number, source, static_cast<int>(token)});
      row = k.row(k.g.rank, source, token);
    } else {
      const uint32_t its = streams.masks.row(source, token);
      const DeviceFlag<SlotRowsThere>* const there = k.g.slot_net_state.rows_there + source;
      good = lane != 0 ||
             wait_for(k.g, {there, streams.rings[source].arrived(k.map(), its), source, static_cast<int>(token)});
      row = streams.rings[source].row(k.map(), its);
    }
    if (!__all_sync(kFullWarp, good)) return false;
    __syncwarp();  // orders what the lanes have written and read before what any of them reads
    const auto others = static_cast<uint32_t>(__popcll(wants)) - 1;
    const uint32_t vectors = out_bytes / 16, of_part = (vectors + kPlaceParts - 1) / kPlaceParts;
    copy_row<8>(reinterpret_cast<const uint4*>(row), {places[0], others, places + 1},
                min((part + 1) * of_part, vectors), lane, part * of_part);
    if (k.args.scales != nullptr && part == kPlaceParts - 1)
      for (LaneMask left = wants; left != 0; left &= left - 1) {
        const uint64_t its = __shfl_sync(kFullWarp, slot, lowest_lane(left));
        put_scales(k, row, static_cast<uint32_t>(its / slots), static_cast<uint32_t>(its % slots), lane);
      }
    __syncwarp();
  }
  return true;
}

}  // namespace uccl_ep::gpu
