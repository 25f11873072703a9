// Exchange: every rank writes, once, what its routing means for each destination; peers pull it.
//
// A block routes whole tiles of kTileTokens tokens, neighbouring ones. First every tile's counts go to memory: pairs by
// expert, rows and pairs by destination, all pairs, all rows. When all blocks have counted, each adds up the tiles
// before its own, so that positions count tokens in their order.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {

using Mask = unsigned long long;  // a bit per token of a tile

// A tile in shared memory, number `number` of those that the block has there.
struct Tile {
  Mask* expert;  // [experts] tokens that have it
  Mask* destination;  // [ranks] tokens that go there
  uint32_t* pairs_to;  // [tokens][ranks] pairs of the token
  uint32_t* slot_begin;  // [tokens][ranks] pairs of earlier tokens
  uint32_t* num_pairs;  // [tokens]
  uint32_t* num_ranks;  // [tokens]; in write_tile pieces of earlier tokens
  // What lies before it; carried from tile to tile, one place for all.
  uint32_t* expert_base;  // [experts]
  uint32_t* row_base;  // [ranks]
  uint32_t* pair_base;  // [ranks]
  uint32_t* pair_begin;  // [ranks] of all tiles: pairs for lower ranks
  uint32_t* row_total;  // [ranks] of all tiles
  uint32_t* all;  // [2] pairs of all tiles, pieces before it

  static __host__ __device__ uint32_t carried_bytes(uint32_t experts, uint32_t ranks) {
    return round_up(4 * (experts + 4 * ranks + 2), 8);
  }
  static __host__ __device__ uint32_t own_bytes(uint32_t experts, uint32_t ranks) {
    return 8 * (experts + ranks) + 4 * kTileTokens * (2 * ranks + 2);
  }
  __device__ Tile(uint8_t* shared, uint32_t experts, uint32_t ranks, uint32_t number)
      : expert(reinterpret_cast<Mask*>(shared + carried_bytes(experts, ranks) + number * own_bytes(experts, ranks))),
        destination(expert + experts),
        pairs_to(reinterpret_cast<uint32_t*>(destination + ranks)),
        slot_begin(pairs_to + kTileTokens * ranks),
        num_pairs(slot_begin + kTileTokens * ranks),
        num_ranks(num_pairs + kTileTokens),
        expert_base(reinterpret_cast<uint32_t*>(shared)),
        row_base(expert_base + experts),
        pair_base(row_base + ranks),
        pair_begin(pair_base + ranks),
        row_total(pair_begin + ranks),
        all(row_total + ranks) {}
};

// What is counted of a tile, in memory.
struct TileCounts {
  uint32_t *expert, *rows_to, *pairs_to, *pairs, *rows;
  __device__ TileCounts(const Domain& d, uint32_t tile)
      : expert(at<uint32_t>(d, d.rank, d.at.tile_counts) +
               uint64_t{tile} * (d.at.num_experts + 2 * d.at.num_ranks + 2)),
        rows_to(expert + d.at.num_experts),
        pairs_to(rows_to + d.at.num_ranks),
        pairs(pairs_to + d.at.num_ranks),
        rows(pairs + 1) {}
};

// A pair of token and expert, as one lane sees it, and what its token has besides.
struct Pair {
  uint32_t token;  // of the tile
  uint32_t column;  // of the caller's routing
  uint32_t expert, to;  // `to`: the expert's rank
  uint32_t same;  // pairs of the token for that rank
  uint32_t same_lower;  // of them, with a lower expert
  uint32_t ranks_lower;  // lower ranks that the token goes to
};

__device__ inline bool good_expert(const Domain& d, long long expert, uint32_t token) {
  if (expert >= 0 && expert < d.at.num_experts) return true;
  report(d, DeviceFault::kExpertRange, Step::kExchange, static_cast<int>(d.rank), static_cast<int>(token),
         d.at.num_experts, static_cast<uint64_t>(expert), ErrorKind::kPeerFailed);
  return false;
}

// Calls visit(pair) for the pairs of a tile whose tokens are `first` to `first + count`, by the lanes of a crew. A
// token's columns lie in neighbouring lanes, as many as its K rounded up to a power of two.
template <typename Visit>
__device__ __forceinline__ void visit_topk(const Crew& crew, const Domain& d, const DeviceRouting& r, uint32_t first,
                                           uint32_t count, Visit visit) {
  uint32_t group = 1;
  while (group < r.width) group *= 2;
  const uint32_t per_warp = kWarp / group, lane = crew.lane(), column = lane % group;
  for (uint32_t begin = crew.warp() * per_warp; begin < count; begin += crew.warps() * per_warp) {
    const uint32_t token = begin + lane / group;
    long long expert = -1;
    if (token < count && column < r.width)
      expert = static_cast<const long long*>(r.data)[uint64_t{first + token} * r.width + column];
    if (expert != -1 && !good_expert(d, expert, first + token)) expert = -1;
    const int own = static_cast<int>(expert);
    const int to = own < 0 ? -1 : static_cast<int>(own / d.experts_per_rank);
    Pair pair{token, column, static_cast<uint32_t>(own), static_cast<uint32_t>(to), 0, 0, 0};
    bool twice = false;
    for (uint32_t i = 0; i < r.width; ++i) {
      const int other = __shfl_sync(kFullWarp, own, i, group), other_to = __shfl_sync(kFullWarp, to, i, group);
      if (other < 0) continue;
      twice |= other == own && i != column;
      pair.same += other_to == to;
      pair.same_lower += other_to == to && other < own;
    }
    const bool leads = own >= 0 && pair.same_lower == 0;
    for (uint32_t i = 0; i < r.width; ++i) {
      const int leader_to = __shfl_sync(kFullWarp, leads ? to : -1, i, group);
      pair.ranks_lower += leader_to >= 0 && leader_to < to;
    }
    if (own < 0) continue;
    if (twice)
      report(d, DeviceFault::kExpertTwice, Step::kExchange, static_cast<int>(d.rank), static_cast<int>(first + token),
             1, static_cast<uint64_t>(own), ErrorKind::kPeerFailed);
    visit(pair);
  }
}
// The same for a map, a warp per token. `pairs_to` of the tile must be known if `counted`.
template <typename Visit>
__device__ __forceinline__ void visit_map(const Crew& crew, const Domain& d, const DeviceRouting& r, const Tile& tile,
                                          bool counted, uint32_t first, uint32_t count, Visit visit) {
  const uint32_t lane = crew.lane(), ranks = d.at.num_ranks;
  for (uint32_t token = crew.warp(); token < count; token += crew.warps()) {
    const uint8_t* const row = static_cast<const uint8_t*>(r.data) + uint64_t{first + token} * r.width;
    uint32_t before = 0;  // experts of the token in earlier columns
    for (uint32_t begin = 0; begin < r.width; begin += kWarp) {
      const uint32_t expert = begin + lane;
      const bool has = expert < r.width && row[expert] != 0;
      const uint32_t all = __ballot_sync(kFullWarp, has);
      if (has) {
        Pair pair{token, expert, expert, expert / d.experts_per_rank, 0, 0, 0};
        if (counted) {
          pair.same = tile.pairs_to[token * ranks + pair.to];
          pair.same_lower = before + __popc(all & ((1u << lane) - 1));
          for (uint32_t to = 0; to < pair.to; ++to) {
            const uint32_t theirs = tile.pairs_to[token * ranks + to];
            pair.same_lower -= theirs;
            pair.ranks_lower += theirs != 0;
          }
        }
        visit(pair);
      }
      before += __popc(all);
    }
  }
}

// By a crew: the tile's masks and counts, from the caller's routing.
__device__ inline void read_tile(const Crew& crew, const Domain& d, const DeviceRouting& r, const Tile& tile,
                                 uint32_t first, uint32_t count) {
  const uint32_t ranks = d.at.num_ranks;
  for (uint32_t i = crew.thread; i < d.at.num_experts + ranks; i += crew.size) tile.expert[i] = 0;
  for (uint32_t i = crew.thread; i < kTileTokens * ranks; i += crew.size) tile.pairs_to[i] = 0;
  crew.sync();
  const auto mark = [&](const Pair& p) {
    or_shared(reinterpret_cast<uint32_t*>(&tile.expert[p.expert]) + p.token / 32, 1u << p.token % 32);
  };
  if (r.is_map)
    visit_map(crew, d, r, tile, false, first, count, [&](const Pair& p) {
      mark(p);
      add_shared(&tile.pairs_to[p.token * ranks + p.to], 1);
    });
  else
    visit_topk(crew, d, r, first, count, [&](const Pair& p) {
      mark(p);
      if (p.same_lower == 0) tile.pairs_to[p.token * ranks + p.to] = p.same;
    });
  crew.sync();
  // A warp per destination: its tokens, and the pairs of earlier tokens.
  const uint32_t lane = crew.lane();
  for (uint32_t to = crew.warp(); to < ranks; to += crew.warps()) {
    const uint32_t low = tile.pairs_to[lane * ranks + to], high = tile.pairs_to[(lane + kWarp) * ranks + to];
    const uint32_t low_mask = __ballot_sync(kFullWarp, low != 0), high_mask = __ballot_sync(kFullWarp, high != 0);
    if (lane == 0) tile.destination[to] = Mask{high_mask} << 32 | low_mask;
    const uint32_t low_end = warp_prefix(low, lane), low_total = __shfl_sync(kFullWarp, low_end, kWarp - 1);
    tile.slot_begin[lane * ranks + to] = low_end - low;
    tile.slot_begin[(lane + kWarp) * ranks + to] = low_total + warp_prefix(high, lane) - high;
  }
  for (uint32_t t = crew.thread; t < kTileTokens; t += crew.size) {
    uint32_t sum = 0, reached = 0;
    for (uint32_t to = 0; to < ranks; ++to) {
      sum += tile.pairs_to[t * ranks + to];
      reached += tile.pairs_to[t * ranks + to] != 0;
    }
    tile.num_pairs[t] = sum;
    tile.num_ranks[t] = reached;
  }
  crew.sync();
}

__device__ inline uint32_t pairs_of_tile(const Domain& d, const Tile& tile, uint32_t to) {
  const uint32_t last = (kTileTokens - 1) * d.at.num_ranks + to;
  return tile.slot_begin[last] + tile.pairs_to[last];
}

__device__ inline void count_tile(const Crew& crew, const Domain& d, const Tile& tile, const TileCounts& out) {
  for (uint32_t e = crew.thread; e < d.at.num_experts; e += crew.size) out.expert[e] = __popcll(tile.expert[e]);
  for (uint32_t to = crew.thread; to < d.at.num_ranks; to += crew.size) {
    out.rows_to[to] = __popcll(tile.destination[to]);
    out.pairs_to[to] = pairs_of_tile(d, tile, to);
  }
  if (crew.warp() == 0) {
    const uint32_t lane = crew.lane();
    const uint32_t pairs = warp_prefix(tile.num_pairs[lane] + tile.num_pairs[lane + kWarp], lane);
    const uint32_t rows = warp_prefix(tile.num_ranks[lane] + tile.num_ranks[lane + kWarp], lane);
    if (lane == kWarp - 1) {
      *out.pairs = pairs;
      *out.rows = rows;
    }
  }
}

// One number of the tiles before a tile, and of all.
struct Before {
  uint32_t here = 0, total = 0;
};
// By one thread: of `kNumbers` numbers, `apart` from each other.
template <uint32_t kNumbers>
__device__ __forceinline__ void add_up(const Domain& d, uint32_t number, uint32_t apart, uint32_t tile,
                                       uint32_t num_tiles, Before (&sums)[kNumbers]) {
  constexpr uint32_t kBatch = 16;  // tiles whose counts are loaded at a time
  const uint32_t stride = d.at.num_experts + 2 * d.at.num_ranks + 2;
  const uint32_t* const counts = at<uint32_t>(d, d.rank, d.at.tile_counts) + number;
  for (uint32_t begin = 0; begin < num_tiles; begin += kBatch) {
    uint32_t value[kNumbers][kBatch];
#pragma unroll
    for (uint32_t n = 0; n < kNumbers; ++n)
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u)
        value[n][u] = begin + u < num_tiles && number + n * apart < stride
                          ? __ldcg(counts + n * apart + uint64_t{begin + u} * stride)
                          : 0;
#pragma unroll
    for (uint32_t n = 0; n < kNumbers; ++n)
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u) {
        sums[n].total += value[n][u];
        if (begin + u < tile) sums[n].here += value[n][u];
      }
  }
}

// By a crew: what lies before the block's first tile; block 0 writes the totals into the header. False: too many pairs.
__device__ inline bool begin_tiles(const Crew& crew, const Domain& d, const Op& op, const Tile& tile,
                                   uint32_t first_tile, uint32_t num_tiles, uint32_t& pieces) {
  const uint32_t ranks = d.at.num_ranks, experts = d.at.num_experts;
  DeviceHeader& head = header(d, d.rank, op.epoch);
  const bool writes_totals = blockIdx.x == 0;
  const uint32_t numbers = experts + 2 * ranks + 2;
  constexpr uint32_t kNumbers = 2;
  for (uint32_t first = crew.thread; first < numbers; first += kNumbers * crew.size) {
    Before sums[kNumbers];
    add_up(d, first, crew.size, first_tile, num_tiles, sums);
#pragma unroll
    for (uint32_t n = 0; n < kNumbers; ++n) {
      const uint32_t i = first + n * crew.size;
      if (i < experts + 2 * ranks) tile.expert_base[i] = sums[n].here;  // then row_base, pair_base
      if (writes_totals && i < experts) header_counts(d, d.rank, op.epoch)[i] = sums[n].total;
      if (i >= experts && i < experts + ranks) tile.row_total[i - experts] = sums[n].total;
      if (i >= experts + ranks && i < experts + 2 * ranks) tile.pair_begin[i - experts - ranks] = sums[n].total;
      if (i == numbers - 2) tile.all[0] = sums[n].total;
      if (i == numbers - 1) tile.all[1] = sums[n].here;
    }
  }
  crew.sync();
  if (crew.thread == 0) {
    uint32_t row_sum = 0, pair_sum = 0;
    for (uint32_t to = 0; to < ranks; ++to) {
      if (writes_totals) {
        head.row_begin[to] = row_sum;
        head.pair_begin[to] = pair_sum;
      }
      row_sum += tile.row_total[to];
      const uint32_t mine = tile.pair_begin[to];
      tile.pair_begin[to] = pair_sum;
      pair_sum += mine;
    }
    if (writes_totals) {
      head.row_begin[ranks] = row_sum;
      head.pair_begin[ranks] = pair_sum;
    }
  }
  const uint32_t num_pairs = tile.all[0];
  pieces = tile.all[1];
  if (num_pairs > d.at.max_pairs && crew.thread == 0)
    report(d, DeviceFault::kTooManyPairs, Step::kExchange, static_cast<int>(d.rank), -1, d.at.max_pairs, num_pairs,
           ErrorKind::kPeerFailed);
  return crew.all(num_pairs <= d.at.max_pairs);
}

// A routing's hash is the sum of its pairs' (splitmix64's mixing function).
__device__ __forceinline__ uint64_t hash_pair(uint32_t place, uint32_t expert) {
  uint64_t z = (uint64_t{place} << 32 | expert) + 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

// By a crew: lists, pairs and values of a tile; returns this thread's part of the hash.
__device__ inline uint64_t write_tile(const Crew& crew, const Domain& d, const Op& op, const DeviceRouting& r,
                                      const Tile& tile, uint32_t first, uint32_t count, uint32_t pieces) {
  const uint32_t ranks = d.at.num_ranks, lane = crew.lane();
  uint32_t* const token_pieces = at<uint32_t>(d, d.rank, d.at.token_pieces);
  uint32_t* const origin = at<uint32_t>(d, d.rank, d.at.pair_origin);
  if (crew.warp() == 0) {  // num_ranks becomes the pieces of earlier tokens
    const uint32_t low = tile.num_ranks[lane], high = tile.num_ranks[lane + kWarp];
    const uint32_t low_end = warp_prefix(low, lane), low_total = __shfl_sync(kFullWarp, low_end, kWarp - 1);
    tile.num_ranks[lane] = pieces + low_end - low;
    tile.num_ranks[lane + kWarp] = pieces + low_total + warp_prefix(high, lane) - high;
    if (lane < kTileTokens / kChunkTokens)
      chunk_pieces(d, d.rank, op.half)[first / kChunkTokens + lane] = pieces + (lane == 0 ? 0 : low_total);
  }
  static_assert(kChunkTokens == kWarp && kTileTokens == 2 * kWarp);
  for (uint32_t to = crew.thread; to < ranks; to += crew.size)
    for (uint32_t c = 0; c < kTileTokens / kChunkTokens; ++c)
      chunk_rows(d, d.rank, op.half, to)[first / kChunkTokens + c] =
          tile.row_base[to] + (c == 0 ? 0 : __popc(static_cast<uint32_t>(tile.destination[to])));
  crew.sync();
  for (uint32_t t = crew.thread; t < count; t += crew.size) token_pieces[first + t] = tile.num_ranks[t];
  uint64_t hash = 0;
  const auto write = [&](const Pair& p) {
    const Mask below = (Mask{1} << p.token) - 1;
    const uint32_t first_slot = tile.pair_base[p.to] + tile.slot_begin[p.token * ranks + p.to];
    const uint32_t number = tile.pair_begin[p.to] + first_slot + p.same_lower;
    const uint32_t place = (first + p.token) * r.width + p.column;
    pairs(d, d.rank, op.half)[number] = {p.expert - p.to * d.experts_per_rank,
                                         tile.expert_base[p.expert] + __popcll(tile.expert[p.expert] & below)};
    origin[number] = place;
    if (r.values != nullptr) values(d, d.rank, op.half)[number] = r.values[place];
    hash += hash_pair(place, p.expert);
    if (p.same_lower != 0) return;
    list(d, d.rank, op.half, p.to)[tile.row_base[p.to] + __popcll(tile.destination[p.to] & below)] = {
        first + p.token, first_slot, tile.num_ranks[p.token] + p.ranks_lower, p.same};
  };
  if (r.is_map)
    visit_map(crew, d, r, tile, true, first, count, write);
  else
    visit_topk(crew, d, r, first, count, write);
  crew.sync();
  // On to the next tile.
  for (uint32_t e = crew.thread; e < d.at.num_experts; e += crew.size) tile.expert_base[e] += __popcll(tile.expert[e]);
  for (uint32_t to = crew.thread; to < ranks; to += crew.size) {
    tile.row_base[to] += __popcll(tile.destination[to]);
    tile.pair_base[to] += pairs_of_tile(d, tile, to);
  }
  return hash;
}

// By a crew, one of each block: the routing of all our tokens. Shared memory has room for `kept` tiles; if a block has
// more, each is read twice. False: an error is known.
__device__ inline bool route(const Crew& crew, const Domain& d, const Op& op, const DeviceRouting& r,
                             uint32_t num_tokens, uint32_t kept, uint8_t* shared) {
  const uint32_t num_tiles = (num_tokens + kTileTokens - 1) / kTileTokens;
  const uint32_t per_block = (num_tiles + gridDim.x - 1) / gridDim.x;
  const uint32_t first_tile = min(blockIdx.x * per_block, num_tiles), end_tile = min(first_tile + per_block, num_tiles);
  const auto tokens_of = [&](uint32_t t) { return min(kTileTokens, num_tokens - t * kTileTokens); };
  const auto tile_of = [&](uint32_t t) {
    return Tile(shared, d.at.num_experts, d.at.num_ranks, kept >= per_block ? t - first_tile : 0);
  };
  for (uint32_t t = first_tile; t < end_tile; ++t) {
    const Tile tile = tile_of(t);
    read_tile(crew, d, r, tile, t * kTileTokens, tokens_of(t));
    count_tile(crew, d, tile, TileCounts(d, t));
    crew.sync();
  }
  // All blocks run at the same time: no more than the buffer has SMs.
  if (last_block(crew, d, Arrival::kCounted, gridDim.x) && crew.thread == 0)
    publish_in_gpu(&local(d).counted, op.epoch);
  bool good = crew.thread != 0 || wait_flag(d, &local(d).counted, op.epoch, Step::kExchange, d.rank);
  if (!crew.all(good)) return false;
  uint32_t pieces = 0;
  if (!begin_tiles(crew, d, op, tile_of(first_tile), first_tile, num_tiles, pieces)) return false;
  uint64_t hash = 0;
  for (uint32_t t = first_tile; t < end_tile; ++t) {
    const Tile tile = tile_of(t);
    if (kept < per_block) read_tile(crew, d, r, tile, t * kTileTokens, tokens_of(t));
    uint32_t own_pieces = 0;
    for (uint32_t i = 0; i < kTileTokens; ++i) own_pieces += tile.num_ranks[i];
    crew.sync();
    hash += write_tile(crew, d, op, r, tile, t * kTileTokens, tokens_of(t), pieces);
    pieces += own_pieces;
    crew.sync();
  }
  if (crew.thread == 0 && end_tile == num_tiles && (first_tile < end_tile || blockIdx.x == 0)) {
    // The block with the last tile, or the first if there is none.
    at<uint32_t>(d, d.rank, d.at.token_pieces)[num_tokens] = pieces;
    const uint32_t chunks = (num_tokens + kChunkTokens - 1) / kChunkTokens;
    chunk_pieces(d, d.rank, op.half)[chunks] = pieces;
    for (uint32_t to = 0; to < d.at.num_ranks; ++to)
      chunk_rows(d, d.rank, op.half, to)[chunks] = tile_of(first_tile).row_base[to];
  }
  hash = crew_sum(crew, hash);
  if (crew.thread == 0) local(d).block_hash[blockIdx.x] = hash;
  return !stopped(d);
}

}  // namespace uccl_ep::cuda
