// Tiles: the routing of kTileTokens neighbouring tokens, as masks and counts in shared memory. A block works on several
// tiles together, because each is a chain of latencies. Most instructions run once or twice in a kernel, so fetching
// them counts: loops are unrolled neither here nor in exchange.cuh.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/steps.h"

namespace uccl_ep::gpu {

using Mask = unsigned long long;  // a bit per token of a tile

// Where our packet for a domain is written.
struct PacketPlace {
  ListEntry* lists;
  PairEntry* pairs;
  float* weights;
  uint32_t *token_block_rows, *token_block_pieces, *token_block_streams, *stream_pieces;
};

// A tile in shared memory, number `number` of those that the block has there.
struct Tile {
  Mask* expert;  // [experts] tokens that have it
  Mask* destination;  // [ranks] tokens that go there
  Mask* stream;  // [domains] tokens that go there
  uint32_t* pairs_to;  // [tokens][ranks] pairs of the token
  uint32_t* pairs_before;  // [tokens][ranks] pairs of earlier tokens
  uint32_t* pieces;  // [domains][tokens] pieces of earlier tokens of the tile
  uint32_t* named;  // [tokens][words] of a map: the experts of a token, as the caller names them, a bit each
  // What lies before it.
  uint32_t* expert_base;  // [experts]
  uint32_t* row_base;  // [ranks]
  uint32_t* stream_base;  // [domains]
  uint32_t* pair_base;  // [ranks]
  uint32_t* piece_base;  // [domains]
  // The same for all tiles of the block.
  PacketPlace* packet;  // [domains]
  uint32_t* row_begin;  // [ranks] of all tiles: rows for lower members of the domain
  uint32_t* pair_begin;  // [ranks + 1] of all tiles: pairs for lower ranks
  uint32_t* stream_total;  // [domains] of all tiles: tokens that go there

  __device__ Tile(uint8_t* shared, const DeviceMap& map, uint32_t number)
      : expert(reinterpret_cast<Mask*>(shared + common_tile_bytes(map) + number * own_tile_bytes(map))),
        destination(expert + map.num_experts),
        stream(destination + map.num_ranks),
        pairs_to(reinterpret_cast<uint32_t*>(stream + map.num_domains)),
        pairs_before(pairs_to + kTileTokens * map.num_ranks),
        pieces(pairs_before + kTileTokens * map.num_ranks),
        named(pieces + kTileTokens * map.num_domains),
        expert_base(named + kTileTokens * named_words(map.num_experts)),
        row_base(expert_base + map.num_experts),
        stream_base(row_base + map.num_ranks),
        pair_base(stream_base + map.num_domains),
        piece_base(pair_base + map.num_ranks),
        packet(reinterpret_cast<PacketPlace*>(shared)),
        row_begin(reinterpret_cast<uint32_t*>(packet + map.num_domains)),
        pair_begin(row_begin + map.num_ranks),
        stream_total(pair_begin + map.num_ranks + 1) {}
};
static_assert(sizeof(PacketPlace) == kPacketPlaceBytes);

// Neighbouring tiles of a block, the first ones of its shared memory.
struct Tiles {
  uint8_t* shared;
  const DeviceMap& map;
  uint32_t first, count;  // tokens

  __device__ __forceinline__ uint32_t size() const { return (count + kTileTokens - 1) / kTileTokens; }
  __device__ __forceinline__ Tile tile(uint32_t number) const { return {shared, map, number}; }
  // The tile of token `token`, where it is number `token % kTileTokens`.
  __device__ __forceinline__ Tile with(uint32_t token) const { return tile(token / kTileTokens); }
};

// Counts of a tile, in device memory: numbers of tokens, a byte each, and then words. All but the last are added up
// over tiles.
struct TileCounts {
  uint8_t *expert, *rows_to, *stream;
  uint32_t *pairs_to, *most_pieces;
  __device__ TileCounts(const Group& g, uint32_t tile)
      : expert(reinterpret_cast<uint8_t*>(own_part(g, g.map.tile_counts) + uint64_t{tile} * tile_words(g.map))),
        rows_to(expert + g.map.num_experts),
        stream(rows_to + g.map.num_ranks),
        pairs_to(reinterpret_cast<uint32_t*>(expert) + tile_token_words(g.map)),
        most_pieces(pairs_to + g.map.num_ranks) {}
};
static_assert(kTileTokens < 256);

// A pair of token and expert, as one lane sees it, and what is known of the token's other pairs.
struct Pair {
  uint32_t token;  // of those given
  uint32_t column;  // of the caller's routing
  uint32_t named;  // expert, as the caller names it
  uint32_t expert, to;  // as kernels number it; `to`: its rank
  uint32_t same;  // pairs of the token for that rank
  uint32_t same_lower;  // of them, with a lower expert
  uint32_t ranks_lower;  // lower ranks of that domain that the token goes to
};

__device__ inline bool good_expert(const Group& g, long long expert, uint32_t token) {
  if (expert >= 0 && expert < g.map.num_experts) return true;
  report(g, {DeviceFault::kExpertRange, ErrorKind::kPeerFailed, Step::kExchange, g.rank, static_cast<int>(token),
             g.map.num_experts, static_cast<uint64_t>(expert)});
  return false;
}

// Number of the rank that has the caller's expert `expert`.
__device__ __forceinline__ uint32_t rank_of(const Group& g, uint32_t expert) {
  return number_of(g, expert / g.experts_per_rank);
}
__device__ __forceinline__ uint32_t expert_number(const Group& g, uint32_t expert, uint32_t rank) {
  return rank * g.experts_per_rank + expert % g.experts_per_rank;
}

// Calls visit(pair) for the pairs of tokens `first` to `first + count`, by the lanes of a crew. A token's columns lie
// in neighbouring lanes, as many as its K rounded up to a power of two. False: this lane saw an invalid routing.
template <typename Visit>
__device__ __forceinline__ bool visit_topk(const Crew& crew, const Group& g, const DeviceRouting& r, uint32_t first,
                                           uint32_t count, Visit visit) {
  uint32_t group = 1;
#pragma unroll 1
  while (group < r.width) group *= 2;
  const uint32_t per_warp = kWarp / group, lane = crew.lane(), column = lane % group;
  bool good = true;
#pragma unroll 1
  for (uint32_t begin = crew.warp() * per_warp; begin < count; begin += crew.warps() * per_warp) {
    const uint32_t token = begin + lane / group;
    long long expert = -1;
    if (token < count && column < r.width)
      expert = static_cast<const long long*>(r.data)[uint64_t{first + token} * r.width + column];
    if (expert != -1 && !good_expert(g, expert, first + token)) {
      expert = -1;
      good = false;
    }
    const int own = static_cast<int>(expert);
    const int to = own < 0 ? -1 : static_cast<int>(rank_of(g, own));
    const int first_member = own < 0 ? 0 : first_of(g, domain_of(g, to));
    Pair pair{token, column, static_cast<uint32_t>(own), 0, static_cast<uint32_t>(to), 0, 0, 0};
    if (own >= 0) pair.expert = expert_number(g, own, to);
    bool twice = false;
#pragma unroll 1
    for (uint32_t i = 0; i < r.width; ++i) {
      const int other = __shfl_sync(kFullWarp, own, i, group), other_to = __shfl_sync(kFullWarp, to, i, group);
      if (other < 0) continue;
      twice |= other == own && i != column;
      pair.same += other_to == to;
      pair.same_lower += other_to == to && other < own;
    }
    const bool leads = own >= 0 && pair.same_lower == 0;
#pragma unroll 1
    for (uint32_t i = 0; i < r.width; ++i) {
      const int leader_to = __shfl_sync(kFullWarp, leads ? to : -1, i, group);
      pair.ranks_lower += leader_to >= first_member && leader_to < to;
    }
    if (own < 0) continue;
    if (twice) {
      report(g, {DeviceFault::kExpertTwice, ErrorKind::kPeerFailed, Step::kExchange, g.rank,
                 static_cast<int>(first + token), 1, static_cast<uint64_t>(own)});
      good = false;
    }
    visit(pair);
  }
  return good;
}
// How many bits of a row are set below number `end`.
__device__ __forceinline__ uint32_t bits_below(const uint32_t* row, uint32_t end) {
  uint32_t count = 0;
  for (uint32_t w = 0; w < end / 32; ++w) count += __popc(row[w]);
  if (end % 32 != 0) count += __popc(row[end / 32] & ((1u << end % 32) - 1));
  return count;
}
// The number of the `n`-th bit that is set, or `none`.
__device__ __forceinline__ uint32_t find_bit(const uint32_t* row, uint32_t words, uint32_t n, uint32_t none) {
  for (uint32_t w = 0; w < words; ++w) {
    uint32_t word = row[w];
    const uint32_t count = __popc(word);
    if (n < count) {
      for (; n > 0; --n) word &= word - 1;
      return w * 32 + __ffs(word) - 1;
    }
    n -= count;
  }
  return none;
}
// As visit_topk(), for a map that read_tiles() has read. Several lanes share a token and take its pairs in turn. A
// visit waits for memory, so many pairs are visited at once.
template <typename Visit>
__device__ __forceinline__ void visit_map(const Crew& crew, const Group& g, const Tiles& tiles, Visit visit) {
  constexpr uint32_t kGroup = 8, kTokens = kWarp / kGroup;
  const uint32_t ranks = g.map.num_ranks, experts = g.map.num_experts, words = named_words(experts);
  for (uint32_t begin = crew.warp() * kTokens; begin < tiles.count; begin += crew.warps() * kTokens) {
    const uint32_t token = begin + crew.lane() / kGroup;
    const Tile tile = tiles.with(begin);  // all tokens of a warp are in one tile
    const uint32_t* const row = tile.named + token % kTileTokens * words;
    const uint32_t* const pairs_to = tile.pairs_to + token % kTileTokens * ranks;
    for (uint32_t n = crew.lane() % kGroup;; n += kGroup) {
      const uint32_t expert = token < tiles.count ? find_bit(row, words, n, experts) : experts;
      if (__all_sync(kFullWarp, expert == experts)) break;
      if (expert == experts) continue;
      const uint32_t to = rank_of(g, expert);
      Pair pair{token, expert, expert, expert_number(g, expert, to), to, pairs_to[to], 0, 0};
      pair.same_lower = n - bits_below(row, expert - expert % g.experts_per_rank);
      for (uint32_t r = first_of(g, domain_of(g, to)); r < to; ++r) pair.ranks_lower += pairs_to[r] != 0;
      visit(pair);
    }
  }
}
// Which of four bytes are not 0, a bit each.
__device__ __forceinline__ uint32_t bits_of(uint32_t bytes) {
  const uint32_t ones = ((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu | bytes) >> 7 & 0x01010101u;
  return ones * 0x01020408u >> 24 & 0xF;  // no two partial products overlap
}
// Reads bits, masks and pairs of tiles from a map. A warp takes a token, and a lane takes eight neighbouring columns at
// a time. With one column per lane the warp would wait for memory after every kWarp columns. Not inlined, because its
// caller has no registers to spare.
inline __device__ __noinline__ void read_map(const Crew crew, const Group& g, const DeviceRouting& r,
                                             const Tiles tiles) {
  constexpr uint32_t kColumns = 8;
  const bool eights = r.width % kColumns == 0 && reinterpret_cast<uint64_t>(r.data) % kColumns == 0;
  const uint32_t all_columns = named_words(r.width) * 32;
  for (uint32_t t = crew.warp(); t < tiles.count; t += crew.warps()) {
    const Tile tile = tiles.with(t);
    const uint32_t token = t % kTileTokens;
    const uint8_t* const row = static_cast<const uint8_t*>(r.data) + uint64_t{tiles.first + t} * r.width;
    for (uint32_t column = crew.lane() * kColumns; column < all_columns; column += kWarp * kColumns) {
      uint32_t bits = 0;
      if (eights && column < r.width) {
        const uint2 bytes = *reinterpret_cast<const uint2*>(row + column);
        bits = bits_of(bytes.x) | bits_of(bytes.y) << 4;
      } else {
        for (uint32_t i = 0; i < kColumns && column + i < r.width; ++i) bits |= uint32_t{row[column + i] != 0} << i;
      }
      reinterpret_cast<uint8_t*>(tile.named)[(token * all_columns + column) / 8] = static_cast<uint8_t>(bits);
      for (; bits != 0; bits &= bits - 1) {
        const uint32_t expert = column + __ffs(bits) - 1, to = rank_of(g, expert);
        or_shared(reinterpret_cast<uint32_t*>(tile.expert + expert_number(g, expert, to)) + token / 32,
                  1u << token % 32);
        add_shared(&tile.pairs_to[token * g.map.num_ranks + to], 1);
      }
    }
  }
}

// How many tokens of a tile a lane handles: in turn u number u * kWarp + lane.
static_assert(kTileTokens % kWarp == 0);
constexpr uint32_t kTileTurns = kTileTokens / kWarp;
// By a warp: replaces the number of each token of a tile by the sum of those before it. Returns which were not 0.
__device__ __forceinline__ Mask sum_before(uint32_t (&numbers)[kTileTurns], uint32_t lane) {
  Mask mask = 0;
  uint32_t before = 0;
#pragma unroll
  for (uint32_t u = 0; u < kTileTurns; ++u) {
    mask |= Mask{ballot(numbers[u] != 0)} << u * kWarp;
    const uint32_t end = before + warp_prefix(numbers[u], lane);
    numbers[u] = end - numbers[u];
    if (u + 1 < kTileTurns) before = __shfl_sync(kFullWarp, end, kWarp - 1);
  }
  return mask;
}

// By a crew: makes the tiles' masks and counts from the caller's routing. False: this thread saw an invalid routing.
__device__ inline bool read_tiles(const Crew& crew, const Group& g, const DeviceRouting& r, const Tiles& tiles) {
  const uint32_t ranks = g.map.num_ranks, domains = g.map.num_domains, size = tiles.size();
#pragma unroll 1
  for (uint32_t t = 0; t < size; ++t) {
    const Tile tile = tiles.tile(t);
#pragma unroll 1
    for (uint32_t i = crew.thread; i < g.map.num_experts + ranks; i += crew.size) tile.expert[i] = 0;
#pragma unroll 1
    for (uint32_t i = crew.thread; i < kTileTokens * ranks; i += crew.size) tile.pairs_to[i] = 0;
  }
  crew.sync();
  bool good = true;
  if (r.is_map)
    read_map(crew, g, r, tiles);
  else
    good = visit_topk(crew, g, r, tiles.first, tiles.count, [&](const Pair& p) {
      const Tile tile = tiles.with(p.token);
      const uint32_t token = p.token % kTileTokens;
      or_shared(reinterpret_cast<uint32_t*>(&tile.expert[p.expert]) + token / 32, 1u << token % 32);
      if (p.same_lower == 0) tile.pairs_to[token * ranks + p.to] = p.same;
    });
  crew.sync();
  // A warp per destination of a tile: its tokens, and the pairs of earlier tokens.
  const uint32_t lane = crew.lane();
#pragma unroll 1
  for (uint32_t i = crew.warp(); i < size * ranks; i += crew.warps()) {
    const Tile tile = tiles.tile(i / ranks);
    const uint32_t to = i % ranks;
    uint32_t pairs[kTileTurns];
#pragma unroll
    for (uint32_t u = 0; u < kTileTurns; ++u) pairs[u] = tile.pairs_to[(u * kWarp + lane) * ranks + to];
    const Mask tokens = sum_before(pairs, lane);
    if (lane == 0) tile.destination[to] = tokens;
#pragma unroll
    for (uint32_t u = 0; u < kTileTurns; ++u) tile.pairs_before[(u * kWarp + lane) * ranks + to] = pairs[u];
  }
  // And per domain: its tokens, and the pieces of earlier tokens.
#pragma unroll 1
  for (uint32_t i = crew.warp(); i < size * domains; i += crew.warps()) {
    const Tile tile = tiles.tile(i / domains);
    const uint32_t to = i % domains;
    uint32_t pieces[kTileTurns] = {};
#pragma unroll 1
    for (uint32_t r = first_of(g, to); r < first_of(g, to + 1); ++r)
#pragma unroll
      for (uint32_t u = 0; u < kTileTurns; ++u) pieces[u] += tile.pairs_to[(u * kWarp + lane) * ranks + r] != 0;
    const Mask tokens = sum_before(pieces, lane);
    if (lane == 0) tile.stream[to] = tokens;
#pragma unroll
    for (uint32_t u = 0; u < kTileTurns; ++u) tile.pieces[to * kTileTokens + u * kWarp + lane] = pieces[u];
  }
  crew.sync();
  return good;
}

__device__ inline uint32_t pairs_of_tile(const Group& g, const Tile& tile, uint32_t to) {
  const uint32_t last = (kTileTokens - 1) * g.map.num_ranks + to;
  return tile.pairs_before[last] + tile.pairs_to[last];
}

__device__ inline uint32_t pieces_of_tile(const Group& g, const Tile& tile, uint32_t domain) {
  uint32_t pieces = 0;
#pragma unroll 1
  for (uint32_t r = first_of(g, domain); r < first_of(g, domain + 1); ++r) pieces += __popcll(tile.destination[r]);
  return pieces;
}

// By a crew: writes the counts of tiles to device memory.
__device__ inline void count_tiles(const Crew& crew, const Group& g, const Tiles& tiles) {
  const uint32_t lane = crew.lane(), first = tiles.first / kTileTokens;
#pragma unroll 1
  for (uint32_t t = 0; t < tiles.size(); ++t) {
    const Tile tile = tiles.tile(t);
    const TileCounts out(g, first + t);
#pragma unroll 1
    for (uint32_t e = crew.thread; e < g.map.num_experts; e += crew.size)
      out.expert[e] = static_cast<uint8_t>(__popcll(tile.expert[e]));
    if (crew.warp() != t % crew.warps()) continue;
#pragma unroll 1
    for (uint32_t to = lane; to < g.map.num_ranks; to += kWarp) {
      out.rows_to[to] = static_cast<uint8_t>(__popcll(tile.destination[to]));
      out.pairs_to[to] = pairs_of_tile(g, tile, to);
    }
    uint32_t most = 0;
#pragma unroll 1
    for (uint32_t to = lane; to < g.map.num_domains; to += kWarp) {
      out.stream[to] = static_cast<uint8_t>(__popcll(tile.stream[to]));
      const uint32_t low = tile.pieces[to * kTileTokens + kTokenBlock], all = pieces_of_tile(g, tile, to);
      most = max(most, max(low, all - low));
    }
    most = warp_max(most);
    if (lane == 0) *out.most_pieces = most;
  }
}

}  // namespace uccl_ep::gpu
