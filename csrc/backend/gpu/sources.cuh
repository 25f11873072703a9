// Sources: from the packets of all sources, the first output row of each expert and source, and the plan's sizes.
#pragma once

#include "backend/gpu/device.cuh"
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
  // Expert l has rows from `begin` on, `count` of them, and then padding until `end`.
  __device__ __forceinline__ void note(uint32_t l, uint32_t begin, uint32_t count, uint32_t end) const {
    size[l] = end - begin;
    padding[2 * l] = begin + count;
    padding[2 * l + 1] = end;
  }
};
// Whether an expert after the other, with a source for each lane, is sooner than a source after the other.
__device__ __forceinline__ bool has_many_sources(const Group& g) {
  const auto turns = [](uint32_t n) { return (n + kWarp - 1) / kWarp; };
  return g.experts_per_rank * turns(g.map.num_ranks) < g.map.num_ranks * turns(g.experts_per_rank);
}

// What a source sends to us, and its totals.
struct FromSource {
  uint32_t rows = 0, pairs = 0, first_pair = 0, tokens = 0;
  BlockMost most;
  uint32_t tail_chunks = 0;
  SpanRows span_rows;
};

// By one thread: reads a source's header, and notes where the parts of its packet lie.
__device__ inline FromSource read_header(const Kernel& k, uint32_t source, bool with_weights) {
  uint8_t* const bytes = packet(k.g, source, k.op.epoch);
  const DeviceHeader h = *reinterpret_cast<const DeviceHeader*>(bytes);  // a copy: loaded at once
  const uint32_t member = k.g.rank - k.g.first, members = k.g.end - k.g.first;
  const MemberBegins begins(bytes, members, k.g.experts_per_rank);
  const uint32_t first_row = begins.row[member], end_row = begins.row[member + 1];
  const uint32_t first_pair = begins.pair[member], end_pair = begins.pair[member + 1];
  const uint32_t groups = BlockRows::groups((h.num_tokens + kTokenBlock - 1) / kTokenBlock);
  const PacketParts parts =
      packet_parts({members, k.g.experts_per_rank, h.num_tokens, h.num_rows, h.num_pairs, h.stream_rows, with_weights});
  SourcePlan& plan = source_plan(k.g, source);
  plan.num_pairs = h.num_pairs;
  plan.num_tokens = h.num_tokens;
  plan.stream_rows = h.stream_rows;
  plan.lists = reinterpret_cast<const ListEntry*>(bytes + parts.lists) + first_row;
  plan.all_pairs = reinterpret_cast<const PairEntry*>(bytes + parts.pairs);
  plan.weights = reinterpret_cast<const float*>(bytes + parts.weights);
  plan.token_block_rows = reinterpret_cast<const BlockRows*>(bytes + parts.token_block_rows) + member * groups;
  plan.token_block_streams = reinterpret_cast<const BlockRows*>(bytes + parts.token_block_streams);
  plan.stream_pieces = reinterpret_cast<const uint32_t*>(bytes + parts.stream_pieces);
  plan.tail_chunks = in_domain(k.g, source) || k.g.map.tail_slots == 0
                         ? 0
                         : tail_chunks(parts.end, k.g.map.head_bytes, k.g.map.tail_bytes);
  return {end_row - first_row, end_pair - first_pair, first_pair, h.num_tokens,
          {h.most_of_block},   plan.tail_chunks,      h.span_rows};
}

// By a warp: the sizes that follow from our own packets.
__device__ inline PlanSizes sent_sizes(const Kernel& k) {
  PlanSizes sizes;
#pragma unroll 1
  for (uint32_t to = threadIdx.x % kWarp; to < k.g.map.num_domains; to += kWarp) {
    const DeviceHeader& h = *reinterpret_cast<const DeviceHeader*>(own_packet(k.g, to, k.op.epoch));
    sizes.sent_pairs += h.num_pairs;
    sizes.shipped_rows += h.stream_rows;  // none of our own domain
    if (to == own_domain(k.g)) sizes.sent_addends += h.num_rows;
  }
  sizes.sent_pairs = warp_sum(sizes.sent_pairs);
  sizes.shipped_rows = warp_sum(sizes.shipped_rows);
  sizes.sent_addends = warp_sum(sizes.sent_addends) + sizes.shipped_rows;
  return sizes;
}

// The warps of a crew that lay out experts and that number sources.
constexpr uint32_t kLaysOut = 0, kNumbers = 1;
// By a crew: reads the counts of all sources, and the headers of kWarp of them: that of `source` into `from`, for each
// lane of the warp that numbers sources. The counts go where `Bases::out_row` will be. False: a rank is missing or has
// called something else.
__device__ inline bool read_sources(const Kernel& k, const OpSignature& signature, uint32_t source, FromSource& from) {
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
  // While the first counts are on their way, one warp loads headers and another compares all.
  load(k.crew.thread);
  bool good = true;
  if (k.crew.warp() == kNumbers && k.crew.lane() < ranks) from = read_header(k, source, signature.with_weights != 0);
  if (k.crew.warp() == kLaysOut)
#pragma unroll 1
    for (uint32_t s = k.crew.lane(); s < ranks; s += kWarp) good &= is_alike(k.g, k.op.epoch, signature, s);
  store(k.crew.thread);
#pragma unroll 1
  for (uint32_t first = k.crew.thread + kBatch * k.crew.size; first < all; first += kBatch * k.crew.size) {
    load(first);
    store(first);
  }
  return k.crew.all(good);
}

// By a warp: lays out the experts' segments of the output one after the other, and in each the first row of every
// source. Returns the end of the last segment. A lane takes an expert.
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
      base.note(l, end - size, count, end);
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
// The same where there are many sources: a lane takes a source.
inline __device__ __noinline__ uint32_t lay_out_experts_of_many(const Group& g, uint32_t alignment) {
  const uint32_t ranks = g.map.num_ranks, experts = g.experts_per_rank, lane = threadIdx.x % kWarp;
  const Bases base(g);
  uint32_t first_row = 0;
#pragma unroll 1
  for (uint32_t l = 0; l < experts; ++l) {
    uint32_t out_row = first_row;
#pragma unroll 1
    for (uint32_t first = 0; first < ranks; first += kWarp) {
      const bool has = first + lane < ranks;
      uint32_t* const of_source = base.out_row + (has ? g.source_order[first + lane] : 0) * experts + l;
      const uint32_t theirs = has ? *of_source : 0, end = out_row + warp_prefix(theirs, lane);
      if (has) *of_source = end - theirs;
      out_row = __shfl_sync(kFullWarp, end, kWarp - 1);
    }
    const uint32_t count = out_row - first_row, end = first_row + (count + alignment - 1) / alignment * alignment;
    if (lane == 0) base.note(l, first_row, count, end);
    first_row = end;
  }
  return first_row;
}

// By a warp, with the sources in the given order (`s`: this lane's first one, whose header has been read): writes the
// numbers of each source's first row and first pair, and the sizes of the plan except its number of rows.
__device__ inline void number_sources(const DispatchKernel& k, uint32_t s, FromSource from, bool with_weights,
                                      PlanSizes& out) {
  const uint32_t lane = threadIdx.x % kWarp;
  uint32_t received_rows = 0, received_pairs = 0, most_tokens = 0, relayed_rows = 0, most_tail = 0;
  BlockMost most;
  SpanRows span_rows;
#pragma unroll 1
  for (uint32_t first = 0; first < k.g.map.num_ranks; first += kWarp) {
    const bool has = first + lane < k.g.map.num_ranks;
    if (first > 0 && has) {
      s = k.g.source_order[first + lane];
      from = read_header(k, s, with_weights);
    }
    if (!has) from = {};
    const uint32_t row_end = received_rows + warp_prefix(from.rows, lane);
    const uint32_t pair_end = received_pairs + warp_prefix(from.pairs, lane);
    if (has) {
      SourcePlan& plan = source_plan(k.g, s);
      plan.row_begin = row_end - from.rows;
      plan.row_end = row_end;
      plan.pair_begin = pair_end - from.pairs;
      plan.pair_end = pair_end;
      plan.weight_begin = from.first_pair - plan.pair_begin;
      most_tokens = max(most_tokens, from.tokens);
      most = most.with(from.most);
      most_tail = max(most_tail, from.tail_chunks);
      span_rows = span_rows.with(from.span_rows);
    }
    received_rows = __shfl_sync(kFullWarp, row_end, kWarp - 1);
    received_pairs = __shfl_sync(kFullWarp, pair_end, kWarp - 1);
  }
  __syncwarp();  // lanes read what others have noted of sources
  if (has_net(k.g))
#pragma unroll 1
    for (uint32_t stream = 1 + lane; stream <= k.g.net.num_relayed; stream += kWarp)
      relayed_rows += source_plan(k.g, k.g.net.relayed[stream].source).stream_rows;
  relayed_rows = warp_sum(relayed_rows);
  most_tokens = warp_max(most_tokens);
  most = warp_most(most);
  if (has_net(k.g)) {
    most_tail = warp_max(most_tail);
    span_rows = warp_most(span_rows);
  }
  const PlanSizes sent = sent_sizes(k);
  if (lane != 0) return;
  if (has_net(k.g)) {
    const DispatchWindows& windows = k.args.windows;
    scratch(k.g).most_tail = most_tail;
    scratch(k.g).window_tokens = most_tokens <= windows.first
                                     ? windows.first
                                     : later_window_tokens(k.g.map, k.args.stage.stride, most.rows(), span_rows);
  }
  out = sent;
  out.received_rows = received_rows;
  out.received_pairs = received_pairs;
  out.most_tokens = most_tokens;
  out.most_pieces = most.pieces();
  out.most_rows = most.rows();
  out.span_rows = span_rows;
  out.most_pairs = most.pairs();
  out.relayed_rows = relayed_rows;
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

// By a thread of the warp that has numbered sources: reports a rank with more tokens than a plan of fixed size holds.
// False: there is one.
__device__ __noinline__ bool plan_holds_tokens(const Kernel& k) {
  const uint32_t most = k.plan.num_token_blocks * kTokenBlock;
  if (scratch(k.g).sizes.most_tokens <= most) return true;
  for (uint32_t s = 0; s < k.g.map.num_ranks; ++s)
    if (const uint32_t tokens = source_plan(k.g, s).num_tokens; tokens > most) {
      report(k.g, {DeviceFault::kTooManyTokens, ErrorKind::kRankMismatch, Step::kPlan, s, -1, most, tokens});
      break;
    }
  return false;
}

// By a crew of at least two warps of one block. When all ranks have entered, it publishes what placing rows needs, and
// then the counts for the host. It publishes nothing if a rank is missing, has called something else, or has more
// tokens than a plan of fixed size holds.
__device__ inline void count_received(const DispatchKernel& k) {
  __shared__ uint32_t end_row;
  const OpSignature& signature = k.args.signature;
  const bool fixed_size = k.args.fit == Fit::kAlways;
  const uint32_t lane = k.crew.lane(), first_source = lane < k.g.map.num_ranks ? k.g.source_order[lane] : 0;
  FromSource from;
  if (!read_sources(k, signature, first_source, from)) return;
  const bool sums_up = k.crew.warp() == kNumbers && k.crew.lane() == 0;
  PlanSizes& sizes = scratch(k.g).sizes;
  if (k.crew.warp() == kLaysOut) {
    const uint32_t end = has_many_sources(k.g) ? lay_out_experts_of_many(k.g, signature.expert_alignment)
                                               : lay_out_experts(k.g, signature.expert_alignment);
    if (k.crew.lane() == 0) end_row = end;
  }
  if (k.crew.warp() == kNumbers) number_sources(k, first_source, from, signature.with_weights != 0, sizes);
  if (!k.crew.all(!sums_up || !fixed_size || plan_holds_tokens(k))) return;
  if (sums_up) {
    sizes.num_rows = signature.compact_width > 0 ? sizes.received_rows : end_row;
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
  if (k.crew.thread == 0) publish(&k.g.counts->call, k.args.call);
}

}  // namespace uccl_ep::gpu
