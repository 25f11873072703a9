// Tiles of few ranks: for each of their tokens and each rank a table says how many pairs there are.
#pragma once

#include "backend/gpu/tile.cuh"

namespace uccl_ep::gpu {

struct TableTile : TileParts {
  static constexpr TileKind kKind = TileKind::kTables;
  static constexpr bool kManyRanks = false;
  uint32_t* pair_base;  // [ranks] pairs of what lies before the tile
  uint32_t* pairs_to;  // [tokens][ranks] pairs of the token
  uint32_t* pairs_earlier;  // [tokens][ranks] pairs of earlier tokens of the tile
  uint32_t* pieces;  // [domains][tokens] pieces of earlier tokens of the tile
  uint32_t* named;  // [tokens][words] of a map: the experts of a token, as the caller names them, a bit each

  __device__ TableTile(uint8_t* shared, const DeviceMap& map, uint32_t number)
      : TileParts(shared, map, kKind, number),
        pair_base(own_words(map)),
        pairs_to(pair_base + map.num_ranks),
        pairs_earlier(pairs_to + kTileTokens * map.num_ranks),
        pieces(pairs_earlier + kTileTokens * map.num_ranks),
        named(pieces + kTileTokens * map.num_domains) {}

  // By a crew.
  __device__ __forceinline__ void clear(const Crew& crew, const Group& g) const {
    const uint32_t ranks = g.map.num_ranks;
#pragma unroll 1
    for (uint32_t i = crew.thread; i < g.map.num_experts + ranks; i += crew.size) expert[i] = 0;
#pragma unroll 1
    for (uint32_t i = crew.thread; i < kTileTokens * ranks; i += crew.size) pairs_to[i] = 0;
  }
  __device__ __forceinline__ void note(const Group& g, uint32_t token, const Pair& p) const {
    add_token(expert[p.expert], token);
    if (p.same_lower == 0) pairs_to[token * g.map.num_ranks + p.to] = p.same;
  }
  __device__ __forceinline__ void note_named(uint32_t token, uint32_t column, uint32_t columns, uint32_t bits) const {
    reinterpret_cast<uint8_t*>(named)[(token * columns + column) / 8] = static_cast<uint8_t>(bits);
  }
  __device__ __forceinline__ void note_of_map(const Group& g, uint32_t token, uint32_t number, uint32_t to) const {
    add_token(expert[number], token);
    add_shared(&pairs_to[token * g.map.num_ranks + to], 1);
  }
  __device__ __forceinline__ void set_pair_base(uint32_t to, uint32_t before) const { pair_base[to] = before; }
  // Pairs for a rank: of the tile, and of all tokens before one.
  __device__ __forceinline__ uint32_t pairs_of(const Group& g, uint32_t to) const {
    const uint32_t last = (kTileTokens - 1) * g.map.num_ranks + to;
    return pairs_earlier[last] + pairs_to[last];
  }
  __device__ __forceinline__ uint32_t first_pair(const Group& g, uint32_t token, uint32_t to) const {
    return pair_base[to] + pairs_earlier[token * g.map.num_ranks + to];
  }
  // Pieces in a domain of the tile's tokens before one.
  __device__ __forceinline__ uint32_t pieces_before(const Group&, uint32_t token, uint32_t domain) const {
    return pieces[domain * kTileTokens + token];
  }
};

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
// As visit_topk(), for a map that has been read. Several lanes share a token and take its pairs in turn. A visit waits
// for memory, so many pairs are visited at once.
template <typename Visit>
__device__ __forceinline__ void visit_map(const Crew& crew, const Group& g, const Tiles<TableTile>& tiles,
                                          Visit visit) {
  constexpr uint32_t kGroup = 8, kTokens = kWarp / kGroup;
  const uint32_t ranks = g.map.num_ranks, experts = g.map.num_experts, words = named_words(experts);
  for (uint32_t begin = crew.warp() * kTokens; begin < tiles.count; begin += crew.warps() * kTokens) {
    const uint32_t token = begin + crew.lane() / kGroup;
    const TableTile tile = tiles.with(begin);  // all tokens of a warp are in one tile
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

// By a crew: makes the masks and numbers that do not come from single pairs.
__device__ inline void complete_tiles(const Crew& crew, const Group& g, const Tiles<TableTile>& tiles) {
  const uint32_t ranks = g.map.num_ranks, domains = g.map.num_domains, size = tiles.size(), lane = crew.lane();
  // A warp per destination of a tile: its tokens, and the pairs of earlier tokens.
#pragma unroll 1
  for (uint32_t i = crew.warp(); i < size * ranks; i += crew.warps()) {
    const TableTile tile = tiles.tile(i / ranks);
    const uint32_t to = i % ranks;
    uint32_t pairs[kTileTurns];
#pragma unroll
    for (uint32_t u = 0; u < kTileTurns; ++u) pairs[u] = tile.pairs_to[(u * kWarp + lane) * ranks + to];
    const Mask tokens = sum_before(pairs, lane);
    if (lane == 0) tile.destination[to] = tokens;
#pragma unroll
    for (uint32_t u = 0; u < kTileTurns; ++u) tile.pairs_earlier[(u * kWarp + lane) * ranks + to] = pairs[u];
  }
  // And per domain: its tokens, and the pieces of earlier tokens.
#pragma unroll 1
  for (uint32_t i = crew.warp(); i < size * domains; i += crew.warps()) {
    const TableTile tile = tiles.tile(i / domains);
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
}

// By a crew: writes each token's addends, and the pieces of earlier tokens of our streams.
__device__ inline void write_streams(const Crew& crew, const Group& g, const Tiles<TableTile>& tiles) {
  if (!has_net(g)) {
#pragma unroll 1
    for (uint32_t t = crew.thread; t < tiles.count; t += crew.size)
      own_part(g, g.map.token_addends)[tiles.first + t] =
          tiles.with(t).piece_base[0] + tiles.with(t).pieces[t % kTileTokens];
    return;
  }
  const uint32_t own = own_domain(g);
  Addend* const addends = own_part(g, g.map.addends);
#pragma unroll 1
  for (uint32_t token = crew.thread; token < tiles.count; token += crew.size) {
    const TableTile tile = tiles.with(token);
    const uint32_t t = token % kTileTokens;
    const Mask bit = Mask{1} << t;
    uint32_t begin = 0;
#pragma unroll 1
    for (uint32_t to = 0; to < g.map.num_domains; ++to) {
      const uint32_t row = tile.stream_row(to, t);
      begin += to == own ? tile.piece_base[own] + tile.pieces_before(g, t, own) : row;
      if (to == own || (tile.stream[to] & bit) == 0) continue;
      tile.packet[to].stream_pieces()[row] = tile.piece_base[to] + tile.pieces_before(g, t, to);
    }
    own_part(g, g.map.token_addends)[tiles.first + token] = begin;
#pragma unroll 1
    for (uint32_t to = 0; to < g.map.num_domains; ++to) {
      if ((tile.stream[to] & bit) == 0) continue;
      if (to != own) {
        addends[begin++] = Addend::of_domain(to, tile.stream_row(to, t));
        continue;
      }
      uint32_t piece = tile.piece_base[own] + tile.pieces_before(g, t, own);
#pragma unroll 1
      for (uint32_t r = g.first; r < g.end; ++r)
        if ((tile.destination[r] & bit) != 0) addends[begin++] = Addend::of_piece(piece++);
    }
  }
}

}  // namespace uccl_ep::gpu
