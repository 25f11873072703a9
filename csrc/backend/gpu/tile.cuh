// Tiles: the routing of kTileTokens neighbouring tokens, in shared memory. Here is what all kinds of tiles share
// (TileKind): masks of tokens, and reading the caller's routing. A block works on several tiles together, because each
// is a chain of latencies. Most instructions run once or twice in a kernel, so fetching them counts: loops are unrolled
// neither here nor in exchange.cuh.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/steps.h"

namespace uccl_ep::gpu {

using Mask = unsigned long long;  // a bit per token of a tile
__device__ __forceinline__ void add_token(Mask& mask, uint32_t token) {
  or_shared(reinterpret_cast<uint32_t*>(&mask) + token / 32, 1u << token % 32);
}
// The tokens before one.
__device__ __forceinline__ Mask tokens_before(uint32_t token) { return (Mask{1} << token) - 1; }

// Where our packet for a domain is written, and where its parts begin in it.
#pragma pack(push, 4)
struct PacketPlace {
  uint8_t* bytes;
  uint32_t token_block_rows_at, lists_at, pairs_at, stream_pieces_at, weights_at;

  __device__ __forceinline__ ListEntry* lists() const { return reinterpret_cast<ListEntry*>(bytes + lists_at); }
  __device__ __forceinline__ PairEntry* pairs() const { return reinterpret_cast<PairEntry*>(bytes + pairs_at); }
  __device__ __forceinline__ float* weights() const { return reinterpret_cast<float*>(bytes + weights_at); }
  __device__ __forceinline__ uint32_t* stream_pieces() const { return words(stream_pieces_at); }
  __device__ __forceinline__ BlockRows* token_block_rows() const {
    return reinterpret_cast<BlockRows*>(bytes + token_block_rows_at);
  }
  // In front of the lists.
  __device__ __forceinline__ BlockRows* token_block_streams(uint32_t groups) const {
    return reinterpret_cast<BlockRows*>(bytes + lists_at - token_block_part_bytes(groups));
  }

 private:
  __device__ __forceinline__ uint32_t* words(uint32_t at) const { return reinterpret_cast<uint32_t*>(bytes + at); }
};
#pragma pack(pop)

// What a tile of either kind has, number `number` of those that the block has there.
struct TileParts {
  Mask* expert;  // [experts] tokens that have it
  Mask* destination;  // [ranks] tokens that go there
  Mask* stream;  // [domains] tokens that go there
  // What lies before it.
  uint32_t* expert_base;  // [experts]
  uint32_t* row_base;  // [ranks]
  uint32_t* stream_base;  // [domains]
  uint32_t* piece_base;  // [domains]
  // The same for all tiles of the block.
  PacketPlace* packet;  // [domains]
  uint32_t* row_begin;  // [ranks] of all tiles: rows for lower members of the domain
  uint32_t* pair_begin;  // [ranks + 1] of all tiles: pairs for lower ranks
  uint32_t* stream_total;  // [domains] of all tiles: tokens that go there

  __device__ TileParts(uint8_t* shared, const DeviceMap& map, TileKind kind, uint32_t number)
      : expert(reinterpret_cast<Mask*>(shared + common_tile_bytes(map) + number * own_tile_bytes(map, kind))),
        destination(expert + map.num_experts),
        stream(destination + map.num_ranks),
        expert_base(reinterpret_cast<uint32_t*>(stream + map.num_domains)),
        row_base(expert_base + map.num_experts),
        stream_base(row_base + map.num_ranks),
        piece_base(stream_base + map.num_domains),
        packet(reinterpret_cast<PacketPlace*>(shared)),
        row_begin(reinterpret_cast<uint32_t*>(packet + map.num_domains)),
        pair_begin(row_begin + map.num_ranks),
        stream_total(pair_begin + map.num_ranks + 1) {}
  // What a kind has beside.
  __device__ __forceinline__ uint32_t* own_words(const DeviceMap& map) const { return piece_base + map.num_domains; }
  // Pairs with an expert of all earlier tokens.
  __device__ __forceinline__ uint32_t pairs_with(uint32_t number, uint32_t token) const {
    return expert_base[number] + __popcll(expert[number] & tokens_before(token));
  }
  // The row of a token in our stream to a domain.
  __device__ __forceinline__ uint32_t stream_row(uint32_t to, uint32_t token) const {
    return stream_base[to] + __popcll(stream[to] & tokens_before(token));
  }
};
static_assert(sizeof(PacketPlace) == kPacketPlaceBytes);

// Neighbouring tiles of a block, the first ones of its shared memory.
template <typename Tile>
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
  uint32_t *pairs_to, *most_of_block;  // the second: BlockMost
  __device__ TileCounts(const Group& g, uint32_t tile)
      : expert(reinterpret_cast<uint8_t*>(own_part(g, g.map.tile_counts) + uint64_t{tile} * tile_words(g.map))),
        rows_to(expert + g.map.num_experts),
        stream(rows_to + g.map.num_ranks),
        pairs_to(reinterpret_cast<uint32_t*>(expert) + tile_token_words(g.map)),
        most_of_block(pairs_to + g.map.num_ranks) {}
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
// Which of four bytes are not 0, a bit each.
__device__ __forceinline__ uint32_t bits_of(uint32_t bytes) {
  const uint32_t ones = ((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu | bytes) >> 7 & 0x01010101u;
  return ones * 0x01020408u >> 24 & 0xF;  // no two partial products overlap
}
// Reads a map into tiles. A warp takes a token, and a lane takes eight neighbouring columns at a time. With one column
// per lane the warp would wait for memory after every kWarp columns. Not inlined, because its caller has no registers
// to spare.
template <typename Tile>
__device__ __noinline__ void read_map(const Crew crew, const Group& g, const DeviceRouting& r,
                                      const Tiles<Tile> tiles) {
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
      tile.note_named(token, column, all_columns, bits);
      for (; bits != 0; bits &= bits - 1) {
        const uint32_t expert = column + __ffs(bits) - 1, to = rank_of(g, expert);
        tile.note_of_map(g, token, expert_number(g, expert, to), to);
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

__device__ inline uint32_t pieces_of_tile(const Group& g, const TileParts& tile, uint32_t domain) {
  uint32_t pieces = 0;
#pragma unroll 1
  for (uint32_t r = first_of(g, domain); r < first_of(g, domain + 1); ++r) pieces += __popcll(tile.destination[r]);
  return pieces;
}

// By a crew: makes tiles from the caller's routing. False: this thread saw an invalid routing.
template <typename Tile>
__device__ inline bool read_tiles(const Crew& crew, const Group& g, const DeviceRouting& r, const Tiles<Tile>& tiles) {
#pragma unroll 1
  for (uint32_t t = 0; t < tiles.size(); ++t) tiles.tile(t).clear(crew, g);
  crew.sync();
  bool good = true;
  if (r.is_map)
    read_map(crew, g, r, tiles);
  else
    good = visit_topk(crew, g, r, tiles.first, tiles.count,
                      [&](const Pair& p) { tiles.with(p.token).note(g, p.token % kTileTokens, p); });
  crew.sync();
  complete_tiles(crew, g, tiles);
  crew.sync();
  return good;
}

// By a warp: of all lanes.
__device__ __forceinline__ BlockMost warp_most(BlockMost own) {
  return BlockMost::of(warp_max(own.pieces()), warp_max(own.rows())).with(BlockMost::of_pairs(warp_max(own.pairs())));
}
__device__ __forceinline__ SpanRows warp_most(SpanRows own) {
#pragma unroll
  for (uint16_t& most : own.most) most = static_cast<uint16_t>(warp_max(most));
  return own;
}
// By a crew: writes the counts of tiles to device memory.
template <typename Tile>
__device__ inline void count_tiles(const Crew& crew, const Group& g, const Tiles<Tile>& tiles) {
  const uint32_t lane = crew.lane(), first = tiles.first / kTileTokens;
#pragma unroll 1
  for (uint32_t t = 0; t < tiles.size(); ++t) {
    const Tile tile = tiles.tile(t);
    const TileCounts out(g, first + t);
#pragma unroll 1
    for (uint32_t e = crew.thread; e < g.map.num_experts; e += crew.size)
      out.expert[e] = static_cast<uint8_t>(__popcll(tile.expert[e]));
    // A few ranks are the work of one warp.
    const bool mine = crew.warp() == t % crew.warps();
    if (!Tile::kManyRanks && !mine) continue;
#pragma unroll 1
    for (uint32_t to = Tile::kManyRanks ? crew.thread : lane; to < g.map.num_ranks;
         to += Tile::kManyRanks ? crew.size : kWarp) {
      out.rows_to[to] = static_cast<uint8_t>(__popcll(tile.destination[to]));
      out.pairs_to[to] = tile.pairs_of(g, to);
    }
    if (!mine) continue;
    BlockMost most;
    static_assert(kTileTokens == 2 * kTokenBlock && kTokenBlock == 32, "a half of a mask is a token block");
#pragma unroll 1
    for (uint32_t to = lane; to < g.map.num_domains; to += kWarp) {
      const Mask stream = tile.stream[to];
      const uint32_t rows = __popcll(stream), low_rows = __popc(static_cast<uint32_t>(stream));
      out.stream[to] = static_cast<uint8_t>(rows);
      const uint32_t low = tile.pieces_before(g, kTokenBlock, to), all = pieces_of_tile(g, tile, to);
      const uint32_t far_rows = to == own_domain(g) ? 0 : max(low_rows, rows - low_rows);
      most = most.with(BlockMost::of(max(low, all - low), far_rows));
    }
    most = warp_most(most);
    if (lane == 0) *out.most_of_block = most.word;
  }
}

}  // namespace uccl_ep::gpu
