// Exchange: every rank writes one packet for each domain, with what its routing means for the ranks there. Ranks of its
// own domain pull the packet; to the others it is shipped.
//
// A block routes neighbouring tiles of kTileTokens tokens. First it writes each tile's counts to device memory: pairs
// by expert, rows and pairs by destination, rows by domain, most pieces of a token block. When all blocks have counted,
// each adds up the tiles before its own, so that positions follow the order of tokens.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/mask_tile.cuh"
#include "backend/gpu/most.cuh"
#include "backend/gpu/steps.h"
#include "backend/gpu/table_tile.cuh"

namespace uccl_ep::gpu {

// A count, summed over the tiles before a tile and over all tiles.
struct Before {
  uint32_t here = 0, total = 0;
};
// By one thread: adds up one word of the tiles' counts, which holds four counts of a byte.
__device__ __forceinline__ void add_up(const Group& g, uint32_t word, uint32_t tile, uint32_t num_tiles,
                                       Before (&sums)[4]) {
  constexpr uint32_t kBatch = 24;  // tiles whose counts are loaded at a time
  const uint32_t stride = tile_words(g.map);
  const uint32_t* const counts = own_part(g, g.map.tile_counts) + word;
#pragma unroll 1
  for (uint32_t begin = 0; begin < num_tiles; begin += kBatch) {
    uint32_t value[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      value[u] = begin + u < num_tiles ? device::load_past_l1(counts + uint64_t{begin + u} * stride) : 0;
    // Two counts in a word, with room for the sum of a batch.
    static_assert(kBatch * 0xFF < 1 << 16);
    Before even, odd;
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t low = value[u] & 0x00FF00FFu, high = value[u] >> 8 & 0x00FF00FFu;
      even.total += low;
      odd.total += high;
      if (begin + u < tile) {
        even.here += low;
        odd.here += high;
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n) {
      const Before& both = n % 2 == 0 ? even : odd;
      sums[n].here += both.here >> n / 2 * 16 & 0xFFFF;
      sums[n].total += both.total >> n / 2 * 16 & 0xFFFF;
    }
  }
}

// By a warp, one domain per lane: finds where our packets lie. Block 0 also writes the numbers in their headers, and
// where the packets begin.
__device__ inline void begin_packets(const DispatchKernel& k, const TileParts& tile, BlockMost most,
                                     const SpanRows& span_rows) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t units = 0;  // of packets for lower domains
#pragma unroll 1
  for (uint32_t batch = 0; batch < k.g.map.num_domains; batch += kWarp) {
    const uint32_t to = batch + lane;
    const bool has = to < k.g.map.num_domains, is_own = to == own_domain(k.g);
    const uint32_t first = has ? first_of(k.g, to) : 0, end = has ? first_of(k.g, to + 1) : 0;
    uint32_t rows = 0, pieces = 0;
#pragma unroll 1
    for (uint32_t r = first; r < end; ++r) {
      const uint32_t theirs = tile.row_begin[r];
      tile.row_begin[r] = rows;
      rows += theirs;
      pieces += tile.row_base[r];
    }
    const uint32_t num_pairs = tile.pair_begin[end] - tile.pair_begin[first];
    const uint32_t stream_rows = !has || is_own ? 0 : tile.stream_total[to];
    const PacketParts parts = packet_parts({end - first, k.g.experts_per_rank, k.args.stage.num_tokens, rows, num_pairs,
                                            stream_rows, k.args.routing.weights != nullptr});
    const uint32_t its = has && !is_own ? static_cast<uint32_t>((parts.end + kPacketUnit - 1) / kPacketUnit) : 0;
    const uint32_t behind = units + warp_prefix(its, lane);
    units = __shfl_sync(kFullWarp, behind, kWarp - 1);
    if (!has) continue;
    tile.piece_base[to] = pieces;
    uint8_t* const bytes = is_own ? own_packet(k.g, to, k.op.epoch) : shipped_packet(k.g, behind - its, k.op.epoch);
    if (blockIdx.x == 0) {
      if (has_net(k.g)) k.g.net_state.packet_unit[to] = behind - its;
      DeviceHeader& head = *reinterpret_cast<DeviceHeader*>(bytes);
      const MemberBegins begins(bytes, end - first, k.g.experts_per_rank);
#pragma unroll 1
      for (uint32_t r = first; r < end; ++r) {
        begins.row[r - first] = tile.row_begin[r];
        begins.pair[r - first] = tile.pair_begin[r] - tile.pair_begin[first];
      }
      begins.row[end - first] = head.num_rows = rows;
      begins.pair[end - first] = head.num_pairs = num_pairs;
      head.stream_rows = stream_rows;
      head.most_of_block = most.word;
      head.span_rows = span_rows;
    }
    const auto word = [](uint64_t offset) { return static_cast<uint32_t>(offset); };
    tile.packet[to] = {bytes,
                       word(parts.token_block_rows),
                       word(parts.lists),
                       word(parts.pairs),
                       word(parts.stream_pieces),
                       word(parts.weights)};
  }
}

// By a warp: replaces each rank's number of pairs by the number of its first pair.
__device__ __forceinline__ void begin_pairs(const TileParts& tile, uint32_t ranks) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t before = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < ranks; first += kWarp) {
    const uint32_t to = first + lane, mine = to < ranks ? tile.pair_begin[to] : 0;
    const uint32_t end = before + warp_prefix(mine, lane);
    if (to < ranks) tile.pair_begin[to] = end - mine;
    before = __shfl_sync(kFullWarp, end, kWarp - 1);
  }
  if (lane == 0) tile.pair_begin[ranks] = before;
}

// By the crew of block 0, when it is known where our packets lie: writes their headers and counts.
template <typename Tile>
__device__ inline void write_totals(const DispatchKernel& k, const Tile& tile) {
  write_headers(k, k.args.signature, k.args.stage.num_tokens);
#pragma unroll 1
  for (uint32_t i = k.crew.thread; i < k.g.map.num_experts; i += k.crew.size) {
    const uint32_t to = domain_of(k.g, i / k.g.experts_per_rank), base = first_of(k.g, to) * k.g.experts_per_rank;
    uint8_t* const counts = own_packet(k.g, to, k.op.epoch) + packet_parts({}).counts;
    reinterpret_cast<uint32_t*>(counts)[i - base] = tile.expert_base[i];
    tile.expert_base[i] = 0;
  }
  k.crew.sync();
}

// By a crew: finds what lies before the block's first tile. Block 0 writes the totals into the headers. False: too many
// pairs.
template <typename Tile>
__device__ inline bool begin_tiles(const DispatchKernel& k, const Tile& tile, uint32_t first_tile, uint32_t num_tiles) {
  const uint32_t ranks = k.g.map.num_ranks, experts = k.g.map.num_experts;
  __shared__ uint32_t all_most;  // BlockMost
  __shared__ SpanRows span_rows[kWarp];  // by warp
  const bool writes_totals = blockIdx.x == 0;
  const uint32_t token_words = tile_token_words(k.g.map), numbers = experts + ranks + k.g.map.num_domains;
#pragma unroll 1
  for (uint32_t word = k.crew.thread; word < token_words + ranks; word += k.crew.size) {
    Before sums[4];
    add_up(k.g, word, first_tile, num_tiles, sums);
    if (word >= token_words) {  // one number
      uint32_t here = 0, total = 0;
#pragma unroll
      for (uint32_t n = 0; n < 4; ++n) {
        here += sums[n].here << 8 * n;
        total += sums[n].total << 8 * n;
      }
      tile.set_pair_base(word - token_words, here);
      tile.pair_begin[word - token_words] = total;
      continue;
    }
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n) {
      const uint32_t i = 4 * word + n;
      if (i >= numbers) break;
      // Before block 0 there is nothing: it keeps totals of experts here until it knows where the packets lie.
      const bool is_total = writes_totals && i < experts;
      tile.expert_base[i] = is_total ? sums[n].total : sums[n].here;  // then row_base, stream_base
      if (i >= experts + ranks) {
        tile.stream_total[i - experts - ranks] = sums[n].total;
      } else if (i >= experts) {
        tile.row_begin[i - experts] = sums[n].total;
      }
    }
  }
  if (writes_totals && k.args.tells_spans) find_span_rows(k.crew, k.g, num_tiles, span_rows);
  if (writes_totals && k.crew.warp() == k.crew.warps() - 1) {
    const BlockMost most = most_of_all(k.g, num_tiles);
    if (k.crew.lane() == 0) all_most = most.word;
  }
  k.crew.sync();
  if (k.crew.warp() == 0) begin_pairs(tile, ranks);
  k.crew.sync();
  const uint32_t num_pairs = tile.pair_begin[ranks];
  if (num_pairs > k.g.map.max_pairs) {
    if (k.crew.thread == 0)
      report(k.g, {DeviceFault::kTooManyPairs, ErrorKind::kPeerFailed, Step::kExchange, k.g.rank, -1, k.g.map.max_pairs,
                   num_pairs});
    return false;
  }
  if (k.crew.warp() == 0) {
    const bool told = writes_totals && k.args.tells_spans && k.crew.lane() < k.crew.warps();
    begin_packets(k, tile, BlockMost{all_most}.with(BlockMost::of_pairs(num_pairs)),
                  warp_most(told ? span_rows[k.crew.lane()] : SpanRows{}));
  }
  k.crew.sync();
  if (writes_totals) write_totals(k, tile);
  return true;
}

// The hash of a pair (splitmix64's mixing function). A routing's hash is the sum over its pairs.
__device__ __forceinline__ uint64_t hash_pair(uint32_t place, uint32_t expert) {
  uint64_t z = (uint64_t{place} << 32 | expert) + 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

// By one thread: what an array says of a token block. Neighbours may be written at the same time.
__device__ __forceinline__ void put_rows(BlockRows* array, uint32_t block, uint32_t rows) {
  reinterpret_cast<uint8_t*>(array[block / BlockRows::kBlocks].counts)[block % BlockRows::kBlocks] =
      static_cast<uint8_t>(rows);
}
// By a warp: writes what a tile's token blocks have, and what the earlier ones. With `token_blocks` = 0, behind the
// last one, it writes the totals.
template <typename Tile>
__device__ inline void write_token_blocks(const Group& g, const Tile& tile, uint32_t first, uint32_t token_blocks,
                                          uint32_t all_token_blocks) {
  const uint32_t block = first / kTokenBlock, lane = threadIdx.x % kWarp;
  const uint32_t groups = BlockRows::groups(all_token_blocks);
  static_assert(BlockRows::kBlocks * kTokenBlock % kTileTokens == 0 && 8 * sizeof(Mask) == kTileTokens);
  const auto write = [&](BlockRows* array, uint32_t before, Mask tokens) {
    if (block % BlockRows::kBlocks == 0) array[block / BlockRows::kBlocks].before = before;
#pragma unroll 1
    for (uint32_t i = 0; i < token_blocks; ++i, tokens >>= kTokenBlock)
      put_rows(array, block + i, __popcll(tokens & ((Mask{1} << kTokenBlock) - 1)));
  };
#pragma unroll 1
  for (uint32_t r = lane; r < g.map.num_ranks; r += kWarp) {
    const uint32_t to = domain_of(g, r);
    write(tile.packet[to].token_block_rows() + uint64_t{r - first_of(g, to)} * groups, tile.row_base[r],
          tile.destination[r]);
  }
#pragma unroll 1
  for (uint32_t to = lane; to < g.map.num_domains; to += kWarp) {
    if (to == own_domain(g)) continue;
    write(tile.packet[to].token_block_streams(groups), tile.stream_base[to], tile.stream[to]);
    write(own_part(g, g.map.sent_token_blocks) + uint64_t{to} * BlockRows::groups(max_token_blocks(g)),
          tile.stream_base[to], tile.stream[to]);
  }
}

// By a crew: what lies before `next` becomes what lies before `tile` plus `tile` itself. Both may be the same tile.
template <typename Tile>
__device__ inline void add_tile(const Crew& crew, const Group& g, const Tile& tile, const Tile& next) {
  const uint32_t experts = g.map.num_experts, ranks = g.map.num_ranks, domains = g.map.num_domains;
#pragma unroll 1
  for (uint32_t i = crew.thread; i < experts + ranks; i += crew.size)  // row_base follows expert_base
    next.expert_base[i] = tile.expert_base[i] + __popcll(tile.expert[i]);
  if constexpr (!Tile::kManyRanks)
#pragma unroll 1
    for (uint32_t to = crew.thread; to < ranks; to += crew.size)
      next.pair_base[to] = tile.pair_base[to] + tile.pairs_of(g, to);
#pragma unroll 1
  for (uint32_t to = crew.thread; to < domains; to += crew.size) {
    next.stream_base[to] = tile.stream_base[to] + __popcll(tile.stream[to]);
    next.piece_base[to] = tile.piece_base[to] + pieces_of_tile(g, tile, to);
  }
}

// By a crew: writes lists, pairs and weights of tiles. The first tile has to know what lies before it; at the end it
// knows what lies before the tile behind them. Returns this thread's part of the hash.
template <typename Tile>
__device__ UCCL_EP_INLINE_WHERE_ROOM uint64_t write_tiles(const Crew crew, const Group& g, const DeviceRouting& r,
                                                          const Tiles<Tile>& tiles, uint32_t all_token_blocks) {
  const uint32_t own = own_domain(g), size = tiles.size();
  uint32_t* const origin = own_part(g, g.map.pair_origin);
  // The same thread carries a number from tile to tile.
#pragma unroll 1
  for (uint32_t t = 1; t < size; ++t) add_tile(crew, g, tiles.tile(t - 1), tiles.tile(t));
  crew.sync();
#pragma unroll 1
  for (uint32_t t = crew.warp(); t < size; t += crew.warps()) {
    const uint32_t first = tiles.first + t * kTileTokens;
    write_token_blocks(g, tiles.tile(t), first, min(kTileTokens / kTokenBlock, all_token_blocks - first / kTokenBlock),
                       all_token_blocks);
  }
  write_streams(crew, g, tiles);
  uint64_t hash = 0;
  const auto write = [&](const Pair& p) {
    const Tile tile = tiles.with(p.token);
    const uint32_t t = p.token % kTileTokens, token = tiles.first + p.token;
    const uint32_t to = domain_of(g, p.to), first_pair = tile.pair_begin[first_of(g, to)];
    const PacketPlace& packet = tile.packet[to];
    const uint32_t row_first_pair = tile.first_pair(g, t, p.to);
    const uint32_t number = tile.pair_begin[p.to] + row_first_pair + p.same_lower;
    const uint32_t place = token * r.width + p.column;
    packet.pairs()[number - first_pair] = {static_cast<uint16_t>(p.expert - p.to * g.experts_per_rank),
                                           static_cast<uint16_t>(tile.pairs_with(p.expert, t))};
    origin[number] = place;
    if (r.weights != nullptr) packet.weights()[number - first_pair] = r.weights[place];
    hash += hash_pair(place, p.named);
    if (p.same_lower != 0) return;
    const uint32_t piece = tile.piece_base[to] + tile.pieces_before(g, t, to) + p.ranks_lower;
    const uint32_t position = to == own ? token : tile.stream_row(to, t);
    packet.lists()[tile.row_begin[p.to] + tile.row_base[p.to] + __popcll(tile.destination[p.to] & tokens_before(t))] = {
        row_first_pair, piece, position, static_cast<uint16_t>(token), static_cast<uint16_t>(p.same)};
    if constexpr (Tile::kManyRanks) write_addends(g, tile, p, piece);
  };
  if (r.is_map)
    visit_map(crew, g, tiles, write);
  else
    visit_topk(crew, g, r, tiles.first, tiles.count, write);
  crew.sync();
  add_tile(crew, g, tiles.tile(size - 1), tiles.tile(0));
  crew.sync();
  return hash;
}
#undef UCCL_EP_INLINE_WHERE_ROOM

// By a warp of one block, after the last tile: writes the totals.
template <typename Tile>
__device__ inline void end_tiles(const Group& g, const Tile& tile, uint32_t num_tokens) {
  const uint32_t token_blocks = (num_tokens + kTokenBlock - 1) / kTokenBlock, lane = threadIdx.x % kWarp;
  write_token_blocks(g, tile, token_blocks * kTokenBlock, 0, token_blocks);
  uint32_t addends = 0;
#pragma unroll 1
  for (uint32_t to = lane; to < g.map.num_domains; to += kWarp) {
    const bool own = to == own_domain(g);
    addends += own ? tile.piece_base[to] : tile.stream_base[to];
    if (!own) tile.packet[to].stream_pieces()[tile.stream_base[to]] = tile.piece_base[to];
  }
  addends = warp_sum(addends);
  if (lane == 0) own_part(g, g.map.token_addends)[num_tokens] = addends;
}

// By one crew of each block: routes all our tokens. Shared memory has room for `kept_tiles` tiles; a block that has
// more reads each twice. `totals`, in shared memory, is set when block 0 has written the headers and counts. False: an
// error is known.
template <typename Tile>
__device__ inline bool route(const DispatchKernel& k, uint8_t* shared, uint32_t* totals) {
  const DeviceRouting& r = k.args.routing;
  const uint32_t num_tokens = k.args.stage.num_tokens, kept = k.args.kept_tiles;
  const uint32_t num_tiles = (num_tokens + kTileTokens - 1) / kTileTokens;
  const uint32_t per_block = (num_tiles + workers(k.g) - 1) / workers(k.g);
  const uint32_t first_tile = min(blockIdx.x * per_block, num_tiles), end_tile = min(first_tile + per_block, num_tiles);
  const auto tiles_from = [&](uint32_t tile) {
    const uint32_t first = tile * kTileTokens, end = min(min(tile + kept, end_tile) * kTileTokens, num_tokens);
    return Tiles<Tile>{shared, k.g.map, first, end - first};
  };
  bool good = true;
#pragma unroll 1
  for (uint32_t t = first_tile; t < end_tile; t += kept) {
    const Tiles<Tile> tiles = tiles_from(t);
    good &= read_tiles(k.crew, k.g, r, tiles);
    count_tiles(k.crew, k.g, tiles);
    k.crew.sync();
  }
  // All blocks run at the same time, because there are no more than the buffer has SMs.
  if (k.crew.thread == k.crew.size - 1) {
    if (arrive_last(&local(k.g).arrived[static_cast<uint32_t>(Phase::kCounted)], workers(k.g)))
      publish(&local(k.g).counted, k.op.epoch);
    good &= wait_flag(k.g, {&local(k.g).counted, k.op.epoch, k.g.rank});
  }
  // Meanwhile it waits until our packets of two operations ago have been read and have left.
  good &= wait_some_members(k, k.g.map.read, k.op.free_after(0), Step::kExchange);
  good &= wait_some_packets_gone(k);
  if (!k.crew.all(good)) return false;
  const Tile first(shared, k.g.map, 0);
  if (!begin_tiles(k, first, first_tile, num_tiles)) return false;
  if (blockIdx.x == 0 && k.crew.thread == 0) count_shared(totals);
  uint64_t hash = 0;
#pragma unroll 1
  for (uint32_t t = first_tile; t < end_tile; t += kept) {
    const Tiles<Tile> tiles = tiles_from(t);
    if (kept < per_block) read_tiles(k.crew, k.g, r, tiles);
    hash += write_tiles(k.crew, k.g, r, tiles, (num_tokens + kTokenBlock - 1) / kTokenBlock);
  }
  // The block with the last tile, or block 0 if there is no tile.
  const bool ends = end_tile == num_tiles && (first_tile < end_tile || (num_tiles == 0 && blockIdx.x == 0));
  if (ends && k.crew.warp() == 0) end_tiles(k.g, first, num_tokens);
  hash = crew_sum(k.crew, hash);
  if (k.crew.thread == 0) local(k.g).block_hash[blockIdx.x] = hash;
  return true;
}

}  // namespace uccl_ep::gpu
