// Unpack: what other domains' packets say, where they are longer than their slots. Each block takes some sources. It
// reads the head and then the tail, chunk by chunk, and keeps in the plan and the output what is for us.
#pragma once

#include "backend/gpu/net.cuh"
#include "backend/gpu/plan_reader.cuh"
#include "backend/gpu/steps.h"

namespace uccl_ep::gpu {

// Chunks of the tail of a source's packet.
template <bool kFresh>
__device__ __forceinline__ uint32_t tail_of(const Kernel& k, uint32_t source, bool with_weights) {
  if (k.g.map.tail_slots == 0 || in_domain(k.g, source)) return 0;
  if (kFresh) return source_plan(k.g, source).tail_chunks;
  PacketSizes sizes;
  sizes.pairs = header(k.g, source, k.op.epoch).num_pairs;
  sizes.with_weights = with_weights;
  return tail_chunks(packet_parts(sizes).end, k.g.map.head_bytes, k.g.map.tail_bytes);
}

// Bytes of a packet that are there.
struct PacketBytes {
  const uint8_t* memory;  // of byte `begin`
  uint64_t begin, end;
};

// One source's packet, by a crew.
template <bool kFresh>
struct Unpacking {
  const DispatchKernel& k;
  const uint32_t source;
  PacketParts parts;
  uint64_t row_begin = 0, num_rows = 0;    // for us, of the packet's
  uint64_t pair_begin = 0, num_pairs = 0;
  uint64_t num_pieces = 0;  // entries; 0: we do not merge the stream
  uint32_t first_row, first_pair, first_piece = 0;  // of the plan

  __device__ Unpacking(const DispatchKernel& kernel, uint32_t s) : k(kernel), source(s) {
    const PlanReader<kFresh> plan(k);
    const DeviceHeader h = header(k.g, source, k.op.epoch);
    PacketSizes sizes;
    sizes.with_weights = k.args.signature.with_weights != 0;
    sizes.pairs = h.num_pairs;
    const uint32_t member = k.g.rank - k.g.first, members = k.g.end - k.g.first;
    first_row = plan.row_begin(source);
    first_pair = plan.pair_begin(source);
    pair_begin = first_pair + plan.weight_begin(source);
    num_pairs = plan.pair_end(source) - first_pair;
    if constexpr (kFresh) {
      sizes = {members, k.g.experts_per_rank, h.num_tokens, h.num_rows, h.num_pairs, h.stream_rows, sizes.with_weights};
      row_begin = MemberBegins(packet(k.g, source, k.op.epoch), members, k.g.experts_per_rank).row[member];
      num_rows = plan.row_end(source) - first_row;
      if (holder_of(k.g, source) == k.g.rank) {
        num_pieces = h.stream_rows + 1;
        for (uint32_t stream = 1; stream < stream_of(k.g, source); ++stream)
          first_piece += source_plan(k.g, k.g.net.relayed[stream].source).stream_rows + 1;
      }
    }
    parts = packet_parts(sizes);
  }

  // Calls keep(i, element) for the elements `begin` to `begin + count` of the part at `part` of which `bytes` has all.
  template <typename Element, typename Keep>
  __device__ __forceinline__ void each(const PacketBytes& bytes, uint64_t part, uint64_t begin, uint64_t count,
                                       Keep keep) const {
    const auto index = [&](uint64_t at) { return at < part ? 0 : (at - part) / sizeof(Element); };
    const uint64_t from = index(bytes.begin), to = index(bytes.end);
    const uint64_t first = from > begin ? from : begin, last = to < begin + count ? to : begin + count;
    for (uint64_t i = first + k.crew.thread; i < last; i += k.crew.size)
      keep(static_cast<uint32_t>(i - begin),
           *reinterpret_cast<const Element*>(bytes.memory + (part + i * sizeof(Element) - bytes.begin)));
  }
  // The row of pair p: the last one whose pairs begin there or before.
  __device__ __forceinline__ uint32_t row_of(uint32_t p) const {
    uint32_t low = first_row, high = PlanReader<kFresh>(k).row_end(source);
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      (k.plan.row_pair_begin[middle] <= p ? low : high) = middle;
    }
    return low;
  }
  // Of a compact row: the place of pair p among the columns of [rows, compact_width]. False: the caller has no such
  // row.
  __device__ __forceinline__ bool find_column(uint32_t p, uint64_t& place) const {
    const uint32_t row = row_of(p);
    place = uint64_t{row} * k.plan.compact_width + (p - k.plan.row_pair_begin[row]);
    return row < k.plan.num_out_rows;
  }

  __device__ void keep_row(uint32_t n, const uint4& entry) const {  // a ListEntry, loaded at once
    const uint32_t row = first_row + n, width = k.plan.compact_width;
    k.plan.row_token[row] = entry.w & 0xFFFF;
    k.plan.row_piece[row] = entry.y;
    k.plan.row_pair_begin[row] = first_pair + entry.x;
    k.plan.row_position[row] = entry.z;
    if (k.args.row_experts == nullptr || row >= k.plan.num_out_rows) return;
    for (uint32_t j = entry.w >> 16; j < width; ++j) {  // columns without a pair
      k.args.row_experts[uint64_t{row} * width + j] = -1;
      if (k.args.row_weights != nullptr) k.args.row_weights[uint64_t{row} * width + j] = 0.0f;
    }
  }
  __device__ void keep_pair(uint32_t n, uint32_t entry) const {  // a PairEntry
    const uint32_t p = first_pair + n, expert = entry & 0xFFFF, position = entry >> 16;
    const bool compact = k.plan.compact_width > 0;
    k.plan.out_rows[p] = compact ? expert : out_row_base(k.g)[source * k.g.experts_per_rank + expert] + position;
    uint64_t column;
    if (k.args.row_experts != nullptr && find_column(p, column)) k.args.row_experts[column] = expert;
  }
  __device__ void keep_weight(uint32_t n, float weight) const {
    const uint32_t p = first_pair + n;
    if (k.args.row_weights == nullptr) return;
    uint64_t place;
    if (k.plan.compact_width == 0) {
      place = k.plan.out_rows[p];
      if (place >= k.plan.num_out_rows) return;
    } else if (!find_column(p, place)) {
      return;
    }
    k.args.row_weights[place] = weight;
  }
  // Keeps what `bytes` has.
  __device__ void keep(const PacketBytes& bytes) const {
    if constexpr (kFresh) {
      each<uint4>(bytes, parts.lists, row_begin, num_rows, [&](uint32_t n, const uint4& e) { keep_row(n, e); });
      k.crew.sync();  // rows are there for their pairs, and these for their weights
      each<uint32_t>(bytes, parts.pairs, pair_begin, num_pairs, [&](uint32_t n, uint32_t e) { keep_pair(n, e); });
      each<uint32_t>(bytes, parts.stream_pieces, 0, num_pieces,
                     [&](uint32_t n, uint32_t pieces) { k.plan.relayed_piece[first_piece + n] = pieces; });
      k.crew.sync();
    }
    if (k.args.signature.with_weights != 0)
      each<float>(bytes, parts.weights, pair_begin, num_pairs, [&](uint32_t n, float w) { keep_weight(n, w); });
  }
};

// By a crew: unpacks a source's packet, whose tail has so many chunks. False: an error is known.
template <bool kFresh>
__device__ inline bool unpack(const DispatchKernel& k, uint32_t source, uint32_t chunks) {
  const Net::From& from = k.g.net.from[source];
  const Unpacking<kFresh> unpacking(k, source);
  const uint64_t head = k.g.map.head_bytes, read = k.g.net_state.tails_read[source];
  unpacking.keep({packet(k.g, source, k.op.epoch), 0, head});
  const uint8_t* const tails = at(k.g, from.holder, from.tails);
  for (uint32_t c = 0; c < chunks; ++c) {
    const Awaited there{k.g.net_state.tails_there + source, read + c + 1, source, static_cast<int>(c)};
    if (!k.crew.all(k.crew.thread != 0 || wait_peer(k, there))) return false;
    const uint64_t begin = head + c * k.g.map.tail_bytes, end = begin + k.g.map.tail_bytes;
    unpacking.keep({tails + (read + c) % k.g.map.tail_slots * k.g.map.tail_bytes, begin, end});
    k.crew.sync();  // all have read the chunk
    if (k.crew.thread == 0) publish_flag(from.tails_consumed, read + c + 1);
  }
  if (k.crew.thread == 0) k.g.net_state.tails_read[source] = read + chunks;
  return true;
}

// By crews of all blocks that place: plans all rows of a new plan, where a packet has a tail. Blocks share the rows of
// the other sources; a source with a tail is one block's. False: an error is known.
inline __device__ __noinline__ bool plan_with_tails(const DispatchKernel k) {
  const uint32_t blocks = k.args.num_blocks;
  Spread::over(k.crew, blocks).each(k.g.map.num_ranks, [&](uint32_t source, uint32_t first, uint32_t step) {
    const SourcePlan& from = source_plan(k.g, source);
    for (uint32_t row = from.row_begin + first; row < from.row_end && from.tail_chunks == 0; row += step)
      plan_row(k.g, k.plan, source, row);
  });
  for (uint32_t source = blockIdx.x; source < k.g.map.num_ranks; source += blocks)
    if (const uint32_t chunks = source_plan(k.g, source).tail_chunks; chunks > 0 && !unpack<true>(k, source, chunks))
      return false;
  tell_planned(k, blocks);
  return true;
}

// By crews of all blocks that place: with a known plan, unpacks the weights of packets with tails. A rank without rows
// does so, too: nobody gets a slot again before every member has read it.
inline __device__ __noinline__ void unpack_weights(const DispatchKernel k) {
  if (k.g.map.tail_slots == 0) return;
  for (uint32_t source = blockIdx.x; source < k.g.map.num_ranks; source += k.args.num_blocks) {
    if (!k.crew.all(k.crew.thread != 0 || wait_flag(k.g, entry_of(k.g, source, k.op.epoch)))) return;
    if (const uint32_t chunks = tail_of<false>(k, source, true); chunks > 0 && !unpack<false>(k, source, chunks))
      return;
  }
}

}  // namespace uccl_ep::gpu
