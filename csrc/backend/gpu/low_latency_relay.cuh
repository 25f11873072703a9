// A low-latency combine between domains: a rank sums, for the ranks of other domains whose rail it is, what the ranks
// of its own domain computed.
#pragma once

#include "backend/gpu/low_latency_sum.cuh"

namespace uccl_ep::gpu {

// Of a rank of another domain: its routing, -1 for none, and its weights.
struct RelayedRouting {
  const int32_t* experts;
  const uint32_t* weights;
  uint32_t tokens;
};
__device__ __forceinline__ RelayedRouting routing_of(const NetCombine& k, uint32_t source) {
  if (k.args.routed != nullptr) {
    const uint64_t first = uint64_t{source} * k.map().tokens * k.args.width;
    return {reinterpret_cast<const int32_t*>(k.args.pairs + first), k.args.routed + first, k.map().tokens};
  }
  const SlotPacket packet = slot_packet(k, source);
  const uint32_t tokens = min(packet.header().num_tokens, k.map().tokens);
  return {packet.routing(), reinterpret_cast<const uint32_t*>(packet.weights(tokens * k.args.width)), tokens};
}

// By a crew: waits for the weights of the streams that we relay, unless they are known, and finds their tokens: none of
// a source that is masked, or suspected because they do not come. False: an error is known.
__device__ inline bool fill_relayed_streams(const NetCombine& k, const StreamMasks& streams) {
  __shared__ RankSet missing;
  const uint32_t relayed = k.g.net.num_relayed, width = k.args.width;
  const uint32_t first_of_domain = k.g.first * k.g.experts_per_rank;
  const uint32_t of_domain = k.members() * k.g.experts_per_rank;
  streams.clear(k.crew, k.g.map.num_streams);
  if (masks(k.g)) {
    if (k.crew.thread == 0) missing = k.masked;
    k.crew.sync();
  }
  bool good = !stopped(k.g);
#pragma unroll 1
  for (uint32_t i = 1 + k.crew.thread; k.args.routed == nullptr && i <= relayed; i += k.crew.size) {
    const Came came = wait_or_suspect(k, packet_there(k, k.g.net.relayed[i].source));
    if (came == Came::kNo) missing.add(k.g.net.relayed[i].source);
    good &= came != Came::kStopped;
  }
  if (!k.crew.all(good)) return false;
#pragma unroll 1
  for (uint32_t i = 1; i <= relayed; ++i) {
    if (masks(k.g) && missing.has(k.g.net.relayed[i].source)) continue;
    const RelayedRouting its = routing_of(k, k.g.net.relayed[i].source);
#pragma unroll 1
    for (uint32_t p = k.crew.thread; p < its.tokens * width; p += k.crew.size)
      if (static_cast<uint32_t>(its.experts[p]) - first_of_domain < of_domain) streams.add(i, p / width);
  }
  k.crew.sync();
  return true;
}

__device__ __forceinline__ Awaited sums_gone(const NetCombine& k, uint32_t stream, const SlotRing& ring) {
  return {k.g.slot_net_state.sums_gone + stream, ring.free_after(k.map(), k.map().tokens),
          k.g.net.relayed[stream].source};
}
// By a crew, while weights are on their way: finds the rings that our sums go into, and waits until they are free for
// as many chunks as there may be, which is when all that were sent two operations ago have left.
__device__ inline bool open_rings(const NetCombine& k, SlotRing* relayed) {
  bool good = !stopped(k.g);
#pragma unroll 1
  for (uint32_t i = 1 + k.crew.thread; i <= k.g.net.num_relayed; i += k.crew.size) {
    const SlotRing ring = relayed[i] = relayed_ring(k, i);
    good &= wait_or_suspect(k, sums_gone(k, i, ring)) != Came::kStopped;
  }
  return k.crew.all(good);
}

// How many warps share a row that is summed for another domain: all have a share, and few have two. Where ranks may be
// masked one does, because blocks may disagree about whose weights have come.
__device__ __forceinline__ uint32_t relay_shares(const NetCombine& k, const StreamMasks& streams) {
  if (masks(k.g)) return 1;
  uint32_t rows = 1;
  for (uint32_t i = 1; i <= k.g.net.num_relayed; ++i) rows += streams.count(i);
  return min(max(k.workers() * kSlotWarps / rows, 1), parts_of(k));
}

// By a crew: sums its share of the rows for other domains. False: an error is known.
__device__ inline bool relay_sums(const NetCombine& k, const Streams& streams, const Sources& sources) {
  const uint32_t relayed = k.g.net.num_relayed, width = k.args.width, lane = threadIdx.x % kWarp;
  const bool wide = k.args.signature.wire == Dtype::kFp32;
  const uint32_t parts = parts_of(k), shares = relay_shares(k, streams.masks), at_once = (parts + shares - 1) / shares;
  uint32_t share = k.warp();  // of all streams, one after the other
#pragma unroll 1
  for (uint32_t i = 1; i <= relayed; ++i) {
    const RelayedRouting its = routing_of(k, k.g.net.relayed[i].source);
    const uint32_t tokens = its.tokens;
#pragma unroll 1
    for (; share < tokens * shares; share += k.warps()) {
      const uint32_t token = share / shares, first = share % shares * at_once;
      if (!streams.masks.has(i, token)) continue;
      const uint32_t place = token * width + lane;
      int32_t expert = lane < width ? its.experts[place] : -1;
      const float weight = expert < 0 ? 0.0f : __uint_as_float(its.weights[place]);
      if (expert >= 0 && !k.is_near(static_cast<uint32_t>(expert) / k.g.experts_per_rank)) expert = -1;
      Addends addends = find_pairs(k, i, token, {expert, weight});
      if (!wait_rows(k, sources, token, addends)) return false;
      const uint32_t row = streams.masks.row(i, token);
      const uint32_t sum = row_at(k.g, streams.rings[i].row(k.map(), row));
#pragma unroll 1
      for (uint32_t part = first; part < min(first + at_once, parts); ++part) sum_part(k, addends, {sum, wide}, part);
      __syncwarp();
      if (lane == 0)
        count_one(own_part(k.g, k.map().relayed_counts) + i * k.map().chunks + row / k.map().rows_of_chunk);
    }
    share -= tokens * shares;
  }
  return true;
}

// By the crew of the last block: what other domains sent is read, and its memory may be used again.
__device__ inline void end_rings(const NetCombine& k, const Streams& streams) {
  const SlotNetState& state = k.g.slot_net_state;
  fence_system();
#pragma unroll 1
  for (uint32_t s = k.crew.thread; s < k.g.map.num_ranks; s += k.crew.size)
    if (!k.is_near(s) && !k.is_masked(s)) store_flag(k.g.slot_net.from[s].weights_consumed, k.number);
#pragma unroll 1
  for (uint32_t d = k.crew.thread; d < k.g.map.num_domains; d += k.crew.size) {
    if (d == own_domain(k.g) || k.is_masked(k.first_of(d))) continue;
    state.returned[d] = streams.rings[d].after(k.map(), streams.masks.count(d));
    store_flag(k.g.slot_net.to[d].sums_consumed, state.returned[d]);
  }
}

// By block 0, where ranks may be masked: waits for all that other domains send and return. `sent`: our streams.
static __device__ __noinline__ bool wait_live_sums(const NetCombine k, Settling& settling, const Streams sent) {
  const SlotNetState& state = k.g.slot_net_state;
  RankSet& gone = settling.gone;
  bool good = true;
#pragma unroll 1
  for (uint32_t s = k.crew.thread; s < k.g.map.num_ranks; s += k.crew.size)
    if (!k.is_near(s) && !gone.has(s))
      good &= note_missing_by_rail(k, state.weights_there + s, k.number, s, settling) != Came::kStopped;
  if (!k.crew.all(good)) return false;
#pragma unroll 1
  for (uint32_t d = k.crew.thread; d < k.g.map.num_domains; d += k.crew.size) {
    const uint32_t rank = k.first_of(d);
    if (d == own_domain(k.g) || any_there(gone.words, rank, k.first_of(d + 1))) continue;
    const uint64_t sums = sent.rings[d].after(k.map(), sent.masks.count(d));
    good &= note_missing(k, state.sums_there + d, sums, rank, settling) != Came::kStopped;
  }
  return good;
}

// ---- the block that sees to the network -----------------------------------------------------------------------------
// By its crew, where ranks may be masked: those that take no sums. False: an error is known.
static __device__ __noinline__ bool find_shunned(const NetCombine k, SlotNetShared& shared) {
  bool good = true;
#pragma unroll 1
  for (uint32_t i = 1 + k.crew.thread; i <= k.g.net.num_relayed; i += k.crew.size)
    good &= wait_gone(k, sums_gone(k, i, relayed_ring(k, i)), shared);
  return k.crew.all(good);
}
__device__ inline void serve_network(const Group& g, const SlotCombineArgs& args, const StreamMasks& relayed,
                                     SlotNetShared& shared) {
  const bool sends = args.phase != SlotPhase::kReceive, receives = args.phase != SlotPhase::kSend;
  const NetCombine sent = begin_slots<true>(g, args, SlotKind::kCombine, net_crew(), true);
  const NetCombine k = begin_slots<true>(g, args, SlotKind::kCombine, net_crew(), false);
  const SlotNetState& state = g.slot_net_state;
  const auto fill = [&](SlotStep step) {
    if (step == SlotStep::kPackets) return !sends || write_slot_packets(sent, shared);
    return !receives || (fill_relayed_streams(k, relayed) && (!masks(g) || find_shunned(k, shared)));
  };
  const auto push = [&](SlotStep step) {
    if (sends && step == SlotStep::kPackets) push_slot_packets(sent, shared);
    if (!receives || step == SlotStep::kPackets) return;
#pragma unroll 1
    for (uint32_t first = 1; first <= g.net.num_relayed; first += kWarp) {
      const uint32_t stream = first + threadIdx.x % kWarp;
      Outgoing<SlotPartsDone> out;
      const uint32_t source = stream <= g.net.num_relayed ? g.net.relayed[stream].source : 0;
      if (stream <= g.net.num_relayed && !shared.shuns(g, source)) {
        out.channel = g.slot_net.relayed[stream].channel;
        out.counts = own_part(g, k.map().relayed_counts) + stream * k.map().chunks;
        out.rows = relayed.count(stream);
        out.per_chunk = k.map().rows_of_chunk;
        out.row_bytes = sum_bytes(args);
        out.serial = state.relayed[stream];
        out.parts = relay_shares(k, relayed);
      }
      push_slot_chunks(k, out, source);
    }
  };
  const auto keep = [&] {
    if (sends) keep_number(sent, true);
    if (!receives || !keep_number(k, false)) return;
#pragma unroll 1
    for (uint32_t i = 1; i <= g.net.num_relayed; ++i)
      state.relayed[i] = relayed_ring(k, i).after(k.map(), relayed.count(i));
  };
  serve_slot_network(g, shared, fill, push, [] {}, keep);
}

}  // namespace uccl_ep::gpu
