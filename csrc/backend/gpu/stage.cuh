// Stage: copies or quantises the hidden states into our region in one pass, with a flag per row group.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/net.cuh"
#include "backend/gpu/pipeline.cuh"
#include "backend/gpu/plan_reader.cuh"
#include "backend/gpu/steps.h"
#include "backend/gpu/write_row.cuh"

namespace uccl_ep::gpu {

// A crew has a warp for every row of a row group.
constexpr uint32_t kStageWarps = kRowGroup;

// What a block stages of tokens [begin, end): row groups first, first + count, ..., with a flag each.
struct StageShare {
  uint32_t begin, end, first, count;
  __device__ __forceinline__ bool has(uint32_t row_group) const { return begin + row_group * kRowGroup < end; }
  __device__ __forceinline__ uint32_t row_groups() const {
    const uint32_t all = (max(begin, end) - begin + kRowGroup - 1) / kRowGroup;
    return first < all ? (all - first + count - 1) / count : 0;
  }
};
constexpr uint32_t kMostPlaces = 32;  // in rings that a row is written to at once
// What the crew tells the other warps of its block, in shared memory.
struct Staged {
  uint32_t row_groups[kStageWarps];  // by warp: of how many row groups of the block it has staged its row
  uint32_t routed;  // 1: the block's part of a new plan is routed, or there is an error
  uint32_t totals;  // 1: the headers of a new plan have its counts; in block 0
  // By warp: where its row goes in rings to other domains, and the index in sent_counts of the chunks' counters.
  struct InRings {
    uint8_t* place[kMostPlaces];
    uint32_t counter[kMostPlaces];
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
// By one warp beside the crew: publishes flags of a window's staged rows. The crew does not wait for the flags, which
// are slow on a link full of rows. `earlier`: row groups of earlier windows.
__device__ inline void tell_staged(const DispatchKernel& k, uint32_t window, const StageShare& share, uint32_t earlier,
                                   Staged& staged) {
  const uint32_t lane = threadIdx.x % kWarp, end = share.row_groups(), ranks = k.g.end - k.g.first;
  for (uint32_t told = 0, looks = 1; told < end; ++looks) {
    const uint32_t done =
        min(warp_min(lane < kStageWarps ? read_shared(&staged.row_groups[lane]) : ~0u) - earlier, end);
    if (done == told) {
      if (looks % 64 == 0 && __any_sync(kFullWarp, stopped(k.g))) return;
      device::pause_nsec(50);  // of the microsecond or more that a row takes
      continue;
    }
    __syncwarp();  // orders what the lanes have read before what any of them writes
    fence_system();
    for (uint32_t i = lane; i < (done - told) * ranks; i += kWarp)
      publish_after_fence(
          rows_full(k.g, k.g.first + i % ranks, k.g.rank) + share.first + (told + i / ranks) * share.count,
          k.op.window(window));
    told = done;
  }
}

// A rank that finds the memory of a new plan too small stages the first window, which the rings hold though nobody
// reads; the kernel that places stages the others.
template <PlanState kState>
constexpr uint32_t kFirstStaged = kState == PlanState::kExchanged;  // window
// Whether a window has tokens of ours. The first one counts, too, where there are none.
template <PlanState kState>
__device__ __forceinline__ bool has_window(const DispatchKernel& k, uint32_t w) {
  return w == 0 || window_begin<kState != PlanState::kKnown>(k.g, k.args, w) < k.args.stage.num_tokens;
}
// By one thread: whether window `w` is staged by this kernel. False, too, if an error is known.
template <PlanState kState>
__device__ __forceinline__ bool stages_window(const DispatchKernel& k, uint32_t w) {
  if (kState != PlanState::kNew || w == 0) return true;
  return wait_block(k.g, &local(k.g).planned, k.op.epoch) && has_memory<kState>(k.g, k.args);
}

// The part of our stream to a domain that a window ships.
template <bool kFresh>
__device__ inline StreamPart sent_part(const Group& g, const PlanView& plan, const PlaceArgs& args, uint32_t window,
                                       uint32_t to) {
  const uint32_t row_bytes = args.stage.stride;
  const uint32_t token_blocks = (args.stage.num_tokens + kTokenBlock - 1) / kTokenBlock;
  const uint32_t first = min(first_block_of<kFresh>(g, args, window), token_blocks),
                 end = min(first_block_of<kFresh>(g, args, window + 1), token_blocks);
  if (to == own_domain(g)) return {};
  const BlockRows* const sent = PlanReader<kFresh>(g, plan).sent_to(to);
  // Other blocks may have written it in this kernel.
  const auto rows_before = [&](uint32_t block) {
    const BlockRows& its = sent[block / BlockRows::kBlocks];
    return BlockRows{device::load_past_l1(&its.before),
                     {device::load_past_l1(its.counts), device::load_past_l1(its.counts + 1)}}
        .before_number(block % BlockRows::kBlocks);
  };
  return part_of(g, rows_before(first), rows_before(end), row_bytes);
}

// What a window ships to a domain. Of all domains; in shared memory, behind the tables of sources.
struct SentWindow {
  uint32_t first_row;  // of the stream
  uint32_t chunks;     // of this kernel's earlier windows
  uint32_t slot;       // of its first chunk in the ring
  static __device__ __forceinline__ SentWindow& of(const Group& g, uint32_t to) {
    return shared_table<SentWindow>(g, source_table_bytes(g.map))[to];
  }
};
static_assert(sizeof(SentWindow) == kSentEntryBytes);
// By a crew, window by window.
template <PlanState kState>
__device__ inline void find_sent(const DispatchKernel& k, uint32_t window) {
  constexpr bool kFresh = kState != PlanState::kKnown;
  k.crew.sync();  // all have read what the table says of the last window
  for (uint32_t to = k.crew.thread; to < k.g.map.num_domains; to += k.crew.size) {
    SentWindow& its = SentWindow::of(k.g, to);
    its.chunks =
        window == kFirstStaged<kState> ? 0 : its.chunks + sent_part<kFresh>(k.g, k.plan, k.args, window - 1, to).chunks;
    its.first_row = sent_part<kFresh>(k.g, k.plan, k.args, window, to).first;
    its.slot = static_cast<uint32_t>((k.g.net_state.sent[to] + its.chunks) % k.g.map.row_slots);
  }
  k.crew.sync();
}

// By a lane with a place: waits until the earlier chunk in its slot has left. Chunks of earlier windows do not depend
// on this one. `chunk`: of this kernel.
__device__ __forceinline__ bool wait_slot(const Group& g, uint32_t to, uint32_t chunk) {
  const NetState& state = g.net_state;
  const uint64_t serial = state.sent[to] + chunk, slots = g.map.row_slots;
  return serial < slots ||
         wait_flag(g, {state.rows_gone + to, serial - slots + 1, first_of(g, to), static_cast<int>(chunk)});
}
// By a warp: finds where a token's row goes in the rings to other domains, beyond the first `skipped` of these. A lane
// takes an addend that another domain returns. Returns how many such domains there are. kNoWay: an error is known.
constexpr uint32_t kNoWay = 0xFFFFFFFFu;
template <PlanState kState>
__device__ __noinline__ uint32_t find_places(const Group& g, const PlanView& plan, const PlaceArgs& args,
                                             uint32_t token, uint32_t skipped, Staged::InRings& rings) {
  constexpr bool kFresh = kState != PlanState::kKnown;
  const uint32_t* const begins = PlanReader<kFresh>(g, plan).addend_begin();
  const Addend* const addends = PlanReader<kFresh>(g, plan).addends();
  const uint32_t lane = threadIdx.x % kWarp, end = device::load_past_l1(begins + token + 1);
  uint32_t found = 0;
  bool good = true;
  for (uint32_t first = device::load_past_l1(begins + token); first < end; first += kWarp) {
    const Addend addend{first + lane < end ? device::load_past_l1(&addends[first + lane].word) : 0};
    const LaneMask returned = ballot(addend.is_returned());
    const uint32_t number = found + __popcll(returned & ((LaneMask{1} << lane) - 1)) - skipped;
    found += __popcll(returned);
    if (addend.is_returned() && number < kMostPlaces) {  // numbers below 0 are large
      const uint32_t to = addend.domain(), row_bytes = args.stage.stride;
      const SentWindow& its = SentWindow::of(g, to);
      const uint32_t row = addend.row() - its.first_row, chunk = row / rows_per_chunk(g, row_bytes);
      rings.counter[number] = to * g.map.row_slots + slot_after(its.slot, chunk, g.map.row_slots);
      rings.place[number] = g.own + g.net.to[to].rows + ring_offset(g, its.slot, g.map.row_slots, row, row_bytes);
      good = good && wait_slot(g, to, its.chunks + chunk);
    }
    good = __all_sync(kFullWarp, good);
  }
  __syncwarp();  // every lane reads every place; votes order no memory
  return good ? found : kNoWay;
}
// False: an error is known. `left`: domains for which the row has to be written once more.
template <PlanState kState>
__device__ __forceinline__ bool begin_row(const DispatchKernel& k, uint32_t token, uint32_t skipped, Staged& staged,
                                          Outs& outs, uint32_t& left) {
  Staged::InRings& rings = staged.in_rings[k.crew.warp()];
  const uint32_t found = find_places<kState>(k.g, k.plan, k.args, token, skipped, rings);
  if (found == kNoWay) return false;
  outs.num_places = min(found - skipped, kMostPlaces);
  outs.places = rings.place;
  left = found - skipped - outs.num_places;
  return true;
}
// By a warp, when its row is written: counts the row in its chunks.
__device__ __forceinline__ void end_row(const Kernel& k, const Staged& staged, const Outs& outs) {
  if (outs.num_places == 0) return;
  __syncwarp();
  if (k.crew.lane() < outs.num_places)
    count_one(own_part(k.g, k.g.map.sent_counts) + staged.in_rings[k.crew.warp()].counter[k.crew.lane()]);
  __syncwarp();
}

// By the warp that hands packets and chunks to the proxy. With a new plan packets come first; otherwise rows need not
// wait for the weights in packets. Not inlined, because its caller has no registers to spare.
template <PlanState kState>
__device__ __noinline__ void push_streams(const DispatchKernel k) {
  constexpr bool kFresh = kState != PlanState::kKnown, kPackets = kState != PlanState::kExchanged;
  const bool with_weights = k.args.routing.weights != nullptr;
  if (kState == PlanState::kNew && !wait_packed(k)) return;
  const uint32_t row_bytes = k.args.stage.stride;
  PushedChunks pushed{};
  for (uint32_t w = kFirstStaged<kState>; has_window<kState>(k, w); ++w) {
    if (!__all_sync(kFullWarp, k.crew.lane() != 0 || stages_window<kState>(k, w))) return;
    __syncwarp();  // votes order no memory, and every lane reads the plan
    const auto outgoing_to = [&](uint32_t to) {
      Outgoing<SentRows> out;
      if (to == own_domain(k.g)) return out;
      const StreamPart part = sent_part<kFresh>(k.g, k.plan, k.args, w, to);
      out = {k.g.net.to[to].row_channel,
             own_part(k.g, k.g.map.sent_counts) + to * k.g.map.row_slots,
             part.end - part.first,
             rows_per_chunk(k.g, row_bytes),
             row_bytes,
             k.g.map.row_slots,
             k.g.net_state.sent[to]};
      return out;
    };
    push_chunks(k.g, 0, k.g.map.num_domains, pushed, outgoing_to, [&] {
      if (!kPackets || w > 0) return true;
      if (!are_packed(k)) return false;
      push_packets(k, kFresh, with_weights);
      return true;
    });
  }
}

// By a crew of kStageWarps. kNet: there are several domains.
template <PlanState kState, bool kNet>
__device__ inline void stage_rows(const DispatchKernel& k, uint32_t window, const StageShare& share, Staged& progress) {
  const uint64_t stride = k.args.stage.stride;
  uint8_t* const staged = rows(k.g, k.g.rank, k.op.half(window));
  for (uint32_t row_group = share.first; share.has(row_group); row_group += share.count) {
    const uint32_t row = row_group * kRowGroup + k.crew.warp(), token = share.begin + row;
    if (token < share.end) {
      uint32_t skipped = 0, left = 0;
      do {
        Outs outs{staged + row * stride, 0, nullptr};
        if (kNet && !begin_row<kState>(k, token, skipped, progress, outs, left)) return;
        stage_row(k.args.stage, token, outs, k.crew.lane());
        if (kNet) end_row(k, progress, outs);
        skipped += kMostPlaces;
      } while (kNet && left > 0);
    }
    row_staged(k.crew, progress);
  }
}

// ---- by bulk copies (sm_90): a pipeline of parts of rows in shared memory -------------------------------------------
constexpr uint32_t kStagePart = 3584;  // bytes
constexpr uint32_t kCopyStages = 2;
constexpr uint32_t kStageBytes = kStageWarps * kCopyStages * kStagePart;

// As stage_rows, for rows that are copied, where there is one domain. `turn`: of this warp's pipeline.
__device__ inline void stage_rows_bulk(const DispatchKernel& k, uint32_t window, const StageShare& share,
                                       Staged& progress, uint8_t* shared, PipelineTurn& turn) {
  __shared__ __align__(8) uint64_t barriers[kStageWarps][kCopyStages];
  const StageArgs& args = k.args.stage;
  const uint64_t stride = args.stride;
  const uint32_t row_bytes = args.hidden * dtype_bytes(args.dtype), lane = k.crew.lane(), warp = k.crew.warp();
  uint8_t* const staged = rows(k.g, k.g.rank, k.op.half(window));
  if (window == 0) init_stages<kCopyStages>(barriers[warp], lane);
  Pipeline<kCopyStages> pipeline{shared_address(shared + warp * kCopyStages * kStagePart),
                                 shared_address(barriers[warp]), kStagePart, turn.stage, turn.parity};
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
  turn = {pipeline.stage, pipeline.parity};
}

// By crews of all blocks: stages the weights, fp32 per pair, in the order of the plan. True in the last block.
__device__ inline bool stage_weights(const Kernel& k, const float* from) {
  Spread::over(k.crew, workers(k.g)).each(k.g.map.num_domains, [&](uint32_t to, uint32_t first, uint32_t step) {
    const uint32_t begin = k.plan.pair_begin[first_of(k.g, to)], end = k.plan.pair_begin[first_of(k.g, to + 1)];
    uint8_t* const bytes = to == own_domain(k.g) ? own_packet(k.g, to, k.op.epoch)
                                                 : shipped_packet(k.g, known_packet_unit(k, to, true), k.op.epoch);
    float* const staged = reinterpret_cast<float*>(bytes + packet_parts({}).weights);
    for (uint32_t p = begin + first; p < end; p += step) staged[p - begin] = from[k.plan.pair_place[p]];
    if (first == 0) reinterpret_cast<DeviceHeader*>(bytes)->num_pairs = end - begin;
  });
  return last_block(k, Phase::kWeights, workers(k.g));
}

}  // namespace uccl_ep::gpu
