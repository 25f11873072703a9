// Low latency between domains. A *stream* is the tokens of a source that have experts in another domain, in their
// order: both sides find it from the routing, so no plan travels. A dispatch sends the routing, and each row of a
// stream once, to the source's rail there; the ranks of that domain read both from the rail's memory. A combine sends
// the weights the same way, unless they came with the routing. The rail sums what the ranks of its domain computed, and
// returns one row for each of the stream. All goes through rings of two operations, in chunks of a fixed number of
// rows.
//
// Loops that run a few times are not unrolled, because code is fetched when it first runs.
#pragma once

#include "backend/gpu/low_latency.cuh"
#include "backend/gpu/low_latency_net.h"
#include "backend/gpu/net.cuh"
#include "backend/gpu/poll.cuh"

namespace uccl_ep::gpu {

__host__ __device__ inline uint32_t mask_words(const DeviceMap& map) {
  return (map.low_latency.tokens + kTileTokens - 1) / kTileTokens;
}

using NetDispatch = SlotKernel<SlotDispatchArgs, true>;
using NetCombine = SlotKernel<SlotCombineArgs, true>;

// ---- streams --------------------------------------------------------------------------------------------------------
// In shared memory: the tokens of each of several streams.
struct StreamMasks {
  uint32_t words;
  Mask* tokens;  // [streams][words]

  static __host__ __device__ uint64_t bytes(const DeviceMap& map, uint32_t streams) {
    return uint64_t{streams} * mask_words(map) * sizeof(Mask);
  }
  __device__ StreamMasks(const DeviceMap& map, uint8_t* shared)
      : words(mask_words(map)), tokens(reinterpret_cast<Mask*>(shared)) {}

  // By a crew, and then it has to sync.
  __device__ __forceinline__ void clear(const Crew& crew, uint32_t streams) const {
#pragma unroll 1
    for (uint32_t i = crew.thread; i < streams * words; i += crew.size) tokens[i] = 0;
  }
  __device__ __forceinline__ void add(uint32_t stream, uint32_t token) const {
    or_shared(reinterpret_cast<uint32_t*>(tokens + stream * words) + token / 32, 1u << token % 32);
  }
  __device__ __forceinline__ bool has(uint32_t stream, uint32_t token) const {
    return (tokens[stream * words + token / kTileTokens] >> token % kTileTokens & 1) != 0;
  }
  __device__ __forceinline__ uint32_t count(uint32_t stream) const {
    uint32_t sum = 0;
#pragma unroll 1
    for (uint32_t w = 0; w < words; ++w) sum += __popcll(tokens[stream * words + w]);
    return sum;
  }
  // Rows of earlier tokens.
  __device__ __forceinline__ uint32_t row(uint32_t stream, uint32_t token) const {
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t w = 0; w < token / kTileTokens; ++w) before += __popcll(tokens[stream * words + w]);
    return before + __popcll(tokens[stream * words + token / kTileTokens] & ((Mask{1} << token % kTileTokens) - 1));
  }
};

// By a crew: our streams to other domains.
template <typename K>
__device__ inline void fill_sent_streams(const K& k, const StreamMasks& streams) {
  streams.clear(k.crew, k.g.map.num_domains);
  k.crew.sync();
  const uint32_t width = k.args.width;
#pragma unroll 1
  for (uint32_t i = k.crew.thread; i < tokens_of(k.args) * width; i += k.crew.size) {
    const int32_t expert = k.numbered(k.args.topk_idx[i]);
    if (expert < 0 || expert >= static_cast<int32_t>(k.g.map.num_experts)) continue;
    const uint32_t to = static_cast<uint32_t>(expert) / k.g.experts_per_rank;
    if (!k.is_near(to)) streams.add(k.domain_of(to), i / width);
  }
  k.crew.sync();
}

// ---- rings ----------------------------------------------------------------------------------------------------------
// A ring of rows or sums of an operation, as this rank sees it.
struct SlotRing {
  uint8_t* slots;
  uint64_t before;  // chunks of earlier operations
  uint64_t slot_bytes;
  uint32_t row_bytes;

  __device__ __forceinline__ uint32_t slot(const LowLatencyMap& map, uint32_t row) const {
    return static_cast<uint32_t>((before + row / map.rows_of_chunk) % (kHalves * map.chunks));
  }
  __device__ __forceinline__ uint8_t* row(const LowLatencyMap& map, uint32_t row) const {
    return slots + slot(map, row) * slot_bytes + uint64_t{row % map.rows_of_chunk} * row_bytes;
  }
  // What a flag of arrived chunks has to say before a row is there.
  __device__ __forceinline__ uint64_t arrived(const LowLatencyMap& map, uint32_t row) const {
    return before + row / map.rows_of_chunk + 1;
  }
  __device__ __forceinline__ uint64_t after(const LowLatencyMap& map, uint32_t rows) const {
    return before + (rows + map.rows_of_chunk - 1) / map.rows_of_chunk;
  }
  // What a flag of chunks that are gone has to say before the operation's chunks are written.
  __device__ __forceinline__ uint64_t free_after(const LowLatencyMap& map, uint32_t rows) const {
    const uint64_t end = after(map, rows), held = kHalves * map.chunks;
    return end < held ? 0 : end - held;
  }
};

// Streams and their rings, beside each other in shared memory. None where there is one domain.
struct Streams {
  StreamMasks masks;
  SlotRing* rings;

  static __host__ __device__ uint64_t bytes(const DeviceMap& map, uint32_t streams) {
    return map.num_domains > 1 ? StreamMasks::bytes(map, streams) + sizeof(SlotRing) * streams : 0;
  }
  static __device__ __forceinline__ Streams in(const DeviceMap& map, uint8_t* shared, uint32_t streams) {
    return {StreamMasks(map, shared), reinterpret_cast<SlotRing*>(shared + StreamMasks::bytes(map, streams))};
  }
};
static_assert(alignof(SlotRing) == sizeof(Mask));

__device__ __forceinline__ uint32_t slot_wire_bytes(const SlotDispatchArgs& args) {
  return static_cast<uint32_t>(round_up(args.stage.row.bytes, 128));
}
__device__ __forceinline__ SlotRing sent_ring(const NetDispatch& k, uint32_t domain) {
  return {at(k.g, k.g.rank, k.g.slot_net.to[domain].rows), k.g.slot_net_state.sent[domain], k.map().row_chunk_bytes,
          slot_wire_bytes(k.args)};
}
__device__ __forceinline__ SlotRing received_ring(const NetDispatch& k, uint32_t source) {
  return {at(k.g, k.g.net.from[source].holder, k.g.slot_net.from[source].rows), k.g.slot_net_state.received[source],
          k.map().row_chunk_bytes, slot_wire_bytes(k.args)};
}
__device__ __forceinline__ uint32_t sum_bytes(const SlotCombineArgs& args) {
  return static_cast<uint32_t>(round_up(uint64_t{args.hidden} * dtype_bytes(args.signature.wire), 128));
}
__device__ __forceinline__ SlotRing relayed_ring(const NetCombine& k, uint32_t stream) {
  return {at(k.g, k.g.rank, k.g.slot_net.relayed[stream].sums), k.g.slot_net_state.relayed[stream],
          k.map().sum_chunk_bytes, sum_bytes(k.args)};
}
__device__ __forceinline__ SlotRing returned_ring(const NetCombine& k, uint32_t domain) {
  return {at(k.g, k.g.rank, k.g.slot_net.to[domain].sums), k.g.slot_net_state.returned[domain], k.map().sum_chunk_bytes,
          sum_bytes(k.args)};
}

// ---- one chunk of an operation: header and routing, of a combine with weights ---------------------------------------
struct SlotPacket {
  uint8_t* begin;
  __device__ __forceinline__ SlotHeader& header() const { return *reinterpret_cast<SlotHeader*>(begin); }
  __device__ __forceinline__ int32_t* routing() const { return reinterpret_cast<int32_t*>(begin + sizeof(SlotHeader)); }
  __device__ __forceinline__ float* weights(uint32_t places) const {
    return reinterpret_cast<float*>(routing() + places);
  }
};
// Operation n is chunk n - 1.
__device__ __forceinline__ uint64_t packet_offset(uint64_t number, uint64_t slot_bytes) {
  return (number - 1) % kHalves * slot_bytes;
}
// Of our packet for all other domains, in the memory that they share.
__device__ __forceinline__ uint64_t own_packet_offset(const NetDispatch& k) {
  return packet_offset(k.number, k.map().routing_bytes);
}
__device__ __forceinline__ uint64_t own_packet_offset(const NetCombine& k) {
  return packet_offset(k.number, k.map().weights_bytes);
}
__device__ __forceinline__ SlotPacket own_slot_packet(const NetDispatch& k) {
  return {at(k.g, k.g.rank, k.g.slot_net.routing) + own_packet_offset(k)};
}
__device__ __forceinline__ SlotPacket own_slot_packet(const NetCombine& k) {
  return {at(k.g, k.g.rank, k.g.slot_net.weights) + own_packet_offset(k)};
}
__device__ __forceinline__ SlotPacket slot_packet(const NetDispatch& k, uint32_t source) {
  return {at(k.g, k.g.net.from[source].holder, k.g.slot_net.from[source].routing) +
          packet_offset(k.number, k.map().routing_bytes)};
}
__device__ __forceinline__ SlotPacket slot_packet(const NetCombine& k, uint32_t source) {
  return {at(k.g, k.g.net.from[source].holder, k.g.slot_net.from[source].weights) +
          packet_offset(k.number, k.map().weights_bytes)};
}
__device__ __forceinline__ uint32_t packet_channel(const NetDispatch& k, uint32_t domain) {
  return k.g.slot_net.to[domain].routing_channel;
}
__device__ __forceinline__ uint32_t packet_channel(const NetCombine& k, uint32_t domain) {
  return k.g.slot_net.to[domain].weights_channel;
}
__device__ __forceinline__ Awaited packet_gone(const NetDispatch& k, uint32_t domain) {
  return {k.g.slot_net_state.routing_gone + domain, k.number - kHalves, k.first_of(domain)};
}
__device__ __forceinline__ Awaited packet_gone(const NetCombine& k, uint32_t domain) {
  return {k.g.slot_net_state.weights_gone + domain, k.number - kHalves, k.first_of(domain)};
}
__device__ __forceinline__ Awaited packet_there(const NetDispatch& k, uint32_t source) {
  return {k.g.slot_net_state.routing_there + source, k.number, source};
}
__device__ __forceinline__ Awaited packet_there(const NetCombine& k, uint32_t source) {
  return {k.g.slot_net_state.weights_there + source, k.number, source};
}
// What a packet has behind its header: routing of so many places, and weights or none.
__device__ __forceinline__ uint32_t sent_places(const SlotDispatchArgs& args) {
  return args.stage.num_tokens * args.width;
}
__device__ __forceinline__ uint32_t sent_places(const SlotCombineArgs& args) {
  return args.routed != nullptr ? 0 : args.num_tokens * args.width;
}

// In shared memory of the block that sees to the network. Words; 1: it is so.
struct SlotNetShared {
  uint32_t poller_ends;
  uint32_t pushed;  // all is
  // Where ranks may be masked: those that are, or that are suspected of not taking what was sent before. No chunk goes
  // to them.
  RankSet shunned;

  __device__ __forceinline__ bool shuns(const Group& g, uint32_t rank) const { return masks(g) && shunned.has(rank); }
};
// By one thread: waits until chunks to a peer have left, whose memory is written again; else the peer is shunned.
// False: an error is known.
template <typename K>
__device__ inline bool wait_gone(const K& k, const Awaited& what, SlotNetShared& shared) {
  const Came came = wait_or_suspect(k, what);
  if (came == Came::kNo) shared.shunned.add(what.peer);
  return came != Came::kStopped;
}

// By one thread, where ranks may be masked: as note_missing(), of what a rank of another domain sends to its rail here.
// The rail alone votes for that rank: it may be dead itself. If it does not vote for it, its own rows are missing, or
// its vote will be.
template <typename K, typename Of>
__device__ inline Came note_missing_by_rail(const K& k, const DeviceFlag<Of>* flag, uint64_t number, uint32_t source,
                                            Settling& settling) {
  if (k.g.net.from[source].holder == k.g.rank) return note_missing(k, flag, number, source, settling);
  return wait_live(k.g, &flag->value, number, settling.began, settling.settlement, true);
}

// By a crew: writes what every other domain gets, when none reads what lay there. False: an error is known.
template <typename K>
__device__ inline bool write_slot_packets(const K& k, SlotNetShared& shared) {
  const uint32_t domains = k.g.map.num_domains, places = sent_places(k.args);
  const float* const weights = k.args.weights;
  bool good = !stopped(k.g);
#pragma unroll 1
  for (uint32_t d = k.crew.thread; k.number > kHalves && d < domains; d += k.crew.size)
    if (d != own_domain(k.g)) good &= wait_gone(k, packet_gone(k, d), shared);
  if (!k.crew.all(good)) return false;
  const SlotPacket packet = own_slot_packet(k);
  if (k.crew.thread == 0) write_header(k, packet.header());
#pragma unroll 1
  for (uint32_t i = k.crew.thread; i < places; i += k.crew.size) {
    packet.routing()[i] = k.numbered(k.args.topk_idx[i]);
    if (weights != nullptr) packet.weights(places)[i] = weights[i];
  }
  k.crew.sync();
  return true;
}
// By one warp: pushes them.
template <typename K>
__device__ inline void push_slot_packets(const K& k, const SlotNetShared& shared) {
  const uint32_t places = sent_places(k.args), lane = threadIdx.x % kWarp;
  const uint64_t of_place = sizeof(int32_t) + (k.args.weights != nullptr ? sizeof(float) : 0);
  const auto unit = static_cast<uint32_t>(own_packet_offset(k) / kSharedUnitBytes);
#pragma unroll 1
  for (uint32_t first = 0; first < k.g.map.num_domains; first += kWarp) {
    const uint32_t to = first + lane;
    const bool has = to < k.g.map.num_domains && to != own_domain(k.g) && !shared.shuns(k.g, k.first_of(to));
    push_all(k.g, has, [&](uint32_t) {
      return has ? Command{packet_channel(k, to), sizeof(SlotHeader) + of_place * places, k.number - 1, unit}
                 : Command{};
    });
  }
}

// By crews of all blocks: copies here what ranks of other domains sent, as if they had written it. False: an error is
// known.
template <typename K, typename Of>
__device__ inline bool adopt_packets(const K& k, Part<DeviceFlag<Of>> flags) {
  const uint32_t before = k.first(), others = k.g.map.num_ranks - k.members();
#pragma unroll 1
  for (uint32_t i = blockIdx.x; i < others; i += k.workers()) {
    const uint32_t source = i < before ? i : i + k.members();
    if (k.is_masked(source)) continue;
    if (!k.crew.all(k.crew.thread != 0 || wait_for(k.g, packet_there(k, source)))) return false;
    const SlotPacket packet = slot_packet(k, source);
    if constexpr (std::is_same_v<K, NetDispatch>) {
      const uint32_t places = min(packet.header().num_tokens, k.map().tokens) * k.args.width;
      int32_t* const out = k.routing(k.g.rank, source);
      uint32_t* const weights = k.routed(k.g.rank, source);
#pragma unroll 1
      for (uint32_t p = k.crew.thread; p < places; p += k.crew.size) {
        out[p] = packet.routing()[p];
        if (k.args.weights != nullptr) weights[p] = __float_as_uint(packet.weights(places)[p]);
      }
    }
    if (k.crew.thread == 0) k.header(k.g.rank, source) = packet.header();
    k.crew.sync();
    if (k.crew.thread == 0) publish(own_part(k.g, flags) + source, k.number);
    __syncwarp();  // lanes of this warp will wait for it
  }
  return true;
}

// ---- the block that sees to the network -----------------------------------------------------------------------------
// By one warp, one channel per lane, to rank `to`: as push_chunks(), but what is for a rank that is suspected meanwhile
// may stay incomplete.
template <typename K, typename Of>
__device__ inline void push_slot_chunks(const K& k, Outgoing<Of>& out, uint32_t to) {
  for (uint32_t looks = 1; __any_sync(kFullWarp, out.left()); ++looks) {
    push_complete(k.g, out);
    if (looks % 64 != 0) continue;
    if (__any_sync(kFullWarp, stopped(k.g))) return;
    if (masks(k.g) && out.left() && (device::load_past_l1(&k.state().suspected[word_of(to)]) & bit_of(to)) != 0)
      out.rows = 0;
  }
}
constexpr uint32_t kNetHelpers = 2;  // warps that poll and push; the others are a crew
__device__ __forceinline__ Crew net_crew() { return Crew::of(1, kNetHelpers, kSlotWarps - kNetHelpers); }
// What the crew fills and a warp then pushes, in this order.
enum class SlotStep : uint32_t { kPackets, kStreams };

// By one thread: waits until the other blocks are through, and keeps the number of the operation. False: an error is
// known.
template <typename K>
__device__ inline bool keep_number(const K& k, bool sends) {
  LowLatencyState& state = k.state();
  const auto kind = static_cast<uint32_t>(k.kind);
  if (!wait_block(k.g, &state.through[kind][sends ? 0 : 1], k.number)) return false;
  (sends ? state.sent : state.received)[kind] = k.number;
  return true;
}
// By all threads of the block. fill(step): by the crew; false in all threads: an error is known. push(step): by a warp,
// when that is filled. end(): by the crew, when all is. keep(): by one thread, at the end.
template <typename Fill, typename Push, typename End, typename Keep>
__device__ inline void serve_slot_network(const Group& g, SlotNetShared& shared, Fill fill, Push push, End end,
                                          Keep keep) {
  if (threadIdx.x == 0) {
    shared = {};
    if (masks(g)) {
      for (const bool sends : {false, true}) take_masked(g, masked_of_block(sends), 0, 1);
      take_masked(g, shared.shunned, 0, 1);
      take_suspected(g, shared.shunned, 0, 1);
      add_domains(g, shared.shunned, 0, 1);
    }
  }
  __syncthreads();
  const uint32_t warp = threadIdx.x / kWarp;
  if (warp == 0) return follow_events(g, g.slot_net.followed, &shared.poller_ends);
  const bool pushes = warp < kNetHelpers;
  bool good = true;
#pragma unroll 1
  for (uint32_t i = 0; good && i < 2; ++i) {
    const auto step = static_cast<SlotStep>(i);
    if (!pushes) good = fill(step);
    // Both meet at one place of the code, as compute-sanitizer demands.
    good = device::barrier_and(2, (kSlotWarps - kNetHelpers + 1) * kWarp, good);
    if (pushes && good) push(step);
  }
  if (pushes) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) count_shared(&shared.pushed);
    return;
  }
  if (good) end();
  if (net_crew().thread != 0) return;
  wait_shared(g, &shared.pushed);  // what is kept was read before
  keep();
  count_shared(&shared.poller_ends);
  tell_ended(g);
}

}  // namespace uccl_ep::gpu
