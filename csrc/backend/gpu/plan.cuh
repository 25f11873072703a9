// Plan: from the routing of all sources, the output rows of every row that comes here, and who returns each of ours.
// The warps that place received rows first also write what the plan says of them: place.cuh.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/exchange.cuh"
#include "backend/gpu/shares.cuh"
#include "backend/gpu/sources.cuh"
#include "backend/gpu/steps.h"

namespace uccl_ep::gpu {

// Whether a new plan and its output have enough memory. Every rank decides for itself, and its blocks decide alike.
template <PlanState kState>
__device__ __forceinline__ bool has_memory(const Group& g, const PlaceArgs& args) {
  if (kState != PlanState::kNew || args.fit == Fit::kAlways) return true;
  return args.fit == Fit::kIfLargeEnough && scratch(g).sizes.fits(args.memory);
}

// What is known of a received row: its first pair, their number, and where it lies in its source's stream.
struct PlannedRow {
  uint32_t first, count, position;
};
// By one thread, with a new plan: plans row `row`, which comes from `source`.
__device__ __forceinline__ PlannedRow plan_row(const Group& g, const PlanView& plan, uint32_t source, uint32_t row) {
  // What does not depend on the list is loaded before it, and the pairs are loaded together. Each load is a round trip
  // to the source, and a store in between would delay the next load.
  constexpr uint32_t kBatch = 6;
  const SourcePlan& from = source_plan(g, source);
  const ListEntry* const list = from.lists;
  const uint32_t number = row - from.row_begin;
  const uint32_t pair_begin = from.pair_begin;
  const PairEntry* const pairs = from.all_pairs + (pair_begin + from.weight_begin);
  const uint32_t* const base = out_row_base(g) + source * g.experts_per_rank;
  const uint4 raw = *reinterpret_cast<const uint4*>(list + number);
  const uint32_t first = pair_begin + raw.x, count = raw.w >> 16, position = raw.z;
#pragma unroll 1
  for (uint32_t begin = 0; begin < count; begin += kBatch) {
    uint32_t out[kBatch];
#pragma unroll
    for (uint32_t p = 0; p < kBatch; ++p)
      if (begin + p < count) out[p] = *reinterpret_cast<const uint32_t*>(pairs + raw.x + begin + p);
#pragma unroll
    for (uint32_t p = 0; p < kBatch; ++p) {
      if (begin + p >= count) continue;
      const uint32_t expert = out[p] & 0xFFFF, position = out[p] >> 16;
      out[p] = plan.compact_width == 0 ? base[expert] + position : expert;
    }
#pragma unroll
    for (uint32_t p = 0; p < kBatch; ++p)
      if (begin + p < count) plan.out_rows[first + begin + p] = out[p];
  }
  plan.row_token[row] = raw.w & 0xFFFF;
  plan.row_piece[row] = raw.y;
  plan.row_pair_begin[row] = first;
  if (has_net(g)) plan.row_position[row] = position;
  return {first, count, position};
}

// When a new plan is known: whether a packet has a tail. Then all rows are planned before any is placed.
__device__ __forceinline__ bool has_tails(const Group& g) { return has_net(g) && scratch(g).most_tail > 0; }
// By a crew: waits for that. False: an error is known.
__device__ inline bool wait_rows_planned(const Kernel& k) {
  return k.crew.all(k.crew.thread != 0 || wait_block(k.g, &local(k.g).rows_planned, k.op.epoch));
}
// By the crews that have planned rows, of `num_blocks` blocks.
__device__ __forceinline__ void tell_planned(const Kernel& k, uint32_t num_blocks) {
  if (last_block(k, Phase::kRowsPlanned, num_blocks) && k.crew.thread == 0)
    publish(&local(k.g).rows_planned, k.op.epoch);
}

// By crews of `num_blocks` blocks: plans the rows of a new plan without tails. If the rows go in one window, without
// the first rows of each of `warps` warps that place. These plan their first rows themselves, and all of their rows if
// there are few.
__device__ inline void plan_rows(const Kernel& k, uint32_t num_blocks, uint32_t warps, bool one_window) {
  const PlanSizes& sizes = scratch(k.g).sizes;
  if (sizes.received_rows < warps * kWarp) return;
  // A lower bound of what is dealt out, because sources with fewer rows leave empty places that are dealt out, too.
  const uint32_t first_rows = one_window ? min(Dealing{8}.share(sizes.received_rows, warps), kWarp) * warps : 0;
  Spread::over(k.crew, num_blocks).each(k.g.map.num_ranks, [&](uint32_t i, uint32_t first, uint32_t step) {
    const uint32_t source = rotated(k.g, i), begin = source_plan(k.g, source).row_begin,
                   rows = source_plan(k.g, source).row_end - begin;
    const uint32_t skipped = in_domain(k.g, source) ? first_rows / (k.g.end - k.g.first) : 0;
#pragma unroll 1
    for (uint32_t n = skipped + first; n < rows; n += step) plan_row(k.g, k.plan, source, begin + n);
  });
  tell_planned(k, num_blocks);
}

// Groups of token blocks of a source.
__device__ __forceinline__ uint32_t groups_of(const SourcePlan& source) {
  return BlockRows::groups((source.num_tokens + kTokenBlock - 1) / kTokenBlock);
}
// By crews of `num_blocks` blocks, with several domains: writes the parts of a new plan that describe streams.
__device__ inline void plan_streams(const Kernel& k, uint32_t num_blocks) {
  const uint32_t me = blockIdx.x * k.crew.size + k.crew.thread, all = num_blocks * k.crew.size;
  const uint32_t groups = BlockRows::groups(k.plan.num_token_blocks),
                 own_groups = BlockRows::groups((k.plan.num_tokens + kTokenBlock - 1) / kTokenBlock);
  for (uint32_t i = me; i < k.g.map.num_ranks * groups; i += all) {
    const SourcePlan& from = source_plan(k.g, i / groups);
    if (!in_domain(k.g, i / groups) && i % groups < groups_of(from))
      k.plan.token_block_streams[i] = from.token_block_streams[i % groups];
  }
  const BlockRows* const sent = own_part(k.g, k.g.map.sent_token_blocks);
  const uint32_t most_groups = BlockRows::groups(max_token_blocks(k.g));
  for (uint32_t i = me; i < k.g.map.num_domains * groups; i += all)
    if (i / groups != own_domain(k.g) && i % groups < own_groups)
      k.plan.sent_token_blocks[i] = sent[uint64_t{i / groups} * most_groups + i % groups];
  const Addend* const addends = own_part(k.g, k.g.map.addends);
  for (uint32_t i = me; i < scratch(k.g).sizes.sent_addends; i += all) k.plan.addends[i] = addends[i];
  const auto from = [&](uint32_t i) -> const SourcePlan& { return source_plan(k.g, k.g.net.relayed[i + 1].source); };
  const Spread spread = Spread::over(k.crew, num_blocks);
  spread.each_behind(
      k.g.net.num_relayed, [&](uint32_t i) { return from(i).stream_rows + 1; },
      [&](uint32_t i, uint32_t begin, uint32_t first, uint32_t step) {
        if (first == 0) {
          k.plan.relayed_begin[i + 1] = begin;
          k.plan.relayed_pairs[i + 1] = from(i).num_pairs;
        }
        for (uint32_t row = first; row <= from(i).stream_rows && from(i).tail_chunks == 0; row += step)
          k.plan.relayed_piece[begin + row] = from(i).stream_pieces[row];
      });
}

// By crews of `num_blocks` blocks: writes the parts of a new plan that belong to no single row.
__device__ inline void plan_heads(const Kernel& k, uint32_t num_blocks) {
  const uint32_t ranks = k.g.map.num_ranks, experts = k.g.experts_per_rank;
  const uint32_t me = blockIdx.x * k.crew.size + k.crew.thread, all = num_blocks * k.crew.size;
  const PlanSizes& sizes = scratch(k.g).sizes;
  const uint32_t* const addends = own_part(k.g, k.g.map.token_addends);
  const uint32_t* const origin = own_part(k.g, k.g.map.pair_origin);
  for (uint32_t t = me; t <= k.plan.num_tokens; t += all) k.plan.addend_begin[t] = addends[t];
  for (uint32_t p = me; p < sizes.sent_pairs; p += all) k.plan.pair_place[p] = origin[p];
  const uint32_t groups = BlockRows::groups(k.plan.num_token_blocks);
  for (uint32_t i = me; i < ranks * groups; i += all) {
    const SourcePlan& from = source_plan(k.g, i / groups);
    if (i % groups < groups_of(from)) k.plan.token_block_rows[i] = from.token_block_rows[i % groups];
  }
  if (has_net(k.g)) plan_streams(k, num_blocks);
  if (blockIdx.x != num_blocks - 1) return;
  const Bases base(k.g);
  const Spread spread{k.crew.warp(), k.crew.warps()};
  spread.each_behind(
      k.g.map.num_domains,
      [&](uint32_t to) { return reinterpret_cast<const DeviceHeader*>(own_packet(k.g, to, k.op.epoch))->num_pairs; },
      [&](uint32_t to, uint32_t begin, uint32_t first, uint32_t step) {
        const uint32_t first_member = first_of(k.g, to), members = first_of(k.g, to + 1) - first_member;
        const MemberBegins begins(own_packet(k.g, to, k.op.epoch), members, experts);
        for (uint32_t i = first; i < members; i += step) k.plan.pair_begin[first_member + i] = begin + begins.pair[i];
      });
  for (uint32_t s = k.crew.thread; s < ranks; s += k.crew.size) {
    const SourcePlan& from = source_plan(k.g, s);
    k.plan.row_begin[s] = from.row_begin;
    k.plan.row_end[s] = from.row_end;
    k.plan.weight_begin[s] = from.weight_begin;
    k.plan.token_blocks[s] = (from.num_tokens + kTokenBlock - 1) / kTokenBlock;
  }
  for (uint32_t i = k.crew.thread; i < 2 * experts; i += k.crew.size) k.plan.padding[i] = base.padding[i];
  for (uint32_t l = k.crew.thread; l < experts; l += k.crew.size) k.plan.tokens_per_expert[l] = base.size[l];
  if (k.crew.thread == 0) {
    k.plan.pair_begin[ranks] = sizes.sent_pairs;
    k.plan.row_pair_begin[sizes.received_rows] = sizes.received_pairs;
    if (wait_block(k.g, &local(k.g).hashed, k.op.epoch))
      *k.plan.routing_hash = header(k.g, k.g.rank, k.op.epoch).routing_hash;
    *k.plan.overflow = sizes.num_rows > k.plan.num_out_rows;
    *k.plan.most_tokens = sizes.most_tokens;
  }
}

// By crews of all blocks: reports an error unless the given routing is the plan's. Not inlined, because its caller has
// no registers to spare.
__device__ __noinline__ void compare_routing(const Kernel k, const DeviceRouting& r, uint64_t plan_id) {
  const uint64_t places = uint64_t{k.plan.num_tokens} * r.width;
  uint64_t hash = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * k.crew.size + k.crew.thread; i < places;
       i += uint64_t{workers(k.g)} * k.crew.size) {
    const long long expert = !r.is_map                                     ? static_cast<const long long*>(r.data)[i]
                             : static_cast<const uint8_t*>(r.data)[i] != 0 ? static_cast<long long>(i % r.width)
                                                                           : -1;
    if (expert != -1) hash += hash_pair(static_cast<uint32_t>(i), static_cast<uint32_t>(expert));
  }
  hash = crew_sum(k.crew, hash);
  if (k.crew.thread == 0) add_global(&local(k.g).routing_hash, hash);
  if (!last_block(k, Phase::kHashed, workers(k.g)) || k.crew.thread != 0) return;
  const uint64_t seen = local(k.g).routing_hash;
  local(k.g).routing_hash = 0;
  if (seen != *k.plan.routing_hash)
    report(k.g, {DeviceFault::kPlanDiffers, ErrorKind::kPlanMismatch, Step::kPlan, k.g.rank, -1, *k.plan.routing_hash,
                 plan_id});
}

}  // namespace uccl_ep::gpu
