// The kernel of a low-latency dispatch. Crews of every block send the block's tokens and receive its share of the rows,
// side by side or in two launches.
//
// `a ..> b`: b waits for a. `a --> b`: b is published when a is done.
//
// send     rows_read (of two ago) ..> routing, header --> routing_full | rows of the block's tokens --> rows_full
// receive  routing_full of all ..> slots; counts | rows_full ..> rows into slots | last block --> rows_read
//
// Between domains (low_latency_net.cuh) a block sends rows into rings, too, and one more block sees to the network:
//
// poll     words of hosts ..> --> routing_there, rows_there, rows_gone, routing_gone
// push     routing of ours --> command | parts of a chunk's rows are there ..> --> command
// others   routing for other domains, and for ours --> routing_full | all blocks through ..> numbers, ended
// receive  first: routing_there ..> routing of another domain's rank, copied here --> routing_full; rows_there ..> its
// rows
#include "backend/gpu/low_latency_place.cuh"

namespace uccl_ep::gpu {
namespace {

// ---- send -----------------------------------------------------------------------------------------------------------
// By a crew: our routing, for rank `to`, and the weights if they travel. With our own copy it is checked. False: this
// thread saw a wrong one.
template <typename Dispatch>
__device__ inline bool send_routing(const Dispatch& k, uint32_t to) {
  const uint32_t width = k.args.width, places = k.args.stage.num_tokens * width;
  int32_t* const out = k.routing(to, k.g.rank);
  bool good = true;
  for (uint32_t i = k.crew.thread; i < places; i += k.crew.size) {
    const int64_t expert = k.args.topk_idx[i];
    out[i] = k.numbered(expert);
    if (k.args.weights != nullptr) k.routed(to, k.g.rank)[i] = own_weight(k, i);
    if (to != k.g.rank || expert == -1) continue;
    const uint32_t token = i / width;
    good &= good_expert(k.g, expert, token);
    for (uint32_t other = token * width; other < i; ++other) {
      if (k.args.topk_idx[other] != expert) continue;
      report(k.g, {DeviceFault::kExpertTwice, ErrorKind::kPeerFailed, Step::kExchange, k.g.rank,
                   static_cast<int>(token), 1, static_cast<uint64_t>(expert)});
      good = false;
    }
  }
  return good;
}

// By a crew. Between domains the block that sees to the network does it.
template <typename Dispatch>
__device__ inline bool tell_routing(const Dispatch& k) {
  return send_headers(k, k.map().routing_full, [&](uint32_t to) { return send_routing(k, to); });
}

// Whom a token goes to, as a lane has it: a rank of our domain, or another domain. No two lanes have the same.
struct Target {
  uint32_t rank = kNobody, domain = kNobody;
  __device__ __forceinline__ bool is_there() const { return rank != kNobody || domain != kNobody; }
};
// By a warp. Lane k < width names the token's k-th expert.
template <typename Dispatch>
__device__ __forceinline__ Target target_of(const Dispatch& k, uint32_t token, uint32_t lane) {
  const uint32_t width = k.args.width;
  const int32_t expert = lane < width ? k.numbered(k.args.topk_idx[uint64_t{token} * width + lane]) : -1;
  const bool there = expert >= 0 && expert < static_cast<int32_t>(k.g.map.num_experts);
  const uint32_t to = there ? static_cast<uint32_t>(expert) / k.g.experts_per_rank : kNobody;
  Target target;
  if (there && k.is_near(to))
    target.rank = k.is_masked(to) ? kNobody : to;
  else if (there)
    target.domain = k.domain_of(to);
  bool first = target.is_there();
  for (uint32_t i = 0; i < width; ++i) {
    const uint32_t rank = __shfl_sync(kFullWarp, target.rank, i);
    const uint32_t domain = Dispatch::kNet ? __shfl_sync(kFullWarp, target.domain, i) : kNobody;
    first &= i >= lane || rank != target.rank || domain != target.domain;
  }
  return first ? target : Target{};
}

// Rows are sent and placed in so many parts, each by another warp: a row takes a warp several round trips to memory.
constexpr uint32_t kRowParts = 4;
// Vectors of a part of a row of `vectors`: whole blocks of the quantiser, whose scale is one.
__device__ __forceinline__ uint32_t part_vectors(uint32_t vectors) {
  constexpr uint32_t kOfBlock = kFp8Block / 8;
  return (vectors + kOfBlock * kRowParts - 1) / (kOfBlock * kRowParts) * kOfBlock;
}

// By a warp: sends a part of a row.
__device__ __forceinline__ void send_part(const StageArgs& args, uint32_t token, uint32_t part, const Outs& outs,
                                          uint32_t lane) {
  const uint32_t vectors = args.hidden / 8, of_part = part_vectors(vectors);
  const uint32_t first = min(part * of_part, vectors), end = min(first + of_part, vectors);
  const uint4* const from = reinterpret_cast<const uint4*>(args.x) + uint64_t{token} * vectors;
  if (args.row.num_scales == 0 || !quantise_row(AllScaleRules{}, args, from, outs, lane, {first, end}))
    copy_row<8>(from, outs, end, lane, first);
}

// By a crew: sends its tokens' rows, and publishes that.
template <typename Dispatch>
__device__ inline void send_rows(const Dispatch& k, SlotPlaces& shared, const Streams& streams) {
  static_assert(kSlotWarps / 2 % kRowParts == 0 && kPairsPerToken <= kSlotPlaces);
  const uint32_t at_once = k.crew.warps() / kRowParts;  // tokens of a block
  const uint32_t lane = threadIdx.x % kWarp, warp = k.crew.warp();
  uint8_t** const places = shared.of[threadIdx.x / kWarp];
  for (uint32_t token = blockIdx.x + k.workers() * (warp / kRowParts); token < k.args.stage.num_tokens;
       token += k.workers() * at_once) {
    const Target target = target_of(k, token, lane);
    const bool leaves = Dispatch::kNet && target.domain != kNobody;
    const LaneMask all = ballot(target.is_there());
    if (all == 0) continue;
    const uint32_t row = leaves ? streams.masks.row(target.domain, token) : 0;
    if (target.is_there())
      places[__popcll(all & ((LaneMask{1} << lane) - 1))] =
          leaves ? streams.rings[target.domain].row(k.map(), row) : k.row(target.rank, k.g.rank, token);
    __syncwarp();
    send_part(k.args.stage, token, warp % kRowParts, {places[0], static_cast<uint32_t>(__popcll(all)) - 1, places + 1},
              lane);
    __syncwarp();
    if (leaves)
      count_one(own_part(k.g, k.map().sent_counts) + target.domain * k.map().chunks + row / k.map().rows_of_chunk);
  }
  tell_sent(k, k.map().rows_full);
}

// By a crew, where there are other domains: our streams, and the rings that they go into, which are free then. A domain
// that is masked or suspected takes no more chunks, but what is for it is written as if it did.
__device__ inline bool open_rings(const NetDispatch& k, const Streams& streams) {
  fill_sent_streams(k, streams.masks);
  bool good = !stopped(k.g);
#pragma unroll 1
  for (uint32_t d = k.crew.thread; d < k.g.map.num_domains; d += k.crew.size) {
    if (d == own_domain(k.g)) continue;
    const SlotRing ring = streams.rings[d] = sent_ring(k, d);
    good &= wait_or_suspect(k, {k.g.slot_net_state.rows_gone + d, ring.free_after(k.map(), streams.masks.count(d)),
                                k.first_of(d)}) != Came::kStopped;
  }
  return k.crew.all(good);
}

template <typename Dispatch>
__device__ inline bool send(Dispatch k, SlotPlaces& shared, const Streams& streams) {
  __shared__ uint64_t began;
  find_masked(k);
  if (!wait_free(k, k.map().rows_read)) return false;
  if constexpr (Dispatch::kNet) {
    if (!open_rings(k, streams)) return false;
  } else {
    if (!tell_routing(k)) return false;
  }
  begin_step(k, began);
  send_rows(k, shared, streams);
  end_step(k, began, Step::kStage);
  end_send(k, Phase::kSlotsSent);
  return true;
}

// ---- receive -------------------------------------------------------------------------------------------------------
// By the crew of the last block: what other domains sent is read, and its memory may be used again.
__device__ inline void end_rings(const NetDispatch& k, const Streams& streams) {
#pragma unroll 1
  for (uint32_t s = k.crew.thread; s < k.g.map.num_ranks; s += k.crew.size) {
    if (k.is_near(s) || k.is_masked(s)) continue;
    const uint64_t received = streams.rings[s].after(k.map(), streams.masks.count(s));
    k.g.slot_net_state.received[s] = received;
    fence_system();
    store_flag(k.g.slot_net.from[s].rows_consumed, received);
    store_flag(k.g.slot_net.from[s].routing_consumed, k.number);
  }
}

// By a warp: rows of a source's stream to our domain, whose routing has come.
__device__ __forceinline__ uint32_t count_stream(const NetDispatch& k, uint32_t source) {
  const SlotPacket packet = slot_packet(k, source);
  const uint32_t tokens = min(packet.header().num_tokens, k.map().tokens), width = k.args.width;
  const uint32_t first = k.g.first * k.g.experts_per_rank, of_domain = k.members() * k.g.experts_per_rank;
  uint32_t rows = 0;
#pragma unroll 1
  for (uint32_t begin = 0; begin < tokens; begin += kWarp) {
    const uint32_t token = begin + k.crew.lane();
    bool wants = false;
    for (uint32_t i = 0; token < tokens && i < width; ++i)
      wants |= static_cast<uint32_t>(packet.routing()[token * width + i]) - first < of_domain;
    rows += __popcll(ballot(wants));
  }
  return rows;
}
// By block 0, where ranks may be masked: waits for all that comes from other domains.
__device__ __noinline__ bool wait_live_rows(const NetDispatch k, Settling& settling) {
  const uint32_t before = k.first(), others = k.g.map.num_ranks - k.members(), lane = k.crew.lane();
  bool good = true;
#pragma unroll 1
  for (uint32_t i = k.crew.warp(); i < others; i += k.crew.warps()) {
    const uint32_t source = i < before ? i : i + k.members();
    if (__any_sync(kFullWarp, settling.gone.has(source))) continue;
    // What has not come is not read, also by a rank that does not vote for its source: it may come meanwhile.
    const auto note = [&](const auto* flag, uint64_t value) {
      const Came came = lane == 0 ? note_missing_by_rail(k, flag, value, source, settling) : Came::kYes;
      good &= came != Came::kStopped;
      const bool is_there = __all_sync(kFullWarp, came == Came::kYes);
      __syncwarp();  // votes order no memory
      return is_there;
    };
    if (!note(k.g.slot_net_state.routing_there + source, k.number)) continue;
    note(k.g.slot_net_state.rows_there + source, received_ring(k, source).after(k.map(), count_stream(k, source)));
  }
  return good;
}

template <typename Dispatch>
__device__ inline bool receive(Dispatch k, uint8_t* dynamic, SlotPlaces& shared) {
  __shared__ uint64_t began;
  const auto wait = [&](Settling& settling) {
    bool good = wait_live_blocks(k, settling, k.map().routing_full, k.map().rows_full);
    if constexpr (Dispatch::kNet) good &= wait_live_rows(k, settling);
    return good;
  };
  if (!settle(k, wait)) return false;
  if constexpr (Dispatch::kNet)
    if (!adopt_packets(k, k.map().routing_full)) return false;
  begin_step(k, began);
  if (!wait_headers(k, k.map().routing_full)) return false;
  end_step(k, began, Step::kExchange);
  begin_step(k, began);
  const SlotTable table(k.g, dynamic);
  const Streams streams = received_streams(k.g.map, dynamic);
  if constexpr (Dispatch::kNet)
#pragma unroll 1
    for (uint32_t s = k.crew.thread; s < k.g.map.num_ranks; s += k.crew.size)
      if (!k.is_near(s)) streams.rings[s] = received_ring(k, s);
  fill_table(k, table, streams.masks);
  if (!k.crew.all(place_slots(k, table, shared, streams))) return false;
  end_step(k, began, Step::kPlace);
  end_receive(k, Phase::kSlotsReceived, k.map().rows_read, [&] {
    if constexpr (Dispatch::kNet) end_rings(k, streams);
  });
  return true;
}

// ---- the block that sees to the network -----------------------------------------------------------------------------
// By its crew, where ranks may be masked: those that take no rows. False: an error is known.
__device__ __noinline__ bool find_shunned(const NetDispatch k, const StreamMasks streams, SlotNetShared& shared) {
  bool good = true;
#pragma unroll 1
  for (uint32_t d = k.crew.thread; d < k.g.map.num_domains; d += k.crew.size)
    if (d != own_domain(k.g))
      good &= wait_gone(
          k, {k.g.slot_net_state.rows_gone + d, sent_ring(k, d).free_after(k.map(), streams.count(d)), k.first_of(d)},
          shared);
  return k.crew.all(good);
}
__device__ inline void serve_network(const Group& g, const SlotDispatchArgs& args, const StreamMasks& streams,
                                     SlotNetShared& shared) {
  const bool sends = args.phase != SlotPhase::kReceive, receives = args.phase != SlotPhase::kSend;
  const auto begin = [&](const Crew& crew, bool sending) {
    return begin_slots<true>(g, args, SlotKind::kDispatch, crew, sending);
  };
  const NetDispatch k = begin(net_crew(), true), received = begin(net_crew(), false);
  const auto fill = [&](SlotStep step) {
    if (!sends) return true;
    if (step == SlotStep::kPackets) return write_slot_packets(k, shared);
    fill_sent_streams(k, streams);
    return !masks(g) || find_shunned(k, streams, shared);
  };
  const auto push = [&](SlotStep step) {
    if (!sends) return;
    if (step == SlotStep::kPackets) return push_slot_packets(k, shared);
#pragma unroll 1
    for (uint32_t first = 0; first < g.map.num_domains; first += kWarp) {
      const uint32_t to = first + threadIdx.x % kWarp;
      Outgoing<SlotPartsDone> out;
      const uint32_t rank = to < g.map.num_domains ? k.first_of(to) : 0;
      if (to < g.map.num_domains && to != own_domain(g) && !shared.shuns(g, rank)) {
        out.channel = g.slot_net.to[to].row_channel;
        out.counts = own_part(g, k.map().sent_counts) + to * k.map().chunks;
        out.rows = streams.count(to);
        out.per_chunk = k.map().rows_of_chunk;
        out.row_bytes = slot_wire_bytes(args);
        out.serial = g.slot_net_state.sent[to];
        out.parts = kRowParts;
      }
      push_slot_chunks(k, out, rank);
    }
  };
  const auto end = [&] {
    if (sends && wait_free(k, k.map().rows_read)) tell_routing(k);
  };
  const auto keep = [&] {
    if (sends && keep_number(k, true))
#pragma unroll 1
      for (uint32_t d = 0; d < g.map.num_domains; ++d)
        if (d != own_domain(g)) g.slot_net_state.sent[d] = sent_ring(k, d).after(k.map(), streams.count(d));
    if (receives) keep_number(received, false);
  };
  serve_slot_network(g, shared, fill, push, end, keep);
}

template <bool kNet>
__global__ void __launch_bounds__(kSlotThreads, 1)
    low_latency_dispatch(const __grid_constant__ Group g, const __grid_constant__ SlotDispatchArgs args) {
  UCCL_EP_DYNAMIC_SHARED(dynamic);
  __shared__ SlotPlaces places;
  // Of other domains: what sends has its streams behind what receives.
  const Streams streams = sent_streams(g.map, dynamic + (args.phase == SlotPhase::kSend ? 0 : received_bytes(g.map)));
  if constexpr (kNet) {
    if (blockIdx.x == workers(g)) {
      __shared__ SlotNetShared shared;
      serve_network(g, args, streams.masks, shared);
      return;
    }
  }
  // Half of the warps do each, side by side; in a launch of one phase all do.
  constexpr uint32_t kHalf = kSlotWarps / 2;
  const bool both = args.phase == SlotPhase::kBoth;
  const bool sends = both ? threadIdx.x < kHalf * kWarp : args.phase == SlotPhase::kSend;
  const Crew crew = !both ? Crew::of(1, 0, kSlotWarps) : sends ? Crew::of(1, 0, kHalf) : Crew::of(2, kHalf, kHalf);
  const auto k = begin_slots<kNet>(g, args, SlotKind::kDispatch, crew, sends);
  if (sends) {
    send(k, places, streams);
    return;
  }
  // After an error nothing is valid: neither here, nor in a block that is through before another finds one.
  if (!receive(k, dynamic, places) || stopped(g))
    for (uint32_t i = k.crew.thread; i < g.experts_per_rank; i += k.crew.size) args.counts[i] = 0;
}

}  // namespace

uint32_t slot_dispatch_bytes(const DeviceMap& map) {
  return static_cast<uint32_t>(received_bytes(map) + sent_bytes(map));
}

Status load_low_latency_dispatch(uint32_t shared_bytes) {
  return load_all(shared_bytes, low_latency_dispatch<false>, low_latency_dispatch<true>);
}

Status launch_low_latency(const Group& group, const SlotDispatchArgs& args, uint32_t num_sms, StreamHandle stream) {
  const auto to_send = static_cast<uint32_t>(sent_bytes(group.map));
  const uint32_t shared_bytes = args.phase == SlotPhase::kSend ? to_send : slot_dispatch_bytes(group.map);
  launch_kernel(!has_net(group) ? low_latency_dispatch<false> : low_latency_dispatch<true>,
                {num_sms, kSlotThreads, shared_bytes, stream}, group, args);
  return launch_status();
}

}  // namespace uccl_ep::gpu
