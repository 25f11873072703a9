// The most bytes of packets, for layouts.
#pragma once

#include <algorithm>

#include "backend/gpu/packet.h"
#include "common/units.h"

namespace uccl_ep::gpu {

constexpr uint64_t kAlign = 256;
constexpr uint32_t kUsualRanks = 8;  // that a token reaches
constexpr uint32_t kUneven = 4;  // times as much as its share: what a domain may get
constexpr uint32_t kUsualTokens = 4096;  // of an operation

static_assert(packet_parts({kMaxMembers, 1, kMaxTokens, kMaxTokens * kPairsPerToken, kMaxTokens * kPairsPerToken,
                            kMaxTokens, true})
                      .end < 0x80000000u,
              "a word says where a part of a packet begins (PacketPlace)");

// The most pairs of a rank's tokens in a domain.
inline uint32_t most_pairs_in(const DeviceMap& map, uint32_t members) {
  const uint64_t experts = uint64_t{members} * (map.num_experts / map.num_ranks);
  return static_cast<uint32_t>(std::min<uint64_t>(map.max_pairs, map.max_tokens * experts));
}

// The most bytes of a packet to a domain. A row has at least one pair.
inline uint64_t most_packet_bytes(const DeviceMap& map, uint32_t members) {
  const uint32_t tokens = map.max_tokens, pairs = most_pairs_in(map, members), rows = std::min(members * tokens, pairs);
  const uint32_t stream_rows = map.num_domains > 1 ? tokens : 0;
  const PacketSizes most{members, map.num_experts / map.num_ranks, tokens, rows, pairs, stream_rows, true};
  return round_up(packet_parts(most).end, kAlign);
}

// Bytes of a packet that land at once: all tables, and the routing of so many usual tokens, though their experts lie in
// the domain some times more often than elsewhere.
inline uint64_t head_bytes_for(const DeviceMap& map, uint32_t members, uint32_t tokens) {
  const uint32_t usual = std::min(map.max_tokens, tokens);
  const uint64_t most = uint64_t{usual} * kUsualRanks * kUneven * members / map.num_ranks;
  const uint32_t pairs = static_cast<uint32_t>(std::min<uint64_t>(most, most_pairs_in(map, members)));
  const uint32_t rows = std::min(members * usual, pairs), stream_rows = std::min(usual, pairs);
  const PacketSizes sizes{members, map.num_experts / map.num_ranks, map.max_tokens, rows, pairs, stream_rows, true};
  return std::min(round_up(packet_parts(sizes).end, kAlign), most_packet_bytes(map, members));
}

// The most bytes of all packets that a rank sends to other domains. Together they have no more pairs than a rank has.
inline uint64_t most_sent_bytes(const Topology& topo, const DeviceMap& map, int own_size) {
  uint64_t each = 0, fixed = 0, rows = 0, stream_rows = 0;
  for (const auto& [size, number] : topo.domains_of_size) {
    const uint32_t members = static_cast<uint32_t>(size);
    const uint64_t domains = static_cast<uint64_t>(number) - (size == own_size), tokens = map.max_tokens;
    // What is left to a multiple of 16 bytes behind weights, lists, pairs and pieces, and of a unit behind all.
    const uint64_t gaps = 4 * 15 + kPacketUnit - 1;
    each += domains * most_packet_bytes(map, members);
    fixed +=
        domains * (packet_parts({members, map.num_experts / map.num_ranks, map.max_tokens, 0, 0, 0, true}).end + gaps);
    rows += domains * tokens * members;
    stream_rows += domains * tokens;
  }
  const uint64_t pairs = map.max_pairs;
  const uint64_t variable = (sizeof(float) + sizeof(PairEntry)) * pairs + sizeof(ListEntry) * std::min(rows, pairs) +
                            sizeof(uint32_t) * std::min(stream_rows, pairs);
  const uint64_t known = known_packet_unit(map.num_domains, map.max_pairs) * uint64_t{kPacketUnit};
  return round_up(std::max(known, std::min(each, fixed + variable)), kAlign);
}

// Pairs of an operation of so many tokens, of which `full` may have as many as any token has. Where memory is short,
// tokens beyond the usual ones have few.
constexpr uint32_t pairs_of(uint32_t tokens, uint32_t full) {
  constexpr uint32_t kFewPairs = 8;
  const uint32_t usual = std::min(tokens, kUsualTokens);
  return std::max(usual * kPairsPerToken + (tokens - usual) * kFewPairs, std::min(tokens, full) * kPairsPerToken);
}

}  // namespace uccl_ep::gpu
