// Stage: copies or quantises the hidden states into our region in one pass, with a flag per row group.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/net.cuh"
#include "backend/gpu/numerics.cuh"
#include "backend/gpu/pipeline.cuh"
#include "backend/gpu/plan_reader.cuh"
#include "backend/gpu/steps.h"

namespace uccl_ep::gpu {

// A crew has a warp for every row of a row group.
constexpr uint32_t kStageWarps = kRowGroup;

// Where a warp writes a row: for our own domain, and into the rings to other domains that want it. Its places in the
// rings are in shared memory, because a warp that quantises has no registers to spare.
struct Outs {
  uint8_t* own;
  uint32_t others;            // domains, a bit each
  uint8_t* const* ring_places;  // [domains]
  template <typename Put>
  __device__ __forceinline__ void each(Put put) const {
    put(own);
    for (uint32_t left = others; left != 0; left &= left - 1) put(ring_places[__ffs(left) - 1]);
  }
};

__device__ inline void copy_row(const uint4* from, const Outs& outs, uint32_t vectors, uint32_t lane) {
  constexpr uint32_t kBatch = 4;
  for (uint32_t begin = 0; begin < vectors; begin += kBatch * kWarp) {
    const uint32_t first = begin + lane;
    uint4 batch[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (first + u * kWarp < vectors) batch[u] = device::load_once(from + first + u * kWarp);
    outs.each([&](uint8_t* to) {
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u)
        if (first + u * kWarp < vectors) reinterpret_cast<uint4*>(to)[first + u * kWarp] = batch[u];
    });
  }
}

// 8 values of a block of 128, which 16 neighbouring lanes hold together.
struct Codes {
  uint2 codes;
  float scale;
};
// Several at a time, because each is a chain of latencies and the chains are independent.
template <typename Rule, uint32_t kBatch>
__device__ __forceinline__ void quantise(const uint4 (&raw)[kBatch], Codes (&out)[kBatch]) {
  uint32_t most[kBatch];  // two in a word; magnitudes of floats are ordered like their bits
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u)
    most[u] = device::max_unsigned_halves(device::max_unsigned_halves(raw[u].x & 0x7FFF7FFF, raw[u].y & 0x7FFF7FFF),
                                          device::max_unsigned_halves(raw[u].z & 0x7FFF7FFF, raw[u].w & 0x7FFF7FFF));
#pragma unroll
  for (uint32_t o = 8; o > 0; o /= 2)
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      most[u] = device::max_unsigned_halves(most[u], __shfl_xor_sync(kFullWarp, most[u], o));
#pragma unroll
  for (uint32_t u = 0; u < kBatch; ++u) {
    const uint32_t bits = max(most[u] & 0xFFFF, most[u] >> 16);
    const uint32_t words[4] = {raw[u].x, raw[u].y, raw[u].z, raw[u].w};
    const float amax = __uint_as_float(bits << 16);
    const float scale = bits == 0 ? 1.0f : Rule::of(amax);
    const float inverse = Rule::kArePow2 ? __uint_as_float((254u << 23) - __float_as_uint(scale)) : 0.0f;
    uint32_t packed[4];
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      const float low = __uint_as_float(words[w] << 16), high = __uint_as_float(words[w] & 0xFFFF0000u);
      packed[w] = Rule::kArePow2 ? pack_e4m3(low * inverse, high * inverse)
                                 : pack_e4m3(__fdiv_rn(low, scale), __fdiv_rn(high, scale));
    }
    constexpr uint32_t kAllNan = 0x01010101u * kE4m3Nan;
    const bool finite = bits < kBf16Inf;
    out[u].codes.x = finite ? packed[0] | packed[1] << 16 : kAllNan;
    out[u].codes.y = finite ? packed[2] | packed[3] << 16 : kAllNan;
    out[u].scale = finite ? scale : 1.0f;
  }
}

// By a warp. If scales are powers of two, the next vectors are loaded meanwhile.
template <typename Rule>
__device__ __forceinline__ void quantise_row(const uint4* from, const Outs& outs, uint32_t hidden, uint32_t lane) {
  constexpr bool kPow2 = Rule::kArePow2;
  constexpr uint32_t kBatch = kPow2 ? kArch.vectors_ahead : 1;
  const uint32_t end = hidden / 8;
  uint4 next[kBatch];
  const auto load_batch = [&](uint32_t begin) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = begin + u * kWarp + lane;
      next[u] = i < end ? device::load_once(from + i) : make_uint4(0, 0, 0, 0);
    }
  };
  if (kPow2) load_batch(0);
  for (uint32_t begin = 0; begin < end; begin += kBatch * kWarp) {
    if (!kPow2) load_batch(begin);
    uint4 raw[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) raw[u] = next[u];
    if (kPow2) load_batch(begin + kBatch * kWarp);
    Codes out[kBatch];
    quantise<Rule>(raw, out);
    outs.each([&](uint8_t* to) {
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u) {
        const uint32_t i = begin + u * kWarp + lane;
        if (i >= end) continue;  // the same for all 16 lanes of a block
        *reinterpret_cast<uint2*>(to + i * 8) = out[u].codes;
        if (i % 16 == 0) reinterpret_cast<float*>(to + hidden)[i / 16] = out[u].scale;
      }
    });
  }
}

// Not inlined: a division is a function call, which would make its caller spill registers.
template <typename Rule>
__device__ __noinline__ void quantise_row_divided(const uint4* from, const Outs outs, uint32_t hidden, uint32_t lane) {
  quantise_row<Rule>(from, outs, hidden, lane);
}
template <typename Rule>
__device__ __forceinline__ void quantise_row_by(const uint4* from, const Outs& outs, uint32_t hidden, uint32_t lane) {
  if constexpr (Rule::kArePow2)
    quantise_row<Rule>(from, outs, hidden, lane);
  else
    quantise_row_divided<Rule>(from, outs, hidden, lane);
}
// By the rule of the wire format. False: it has none.
template <typename... Rules>
__device__ __forceinline__ bool quantise_row(ScaleRules<Rules...>, const StageArgs& args, const uint4* from,
                                             const Outs& outs, uint32_t lane) {
  return ((args.wire == Rules::kWire && (quantise_row_by<Rules>(from, outs, args.hidden, lane), true)) || ...);
}

// What a block stages of tokens [begin, end): row groups first, first + count, ..., with a flag each.
struct StageShare {
  uint32_t begin, end, first, count;
  __device__ __forceinline__ bool has(uint32_t row_group) const { return begin + row_group * kRowGroup < end; }
  __device__ __forceinline__ uint32_t row_groups() const {
    const uint32_t all = (max(begin, end) - begin + kRowGroup - 1) / kRowGroup;
    return first < all ? (all - first + count - 1) / count : 0;
  }
};
// What the crew tells the other warps of its block, in shared memory.
struct Staged {
  uint32_t row_groups[kStageWarps];  // by warp: of how many row groups of the block it has staged its row
  uint32_t routed;  // 1: the block's part of a new plan is routed, or there is an error
  uint32_t totals;  // 1: the headers of a new plan have its counts; in block 0
  // By warp and domain: where the warp's row goes in the ring to the domain, and in which chunk.
  struct InRings {
    uint8_t* place[kMaxDomains];
    uint32_t chunk[kMaxDomains];
  } in_rings[kStageWarps];
};
// By a warp of the crew, when it has staged its row of a row group.
__device__ __forceinline__ void row_staged(const Crew& crew, Staged& staged) {
  proxy_fence();
  __syncwarp();
  if (crew.lane() == 0) count_shared(&staged.row_groups[crew.warp()]);
}
// With so many row groups to quantise, a block routes first: all ranks wait for the routing, whose loads would queue
// behind those of the rows. Rows that are only copied gain nothing by it.
constexpr uint32_t kManyRowGroups = 4;
// By one warp beside the crew: publishes flags of staged rows. The crew does not wait for the flags, which are slow on
// a link full of rows.
__device__ inline void tell_staged(const Kernel& k, const StageShare& share, Staged& staged) {
  const uint32_t lane = threadIdx.x % kWarp, end = share.row_groups(), ranks = k.g.end - k.g.first;
  for (uint32_t told = 0, looks = 1; told < end; ++looks) {
    const uint32_t done = warp_min(lane < kStageWarps ? read_shared(&staged.row_groups[lane]) : ~0u);
    if (done == told) {
      if (looks % 64 == 0 && __any_sync(kFullWarp, stopped(k.g))) return;
      device::pause_nsec(50);  // of the microsecond or more that a row takes
      continue;
    }
    __syncwarp();  // orders what the lanes have read before what any of them writes
    fence_system();
    for (uint32_t i = lane; i < (done - told) * ranks; i += kWarp)
      publish_after_fence(
          rows_full(k.g, k.g.first + i % ranks, k.g.rank) + share.first + (told + i / ranks) * share.count, k.op.epoch);
    told = done;
  }
}

// By a warp: the words beside a row's codes that the caller gave.
template <typename Word>
__device__ __forceinline__ void stage_words(const Word* from, uint32_t count, const Outs& outs, uint32_t begin,
                                            uint32_t lane) {
  for (uint32_t i = lane; i < count; i += kWarp) {
    const Word word = from[i];
    outs.each([&](uint8_t* to) { reinterpret_cast<Word*>(to + begin)[i] = word; });
  }
}
__device__ __forceinline__ void stage_words(const StageArgs& args, uint32_t token, const Outs& outs, uint32_t lane) {
  const RowShape& row = args.row;
  if (args.scales != nullptr)
    stage_words(args.scales + uint64_t{token} * row.num_scales, row.num_scales, outs, row.code_bytes, lane);
  if (args.metadata != nullptr)
    stage_words(args.metadata + uint64_t{token} * row.num_metadata, row.num_metadata, outs, row.metadata_begin(), lane);
}

// By a warp: one row, copied or quantised.
__device__ __forceinline__ void stage_row(const StageArgs& args, uint32_t token, const Outs& outs, uint32_t lane) {
  stage_words(args, token, outs, lane);
  const uint32_t vectors = args.hidden * dtype_bytes(args.dtype) / 16;
  const uint4* const from = reinterpret_cast<const uint4*>(args.x) + uint64_t{token} * vectors;
  if (!args.quantises() || !quantise_row(AllScaleRules{}, args, from, outs, lane)) copy_row(from, outs, vectors, lane);
}

// The part of our stream to a domain that a window ships. With a new plan, which is not complete yet, that is the first
// window.
template <bool kFresh>
__device__ inline StreamPart sent_part(const Group& g, const PlanView& plan, const PlaceArgs& args, uint32_t to) {
  const uint32_t row_bytes = args.stage.stride;
  const uint32_t token_blocks = (args.stage.num_tokens + kTokenBlock - 1) / kTokenBlock;
  const uint32_t per_window = args.window_tokens / kTokenBlock;
  const uint32_t first = min(args.window * per_window, token_blocks), end = min(first + per_window, token_blocks);
  const uint32_t* const before = PlanReader<kFresh>(g, plan).sent_before(to);
  if (to == own_domain(g)) return {};
  return part_of(g, device::load_past_l1(before + first), device::load_past_l1(before + end), row_bytes);
}

// A warp may have more lanes than there are domains.
__device__ __forceinline__ bool may_have_domain(uint32_t lane) { return kWarp <= kMaxDomains || lane < kMaxDomains; }
// By a warp: finds where a token's row goes in the rings to other domains. Lane `to` handles domain `to`.
template <bool kFresh>
__device__ __forceinline__ void find_slot(const Group& g, const PlanView& plan, const PlaceArgs& args, uint32_t token,
                                          Staged::InRings& rings) {
  const uint32_t* const begins = PlanReader<kFresh>(g, plan).addend_begin();
  const Addend* const addends = PlanReader<kFresh>(g, plan).addends();
  const uint32_t lane = threadIdx.x % kWarp, end = device::load_past_l1(begins + token + 1);
  Addend found = Addend::of_piece(0);
  for (uint32_t first = device::load_past_l1(begins + token); first < end; first += kWarp) {
    const Addend addend{first + lane < end ? device::load_past_l1(&addends[first + lane].word) : 0};
    for (LaneMask left = ballot(addend.is_returned()); left != 0; left &= left - 1) {
      const Addend its{__shfl_sync(kFullWarp, addend.word, lowest_lane(left))};
      if (its.domain() == lane) found = its;
    }
  }
  if (!may_have_domain(lane)) return;
  rings.place[lane] = nullptr;
  if (!found.is_returned()) return;
  const uint32_t row_bytes = args.stage.stride;
  const uint32_t row = found.row() - sent_part<kFresh>(g, plan, args, lane).first;
  const uint32_t slot = static_cast<uint32_t>(net_state(g).sent[lane] % g.map.row_slots);
  rings.chunk[lane] = row / rows_per_chunk(g, row_bytes);
  rings.place[lane] = at(g, g.rank, g.net->to[lane].rows) + ring_offset(g, slot, g.map.row_slots, row, row_bytes);
}
// By a lane with a place: waits until the earlier chunk in its slot has left. Chunks of earlier windows do not depend
// on this one.
__device__ __forceinline__ bool wait_slot(const Group& g, uint32_t to, uint32_t chunk) {
  const NetState& state = net_state(g);
  const uint64_t serial = state.sent[to] + chunk, slots = g.map.row_slots;
  return serial < slots ||
         wait_flag(g, {state.rows_gone + to, serial - slots + 1, g.first_of[to], static_cast<int>(chunk)});
}
// By a warp, for each of its rows: the other domains that it goes to, one bit each. kNoWay: an error is known.
constexpr uint32_t kNoWay = 0xFFFFFFFFu;
template <bool kFresh>
__device__ __noinline__ uint32_t find_slots(const Group& g, const PlanView& plan, const PlaceArgs& args, uint32_t token,
                                            Staged::InRings& rings) {
  const uint32_t lane = threadIdx.x % kWarp;
  find_slot<kFresh>(g, plan, args, token, rings);
  const bool has = may_have_domain(lane) && rings.place[lane] != nullptr;
  const bool good = !has || wait_slot(g, lane, rings.chunk[lane]);
  const uint32_t domains = static_cast<uint32_t>(ballot(has));
  __syncwarp();  // every lane reads every place; votes order no memory
  return __all_sync(kFullWarp, good) ? domains : kNoWay;
}
template <bool kFresh>
__device__ __forceinline__ bool begin_row(const DispatchKernel& k, uint32_t token, Staged& staged, Outs& outs) {
  if (k.g.net == nullptr) return true;
  outs.others = find_slots<kFresh>(k.g, k.plan, k.args, token, staged.in_rings[k.crew.warp()]);
  outs.ring_places = staged.in_rings[k.crew.warp()].place;
  return outs.others != kNoWay;
}
// By a warp, when its row is written: counts the row in its chunks.
__device__ __forceinline__ void end_row(const Kernel& k, const Staged& staged, const Outs& outs) {
  if (outs.others == 0) return;
  __syncwarp();
  if (may_have_domain(k.crew.lane()) && (outs.others >> k.crew.lane() & 1) != 0)
    count_one(own_part(k.g, k.g.map.sent_counts) + k.crew.lane() * k.g.map.row_slots +
              staged.in_rings[k.crew.warp()].chunk[k.crew.lane()]);
  __syncwarp();
}

// By the warp that hands packets and chunks to the proxy. With a new plan packets come first; otherwise rows need not
// wait for the weights in packets. Not inlined, because its caller has no registers to spare.
template <bool kFresh>
__device__ __noinline__ void push_streams(const DispatchKernel k) {
  const bool with_weights = k.args.window == 0 && k.args.routing.weights != nullptr;
  if (kFresh && !wait_packed(k)) return;
  const uint32_t row_bytes = k.args.stage.stride;
  static_assert(kMaxDomains <= kWarp);
  const uint32_t to = threadIdx.x % kWarp;
  Outgoing<SentRows> out;
  if (to < k.g.map.num_domains && to != own_domain(k.g)) {
    const StreamPart part = sent_part<kFresh>(k.g, k.plan, k.args, to);
    out = {k.g.net->to[to].row_channel,
           own_part(k.g, k.g.map.sent_counts) + to * k.g.map.row_slots,
           part.end - part.first,
           rows_per_chunk(k.g, row_bytes),
           row_bytes,
           net_state(k.g).sent[to],
           0};
  }
  push_chunks(k.g, out, [&] {
    if (!are_packed(k)) return false;
    push_packets(k, kFresh, with_weights);
    return true;
  });
}

// By a crew of kStageWarps.
template <bool kFresh>
__device__ inline void stage_rows(const DispatchKernel& k, const StageShare& share, Staged& progress) {
  const uint64_t stride = k.args.stage.stride;
  uint8_t* const staged = rows(k.g, k.g.rank, k.op.half);
  for (uint32_t row_group = share.first; share.has(row_group); row_group += share.count) {
    const uint32_t row = row_group * kRowGroup + k.crew.warp(), token = share.begin + row;
    if (token < share.end) {
      Outs outs{staged + row * stride, 0, nullptr};
      if (!begin_row<kFresh>(k, token, progress, outs)) return;
      stage_row(k.args.stage, token, outs, k.crew.lane());
      end_row(k, progress, outs);
    }
    row_staged(k.crew, progress);
  }
}

// ---- by bulk copies (sm_90): a pipeline of parts of rows in shared memory -------------------------------------------
constexpr uint32_t kStagePart = 3584;  // bytes
constexpr uint32_t kCopyStages = 2;
constexpr uint32_t kStageBytes = kStageWarps * kCopyStages * kStagePart;

// As stage_rows, for rows that are copied, where there is one domain.
__device__ inline void stage_rows_bulk(const DispatchKernel& k, const StageShare& share, Staged& progress,
                                       uint8_t* shared) {
  __shared__ __align__(8) uint64_t barriers[kStageWarps][kCopyStages];
  const StageArgs& args = k.args.stage;
  const uint64_t stride = args.stride;
  const uint32_t row_bytes = args.hidden * dtype_bytes(args.dtype), lane = k.crew.lane(), warp = k.crew.warp();
  uint8_t* const staged = rows(k.g, k.g.rank, k.op.half);
  init_stages<kCopyStages>(barriers[warp], lane);
  Pipeline<kCopyStages> pipeline{shared_address(shared + warp * kCopyStages * kStagePart),
                                 shared_address(barriers[warp]), kStagePart};
  uint32_t load_token = share.begin + share.first * kRowGroup + warp, load_at = 0;
  const auto load_part = [&] {
    if (load_token >= share.end) return;
    if (lane == 0)
      pipeline.load(args.x + uint64_t{load_token} * row_bytes + load_at, min(kStagePart, row_bytes - load_at));
    pipeline.loading();
    load_at += kStagePart;
    if (load_at < row_bytes) return;
    load_at = 0;
    load_token += share.count * kRowGroup;
  };
  for (uint32_t i = 0; i < kCopyStages; ++i) load_part();
  for (uint32_t row_group = share.first; share.has(row_group); row_group += share.count) {
    const uint32_t row = row_group * kRowGroup + warp;
    if (share.begin + row < share.end) stage_words(args, share.begin + row, {staged + row * stride, 0, nullptr}, lane);
    for (uint32_t at = 0; share.begin + row < share.end && at < row_bytes; at += kStagePart) {
      pipeline.wait();
      const uint32_t vectors = min(kStagePart, row_bytes - at) / 16;
      uint4* const to = reinterpret_cast<uint4*>(staged + row * stride + at);
#pragma unroll 4
      for (uint32_t i = lane; i < vectors; i += kWarp) to[i] = load_shared(pipeline.address() + i * 16);
      pipeline.release();
      __syncwarp();
      load_part();
    }
    row_staged(k.crew, progress);
  }
}

// By crews of all blocks: stages the weights, fp32 per pair, in the order of the plan. True in the last block.
__device__ inline bool stage_weights(const Kernel& k, const float* from) {
  const uint32_t me = blockIdx.x * k.crew.size + k.crew.thread, all = workers(k.g) * k.crew.size;
  for (uint32_t to = 0; to < k.g.map.num_domains; ++to) {
    const uint32_t begin = k.plan.pair_begin[k.g.first_of[to]], end = k.plan.pair_begin[k.g.first_of[to + 1]];
    uint8_t* const bytes = own_packet(k.g, to, k.op.epoch);
    float* const staged = reinterpret_cast<float*>(bytes + packet_parts({}).weights);
    for (uint32_t p = begin + me; p < end; p += all) staged[p - begin] = from[k.plan.pair_place[p]];
    if (me == 0)
      reinterpret_cast<DeviceHeader*>(bytes)->pair_begin[k.g.first_of[to + 1] - k.g.first_of[to]] = end - begin;
  }
  return last_block(k, Phase::kWeights, workers(k.g));
}

}  // namespace uccl_ep::gpu
