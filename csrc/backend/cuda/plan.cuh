// Plan: from the routing of all sources, the output rows of every row that comes here, and who returns each of ours.
// What is known of received rows is written by those that place them first: place.cuh.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/exchange.cuh"
#include "backend/cuda/shares.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {

// Where each thing of the scratch lies.
struct Bases {
  uint32_t *out_row, *padding, *size;  // [ranks][experts], [experts][2], [experts]
  __device__ explicit Bases(const Group& g)
      : out_row(out_row_base(g)),
        padding(out_row + g.map.num_ranks * g.experts_per_rank),
        size(padding + 2 * g.experts_per_rank) {}
};

// Whether a new plan and its output have enough memory. Every rank decides for itself, every block of it alike.
template <PlanState kState>
__device__ __forceinline__ bool has_memory(const Group& g, const PlaceArgs& args) {
  if (kState != PlanState::kNew || args.fit == Fit::kAlways) return true;
  return args.fit == Fit::kIfLargeEnough && scratch(g).sizes.fits(args.memory);
}

// What a source has for us, and what it has at all.
struct FromSource {
  uint32_t rows, pairs, first_pair, tokens, stream_rows, most_pieces;
};

// By one thread: what a source's header says, and where the parts of its packet lie.
__device__ inline FromSource read_header(const Group& g, const KernelOp& op, uint32_t source, bool with_weights) {
  const uint8_t* const bytes = packet(g, source, op.epoch);
  const DeviceHeader& h = *reinterpret_cast<const DeviceHeader*>(bytes);
  const uint32_t member = g.rank - g.first, members = g.end - g.first;
  const uint32_t first_row = h.row_begin[member], end_row = h.row_begin[member + 1], all_rows = h.row_begin[members];
  const uint32_t first_pair = h.pair_begin[member], end_pair = h.pair_begin[member + 1];
  const uint32_t all_pairs = h.pair_begin[members], tokens = h.num_tokens, stream_rows = h.stream_rows;
  const uint32_t most_pieces = h.most_pieces;
  const uint64_t entries = (tokens + kTokenBlock - 1) / kTokenBlock + 1;
  const PacketParts parts =
      packet_parts({members, g.experts_per_rank, tokens, all_rows, all_pairs, stream_rows, with_weights});
  PlanScratch& plan = scratch(g);
  plan.lists[source] = reinterpret_cast<const ListEntry*>(bytes + parts.lists) + first_row;
  plan.pairs[source] = reinterpret_cast<const PairEntry*>(bytes + parts.pairs);
  plan.weights[source] = reinterpret_cast<const float*>(bytes + parts.weights);
  plan.token_block_rows[source] = reinterpret_cast<const uint32_t*>(bytes + parts.token_block_rows) + member * entries;
  plan.token_block_pieces[source] = reinterpret_cast<const uint32_t*>(bytes + parts.token_block_pieces);
  plan.token_block_streams[source] = reinterpret_cast<const uint32_t*>(bytes + parts.token_block_streams);
  plan.stream_pieces[source] = reinterpret_cast<const uint32_t*>(bytes + parts.stream_pieces);
  plan.num_tokens[source] = tokens;
  plan.stream_rows[source] = stream_rows;
  plan.num_pairs[source] = all_pairs;
  return {end_row - first_row, end_pair - first_pair, first_pair, tokens, stream_rows, most_pieces};
}

// By one thread: what our own packets say.
__device__ inline PlanSizes sent_sizes(const Group& g, const KernelOp& op) {
  PlanSizes sizes;
#pragma unroll 1
  for (uint32_t to = 0; to < g.map.num_domains; ++to) {
    const DeviceHeader& h = *reinterpret_cast<const DeviceHeader*>(own_packet(g, to, op.epoch));
    const uint32_t members = g.first_of[to + 1] - g.first_of[to];
    sizes.sent_pairs += h.pair_begin[members];
    sizes.shipped_rows += h.stream_rows;  // none of our own domain
    if (to == own_domain(g)) sizes.sent_addends += h.row_begin[members];
  }
  sizes.sent_addends += sizes.shipped_rows;
  return sizes;
}

// By a crew: the headers and counts of all sources; the counts go where `Bases::out_row` will be. False: a rank is
// missing or has called something else.
__device__ inline bool read_sources(const Crew& crew, const Group& g, const KernelOp& op, const OpSignature& signature,
                                    FromSource* from) {
  constexpr uint32_t kBatch = 4;  // counts that a thread loads at a time
  const uint32_t ranks = g.map.num_ranks, experts = g.experts_per_rank, all = ranks * experts;
  if (!wait_entered(crew, g, op.epoch)) return false;
  uint32_t counts[kBatch];
  const auto load = [&](uint32_t first) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = first + u * crew.size, s = i / experts;
      if (i >= all) continue;
      const uint8_t* const theirs = packet(g, s, op.epoch) + packet_parts({}).counts;
      counts[u] = reinterpret_cast<const uint32_t*>(theirs)[(g.rank - g.first) * experts + i % experts];
    }
  };
  const auto store = [&](uint32_t first) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (first + u * crew.size < all) out_row_base(g)[first + u * crew.size] = counts[u];
  };
  // Beside the first counts one warp loads the headers, and another compares them.
  load(crew.thread);
  bool good = true;
#pragma unroll 1
  for (uint32_t s = crew.lane(); s < ranks; s += kWarp) {
    if (crew.warp() == 0) from[s] = read_header(g, op, s, signature.with_weights != 0);
    if (crew.warp() == 1) good &= is_alike(g, op.epoch, signature, s);
  }
  store(crew.thread);
#pragma unroll 1
  for (uint32_t first = crew.thread + kBatch * crew.size; first < all; first += kBatch * crew.size) {
    load(first);
    store(first);
  }
  return crew.all(good);
}

// By a warp: the segments of the experts, one after the other, and of each the first rows of the sources. Returns
// their end.
__device__ inline uint32_t lay_out_experts(const Group& g, uint32_t alignment) {
  const uint32_t ranks = g.map.num_ranks, experts = g.experts_per_rank, lane = threadIdx.x % kWarp;
  const Bases base(g);
  uint32_t first_row = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < experts; first += kWarp) {
    const uint32_t l = first + lane;
    uint32_t count = 0;
    for (uint32_t s = 0; l < experts && s < ranks; ++s) count += base.out_row[s * experts + l];
    const uint32_t size = (count + alignment - 1) / alignment * alignment;
    const uint32_t end = first_row + warp_prefix(size, lane);
    if (l < experts) {
      base.size[l] = size;
      base.padding[2 * l] = end - size + count;
      base.padding[2 * l + 1] = end;
      uint32_t out_row = end - size;
#pragma unroll 1
      for (uint32_t i = 0; i < ranks; ++i) {
        uint32_t& of_source = base.out_row[g.source_order[i] * experts + l];
        const uint32_t theirs = of_source;
        of_source = out_row;
        out_row += theirs;
      }
    }
    first_row = __shfl_sync(kFullWarp, end, kWarp - 1);
  }
  return first_row;
}

// By one thread: what each source's rows and pairs are numbered from, and the sizes of the plan but for its rows.
__device__ inline PlanSizes number_sources(const Group& g, const KernelOp& op, const FromSource* from) {
  PlanScratch& plan = scratch(g);
  PlanSizes sizes = sent_sizes(g, op);
#pragma unroll 1
  for (uint32_t i = 0; i < g.map.num_ranks; ++i) {
    const uint32_t s = g.source_order[i];
    plan.row_begin[s] = sizes.received_rows;
    plan.pair_begin[s] = sizes.received_pairs;
    plan.weight_begin[s] = from[s].first_pair - sizes.received_pairs;
    plan.row_end[s] = sizes.received_rows += from[s].rows;
    plan.pair_end[s] = sizes.received_pairs += from[s].pairs;
    sizes.most_tokens = max(sizes.most_tokens, from[s].tokens);
    sizes.most_pieces = max(sizes.most_pieces, from[s].most_pieces);
  }
  if (g.net != nullptr)
#pragma unroll 1
    for (uint32_t k = 1; k <= g.net->num_relayed; ++k) sizes.relayed_rows += from[g.net->relayed[k].source].stream_rows;
  return sizes;
}

// By a crew: the plan is there. False: an error is known.
__device__ inline bool wait_plan(const Crew& crew, const Group& g, const KernelOp& op) {
  return crew.all(crew.thread != 0 || wait_block(g, &local(g).planned, op.epoch));
}
// By a crew, then: so are the lists that it was made of.
__device__ inline bool wait_lists(const Crew& crew, const Group& g, const KernelOp& op) {
  bool good = true;
  for (uint32_t r = g.first + crew.thread; r < g.end; r += crew.size)
    good &= wait_peer(g, member_flag(g, g.rank, g.map.lists_full, r), op.epoch, op.epoch, Step::kExchange, r, -1);
  return crew.all(good);
}

// By a crew of at least two warps, of one block: when all ranks have entered, what places rows, and then the counts for
// the host. Nothing comes of it if a rank is missing or has called something else.
__device__ inline void count_received(const Crew& crew, const Group& g, const KernelOp& op,
                                      const OpSignature& signature, uint64_t call) {
  __shared__ FromSource from[kMaxCudaRanks];
  __shared__ uint32_t end_row;
  if (!read_sources(crew, g, op, signature, from)) return;
  const bool sums_up = crew.warp() == 1 && crew.lane() == 0;
  PlanSizes sizes;
  if (crew.warp() == 0) {
    const uint32_t end = lay_out_experts(g, signature.expert_alignment);
    if (crew.lane() == 0) end_row = end;
  }
  if (sums_up) sizes = number_sources(g, op, from);
  crew.sync();
  if (sums_up) {
    sizes.num_rows = signature.compact_width > 0 ? sizes.received_rows : end_row;
    scratch(g).sizes = sizes;
    publish_in_gpu(&local(g).planned, op.epoch);
  }
  // The host is told of no counts of a routing that a rank may still refuse: its dispatch would return without an
  // error.
  if (!wait_lists(crew, g, op)) return;
  const uint32_t experts = g.experts_per_rank;
  const Bases base(g);
  uint32_t* const host = reinterpret_cast<uint32_t*>(g.counts + 1);
  for (uint32_t l = crew.thread; l < experts; l += crew.size) {
    const uint32_t padded = base.size[l], padding = base.padding[2 * l + 1] - base.padding[2 * l];
    host[l] = padded - padding;
    host[experts + l] = padded;
  }
  if (sums_up) g.counts->sizes = sizes;
  crew.sync();
  if (crew.thread == 0) publish_flag(&g.counts->call, call);
}

// What is known of a received row: its first pair, their number, and where it lies in its source's stream.
struct PlannedRow {
  uint32_t first, count, position;
};
// By one thread, of a new plan: row `row`, the `number`-th from `source`.
__device__ __forceinline__ PlannedRow plan_row(const Group& g, const PlanView& plan, uint32_t source, uint32_t number,
                                               uint32_t row) {
  // All that is known without the list is loaded before it, and its pairs together: each load is a way to the source
  // and back, and a store would keep the next one waiting.
  constexpr uint32_t kBatch = 6;
  const PlanScratch& from = scratch(g);
  const ListEntry* const list = from.lists[source];
  const uint32_t pair_begin = from.pair_begin[source];
  const PairEntry* const pairs = from.pairs[source] + (pair_begin + from.weight_begin[source]);
  const uint32_t* const base = out_row_base(g) + source * g.experts_per_rank;
  const uint4 raw = *reinterpret_cast<const uint4*>(list + number);
  const uint32_t first = pair_begin + raw.x, count = raw.w >> 16, position = raw.z;
#pragma unroll 1
  for (uint32_t begin = 0; begin < count; begin += kBatch) {
    uint2 pair[kBatch];
#pragma unroll
    for (uint32_t p = 0; p < kBatch; ++p)
      if (begin + p < count) pair[p] = *reinterpret_cast<const uint2*>(pairs + raw.x + begin + p);
    if (plan.compact_width == 0)
#pragma unroll
      for (uint32_t p = 0; p < kBatch; ++p)
        if (begin + p < count) pair[p].x = base[pair[p].x] + pair[p].y;
#pragma unroll
    for (uint32_t p = 0; p < kBatch; ++p)
      if (begin + p < count) plan.out_rows[first + begin + p] = pair[p].x;
  }
  plan.row_token[row] = raw.w & 0xFFFF;
  plan.row_piece[row] = raw.y;
  plan.row_pair_begin[row] = first;
  if (g.net != nullptr) plan.row_position[row] = position;
  return {first, count, position};
}

// By crews of `num_blocks` blocks: the rows of a new plan but for the first ones of each of `warps` that place, which
// plan those themselves and then find the others planned, if they are many.
__device__ inline void plan_rows(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan,
                                 uint32_t num_blocks, uint32_t warps) {
  const PlanScratch& from = scratch(g);
  if (from.sizes.received_rows < warps * kWarp) return;
  // No more than what is dealt out of the rows together with the places that sources with fewer rows leave empty.
  const uint32_t first_rows = min(Shares::dealt_to_each(from.sizes.received_rows, warps), kWarp) * warps;
#pragma unroll 1
  for (uint32_t i = 0; i < g.map.num_ranks; ++i) {
    const uint32_t source = rotated(g, i), begin = from.row_begin[source], rows = from.row_end[source] - begin;
    const uint32_t skipped = in_domain(g, source) ? first_rows / (g.end - g.first) : 0;
#pragma unroll 1
    for (uint32_t n = skipped + blockIdx.x * crew.size + crew.thread; n < rows; n += num_blocks * crew.size)
      plan_row(g, plan, source, n, begin + n);
  }
  if (last_block(crew, g, Phase::kRowsPlanned, num_blocks) && crew.thread == 0)
    publish_in_gpu(&local(g).rows_planned, op.epoch);
}

// By crews of `num_blocks` blocks, where there are several domains: what is known of streams.
__device__ inline void plan_streams(const Crew& crew, const Group& g, const PlanView& plan, uint32_t num_blocks) {
  const uint32_t me = blockIdx.x * crew.size + crew.thread, all = num_blocks * crew.size;
  const PlanScratch& from = scratch(g);
  const uint32_t entries = plan.num_token_blocks + 1,
                 own_token_blocks = (plan.num_tokens + kTokenBlock - 1) / kTokenBlock;
  for (uint32_t i = me; i < g.map.num_ranks * entries; i += all) {
    const uint32_t source = i / entries, token_blocks = (from.num_tokens[source] + kTokenBlock - 1) / kTokenBlock;
    const uint32_t token_block = min(i % entries, token_blocks);
    plan.token_block_streams[i] =
        in_domain(g, source) ? token_block * kTokenBlock : from.token_block_streams[source][token_block];
  }
  const uint32_t* const sent_before = at<uint32_t>(g, g.rank, g.map.sent_token_blocks);
  const uint32_t* const tokens = at<uint32_t>(g, g.rank, g.map.sent_tokens);
  const uint32_t* const addends = at<uint32_t>(g, g.rank, g.map.addends);
  uint32_t begin = 0;
  for (uint32_t to = 0; to < g.map.num_domains; ++to) {
    if (me == 0) plan.sent_begin[to] = begin;
    const uint32_t* const before = sent_before + uint64_t{to} * (max_token_blocks(g) + 1);
    const bool own = to == own_domain(g);
    for (uint32_t c = me; c < entries; c += all)
      plan.sent_token_blocks[to * entries + c] = own ? 0 : before[min(c, own_token_blocks)];
    const uint32_t rows_to = own ? 0 : before[own_token_blocks];
    for (uint32_t row = me; row < rows_to; row += all)
      plan.sent_tokens[begin + row] = tokens[uint64_t{to} * g.map.max_tokens + row];
    begin += rows_to;
  }
  if (me == 0) plan.sent_begin[g.map.num_domains] = begin;
  for (uint32_t i = me; i < from.sizes.sent_addends; i += all) plan.addends[i] = addends[i];
  begin = 0;
  for (uint32_t k = 1; k <= g.net->num_relayed; ++k) {
    const uint32_t source = g.net->relayed[k].source, rows_of = from.stream_rows[source];
    if (me == 0) {
      plan.relayed_begin[k] = begin;
      plan.relayed_pairs[k] = from.num_pairs[source];
    }
    for (uint32_t row = me; row <= rows_of; row += all)
      plan.relayed_piece[begin + row] = from.stream_pieces[source][row];
    begin += rows_of + 1;
  }
}

// By crews of `num_blocks` blocks: the parts of a new plan that no row stands for.
__device__ inline void plan_heads(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan,
                                  uint32_t num_blocks) {
  const uint32_t ranks = g.map.num_ranks, experts = g.experts_per_rank;
  const uint32_t me = blockIdx.x * crew.size + crew.thread, all = num_blocks * crew.size;
  const PlanScratch& from = scratch(g);
  const uint32_t* const addends = at<uint32_t>(g, g.rank, g.map.token_addends);
  const uint32_t* const origin = at<uint32_t>(g, g.rank, g.map.pair_origin);
  for (uint32_t t = me; t <= plan.num_tokens; t += all) plan.addend_begin[t] = addends[t];
  for (uint32_t p = me; p < from.sizes.sent_pairs; p += all) plan.pair_place[p] = origin[p];
  const uint32_t entries = plan.num_token_blocks + 1;
  for (uint32_t i = me; i < ranks * entries; i += all) {
    const uint32_t source = i / entries;
    const uint32_t token_blocks = (from.num_tokens[source] + kTokenBlock - 1) / kTokenBlock;
    const uint32_t token_block = min(i % entries, token_blocks);  // beyond its last: as there
    plan.token_block_rows[i] = from.token_block_rows[source][token_block];
    plan.token_block_pieces[i] = from.token_block_pieces[source][token_block];
  }
  if (g.net != nullptr) plan_streams(crew, g, plan, num_blocks);
  if (blockIdx.x != num_blocks - 1) return;
  const Bases base(g);
  for (uint32_t s = crew.thread; s < ranks; s += crew.size) {
    const uint32_t to = g.domain_of[s];
    uint32_t before = 0;  // pairs for lower domains
    for (uint32_t lower = 0; lower < to; ++lower)
      before += reinterpret_cast<const DeviceHeader*>(own_packet(g, lower, op.epoch))
                    ->pair_begin[g.first_of[lower + 1] - g.first_of[lower]];
    plan.pair_begin[s] =
        before + reinterpret_cast<const DeviceHeader*>(own_packet(g, to, op.epoch))->pair_begin[s - g.first_of[to]];
    plan.row_begin[s] = from.row_begin[s];
    plan.row_end[s] = from.row_end[s];
    plan.weight_begin[s] = from.weight_begin[s];
    plan.token_blocks[s] = (from.num_tokens[s] + kTokenBlock - 1) / kTokenBlock;
  }
  for (uint32_t i = crew.thread; i < 2 * experts; i += crew.size) plan.padding[i] = base.padding[i];
  for (uint32_t l = crew.thread; l < experts; l += crew.size) plan.tokens_per_expert[l] = base.size[l];
  if (crew.thread == 0) {
    plan.pair_begin[ranks] = from.sizes.sent_pairs;
    plan.row_pair_begin[from.sizes.received_rows] = from.sizes.received_pairs;
    if (wait_block(g, &local(g).hashed, op.epoch)) *plan.routing_hash = header(g, g.rank, op.epoch).routing_hash;
    *plan.overflow = from.sizes.num_rows > plan.num_out_rows;
  }
}

// By crews of all blocks: the given routing is the plan's. Not inlined: its caller has no registers to spare.
__device__ __noinline__ void compare_routing(const Crew& crew, const Group& g, const PlanView& plan,
                                             const DeviceRouting& r, uint64_t plan_id) {
  const uint64_t places = uint64_t{plan.num_tokens} * r.width;
  uint64_t hash = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * crew.size + crew.thread; i < places; i += uint64_t{workers(g)} * crew.size) {
    const long long expert = !r.is_map                                     ? static_cast<const long long*>(r.data)[i]
                             : static_cast<const uint8_t*>(r.data)[i] != 0 ? static_cast<long long>(i % r.width)
                                                                           : -1;
    if (expert != -1) hash += hash_pair(static_cast<uint32_t>(i), static_cast<uint32_t>(expert));
  }
  hash = crew_sum(crew, hash);
  if (crew.thread == 0) add_global(&local(g).routing_hash, hash);
  if (!last_block(crew, g, Phase::kHashed, workers(g)) || crew.thread != 0) return;
  const uint64_t seen = local(g).routing_hash;
  local(g).routing_hash = 0;
  if (seen != *plan.routing_hash)
    report(g, DeviceFault::kPlanDiffers, Step::kPlan, static_cast<int>(g.rank), -1, *plan.routing_hash, plan_id,
           ErrorKind::kPlanMismatch);
}

}  // namespace uccl_ep::cuda
