// The kernel of a low-latency dispatch. Crews of every block send the block's tokens and receive its share of the rows,
// side by side or in two launches.
//
// `a ..> b`: b waits for a. `a --> b`: b is published when a is done.
//
// send     rows_read (of two ago) ..> routing, header --> routing_full | rows of the block's tokens --> rows_full
// receive  routing_full of all ..> slots; counts | rows_full ..> rows into slots | last block --> rows_read
#include "backend/gpu/low_latency.cuh"
#include "backend/gpu/tile.cuh"

namespace uccl_ep::gpu {
namespace {

using Dispatch = SlotKernel<SlotDispatchArgs>;
constexpr uint32_t kNoExpert = 0xFFFFFFFF;

// ---- send -----------------------------------------------------------------------------------------------------------
// By a crew: our routing, for rank `to`. With our own copy it is checked. False: this thread saw a wrong one.
__device__ inline bool send_routing(const Dispatch& k, uint32_t to) {
  const uint32_t width = k.args.width, places = k.args.stage.num_tokens * width;
  int32_t* const out = k.routing(to, k.g.rank);
  bool good = true;
  for (uint32_t i = k.crew.thread; i < places; i += k.crew.size) {
    const int64_t expert = k.args.topk_idx[i];
    out[i] = static_cast<int32_t>(expert);
    if (to != k.g.rank || expert == -1) continue;
    const uint32_t token = i / width;
    good &= good_expert(k.g, expert, token);
    for (uint32_t other = token * width; other < i; ++other) {
      if (k.args.topk_idx[other] != expert) continue;
      report(k.g, {DeviceFault::kExpertTwice, ErrorKind::kPeerFailed, Step::kExchange, k.g.rank,
                   static_cast<int>(token), 1, static_cast<uint64_t>(expert)});
      good = false;
    }
  }
  return good;
}

// By a warp: the ranks that have experts of a token, a bit each. Lane k < width names the token's k-th expert.
__device__ __forceinline__ uint64_t ranks_of(const Group& g, int64_t expert, uint32_t width) {
  const int to = expert < 0 || expert >= g.map.num_experts ? -1 : static_cast<int>(expert / g.experts_per_rank);
  uint64_t ranks = 0;
  for (uint32_t i = 0; i < width; ++i) {
    const int its = __shfl_sync(kFullWarp, to, i);
    if (its >= 0) ranks |= uint64_t{1} << its;
  }
  return ranks;
}

// Rows are sent and placed in so many parts, each by another warp: a row takes a warp several round trips to memory.
constexpr uint32_t kRowParts = 4;
// Vectors of a part of a row of `vectors`: whole blocks of the quantiser, whose scale is one.
__device__ __forceinline__ uint32_t part_vectors(uint32_t vectors) {
  constexpr uint32_t kOfBlock = kFp8Block / 8;
  return (vectors + kOfBlock * kRowParts - 1) / (kOfBlock * kRowParts) * kOfBlock;
}

// By a warp: sends a part of a row.
__device__ __forceinline__ void send_part(const StageArgs& args, uint32_t token, uint32_t part, const Outs& outs,
                                          uint32_t lane) {
  const uint32_t vectors = args.hidden / 8, of_part = part_vectors(vectors);
  const uint32_t first = min(part * of_part, vectors), end = min(first + of_part, vectors);
  const uint4* const from = reinterpret_cast<const uint4*>(args.x) + uint64_t{token} * vectors;
  if (args.row.num_scales == 0 || !quantise_row(AllScaleRules{}, args, from, outs, lane, {first, end}))
    copy_row<8>(from, outs, end, lane, first);
}

// By a crew: sends its tokens' rows, and publishes that.
__device__ inline void send_rows(const Dispatch& k, SlotPlaces& shared) {
  static_assert(kSlotWarps / 2 % kRowParts == 0);
  const uint32_t at_once = k.crew.warps() / kRowParts;  // tokens of a block
  const uint32_t lane = threadIdx.x % kWarp, warp = k.crew.warp(), width = k.args.width;
  uint8_t** const places = shared.of[threadIdx.x / kWarp];
  for (uint32_t token = blockIdx.x + gridDim.x * (warp / kRowParts); token < k.args.stage.num_tokens;
       token += gridDim.x * at_once) {
    const int64_t expert = lane < width ? k.args.topk_idx[uint64_t{token} * width + lane] : -1;
    const uint64_t ranks = ranks_of(k.g, expert, width) & ~k.masked;
    for (uint32_t first = 0; first < kMaxGpuRanks; first += kSlotPlaces) {
      const auto left = static_cast<uint32_t>(ranks >> first);
      if (left == 0) continue;
      for (uint32_t i = lane; i < kSlotPlaces; i += kWarp)
        if ((left >> i & 1) != 0) places[i] = k.row(first + i, k.g.rank, token);
      __syncwarp();
      const uint32_t own = __ffs(static_cast<int>(left)) - 1;
      send_part(k.args.stage, token, warp % kRowParts, {places[own], left & (left - 1), places}, lane);
      __syncwarp();
    }
  }
  k.crew.sync();
  for (uint32_t i = k.crew.thread; i < k.g.map.num_ranks; i += k.crew.size)
    publish(at(k.g, rotated(k.g, i), k.map().rows_full) + k.g.rank * kMaxSlotBlocks + blockIdx.x, k.number);
}

__device__ inline bool send(Dispatch k, SlotPlaces& shared) {
  if (!wait_free(k, k.map().rows_read)) return false;
  if (!send_headers(k, k.map().routing_full, [&](uint32_t to) { return send_routing(k, to); })) return false;
  send_rows(k, shared);
  if (k.crew.thread == 0) end_slots(k, Phase::kSlotsSent, k.state().sent);
  return true;
}

// ---- receive --------------------------------------------------------------------------------------------------------
// In dynamic shared memory: which tokens of a source an expert of ours gets, and where the source's slots begin.
struct SlotTable {
  uint32_t ranks, words;  // words of kTileTokens tokens
  Mask* tokens;  // [L][ranks][words]
  uint32_t* begin;  // [L][ranks]
  uint32_t *num_tokens, *num_blocks;  // [ranks]

  static uint64_t bytes(const DeviceMap& map) {
    const uint32_t words = (map.low_latency.tokens + kTileTokens - 1) / kTileTokens;
    return uint64_t{map.num_experts} * (words * sizeof(Mask) + sizeof(uint32_t)) + 2 * sizeof(uint32_t) * map.num_ranks;
  }
  __device__ SlotTable(const Group& g, uint8_t* shared)
      : ranks(g.map.num_ranks),
        words((g.map.low_latency.tokens + kTileTokens - 1) / kTileTokens),
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

// By a crew, when all headers have come.
__device__ inline void fill_table(const Dispatch& k, const SlotTable& table) {
  const uint32_t experts = k.g.experts_per_rank, ranks = table.ranks, width = k.args.width;
  for (uint32_t i = k.crew.thread; i < experts * ranks * table.words; i += k.crew.size) table.tokens[i] = 0;
  for (uint32_t r = k.crew.thread; r < ranks; r += k.crew.size) {
    table.num_tokens[r] = k.is_masked(r) ? 0 : k.header(k.g.rank, r).num_tokens;
    table.num_blocks[r] = k.header(k.g.rank, r).num_blocks;
  }
  k.crew.sync();
  constexpr uint32_t kAhead = 4;  // entries that a thread loads at a time
  const uint32_t most = k.map().tokens * width;
  for (uint32_t begin = k.crew.thread; begin < ranks * most; begin += kAhead * k.crew.size) {
    uint32_t found[kAhead];
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u) {
      const uint32_t i = begin + u * k.crew.size, source = i / most, place = i % most;
      const bool there = i < ranks * most && place / width < table.num_tokens[source];
      found[u] = there ? local_expert(k.g, k.routing(k.g.rank, source)[place]) : kNoExpert;
    }
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u) {
      if (found[u] >= experts) continue;
      const uint32_t i = begin + u * k.crew.size, token = i % most / width;
      or_shared(reinterpret_cast<uint32_t*>(table.of(found[u], i / most)) + token / 32, 1u << token % 32);
    }
  }
  k.crew.sync();
  for (uint32_t expert = k.crew.thread; expert < experts; expert += k.crew.size) {
    uint32_t before = 0;
    for (uint32_t s = 0; s < ranks; ++s) {
      table.begin[expert * ranks + s] = before;
      const uint32_t count = table.count(expert, s);
      if (blockIdx.x == 0) k.args.ranges[expert * ranks + s] = static_cast<int64_t>(uint64_t{before} << 32 | count);
      before += count;
    }
    if (blockIdx.x != 0) continue;
    k.args.counts[expert] = static_cast<int32_t>(before);
    if (k.args.total_counts != nullptr) k.args.total_counts[expert] += static_cast<int32_t>(before);
  }
  k.crew.sync();
}

// By a warp: the scales of a row, for one slot of an expert. Neighbouring slots lie beside each other.
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
__device__ inline bool place_slots(const Dispatch& k, const SlotTable& table, SlotPlaces& shared) {
  const uint32_t lane = threadIdx.x % kWarp, width = k.args.width, ranks = table.ranks;
  const uint32_t slots = ranks * k.map().tokens, out_bytes = k.args.stage.row.code_bytes;
  uint8_t** const places = shared.of[threadIdx.x / kWarp];
  for (uint32_t i = k.warp(); i < slots * kPlaceParts; i += k.warps()) {
    const uint32_t part = i / slots, source = rotated(k.g, i % slots % ranks), token = i % slots / ranks;
    if (token >= table.num_tokens[source]) continue;
    const uint32_t place = token * width + lane;
    const uint32_t expert = lane < width ? local_expert(k.g, k.routing(k.g.rank, source)[place]) : kNoExpert;
    const bool mine = expert < k.g.experts_per_rank;
    const LaneMask wants = ballot(mine);
    if (wants == 0) continue;
    uint64_t slot = 0;
    if (mine) {
      slot = uint64_t{expert} * slots + table.slot(expert, source, token);
      if (part == 0) {
        k.args.source_tokens[slot] = static_cast<int32_t>(token);
        k.args.origins[slot] = SlotOrigin::of(source, place).word;
      }
      places[__popcll(wants & ((LaneMask{1} << lane) - 1))] = k.args.rows + slot * out_bytes;
    }
    const uint32_t block = token % table.num_blocks[source];
    const DeviceFlag<SlotRowsFull>* const full = own_part(k.g, k.map().rows_full) + source * kMaxSlotBlocks + block;
    const bool good = lane != 0 || wait_flag(k.g, {full, k.number, source, static_cast<int>(token)});
    if (!__all_sync(kFullWarp, good)) return false;
    __syncwarp();  // orders what the lanes have written and read before what any of them reads
    const uint8_t* const row = k.row(k.g.rank, source, token);
    const uint32_t others = static_cast<uint32_t>((uint64_t{1} << __popcll(wants)) - 1) & ~1u;
    const uint32_t vectors = out_bytes / 16, of_part = (vectors + kPlaceParts - 1) / kPlaceParts;
    copy_row<8>(reinterpret_cast<const uint4*>(row), {places[0], others, places}, min((part + 1) * of_part, vectors),
                lane, part * of_part);
    if (k.args.scales != nullptr && part == kPlaceParts - 1)
      for (LaneMask left = wants; left != 0; left &= left - 1) {
        const uint64_t its = __shfl_sync(kFullWarp, slot, lowest_lane(left));
        put_scales(k, row, static_cast<uint32_t>(its / slots), static_cast<uint32_t>(its % slots), lane);
      }
    __syncwarp();
  }
  return true;
}

// By block 0, where ranks may be masked: waits for all that comes.
__device__ inline bool wait_rows(const Dispatch& k, RankSet& gone) {
  bool good = true;
  for (uint32_t r = k.crew.thread; r < k.g.map.num_ranks; r += k.crew.size)
    if (!gone.has(r)) good &= note_missing(k, own_part(k.g, k.map().routing_full) + r, r, gone);
  if (!k.crew.all(good)) return false;
  for (uint32_t i = k.crew.thread; i < k.g.map.num_ranks * kMaxSlotBlocks; i += k.crew.size) {
    const uint32_t r = i / kMaxSlotBlocks, block = i % kMaxSlotBlocks;
    if (gone.has(r) || block >= k.header(k.g.rank, r).num_blocks) continue;
    good &= note_missing(k, own_part(k.g, k.map().rows_full) + i, r, gone);
  }
  return good;
}

__device__ inline bool receive(Dispatch k, uint8_t* dynamic, SlotPlaces& shared) {
  if (!settle(k, [&](RankSet& gone) { return wait_rows(k, gone); })) return false;
  if (!wait_headers(k, k.map().routing_full)) return false;
  const SlotTable table(k.g, dynamic);
  fill_table(k, table);
  if (!k.crew.all(place_slots(k, table, shared))) return false;
  end_receive(k, Phase::kSlotsReceived, k.map().rows_read);
  return true;
}

__global__ void __launch_bounds__(kSlotThreads, 1)
    low_latency_dispatch(const __grid_constant__ Group g, const __grid_constant__ SlotDispatchArgs args) {
  UCCL_EP_DYNAMIC_SHARED(dynamic);
  __shared__ SlotPlaces places;
  // Half of the warps do each, side by side; in a launch of one phase all do.
  constexpr uint32_t kHalf = kSlotWarps / 2;
  const bool both = args.phase == SlotPhase::kBoth;
  const bool sends = both ? threadIdx.x < kHalf * kWarp : args.phase == SlotPhase::kSend;
  const Crew crew = !both ? Crew::of(1, 0, kSlotWarps) : sends ? Crew::of(1, 0, kHalf) : Crew::of(2, kHalf, kHalf);
  const Dispatch k = begin_slots(g, args, SlotKind::kDispatch, crew, sends);
  if (sends) {
    send(k, places);
    return;
  }
  // After an error nothing is valid: neither here, nor in a block that is through before another finds one.
  if (!receive(k, dynamic, places) || stopped(g))
    for (uint32_t i = k.crew.thread; i < g.experts_per_rank; i += k.crew.size) args.counts[i] = 0;
}

}  // namespace

uint32_t slot_table_bytes(const DeviceMap& map) { return static_cast<uint32_t>(SlotTable::bytes(map)); }

Status load_low_latency_dispatch(uint32_t shared_bytes) { return load_all(shared_bytes, low_latency_dispatch); }

Status launch_low_latency(const Group& group, const SlotDispatchArgs& args, uint32_t num_sms, StreamHandle stream) {
  const uint32_t shared_bytes = args.phase == SlotPhase::kSend ? 0 : slot_table_bytes(group.map);
  launch_kernel(low_latency_dispatch, {num_sms, kSlotThreads, shared_bytes, stream}, group, args);
  return launch_status();
}

}  // namespace uccl_ep::gpu
