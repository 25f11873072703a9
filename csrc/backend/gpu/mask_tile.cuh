// Tiles of many ranks, in several domains. There are no tables by rank: what is known of a pair is counted in the masks
// of the experts of its rank, and of the members of its domain.
#pragma once

#include "backend/gpu/tile.cuh"

namespace uccl_ep::gpu {

struct MaskTile : TileParts {
  static constexpr TileKind kKind = TileKind::kMasks;
  static constexpr bool kManyRanks = true;
  uint32_t* others;  // [tokens][words] other domains that the token goes to, a bit each
  uint32_t* own_pieces;  // [tokens] members of our domain that the token goes to
  uint32_t* addends_before;  // [tokens] addends of earlier tokens

  __device__ MaskTile(uint8_t* shared, const DeviceMap& map, uint32_t number)
      : TileParts(shared, map, kKind, number),
        others(own_words(map)),
        own_pieces(others + kTileTokens * domain_words(map)),
        addends_before(own_pieces + kTileTokens) {}

  // By a crew.
  __device__ __forceinline__ void clear(const Crew& crew, const Group& g) const {
    const uint32_t masks = g.map.num_experts + g.map.num_ranks + g.map.num_domains;
#pragma unroll 1
    for (uint32_t i = crew.thread; i < masks; i += crew.size) expert[i] = 0;
#pragma unroll 1
    for (uint32_t i = crew.thread; i < kTileTokens * domain_words(g.map); i += crew.size) others[i] = 0;
  }
  __device__ __forceinline__ void note(const Group& g, uint32_t token, const Pair& p) const {
    add_token(expert[p.expert], token);
    if (p.same_lower != 0) return;
    add_token(destination[p.to], token);
    if (p.ranks_lower == 0) note_domain(g, token, domain_of(g, p.to));
  }
  __device__ __forceinline__ void note_domain(const Group& g, uint32_t token, uint32_t to) const {
    add_token(stream[to], token);
    if (to != own_domain(g)) or_shared(&others[token * domain_words(g.map) + to / 32], 1u << to % 32);
  }
  __device__ __forceinline__ void note_named(uint32_t, uint32_t, uint32_t, uint32_t) const {}
  __device__ __forceinline__ void note_of_map(const Group& g, uint32_t token, uint32_t number, uint32_t to) const {
    add_token(expert[number], token);
    add_token(destination[to], token);
    note_domain(g, token, domain_of(g, to));
  }
  __device__ __forceinline__ void set_pair_base(uint32_t, uint32_t) const {}
  // Pairs for a rank: of the tile, and of all tokens before one.
  __device__ __forceinline__ uint32_t pairs_of(const Group& g, uint32_t to) const {
    uint32_t pairs = 0;
#pragma unroll 1
    for (uint32_t e = to * g.experts_per_rank; e < (to + 1) * g.experts_per_rank; ++e) pairs += __popcll(expert[e]);
    return pairs;
  }
  __device__ __forceinline__ uint32_t first_pair(const Group& g, uint32_t token, uint32_t to) const {
    uint32_t pairs = 0;
#pragma unroll 1
    for (uint32_t e = to * g.experts_per_rank; e < (to + 1) * g.experts_per_rank; ++e) pairs += pairs_with(e, token);
    return pairs;
  }
  // Pieces in a domain of the tile's tokens before one.
  __device__ __forceinline__ uint32_t pieces_before(const Group& g, uint32_t token, uint32_t domain) const {
    const Mask before = tokens_before(token);
    uint32_t pieces = 0;
#pragma unroll 1
    for (uint32_t r = first_of(g, domain); r < first_of(g, domain + 1); ++r)
      pieces += __popcll(destination[r] & before);
    return pieces;
  }
  __device__ __forceinline__ uint32_t others_below(const Group& g, uint32_t token, uint32_t end) const {
    return bits_below(others + token * domain_words(g.map), end);
  }
  // What is known of a map's pair.
  __device__ __forceinline__ Pair pair_of_map(const Group& g, uint32_t token, uint32_t number) const {
    const uint32_t to = number / g.experts_per_rank, first = to * g.experts_per_rank;
    const uint32_t named = rank_numbered(g, to) * g.experts_per_rank + (number - first);
    Pair pair{token, named, named, number, to, 0, 0, 0};
    const auto has = [&](Mask mask) { return static_cast<uint32_t>(mask >> token & 1); };
#pragma unroll 1
    for (uint32_t e = first; e < first + g.experts_per_rank; ++e) {
      pair.same += has(expert[e]);
      pair.same_lower += e < number && has(expert[e]) != 0;
    }
#pragma unroll 1
    for (uint32_t r = first_of(g, domain_of(g, to)); r < to; ++r) pair.ranks_lower += has(destination[r]);
    return pair;
  }
};

// As visit_topk(), for a map that has been read. The pairs of kWarp neighbouring experts are dealt out to the lanes of
// a warp, however many each expert has.
template <typename Visit>
__device__ __forceinline__ void visit_map(const Crew& crew, const Group& g, const Tiles<MaskTile>& tiles, Visit visit) {
  const uint32_t groups = (g.map.num_experts + kWarp - 1) / kWarp, lane = crew.lane();
#pragma unroll 1
  for (uint32_t i = crew.warp(); i < tiles.size() * groups; i += crew.warps()) {
    const MaskTile tile = tiles.tile(i / groups);
    const uint32_t first = i % groups * kWarp;
    const Mask mine = first + lane < g.map.num_experts ? tile.expert[first + lane] : 0;
    const uint32_t end = warp_prefix(__popcll(mine), lane), total = __shfl_sync(kFullWarp, end, kWarp - 1);
#pragma unroll 1
    for (uint32_t begin = 0; begin < total; begin += kWarp) {
      // The first lane with more pairs before its end than ours.
      const uint32_t n = begin + lane;
      uint32_t of = 0;
#pragma unroll
      for (uint32_t step = kWarp / 2; step > 0; step /= 2)
        if (__shfl_sync(kFullWarp, end, of + step - 1) <= n) of += step;
      Mask tokens = __shfl_sync(kFullWarp, mine, of);
      const uint32_t its_end = __shfl_sync(kFullWarp, end, of);
      if (n >= total) continue;
#pragma unroll 1
      for (uint32_t skip = n - (its_end - __popcll(tokens)); skip > 0; --skip) tokens &= tokens - 1;
      const uint32_t token = __popcll((tokens & (0 - tokens)) - 1);
      Pair pair = tile.pair_of_map(g, token, first + of);
      pair.token += i / groups * kTileTokens;
      visit(pair);
    }
  }
}

// By a crew, a warp per tile: counts the addends of its tokens.
__device__ inline void complete_tiles(const Crew& crew, const Group& g, const Tiles<MaskTile>& tiles) {
#pragma unroll 1
  for (uint32_t i = crew.warp(); i < tiles.size(); i += crew.warps()) {
    const MaskTile tile = tiles.tile(i);
    uint32_t addends[kTileTurns] = {};
#pragma unroll
    for (uint32_t u = 0; u < kTileTurns; ++u) {
      const uint32_t token = u * kWarp + crew.lane();
#pragma unroll 1
      for (uint32_t r = g.first; r < g.end; ++r) addends[u] += static_cast<uint32_t>(tile.destination[r] >> token & 1);
      tile.own_pieces[token] = addends[u];
      addends[u] += tile.others_below(g, token, g.map.num_domains);
    }
    sum_before(addends, crew.lane());
#pragma unroll
    for (uint32_t u = 0; u < kTileTurns; ++u) tile.addends_before[u * kWarp + crew.lane()] = addends[u];
  }
}

// By a crew, a warp per tile: writes where the addends of each token begin. write_addends() writes them.
__device__ inline void write_streams(const Crew& crew, const Group& g, const Tiles<MaskTile>& tiles) {
  const uint32_t own = own_domain(g), lane = crew.lane();
#pragma unroll 1
  for (uint32_t i = crew.warp(); i < tiles.size(); i += crew.warps()) {
    const MaskTile tile = tiles.tile(i);
    uint32_t base = 0;  // addends of what lies before the tile
#pragma unroll 1
    for (uint32_t to = lane; to < g.map.num_domains; to += kWarp)
      base += to == own ? tile.piece_base[to] : tile.stream_base[to];
    base = warp_sum(base);
#pragma unroll 1
    for (uint32_t token = lane; token < kTileTokens; token += kWarp) {
      const uint32_t begin = tile.addends_before[token] += base, t = i * kTileTokens + token;
      if (t < tiles.count) own_part(g, g.map.token_addends)[tiles.first + t] = begin;
    }
  }
  crew.sync();
}
// Of the first pair of a token and rank: writes what is added for it, which is piece number `piece` of its domain.
__device__ __forceinline__ void write_addends(const Group& g, const MaskTile& tile, const Pair& p, uint32_t piece) {
  const uint32_t t = p.token % kTileTokens, to = domain_of(g, p.to), own = own_domain(g);
  if (to != own && p.ranks_lower != 0) return;
  Addend* const out = own_part(g, g.map.addends) + tile.addends_before[t] + tile.others_below(g, t, to);
  if (to == own) {
    out[p.ranks_lower] = Addend::of_piece(piece);
    return;
  }
  const uint32_t row = tile.stream_row(to, t);
  out[to > own ? tile.own_pieces[t] : 0] = Addend::of_domain(to, row);
  tile.packet[to].stream_pieces()[row] = piece;
}

}  // namespace uccl_ep::gpu
