// Plan: from the routing of all sources, the slots of every row that comes here, and who returns each of ours. What is
// known of received rows is written by those that place them first: place.cuh.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/exchange.cuh"
#include "backend/cuda/shares.cuh"
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
  uint32_t rows, pairs, first_pair, tokens, stream_rows, most_pieces;
};

// By one thread: what a source's header says, and where the parts of its packet lie.
__device__ inline FromSource read_header(const Domain& d, const Op& op, uint32_t source, bool with_values) {
  const uint8_t* const bytes = packet(d, source, op.epoch);
  const DeviceHeader& h = *reinterpret_cast<const DeviceHeader*>(bytes);
  const uint32_t member = d.rank - d.first, members = d.end - d.first;
  const uint32_t first_row = h.row_begin[member], end_row = h.row_begin[member + 1], all_rows = h.row_begin[members];
  const uint32_t first_pair = h.pair_begin[member], end_pair = h.pair_begin[member + 1];
  const uint32_t all_pairs = h.pair_begin[members], tokens = h.num_tokens, stream_rows = h.stream_rows;
  const uint32_t most_pieces = h.most_pieces;
  const uint64_t entries = (tokens + kChunkTokens - 1) / kChunkTokens + 1;
  const PacketParts parts =
      packet_parts({members, d.experts_per_rank, tokens, all_rows, all_pairs, stream_rows, with_values});
  PlanScratch& plan = scratch(d);
  plan.lists[source] = reinterpret_cast<const ListEntry*>(bytes + parts.lists) + first_row;
  plan.pairs[source] = reinterpret_cast<const PairEntry*>(bytes + parts.pairs);
  plan.values[source] = reinterpret_cast<const float*>(bytes + parts.values);
  plan.chunk_rows[source] = reinterpret_cast<const uint32_t*>(bytes + parts.chunk_rows) + member * entries;
  plan.chunk_pieces[source] = reinterpret_cast<const uint32_t*>(bytes + parts.chunk_pieces);
  plan.chunk_streams[source] = reinterpret_cast<const uint32_t*>(bytes + parts.chunk_streams);
  plan.stream_pieces[source] = reinterpret_cast<const uint32_t*>(bytes + parts.stream_pieces);
  plan.num_tokens[source] = tokens;
  plan.stream_rows[source] = stream_rows;
  plan.num_pairs[source] = all_pairs;
  return {end_row - first_row, end_pair - first_pair, first_pair, tokens, stream_rows, most_pieces};
}

// By one thread: what our own packets say.
__device__ inline PlanSizes sent_sizes(const Domain& d, const Op& op) {
  PlanSizes sizes;
#pragma unroll 1
  for (uint32_t to = 0; to < d.at.num_domains; ++to) {
    const DeviceHeader& h = *reinterpret_cast<const DeviceHeader*>(own_packet(d, to, op.epoch));
    const uint32_t members = d.first_of[to + 1] - d.first_of[to];
    sizes.sent_pairs += h.pair_begin[members];
    sizes.shipped_rows += h.stream_rows;  // none of our own domain
    if (to == own_domain(d)) sizes.sent_addends += h.row_begin[members];
  }
  sizes.sent_addends += sizes.shipped_rows;
  return sizes;
}

// By a crew: the headers and counts of all sources; the counts go where `Bases::slot` will be. False: a rank is missing
// or has called something else.
__device__ inline bool read_sources(const Crew& crew, const Domain& d, const Op& op, const OpSignature& signature,
                                    FromSource* from) {
  constexpr uint32_t kBatch = 4;  // counts that a thread loads at a time
  const uint32_t ranks = d.at.num_ranks, experts = d.experts_per_rank, all = ranks * experts;
  if (!wait_entered(crew, d, op.epoch)) return false;
  uint32_t counts[kBatch];
  const auto load = [&](uint32_t first) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = first + u * crew.size, s = i / experts;
      if (i >= all) continue;
      const uint8_t* const theirs = packet(d, s, op.epoch) + packet_parts({}).counts;
      counts[u] = reinterpret_cast<const uint32_t*>(theirs)[(d.rank - d.first) * experts + i % experts];
    }
  };
  const auto store = [&](uint32_t first) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u)
      if (first + u * crew.size < all) slot_base(d)[first + u * crew.size] = counts[u];
  };
  // Beside the first counts one warp loads the headers, and another compares them.
  load(crew.thread);
  bool good = true;
#pragma unroll 1
  for (uint32_t s = crew.lane(); s < ranks; s += kWarp) {
    if (crew.warp() == 0) from[s] = read_header(d, op, s, signature.with_values != 0);
    if (crew.warp() == 1) good &= is_alike(d, op.epoch, signature, s);
  }
  store(crew.thread);
#pragma unroll 1
  for (uint32_t first = crew.thread + kBatch * crew.size; first < all; first += kBatch * crew.size) {
    load(first);
    store(first);
  }
  return crew.all(good);
}

// By a warp: the segments of the experts, one after the other, and of each the first slots of the sources. Returns
// their end.
__device__ inline uint32_t lay_out_experts(const Domain& d, uint32_t alignment) {
  const uint32_t ranks = d.at.num_ranks, experts = d.experts_per_rank, lane = threadIdx.x % kWarp;
  const Bases base(d);
  uint32_t first_slot = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < experts; first += kWarp) {
    const uint32_t l = first + lane;
    uint32_t count = 0;
    for (uint32_t s = 0; l < experts && s < ranks; ++s) count += base.slot[s * experts + l];
    const uint32_t size = (count + alignment - 1) / alignment * alignment;
    const uint32_t end = first_slot + warp_prefix(size, lane);
    if (l < experts) {
      base.size[l] = size;
      base.padding[2 * l] = end - size + count;
      base.padding[2 * l + 1] = end;
      uint32_t slot = end - size;
#pragma unroll 1
      for (uint32_t i = 0; i < ranks; ++i) {
        uint32_t& of_source = base.slot[d.source_order[i] * experts + l];
        const uint32_t theirs = of_source;
        of_source = slot;
        slot += theirs;
      }
    }
    first_slot = __shfl_sync(kFullWarp, end, kWarp - 1);
  }
  return first_slot;
}

// By one thread: what each source's rows and pairs are numbered from, and the sizes of the plan but for its slots.
__device__ inline PlanSizes number_sources(const Domain& d, const Op& op, const FromSource* from) {
  PlanScratch& plan = scratch(d);
  PlanSizes sizes = sent_sizes(d, op);
#pragma unroll 1
  for (uint32_t i = 0; i < d.at.num_ranks; ++i) {
    const uint32_t s = d.source_order[i];
    plan.row_begin[s] = sizes.received_rows;
    plan.slot_begin[s] = sizes.received_pairs;
    plan.value_begin[s] = from[s].first_pair - sizes.received_pairs;
    plan.row_end[s] = sizes.received_rows += from[s].rows;
    plan.slot_end[s] = sizes.received_pairs += from[s].pairs;
    sizes.most_tokens = max(sizes.most_tokens, from[s].tokens);
    sizes.most_pieces = max(sizes.most_pieces, from[s].most_pieces);
  }
  if (d.net != nullptr)
#pragma unroll 1
    for (uint32_t k = 1; k <= d.net->num_relayed; ++k) sizes.relayed_rows += from[d.net->relayed[k].source].stream_rows;
  return sizes;
}

// By a crew: the plan is there. False: an error is known.
__device__ inline bool wait_plan(const Crew& crew, const Domain& d, const Op& op) {
  return crew.all(crew.thread != 0 || wait_block(d, &local(d).planned, op.epoch));
}
// By a crew, then: so are the lists that it was made of.
__device__ inline bool wait_lists(const Crew& crew, const Domain& d, const Op& op) {
  bool good = true;
  for (uint32_t r = d.first + crew.thread; r < d.end; r += crew.size)
    good &= wait_peer(d, member_flag(d, d.rank, d.at.lists_full, r), op.epoch, op.epoch, Step::kExchange, r, -1);
  return crew.all(good);
}

// By a crew of at least two warps, of one block: when all ranks have entered, what places rows, and then the counts for
// the host. Nothing comes of it if a rank is missing or has called something else.
__device__ inline void count_received(const Crew& crew, const Domain& d, const Op& op, const OpSignature& signature,
                                      uint64_t call) {
  __shared__ FromSource from[kMaxRanks];
  __shared__ uint32_t end_slot;
  if (!read_sources(crew, d, op, signature, from)) return;
  const bool sums_up = crew.warp() == 1 && crew.lane() == 0;
  PlanSizes sizes;
  if (crew.warp() == 0) {
    const uint32_t end = lay_out_experts(d, signature.expert_alignment);
    if (crew.lane() == 0) end_slot = end;
  }
  if (sums_up) sizes = number_sources(d, op, from);
  crew.sync();
  if (sums_up) {
    sizes.num_rows = signature.compact_width > 0 ? sizes.received_rows : end_slot;
    scratch(d).sizes = sizes;
    publish_in_gpu(&local(d).planned, op.epoch);
  }
  // The host is told of no counts of a routing that a rank may still refuse: its dispatch would return without an
  // error.
  if (!wait_lists(crew, d, op)) return;
  const uint32_t experts = d.experts_per_rank;
  const Bases base(d);
  uint32_t* const host = reinterpret_cast<uint32_t*>(d.counts + 1);
  for (uint32_t l = crew.thread; l < experts; l += crew.size) {
    const uint32_t padded = base.size[l], padding = base.padding[2 * l + 1] - base.padding[2 * l];
    host[l] = padded - padding;
    host[experts + l] = padded;
  }
  if (sums_up) d.counts->sizes = sizes;
  crew.sync();
  if (crew.thread == 0) publish_flag(&d.counts->call, call);
}

// What is known of a received row: its first pair, their number, and where it lies in its source's stream.
struct PlannedRow {
  uint32_t first, count, position;
};
// By one thread, of a new plan: row `row`, the `number`-th from `source`.
__device__ __forceinline__ PlannedRow plan_row(const Domain& d, const PlanView& plan, uint32_t source, uint32_t number,
                                               uint32_t row) {
  // All that is known without the list is loaded before it, and its pairs together: each load is a way to the source
  // and back, and a store would keep the next one waiting.
  constexpr uint32_t kBatch = 6;
  const PlanScratch& from = scratch(d);
  const ListEntry* const list = from.lists[source];
  const uint32_t slot_begin = from.slot_begin[source];
  const PairEntry* const pairs = from.pairs[source] + (slot_begin + from.value_begin[source]);
  const uint32_t* const base = slot_base(d) + source * d.experts_per_rank;
  const uint4 raw = *reinterpret_cast<const uint4*>(list + number);
  const uint32_t first = slot_begin + raw.x, count = raw.w >> 16, position = raw.z;
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
      if (begin + p < count) plan.slots[first + begin + p] = pair[p].x;
  }
  plan.row_token[row] = raw.w & 0xFFFF;
  plan.row_piece[row] = raw.y;
  plan.row_slot[row] = first;
  if (d.net != nullptr) plan.row_position[row] = position;
  return {first, count, position};
}

// By crews of `num_blocks` blocks: the rows of a new plan but for the first ones of each of `warps` that place, which
// plan those themselves and then find the others planned, if they are many.
__device__ inline void plan_rows(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                 uint32_t num_blocks, uint32_t warps) {
  const PlanScratch& from = scratch(d);
  if (from.sizes.received_rows < warps * kWarp) return;
  // No more than what is dealt out of the rows together with the places that sources with fewer rows leave empty.
  const uint32_t first_rows = min(Shares::dealt_to_each(from.sizes.received_rows, warps), kWarp) * warps;
#pragma unroll 1
  for (uint32_t i = 0; i < d.at.num_ranks; ++i) {
    const uint32_t source = rotated(d, i), begin = from.row_begin[source], rows = from.row_end[source] - begin;
    const uint32_t skipped = in_domain(d, source) ? first_rows / (d.end - d.first) : 0;
#pragma unroll 1
    for (uint32_t n = skipped + blockIdx.x * crew.size + crew.thread; n < rows; n += num_blocks * crew.size)
      plan_row(d, plan, source, n, begin + n);
  }
  if (last_block(crew, d, Arrival::kRowsPlanned, num_blocks) && crew.thread == 0)
    publish_in_gpu(&local(d).rows_planned, op.epoch);
}

// By crews of `num_blocks` blocks, where there are several domains: what is known of streams.
__device__ inline void plan_streams(const Crew& crew, const Domain& d, const PlanView& plan, uint32_t num_blocks) {
  const uint32_t me = blockIdx.x * crew.size + crew.thread, all = num_blocks * crew.size;
  const PlanScratch& from = scratch(d);
  const uint32_t entries = plan.num_chunks + 1, own_chunks = (plan.num_tokens + kChunkTokens - 1) / kChunkTokens;
  for (uint32_t i = me; i < d.at.num_ranks * entries; i += all) {
    const uint32_t source = i / entries, chunks = (from.num_tokens[source] + kChunkTokens - 1) / kChunkTokens;
    const uint32_t chunk = min(i % entries, chunks);
    plan.chunk_streams[i] = in_domain(d, source) ? chunk * kChunkTokens : from.chunk_streams[source][chunk];
  }
  const uint32_t* const chunks_before = at<uint32_t>(d, d.rank, d.at.sent_chunks);
  const uint32_t* const tokens = at<uint32_t>(d, d.rank, d.at.sent_tokens);
  const uint32_t* const addends = at<uint32_t>(d, d.rank, d.at.addends);
  uint32_t begin = 0;
  for (uint32_t to = 0; to < d.at.num_domains; ++to) {
    if (me == 0) plan.sent_begin[to] = begin;
    const uint32_t* const before = chunks_before + uint64_t{to} * (max_chunks(d) + 1);
    const bool own = to == own_domain(d);
    for (uint32_t c = me; c < entries; c += all)
      plan.sent_chunks[to * entries + c] = own ? 0 : before[min(c, own_chunks)];
    const uint32_t rows_to = own ? 0 : before[own_chunks];
    for (uint32_t row = me; row < rows_to; row += all)
      plan.sent_tokens[begin + row] = tokens[uint64_t{to} * d.at.max_tokens + row];
    begin += rows_to;
  }
  if (me == 0) plan.sent_begin[d.at.num_domains] = begin;
  for (uint32_t i = me; i < from.sizes.sent_addends; i += all) plan.addends[i] = addends[i];
  begin = 0;
  for (uint32_t k = 1; k <= d.net->num_relayed; ++k) {
    const uint32_t source = d.net->relayed[k].source, rows_of = from.stream_rows[source];
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
__device__ inline void plan_heads(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                  uint32_t num_blocks) {
  const uint32_t ranks = d.at.num_ranks, experts = d.experts_per_rank;
  const uint32_t me = blockIdx.x * crew.size + crew.thread, all = num_blocks * crew.size;
  const PlanScratch& from = scratch(d);
  const uint32_t* const addends = at<uint32_t>(d, d.rank, d.at.token_addends);
  const uint32_t* const origin = at<uint32_t>(d, d.rank, d.at.pair_origin);
  for (uint32_t t = me; t <= plan.num_tokens; t += all) plan.addend_begin[t] = addends[t];
  for (uint32_t p = me; p < from.sizes.sent_pairs; p += all) plan.pair_place[p] = origin[p];
  const uint32_t entries = plan.num_chunks + 1;
  for (uint32_t i = me; i < ranks * entries; i += all) {
    const uint32_t source = i / entries;
    const uint32_t chunks = (from.num_tokens[source] + kChunkTokens - 1) / kChunkTokens;
    const uint32_t chunk = min(i % entries, chunks);  // beyond its last: as there
    plan.chunk_rows[i] = from.chunk_rows[source][chunk];
    plan.chunk_pieces[i] = from.chunk_pieces[source][chunk];
  }
  if (d.net != nullptr) plan_streams(crew, d, plan, num_blocks);
  if (blockIdx.x != num_blocks - 1) return;
  const Bases base(d);
  for (uint32_t s = crew.thread; s < ranks; s += crew.size) {
    const uint32_t to = d.domain_of[s];
    uint32_t before = 0;  // pairs for lower domains
    for (uint32_t lower = 0; lower < to; ++lower)
      before += reinterpret_cast<const DeviceHeader*>(own_packet(d, lower, op.epoch))
                    ->pair_begin[d.first_of[lower + 1] - d.first_of[lower]];
    plan.pair_begin[s] =
        before + reinterpret_cast<const DeviceHeader*>(own_packet(d, to, op.epoch))->pair_begin[s - d.first_of[to]];
    plan.row_begin[s] = from.row_begin[s];
    plan.row_end[s] = from.row_end[s];
    plan.value_begin[s] = from.value_begin[s];
    plan.chunks[s] = (from.num_tokens[s] + kChunkTokens - 1) / kChunkTokens;
  }
  for (uint32_t i = crew.thread; i < 2 * experts; i += crew.size) plan.padding[i] = base.padding[i];
  for (uint32_t l = crew.thread; l < experts; l += crew.size) plan.tokens_per_expert[l] = base.size[l];
  if (crew.thread == 0) {
    plan.pair_begin[ranks] = from.sizes.sent_pairs;
    plan.row_slot[from.sizes.received_rows] = from.sizes.received_pairs;
    if (wait_block(d, &local(d).hashed, op.epoch)) *plan.routing_hash = header(d, d.rank, op.epoch).routing_hash;
    *plan.overflow = from.sizes.num_rows > plan.num_slots;
  }
}

// By crews of all blocks: the given routing is the plan's. Not inlined: its caller has no registers to spare.
__device__ __noinline__ void compare_routing(const Crew& crew, const Domain& d, const PlanView& plan,
                                             const DeviceRouting& r, uint64_t plan_id) {
  const uint64_t places = uint64_t{plan.num_tokens} * r.width;
  uint64_t hash = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * crew.size + crew.thread; i < places; i += uint64_t{workers(d)} * crew.size) {
    const long long expert = !r.is_map                                     ? static_cast<const long long*>(r.data)[i]
                             : static_cast<const uint8_t*>(r.data)[i] != 0 ? static_cast<long long>(i % r.width)
                                                                           : -1;
    if (expert != -1) hash += hash_pair(static_cast<uint32_t>(i), static_cast<uint32_t>(expert));
  }
  hash = crew_sum(crew, hash);
  if (crew.thread == 0) add_global(&local(d).routing_hash, hash);
  if (!last_block(crew, d, Arrival::kHashed, workers(d)) || crew.thread != 0) return;
  const uint64_t seen = local(d).routing_hash;
  local(d).routing_hash = 0;
  if (seen != *plan.routing_hash)
    report(d, DeviceFault::kPlanDiffers, Step::kPlan, static_cast<int>(d.rank), -1, *plan.routing_hash, plan_id,
           ErrorKind::kPlanMismatch);
}

}  // namespace uccl_ep::cuda
