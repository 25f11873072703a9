// Packets: what a rank tells the ranks of a domain about an operation. Those of its own domain read the packet in
// place; to another domain it is shipped. It has a header, the routing of a new plan, and the weights of the pairs if
// they travel.
//
// Where a packet lands there is a slot for as much as usual operations need. What a longer one has beyond, its *tail*,
// goes in chunks to a ring of its own. Every member unpacks a chunk before the next one takes its slot: unpack.cuh.
#pragma once

#include "backend/gpu/layout.h"
#include "backend/gpu/words.h"
#include "common/units.h"

namespace uccl_ep::gpu {

// A row for one member.
struct ListEntry {
  uint32_t first_pair;  // pairs of earlier rows for the member
  uint32_t piece;       // number of its piece among the source's in the domain
  uint32_t position;    // in the stream
  uint16_t token;
  uint16_t num_pairs;
};
static_assert(sizeof(ListEntry) == 16 && kMaxTokens <= 1u << 16);
// A member has fewer than 2^16 experts: the routing of more does not fit shared memory. No token has an expert twice.
struct alignas(4) PairEntry {
  uint16_t expert;    // of the member
  uint16_t position;  // earlier pairs of this source with the expert
};

struct DeviceHeader {
  uint64_t epoch;
  OpSignature signature;
  uint64_t routing_hash;  // only the rank that wrote it reads it
  uint32_t num_tokens;
  uint32_t num_refused;  // as in OpHeader
  uint32_t num_pairs;
  // Of a new plan.
  uint32_t num_rows;
  uint32_t stream_rows;
  uint32_t most_of_block;  // BlockMost
  SpanRows span_rows;  // of this rank
};

// Where the parts of a packet begin, in bytes. With a known plan a packet has no counts and no token blocks, and ends
// with the weights.
struct PacketParts {
  uint64_t counts = 0;         // [members][experts of a rank] uint32
  uint64_t row_begin = 0, pair_begin = 0;  // [members + 1] uint32 each: rows and pairs for lower members
  uint64_t token_block_rows = 0;  // [members][groups of token blocks] BlockRows: rows for the member
  uint64_t token_block_streams = 0;  // [groups of token blocks] BlockRows, for another domain only, as stream_pieces
  // A tail has elements of these, whole ones, because all parts lie at multiples of 16 bytes. Lists come before pairs
  // and these before weights, because unpacking needs what came before.
  uint64_t lists = 0;  // [rows] ListEntry, by member
  uint64_t pairs = 0;  // [pairs] PairEntry, by member, then token, then expert; so are weights
  uint64_t stream_pieces = 0;  // [stream rows + 1] uint32: pieces of earlier rows
  uint64_t weights = 0;  // [pairs] float
  uint64_t end = 0;
};
struct PacketSizes {
  uint32_t members = 0;  // 0: the plan is known
  uint32_t experts_per_rank = 0, num_tokens = 0, rows = 0, pairs = 0, stream_rows = 0;
  bool with_weights = false;
};
constexpr uint64_t kPartAlign = 16;
// Of token_block_streams.
constexpr uint32_t token_block_part_bytes(uint32_t groups) {
  return static_cast<uint32_t>(round_up(sizeof(BlockRows) * uint64_t{groups}, kPartAlign));
}
constexpr PacketParts packet_parts(const PacketSizes& s) {
  const uint32_t groups = s.members == 0 ? 0 : BlockRows::groups((s.num_tokens + kTokenBlock - 1) / kTokenBlock);
  PacketParts p;
  uint64_t at = round_up(sizeof(DeviceHeader), kPartAlign);
  const auto take = [&](uint64_t& part, uint64_t bytes) {
    part = at;
    at += round_up(bytes, kPartAlign);
  };
  take(p.counts, 4 * uint64_t{s.members} * s.experts_per_rank);
  for (uint64_t* begins : {&p.row_begin, &p.pair_begin})
    take(*begins, s.members == 0 ? 0 : 4 * (uint64_t{s.members} + 1));
  take(p.token_block_rows, sizeof(BlockRows) * s.members * groups);
  take(p.token_block_streams, token_block_part_bytes(groups));
  take(p.lists, sizeof(ListEntry) * s.rows);
  take(p.pairs, s.members == 0 ? 0 : sizeof(PairEntry) * s.pairs);
  take(p.stream_pieces, s.members == 0 ? 0 : 4 * (uint64_t{s.stream_rows} + 1));
  take(p.weights, s.with_weights ? sizeof(float) * s.pairs : 0);
  p.end = at;
  return p;
}

// Packets for other domains lie behind each other, by domain, at multiples of so many bytes. Each operation has them in
// the half of its epoch.
constexpr uint32_t kPacketUnit = static_cast<uint32_t>(kSharedUnitBytes);
// With a known plan: where the packet for a domain begins, in units, if `pairs` pairs of the plan are for lower ones.
constexpr uint32_t known_packet_unit(uint32_t domain, uint64_t pairs) {
  constexpr uint64_t kHeader = (sizeof(DeviceHeader) + kPacketUnit - 1) / kPacketUnit;
  return static_cast<uint32_t>(domain * (kHeader + 1) + sizeof(float) * pairs / kPacketUnit);
}
// Chunks of the tail of a packet, if its head and a chunk have so many bytes.
constexpr uint32_t tail_chunks(uint64_t packet_bytes, uint64_t head_bytes, uint64_t tail_bytes) {
  return packet_bytes <= head_bytes ? 0
                                    : static_cast<uint32_t>((packet_bytes - head_bytes + tail_bytes - 1) / tail_bytes);
}
constexpr uint32_t packet_half(uint64_t epoch) { return static_cast<uint32_t>((epoch - 1) % kHalves); }

}  // namespace uccl_ep::gpu
