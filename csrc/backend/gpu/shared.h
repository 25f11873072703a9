// Shared memory that the block of a kernel needs for tables, which grow with the group.
#pragma once

#include "backend/gpu/layout.h"

namespace uccl_ep::gpu {

constexpr uint32_t kTableAlign = 128;  // of what follows a table
constexpr uint32_t table_bytes(uint64_t num_bytes) { return static_cast<uint32_t>(round_up(num_bytes, kTableAlign)); }

// Of tables by rank: map.cuh.
constexpr uint32_t rank_table_bytes(const DeviceMap& map) {
  const uint64_t entries = 3 * uint64_t{map.num_ranks} + map.num_domains + 1;
  return map.num_domains == 1 ? 0 : table_bytes(sizeof(uint16_t) * entries);
}
// Of a window's sources (SourceRows).
constexpr uint32_t kSourceEntryBytes = 28;
constexpr uint32_t source_table_bytes(const DeviceMap& map) { return table_bytes(kSourceEntryBytes * map.num_ranks); }
// Of what a window ships (SentWindow).
constexpr uint32_t kSentEntryBytes = 12;
constexpr uint32_t sent_table_bytes(const DeviceMap& map) {
  return map.num_domains == 1 ? 0 : table_bytes(kSentEntryBytes * map.num_domains);
}

// Of windows of a dispatch. Tiles have the same memory before there are windows.
constexpr uint32_t windows_bytes(const DeviceMap& map) { return source_table_bytes(map) + sent_table_bytes(map); }
// Of `windows` windows of a combine, at most two at a time: FoldSource, MergeStream, and for each window MergeDomain.
constexpr uint32_t kFoldEntryBytes = 20, kMergeEntryBytes = 20;
constexpr uint32_t fold_table_bytes(const DeviceMap& map) { return table_bytes(kFoldEntryBytes * map.num_ranks); }
constexpr uint32_t stream_table_bytes(const DeviceMap& map) {
  return map.num_domains == 1 ? 0 : table_bytes(kMergeEntryBytes * map.num_streams);
}
constexpr uint32_t domain_table_bytes(const DeviceMap& map) {
  return map.num_domains == 1 ? 0 : table_bytes(kMergeEntryBytes * map.num_domains);
}
constexpr uint32_t combine_table_bytes(const DeviceMap& map, uint32_t windows) {
  return fold_table_bytes(map) + stream_table_bytes(map) + (windows > 1 ? kHalves : 1) * domain_table_bytes(map);
}

// Of tiles: tile.cuh. What all tiles of a block have in common, and what each has.
constexpr uint32_t kPacketPlaceBytes = 28;
constexpr uint32_t common_tile_bytes(const DeviceMap& map) {
  const uint64_t ranks = map.num_ranks, domains = map.num_domains;
  return static_cast<uint32_t>(round_up(kPacketPlaceBytes * domains + 4 * (2 * ranks + 1 + domains), 8));
}
enum class TileKind : uint32_t {
  kTables,  // table_tile.cuh
  kMasks,   // mask_tile.cuh
};
// Tables of a tile have an entry for each of its tokens and each rank.
constexpr uint32_t kMostTabledRanks = 64;
constexpr TileKind tile_kind(const DeviceMap& map) {
  return map.num_domains > 1 && map.num_ranks > kMostTabledRanks ? TileKind::kMasks : TileKind::kTables;
}
constexpr uint32_t named_words(uint32_t experts) { return (experts + 31) / 32; }
constexpr uint32_t domain_words(const DeviceMap& map) { return (map.num_domains + 31) / 32; }
constexpr uint32_t own_tile_bytes(const DeviceMap& map, TileKind kind) {
  const uint64_t experts = map.num_experts, ranks = map.num_ranks, domains = map.num_domains;
  const uint64_t masks = 8 * (experts + ranks + domains), bases = 4 * (experts + ranks + 2 * domains);
  const uint64_t tables = 4 * (ranks + kTileTokens * (2 * ranks + domains + named_words(map.num_experts)));
  const uint64_t addends = 4 * kTileTokens * uint64_t{domain_words(map) + 2};
  return static_cast<uint32_t>(round_up(masks + bases + (kind == TileKind::kTables ? tables : addends), 8));
}
constexpr uint32_t tiles_bytes(const DeviceMap& map, TileKind kind, uint32_t tiles) {
  return table_bytes(common_tile_bytes(map) + uint64_t{tiles} * own_tile_bytes(map, kind));
}
constexpr uint32_t routing_bytes(const DeviceMap& map, uint32_t tiles = 1) {
  return tiles_bytes(map, tile_kind(map), tiles);
}

// What a block needs at least; beside variables, of which kernels have less than kStaticSharedBytes.
constexpr uint32_t least_shared_bytes(const DeviceMap& map) {
  uint32_t most = windows_bytes(map);
  for (uint32_t bytes : {routing_bytes(map), combine_table_bytes(map, kHalves)}) most = bytes > most ? bytes : most;
  return rank_table_bytes(map) + most;
}
constexpr uint32_t kStaticSharedBytes = 8192;
constexpr uint32_t kMostSharedBytes = 227 << 10;  // of a block, on any GPU so far

}  // namespace uccl_ep::gpu
