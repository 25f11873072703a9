// Plan: from the routing of all sources, the output rows of every row that comes here, and who returns each of ours.
// The warps that place received rows first also write what the plan says of them: place.cuh.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/exchange.cuh"
#include "backend/gpu/shares.cuh"
#include "backend/gpu/steps.h"

namespace uccl_ep::gpu {

// Where the parts of the scratch memory lie.
struct Bases {
  uint32_t *out_row, *padding, *size;  // [ranks][experts], [experts][2], [experts]
  __device__ explicit Bases(const Group& g)
      : out_row(out_row_base(g)),
        padding(out_row + g.map.num_ranks * g.experts_per_rank),
        size(padding + 2 * g.experts_per_rank) {}
};

// Whether a new plan and its output have enough memory. Every rank decides for itself, and its blocks decide alike.
template <PlanState kState>
__device__ __forceinline__ bool has_memory(const Group& g, const PlaceArgs& args) {
  if (kState != PlanState::kNew || args.fit == Fit::kAlways) return true;
  return args.fit == Fit::kIfLargeEnough && scratch(g).sizes.fits(args.memory);
}

// What a source sends to us, and its totals.
struct FromSource {
  uint32_t rows, pairs, first_pair, tokens, stream_rows, most_pieces;
};

// By one thread: reads a source's header, and notes where the parts of its packet lie.
__device__ inline FromSource read_header(const Kernel& k, uint32_t source, bool with_weights) {
  const uint8_t* const bytes = packet(k.g, source, k.op.epoch);
  const DeviceHeader& h = *reinterpret_cast<const DeviceHeader*>(bytes);
  const uint32_t member = k.g.rank - k.g.first, members = k.g.end - k.g.first;
  const uint32_t first_row = h.row_begin[member], end_row = h.row_begin[member + 1], all_rows = h.row_begin[members];
  const uint32_t first_pair = h.pair_begin[member], end_pair = h.pair_begin[member + 1];
  const uint32_t all_pairs = h.pair_begin[members], tokens = h.num_tokens, stream_rows = h.stream_rows;
  const uint32_t most_pieces = h.most_pieces;
  const uint64_t entries = (tokens + kTokenBlock - 1) / kTokenBlock + 1;
  const PacketParts parts =
      packet_parts({members, k.g.experts_per_rank, tokens, all_rows, all_pairs, stream_rows, with_weights});
  PlanScratch& plan = scratch(k.g);
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

// By one thread: the sizes that follow from our own packets.
__device__ inline PlanSizes sent_sizes(const Kernel& k) {
  PlanSizes sizes;
#pragma unroll 1
  for (uint32_t to = 0; to < k.g.map.num_domains; ++to) {
    const DeviceHeader& h = *reinterpret_cast<const DeviceHeader*>(own_packet(k.g, to, k.op.epoch));
    const uint32_t members = k.g.first_of[to + 1] - k.g.first_of[to];
    sizes.sent_pairs += h.pair_begin[members];
    sizes.shipped_rows += h.stream_rows;  // none of our own domain
    if (to == own_domain(k.g)) sizes.sent_addends += h.row_begin[members];
  }
  sizes.sent_addends += sizes.shipped_rows;
  return sizes;
}

// By a crew: reads the headers and counts of all sources. The counts go where `Bases::out_row` will be. False: a rank
// is missing or has called something else.
__device__ inline bool read_sources(const Kernel& k, const OpSignature& signature, FromSource* from) {
  constexpr uint32_t kBatch = 4;  // counts that a thread loads at a time
  const uint32_t ranks = k.g.map.num_ranks, experts = k.g.experts_per_rank, all = ranks * experts;
  if (!wait_entered(k)) return false;
  uint32_t counts[kBatch];
  const auto load = [&](uint32_t first) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = first + u * k.crew.size, s = i / experts;
      if (i >= all) continue;
      const uint8_t* const theirs = packet(k.g, s, k.op.epoch) + packet_parts({}).counts;
      counts[u] = reinterpret_cast<const uint32_t*>(theirs)[(k.g.rank - k.g.first) * experts + i % experts];
    }
  };
  const auto store = [&](uint32_t first) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (first + u * k.crew.size < all) out_row_base(k.g)[first + u * k.crew.size] = counts[u];
  };
  // While the first counts are on their way, one warp loads the headers and another compares them.
  load(k.crew.thread);
  bool good = true;
#pragma unroll 1
  for (uint32_t s = k.crew.lane(); s < ranks; s += kWarp) {
    if (k.crew.warp() == 0) from[s] = read_header(k, s, signature.with_weights != 0);
    if (k.crew.warp() == 1) good &= is_alike(k.g, k.op.epoch, signature, s);
  }
  store(k.crew.thread);
#pragma unroll 1
  for (uint32_t first = k.crew.thread + kBatch * k.crew.size; first < all; first += kBatch * k.crew.size) {
    load(first);
    store(first);
  }
  return k.crew.all(good);
}

// By a warp: lays out the experts' segments of the output one after the other, and in each the first row of every
// source. Returns the end of the last segment.
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

// By one thread: writes the numbers of each source's first row and first pair. Returns the sizes of the plan except its
// number of rows.
__device__ inline PlanSizes number_sources(const Kernel& k, const FromSource* from) {
  PlanScratch& plan = scratch(k.g);
  PlanSizes sizes = sent_sizes(k);
#pragma unroll 1
  for (uint32_t i = 0; i < k.g.map.num_ranks; ++i) {
    const uint32_t s = k.g.source_order[i];
    plan.row_begin[s] = sizes.received_rows;
    plan.pair_begin[s] = sizes.received_pairs;
    plan.weight_begin[s] = from[s].first_pair - sizes.received_pairs;
    plan.row_end[s] = sizes.received_rows += from[s].rows;
    plan.pair_end[s] = sizes.received_pairs += from[s].pairs;
    sizes.most_tokens = max(sizes.most_tokens, from[s].tokens);
    sizes.most_pieces = max(sizes.most_pieces, from[s].most_pieces);
  }
  if (k.g.net != nullptr)
#pragma unroll 1
    for (uint32_t stream = 1; stream <= k.g.net->num_relayed; ++stream)
      sizes.relayed_rows += from[k.g.net->relayed[stream].source].stream_rows;
  return sizes;
}

// By a crew: waits until the plan is there. False: an error is known.
__device__ inline bool wait_plan(const Kernel& k) {
  return k.crew.all(k.crew.thread != 0 || wait_block(k.g, &local(k.g).planned, k.op.epoch));
}
// By a crew, after that: waits until the lists of the members are there, too.
__device__ inline bool wait_lists(const Kernel& k) {
  bool good = true;
  for (uint32_t r = k.g.first + k.crew.thread; r < k.g.end; r += k.crew.size)
    good &= wait_peer(k, {member_flag(k.g, k.g.rank, k.g.map.lists_full, r), k.op.epoch, r});
  return k.crew.all(good);
}

// By a crew of at least two warps of one block. When all ranks have entered, it publishes what placing rows needs, and
// then the counts for the host. It publishes nothing if a rank is missing or has called something else.
__device__ inline void count_received(const Kernel& k, const OpSignature& signature, uint64_t call) {
  __shared__ FromSource from[kMaxGpuRanks];
  __shared__ uint32_t end_row;
  if (!read_sources(k, signature, from)) return;
  const bool sums_up = k.crew.warp() == 1 && k.crew.lane() == 0;
  PlanSizes sizes;
  if (k.crew.warp() == 0) {
    const uint32_t end = lay_out_experts(k.g, signature.expert_alignment);
    if (k.crew.lane() == 0) end_row = end;
  }
  if (sums_up) sizes = number_sources(k, from);
  k.crew.sync();
  if (sums_up) {
    sizes.num_rows = signature.compact_width > 0 ? sizes.received_rows : end_row;
    scratch(k.g).sizes = sizes;
    publish(&local(k.g).planned, k.op.epoch);
  }
  // The host must not get the counts of a routing that a rank may still refuse: its dispatch would return without an
  // error.
  if (!wait_lists(k)) return;
  const uint32_t experts = k.g.experts_per_rank;
  const Bases base(k.g);
  uint32_t* const host = reinterpret_cast<uint32_t*>(k.g.counts + 1);
  for (uint32_t l = k.crew.thread; l < experts; l += k.crew.size) {
    const uint32_t padded = base.size[l], padding = base.padding[2 * l + 1] - base.padding[2 * l];
    host[l] = padded - padding;
    host[experts + l] = padded;
  }
  if (sums_up) k.g.counts->sizes = sizes;
  k.crew.sync();
  if (k.crew.thread == 0) publish(&k.g.counts->call, call);
}

// What is known of a received row: its first pair, their number, and where it lies in its source's stream.
struct PlannedRow {
  uint32_t first, count, position;
};
// By one thread, with a new plan: plans row `row`, the `number`-th from `source`.
__device__ __forceinline__ PlannedRow plan_row(const Group& g, const PlanView& plan, uint32_t source, uint32_t number,
                                               uint32_t row) {
  // What does not depend on the list is loaded before it, and the pairs are loaded together. Each load is a round trip
  // to the source, and a store in between would delay the next load.
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

// By crews of `num_blocks` blocks: plans the rows of a new plan except the first rows of each of `warps` warps that
// place. These plan their first rows themselves, and all of their rows if there are few.
__device__ inline void plan_rows(const Kernel& k, uint32_t num_blocks, uint32_t warps) {
  const PlanScratch& from = scratch(k.g);
  if (from.sizes.received_rows < warps * kWarp) return;
  // A lower bound of what is dealt out, because sources with fewer rows leave empty places that are dealt out, too.
  const uint32_t first_rows = min(Dealing{8}.share(from.sizes.received_rows, warps), kWarp) * warps;
#pragma unroll 1
  for (uint32_t i = 0; i < k.g.map.num_ranks; ++i) {
    const uint32_t source = rotated(k.g, i), begin = from.row_begin[source], rows = from.row_end[source] - begin;
    const uint32_t skipped = in_domain(k.g, source) ? first_rows / (k.g.end - k.g.first) : 0;
#pragma unroll 1
    for (uint32_t n = skipped + blockIdx.x * k.crew.size + k.crew.thread; n < rows; n += num_blocks * k.crew.size)
      plan_row(k.g, k.plan, source, n, begin + n);
  }
  if (last_block(k, Phase::kRowsPlanned, num_blocks) && k.crew.thread == 0)
    publish(&local(k.g).rows_planned, k.op.epoch);
}

// By crews of `num_blocks` blocks, with several domains: writes the parts of a new plan that describe streams.
__device__ inline void plan_streams(const Kernel& k, uint32_t num_blocks) {
  const uint32_t me = blockIdx.x * k.crew.size + k.crew.thread, all = num_blocks * k.crew.size;
  const PlanScratch& from = scratch(k.g);
  const uint32_t entries = k.plan.num_token_blocks + 1,
                 own_token_blocks = (k.plan.num_tokens + kTokenBlock - 1) / kTokenBlock;
  for (uint32_t i = me; i < k.g.map.num_ranks * entries; i += all) {
    const uint32_t source = i / entries, token_blocks = (from.num_tokens[source] + kTokenBlock - 1) / kTokenBlock;
    const uint32_t token_block = min(i % entries, token_blocks);
    k.plan.token_block_streams[i] =
        in_domain(k.g, source) ? token_block * kTokenBlock : from.token_block_streams[source][token_block];
  }
  const uint32_t* const sent_before = own_part(k.g, k.g.map.sent_token_blocks);
  const uint32_t* const tokens = own_part(k.g, k.g.map.sent_tokens);
  const Addend* const addends = own_part(k.g, k.g.map.addends);
  uint32_t begin = 0;
  for (uint32_t to = 0; to < k.g.map.num_domains; ++to) {
    if (me == 0) k.plan.sent_begin[to] = begin;
    const uint32_t* const before = sent_before + uint64_t{to} * (max_token_blocks(k.g) + 1);
    const bool own = to == own_domain(k.g);
    for (uint32_t c = me; c < entries; c += all)
      k.plan.sent_token_blocks[to * entries + c] = own ? 0 : before[min(c, own_token_blocks)];
    const uint32_t rows_to = own ? 0 : before[own_token_blocks];
    for (uint32_t row = me; row < rows_to; row += all)
      k.plan.sent_tokens[begin + row] = tokens[uint64_t{to} * k.g.map.max_tokens + row];
    begin += rows_to;
  }
  if (me == 0) k.plan.sent_begin[k.g.map.num_domains] = begin;
  for (uint32_t i = me; i < from.sizes.sent_addends; i += all) k.plan.addends[i] = addends[i];
  begin = 0;
  for (uint32_t stream = 1; stream <= k.g.net->num_relayed; ++stream) {
    const uint32_t source = k.g.net->relayed[stream].source, rows_of = from.stream_rows[source];
    if (me == 0) {
      k.plan.relayed_begin[stream] = begin;
      k.plan.relayed_pairs[stream] = from.num_pairs[source];
    }
    for (uint32_t row = me; row <= rows_of; row += all)
      k.plan.relayed_piece[begin + row] = from.stream_pieces[source][row];
    begin += rows_of + 1;
  }
}

// By crews of `num_blocks` blocks: writes the parts of a new plan that belong to no single row.
__device__ inline void plan_heads(const Kernel& k, uint32_t num_blocks) {
  const uint32_t ranks = k.g.map.num_ranks, experts = k.g.experts_per_rank;
  const uint32_t me = blockIdx.x * k.crew.size + k.crew.thread, all = num_blocks * k.crew.size;
  const PlanScratch& from = scratch(k.g);
  const uint32_t* const addends = own_part(k.g, k.g.map.token_addends);
  const uint32_t* const origin = own_part(k.g, k.g.map.pair_origin);
  for (uint32_t t = me; t <= k.plan.num_tokens; t += all) k.plan.addend_begin[t] = addends[t];
  for (uint32_t p = me; p < from.sizes.sent_pairs; p += all) k.plan.pair_place[p] = origin[p];
  const uint32_t entries = k.plan.num_token_blocks + 1;
  for (uint32_t i = me; i < ranks * entries; i += all) {
    const uint32_t source = i / entries;
    const uint32_t token_blocks = (from.num_tokens[source] + kTokenBlock - 1) / kTokenBlock;
    const uint32_t token_block = min(i % entries, token_blocks);  // behind its last one: the totals
    k.plan.token_block_rows[i] = from.token_block_rows[source][token_block];
    k.plan.token_block_pieces[i] = from.token_block_pieces[source][token_block];
  }
  if (k.g.net != nullptr) plan_streams(k, num_blocks);
  if (blockIdx.x != num_blocks - 1) return;
  const Bases base(k.g);
  for (uint32_t s = k.crew.thread; s < ranks; s += k.crew.size) {
    const uint32_t to = k.g.domain_of[s];
    uint32_t before = 0;  // pairs for lower domains
    for (uint32_t lower = 0; lower < to; ++lower)
      before += reinterpret_cast<const DeviceHeader*>(own_packet(k.g, lower, k.op.epoch))
                    ->pair_begin[k.g.first_of[lower + 1] - k.g.first_of[lower]];
    k.plan.pair_begin[s] =
        before +
        reinterpret_cast<const DeviceHeader*>(own_packet(k.g, to, k.op.epoch))->pair_begin[s - k.g.first_of[to]];
    k.plan.row_begin[s] = from.row_begin[s];
    k.plan.row_end[s] = from.row_end[s];
    k.plan.weight_begin[s] = from.weight_begin[s];
    k.plan.token_blocks[s] = (from.num_tokens[s] + kTokenBlock - 1) / kTokenBlock;
  }
  for (uint32_t i = k.crew.thread; i < 2 * experts; i += k.crew.size) k.plan.padding[i] = base.padding[i];
  for (uint32_t l = k.crew.thread; l < experts; l += k.crew.size) k.plan.tokens_per_expert[l] = base.size[l];
  if (k.crew.thread == 0) {
    k.plan.pair_begin[ranks] = from.sizes.sent_pairs;
    k.plan.row_pair_begin[from.sizes.received_rows] = from.sizes.received_pairs;
    if (wait_block(k.g, &local(k.g).hashed, k.op.epoch))
      *k.plan.routing_hash = header(k.g, k.g.rank, k.op.epoch).routing_hash;
    *k.plan.overflow = from.sizes.num_rows > k.plan.num_out_rows;
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
