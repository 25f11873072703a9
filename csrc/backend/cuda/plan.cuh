// Plan: from the routing of all sources, the slots of every row that comes here, and who returns each of ours. What is
// known of received rows is written by those that place them first: place.cuh.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/exchange.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {

// Where each thing of the scratch lies.
struct Bases {
  uint32_t *slot, *padding, *size;  // [ranks][experts], [experts][2], [experts]
  __device__ explicit Bases(const Domain& d)
      : slot(slot_base(d)),
        padding(slot + d.at.num_ranks * d.experts_per_rank),
        size(padding + 2 * d.experts_per_rank) {}
};

// Whether a new plan and its output have enough memory. Every rank decides for itself, every block of it alike.
template <PlanState kState>
__device__ __forceinline__ bool has_memory(const Domain& d, const PlaceArgs& args) {
  if (kState != PlanState::kNew || args.fit == Fit::kAlways) return true;
  return args.fit == Fit::kIfLargeEnough && scratch(d).sizes.fits(args.memory);
}

// What a source has for us, and what it has at all.
struct FromSource {
  uint32_t rows, pairs, first_pair, tokens, sent_rows;
};

// By a crew of one block: when all ranks have entered, the counts for the host, and what places rows. `shared`: memory
// for three numbers per expert of the group. Nothing comes of it if a rank is missing or has called something else.
__device__ inline void count_received(const Crew& crew, const Domain& d, const Op& op, const OpSignature& signature,
                                      uint64_t call, uint32_t* shared) {
  const uint32_t ranks = d.at.num_ranks, experts = d.experts_per_rank;
  __shared__ FromSource from[kMaxDomainRanks];
  uint32_t* const counts = shared;                   // [ranks][experts]
  uint32_t* const begin = shared + d.at.num_experts;  // [experts]
  uint32_t* const exact = begin + experts;            // [experts]
  PlanScratch& plan = scratch(d);
  const Bases base(d);
  uint32_t* const host = reinterpret_cast<uint32_t*>(d.counts + 1);
  // A warp that waits for several, one after the other, would have as many deadlines.
  if (ranks > crew.warps() && !wait_all(crew, d, d.at.header_full, op.epoch, Step::kExchange, true)) return;
  bool good = true;
  // Two warps for each source, so that all that is read of it is under way at a time.
  for (uint32_t i = crew.warp(); i < 2 * ranks && good; i += crew.warps()) {
    const uint32_t s = i % ranks;
    good = __all_sync(
        kFullWarp, wait_flag(d, at<uint64_t>(d, d.rank, d.at.header_full) + s, op.epoch, Step::kExchange, s, -1, true));
    if (good && i >= ranks) good = __all_sync(kFullWarp, crew.lane() != 0 || is_alike(d, op.epoch, s));
    if (!good || i >= ranks) continue;
    const DeviceHeader& h = header(d, s, op.epoch);
    const uint32_t first_row = h.row_begin[d.rank], end_row = h.row_begin[d.rank + 1], all_rows = h.row_begin[ranks];
    const uint32_t first_pair = h.pair_begin[d.rank], end_pair = h.pair_begin[d.rank + 1], tokens = h.num_tokens;
    for (uint32_t l = crew.lane(); l < experts; l += kWarp)
      counts[s * experts + l] = header_counts(d, s, op.epoch)[d.rank * experts + l];
    if (crew.lane() == 0) from[s] = {end_row - first_row, end_pair - first_pair, first_pair, tokens, all_rows};
  }
  const uint32_t sent_pairs = header(d, d.rank, op.epoch).pair_begin[ranks];
  if (!crew.all(good)) return;
  if (crew.warp() == 0) {  // the segments of the experts, one after the other
    uint32_t first_slot = 0;
    for (uint32_t first = 0; first < experts; first += kWarp) {
      const uint32_t l = first + crew.lane();
      uint32_t count = 0;
      for (uint32_t s = 0; l < experts && s < ranks; ++s) count += counts[s * experts + l];
      const uint32_t size =
          (count + signature.expert_alignment - 1) / signature.expert_alignment * signature.expert_alignment;
      const uint32_t end = first_slot + warp_prefix(size, crew.lane());
      if (l < experts) {
        begin[l] = end - size;
        base.size[l] = size;
        base.padding[2 * l] = end - size + count;
        base.padding[2 * l + 1] = end;
        exact[l] = count;
      }
      first_slot = __shfl_sync(kFullWarp, end, kWarp - 1);
    }
    if (crew.lane() == 0) {
      PlanSizes sizes;
      sizes.sent_pairs = sent_pairs;
      for (uint32_t i = 0; i < ranks; ++i) {
        const uint32_t s = d.source_order[i];
        plan.row_begin[s] = sizes.received_rows;
        plan.slot_begin[s] = sizes.received_pairs;
        plan.value_begin[s] = from[s].first_pair - sizes.received_pairs;
        plan.row_end[s] = sizes.received_rows += from[s].rows;
        plan.slot_end[s] = sizes.received_pairs += from[s].pairs;
        sizes.most_tokens = max(sizes.most_tokens, from[s].tokens);
        sizes.most_sent_rows = max(sizes.most_sent_rows, from[s].sent_rows);
      }
      sizes.num_rows = signature.compact_width > 0 ? sizes.received_rows : first_slot;
      plan.sizes = sizes;
    }
  }
  crew.sync();
  for (uint32_t l = crew.thread; l < experts; l += crew.size) {
    uint32_t slot = begin[l];
    for (uint32_t i = 0; i < ranks; ++i) {
      const uint32_t at_source = d.source_order[i] * experts + l;
      base.slot[at_source] = slot;
      slot += counts[at_source];
    }
  }
  crew.sync();
  if (crew.thread == 0) publish_in_gpu(&local(d).planned, op.epoch);
  // Then the host, which is farther away.
  const uint32_t alignment = signature.expert_alignment;
  for (uint32_t l = crew.thread; l < experts; l += crew.size) {
    host[l] = exact[l];
    host[experts + l] = (exact[l] + alignment - 1) / alignment * alignment;
  }
  if (crew.thread == crew.size - 1) d.counts->sizes = plan.sizes;
  crew.sync();
  if (crew.thread == 0) publish_flag(&d.counts->call, call);
}

// By crews of `num_blocks` blocks: the parts of a new plan that no row stands for.
__device__ inline void plan_heads(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                  uint32_t num_blocks) {
  const uint32_t ranks = d.at.num_ranks, experts = d.experts_per_rank;
  const uint32_t me = blockIdx.x * crew.size + crew.thread, all = num_blocks * crew.size;
  const DeviceHeader& own = header(d, d.rank, op.epoch);
  const uint32_t* const pieces = at<uint32_t>(d, d.rank, d.at.token_pieces);
  const uint32_t* const origin = at<uint32_t>(d, d.rank, d.at.pair_origin);
  for (uint32_t t = me; t <= plan.num_tokens; t += all) plan.piece_begin[t] = pieces[t];
  for (uint32_t p = me; p < own.pair_begin[ranks]; p += all) plan.pair_place[p] = origin[p];
  const uint32_t entries = plan.num_chunks + 1;
  for (uint32_t i = me; i < ranks * entries; i += all) {
    const uint32_t source = i / entries;
    const uint32_t chunks = (header(d, source, op.epoch).num_tokens + kChunkTokens - 1) / kChunkTokens;
    const uint32_t chunk = min(i % entries, chunks);  // beyond its last: as there
    plan.chunk_rows[i] = chunk_rows(d, source, op.half, d.rank)[chunk];
    plan.chunk_pieces[i] = chunk_pieces(d, source, op.half)[chunk];
  }
  if (blockIdx.x != num_blocks - 1) return;
  const PlanScratch& from = scratch(d);
  const Bases base(d);
  for (uint32_t s = crew.thread; s <= ranks; s += crew.size) {
    plan.pair_begin[s] = own.pair_begin[s];
    if (s == ranks) break;
    plan.row_begin[s] = from.row_begin[s];
    plan.row_end[s] = from.row_end[s];
    plan.value_begin[s] = from.value_begin[s];
    plan.chunks[s] = (header(d, s, op.epoch).num_tokens + kChunkTokens - 1) / kChunkTokens;
  }
  for (uint32_t i = crew.thread; i < 2 * experts; i += crew.size) plan.padding[i] = base.padding[i];
  for (uint32_t l = crew.thread; l < experts; l += crew.size) plan.tokens_per_expert[l] = base.size[l];
  if (crew.thread == 0) {
    plan.row_slot[from.sizes.received_rows] = from.sizes.received_pairs;
    *plan.routing_hash = own.routing_hash;
    *plan.overflow = from.sizes.num_rows > plan.num_slots;
  }
}

// By crews of all blocks: the given routing is the plan's. Not inlined: its caller has no registers to spare.
__device__ __noinline__ void compare_routing(const Crew& crew, const Domain& d, const PlanView& plan,
                                             const DeviceRouting& r, uint64_t plan_id) {
  const uint64_t places = uint64_t{plan.num_tokens} * r.width;
  uint64_t hash = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * crew.size + crew.thread; i < places; i += uint64_t{gridDim.x} * crew.size) {
    const long long expert = !r.is_map                                     ? static_cast<const long long*>(r.data)[i]
                             : static_cast<const uint8_t*>(r.data)[i] != 0 ? static_cast<long long>(i % r.width)
                                                                           : -1;
    if (expert != -1) hash += hash_pair(static_cast<uint32_t>(i), static_cast<uint32_t>(expert));
  }
  hash = crew_sum(crew, hash);
  if (crew.thread == 0) add_global(&local(d).routing_hash, hash);
  if (!last_block(crew, d, Arrival::kHashed, gridDim.x) || crew.thread != 0) return;
  const uint64_t seen = local(d).routing_hash;
  local(d).routing_hash = 0;
  if (seen != *plan.routing_hash)
    report(d, DeviceFault::kPlanDiffers, Step::kPlan, static_cast<int>(d.rank), -1, *plan.routing_hash, plan_id,
           ErrorKind::kPlanMismatch);
}

}  // namespace uccl_ep::cuda
