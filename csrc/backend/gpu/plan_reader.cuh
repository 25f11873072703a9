// Reads a plan for the kernels of a dispatch.
#pragma once

#include "backend/gpu/plan.cuh"

namespace uccl_ep::gpu {

// The only code that distinguishes a new plan (kFresh) from a known one. A known plan is read from its arrays. A new
// plan is read from scratch memory, from this rank's own routing and from the sources' packets, because the kernel is
// still filling the arrays.
template <bool kFresh>
struct PlanReader {
  const Group& g;
  const PlanView& plan;

  __device__ __forceinline__ PlanReader(const Group& group, const PlanView& view) : g(group), plan(view) {}
  __device__ __forceinline__ explicit PlanReader(const Kernel& k) : PlanReader(k.g, k.plan) {}

  // ---- of this rank as the destination of `source`
  __device__ __forceinline__ uint32_t most_tokens() const {  // of any rank
    return kFresh ? scratch(g).sizes.most_tokens : *plan.most_tokens;
  }
  __device__ __forceinline__ uint32_t row_begin(uint32_t source) const {
    return kFresh ? source_plan(g, source).row_begin : plan.row_begin[source];
  }
  __device__ __forceinline__ uint32_t row_end(uint32_t source) const {
    return kFresh ? source_plan(g, source).row_end : plan.row_end[source];
  }
  __device__ __forceinline__ uint32_t pair_begin(uint32_t source) const {
    return kFresh ? source_plan(g, source).pair_begin : plan.row_pair_begin[plan.row_begin[source]];
  }
  __device__ __forceinline__ uint32_t pair_end(uint32_t source) const {
    return kFresh ? source_plan(g, source).pair_end : plan.row_pair_begin[plan.row_end[source]];
  }
  __device__ __forceinline__ uint32_t token_blocks(uint32_t source) const {
    return kFresh ? (source_plan(g, source).num_tokens + kTokenBlock - 1) / kTokenBlock : plan.token_blocks[source];
  }
  // The source's rows by token block: those for us, and those of its stream.
  __device__ __forceinline__ const BlockRows* rows_of(uint32_t source) const {
    return kFresh ? source_plan(g, source).token_block_rows : plan.token_block_rows + source * groups();
  }
  __device__ __forceinline__ const BlockRows* stream_rows_of(uint32_t source) const {
    return kFresh ? source_plan(g, source).token_block_streams : plan.token_block_streams + source * groups();
  }
  // The weights in the source's packet. Our pair p has number p + weight_begin(source).
  __device__ __forceinline__ const float* weights(uint32_t source, uint64_t epoch) const {
    if constexpr (kFresh) return source_plan(g, source).weights;
    return reinterpret_cast<const float*>(packet(g, source, epoch) + packet_parts({}).weights);
  }
  __device__ __forceinline__ uint32_t weight_begin(uint32_t source) const {
    return kFresh ? source_plan(g, source).weight_begin : plan.weight_begin[source];
  }

  // ---- of a row that we receive, perhaps the last one of its source
  // `planned`: the row is in the arrays; otherwise this plans it.
  __device__ __forceinline__ PlannedRow row(uint32_t source, uint32_t row, bool is_last, bool planned) const {
    if (kFresh && !planned) return plan_row(g, plan, source, row);
    PlannedRow known;
    known.position = (has_net(g) ? plan.row_position : plan.row_token)[row];
    known.first = plan.row_pair_begin[row];
    // The next source's first row may not be planned.
    const uint32_t end = kFresh && is_last ? source_plan(g, source).pair_end : plan.row_pair_begin[row + 1];
    known.count = end - known.first;
    return known;
  }
  struct Pairs {
    uint32_t first, count;
  };
  __device__ __forceinline__ Pairs pairs_of(uint32_t source, uint32_t number, uint32_t row) const {
    if constexpr (kFresh) {
      const ListEntry entry = source_plan(g, source).lists[number];
      return {source_plan(g, source).pair_begin + entry.first_pair, entry.num_pairs};
    }
    const uint32_t first = plan.row_pair_begin[row];
    return {first, plan.row_pair_begin[row + 1] - first};
  }
  // For our pair p, the source's `number`-th: its output row, and for a compact row its local expert.
  __device__ __forceinline__ uint32_t out_row(uint32_t source, uint32_t p, uint32_t number) const {
    if constexpr (kFresh) {
      const PairEntry pair = source_plan(g, source).all_pairs[number];
      return out_row_base(g)[source * g.experts_per_rank + pair.expert] + pair.position;
    }
    return plan.out_rows[p];
  }
  __device__ __forceinline__ uint32_t expert(uint32_t source, uint32_t p, uint32_t number) const {
    return kFresh ? source_plan(g, source).all_pairs[number].expert : plan.out_rows[p];
  }

  // ---- of the output
  __device__ __forceinline__ const uint32_t* padding() const { return kFresh ? Bases(g).padding : plan.padding; }

  // ---- of this rank as a source
  // The rows by token block of our stream to a domain.
  __device__ __forceinline__ const BlockRows* sent_to(uint32_t domain) const {
    return kFresh ? own_part(g, g.map.sent_token_blocks) + uint64_t{domain} * BlockRows::groups(max_token_blocks(g))
                  : plan.sent_token_blocks + uint64_t{domain} * groups();
  }
  __device__ __forceinline__ const uint32_t* addend_begin() const {
    return kFresh ? own_part(g, g.map.token_addends) : plan.addend_begin;
  }
  __device__ __forceinline__ const Addend* addends() const {
    return kFresh ? own_part(g, g.map.addends) : plan.addends;
  }

 private:
  __device__ __forceinline__ uint32_t groups() const { return BlockRows::groups(plan.num_token_blocks); }
};

// The windows of a dispatch, when its plan is known.
template <bool kFresh>
__device__ __forceinline__ DispatchWindows windows_of(const Group& g, const PlaceArgs& args) {
  if (!kFresh || !has_net(g)) return args.windows;
  return {args.windows.first, scratch(g).window_tokens};
}
// The token with which a window begins. Where the second one does is known before the plan.
template <bool kFresh>
__device__ __forceinline__ uint32_t window_begin(const Group& g, const PlaceArgs& args, uint32_t window) {
  return window < 2 ? window * args.windows.first : windows_of<kFresh>(g, args).begin(window);
}
// The same, as the number of its token block.
template <bool kFresh>
__device__ __forceinline__ uint32_t first_block_of(const Group& g, const PlaceArgs& args, uint32_t window) {
  return window_begin<kFresh>(g, args, window) / kTokenBlock;
}
// Windows of the rank with the most tokens.
template <bool kFresh>
__device__ __forceinline__ uint32_t num_windows(const DispatchKernel& k) {
  // The plan may have memory for more token blocks than there are.
  if (k.plan.num_token_blocks * kTokenBlock <= k.args.windows.first) return 1;
  return windows_of<kFresh>(k.g, k.args).count(PlanReader<kFresh>(k).most_tokens());
}

// By a warp that places: whether others have planned its next batch of rows of a window. With a new plan they never
// plan its first one, unless a packet has a tail.
template <bool kFresh>
struct PlannedByOthers {
  bool first, planned = !kFresh;
  __device__ __forceinline__ explicit PlannedByOthers(const Group& g) : first(!kFresh || !has_tails(g)) {}
  // By every lane, once for each batch.
  __device__ __forceinline__ bool look(const Kernel& k) {
    if (!planned && !first) planned = read(&local(k.g).rows_planned) >= k.op.epoch;
    first = false;
    return planned;
  }
};

}  // namespace uccl_ep::gpu
