// Fold: at the expert's rank, sums a token's output rows in fp32 and writes one piece into the memory of its source or
// rail.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/net.cuh"
#include "backend/gpu/shares.cuh"
#include "backend/gpu/steps.h"
#include "backend/gpu/sum.cuh"
#include "backend/gpu/windows.h"

namespace uccl_ep::gpu {

// How a kernel sums. Where there are several domains parts of rows are summed in any form.
enum class CombineForm : uint32_t {
  kSums,
  kCopies,  // the only row of a sum is copied, because whoever merges it adds it to +0.0 (contract 2)
  kFoldsFirst,  // the same in one domain; all warps fold a window before they merge, if rows are few parts of them
};
// The crews of a block.
template <bool kBulk>
struct SumCrews {
  static constexpr uint32_t kFolds = kBulk ? 7 : warps_by_lanes(11, 9), kMerges = kBulk ? 4 : warps_by_lanes(8, 6),
                            kAll = kFolds + kMerges;
};
constexpr uint32_t kFewRows = 2;  // of a warp: so many are few

__device__ __forceinline__ bool is_last(const KernelCombineArgs& args, uint32_t window) {
  return window + 1 == args.num_windows;
}
// The part of a stream's pairs whose weights' gradients go in a window.
struct PairRange {
  uint32_t begin, end;
};
__device__ __forceinline__ bool has_weights(const KernelCombineArgs& args, uint32_t window) {
  return args.signature.with_weights != 0 && window >= args.first_weight_window;
}
__device__ __forceinline__ PairRange weights_of(const CombineKernel& k, uint32_t window, uint32_t pairs) {
  if (!has_weights(k.args, window)) return {0, 0};
  const uint32_t begin = (window - k.args.first_weight_window) * k.g.map.weight_pairs;
  return {min(begin, pairs), min(begin + k.g.map.weight_pairs, pairs)};
}
// Where those of a stream lie in the region of the rank that merges it.
__device__ __forceinline__ float* weights_at(const Group& g, uint32_t rank, uint32_t stream, uint32_t window) {
  const uint32_t half = g.map.weight_halves == 1 ? 0 : window % kHalves;
  return at(g, rank, g.map.piece_weights) + (uint64_t{stream} * g.map.weight_halves + half) * g.map.stream_weights;
}
// Windows come in turn: of each token block one for every batch of streams, and our own tokens with the last of them.
struct WindowTurn {
  uint32_t tokens, batch;
  __device__ __forceinline__ WindowTurn(const Group& g, uint32_t window)
      : tokens(g.map.stream_batches > 1 ? window / g.map.stream_batches : window),
        batch(window - tokens * g.map.stream_batches) {}
};
// The batch of a stream, of which 0 are our own tokens. A rank that is alone has no pieces, and any number of streams
// in its last batch.
__device__ __forceinline__ uint32_t batch_of(const Group& g, uint32_t stream) {
  const uint32_t last = g.map.stream_batches - 1;
  return last == 0 || stream == 0 ? last : min((stream - 1) / g.map.batch_streams, last);
}
// Where the stream's pieces lie: a number of `piece_bytes`.
__device__ __forceinline__ uint32_t piece_place(const Group& g, uint32_t stream) {
  return stream == 0 ? 0 : stream - batch_of(g, stream) * g.map.batch_streams;
}
// Where a piece lies among a window's: those of a window fit there, and their numbers follow each other.
__device__ __forceinline__ uint64_t piece_slot(const KernelCombineArgs& args, uint32_t piece) {
  return piece < args.piece_slots ? piece : piece % args.piece_slots;  // a division takes long
}
// Where a window's pieces begin in the memory of a stream.
__device__ __forceinline__ uint64_t pieces_begin(const Group& g, uint32_t window) {
  return window % kHalves * piece_half_bytes(g.map);
}
// The token blocks of a source that a window has; none if its stream is of another batch.
struct TokenBlockRange {
  uint32_t first, end;
};
__device__ UCCL_EP_INLINE_BEFORE_100 TokenBlockRange token_blocks_of(const CombineKernel k, uint32_t window,
                                                                     uint32_t stream, uint32_t token_blocks) {
  const WindowTurn turn(k.g, window);
  const uint32_t per_window = k.args.window_tokens / kTokenBlock, first = min(turn.tokens * per_window, token_blocks);
  if (turn.batch != batch_of(k.g, stream)) return {first, first};
  const bool is_last = window + k.g.map.stream_batches >= k.args.num_windows;
  return {first, is_last ? token_blocks : min(first + per_window, token_blocks)};
}

// A rank that is alone in its domain has nothing to merge for others: it folds straight into the rings to them.
__device__ __forceinline__ bool is_alone(const Group& g) { return num_near(g) == 1; }

// What a window folds of a source.
#pragma pack(push, 4)
struct FoldSource {
  uint32_t begin, end;  // rows
  uint8_t* to;          // where its pieces lie; or the ring to it
  uint32_t slot;        // of the first chunk in the ring
};
#pragma pack(pop)
static_assert(sizeof(FoldSource) == kFoldEntryBytes);
// Of all sources; in shared memory.
struct FoldRange {
  uint32_t window;
  MostRows most;
  PartedRows parted;
  uint32_t hurried;  // so many first rows are told by the warps that fold them
  __device__ __forceinline__ FoldSource& of(const Group& g, uint32_t source) const {
    return shared_table<FoldSource>(g, 0)[source];
  }
};
// By a warp, when it has found what the window merges (`streams`).
template <typename Merges>
__device__ inline void find_fold_range(const CombineKernel& k, const Merges& streams, FoldRange& out) {
  const uint32_t groups = BlockRows::groups(k.plan.num_token_blocks), window = streams.window;
  const bool is_only = k.args.num_windows == 1;  // of which nothing is looked up in tables
  if (k.crew.thread == 0) out.window = window;
  k.crew.sync();
  for (uint32_t s = k.crew.thread; s < k.g.map.num_ranks; s += k.crew.size) {
    const uint32_t stream = stream_of(k.g, s);
    FoldSource& its = out.of(k.g, s);
    its.begin = k.plan.row_begin[s];
    its.end = k.plan.row_end[s];
    if (!is_only) {
      const TokenBlockRange token_blocks = token_blocks_of(k, window, stream, k.plan.token_blocks[s]);
      const BlockRows* const rows = k.plan.token_block_rows + s * groups;
      its.end = its.begin + BlockRows::rows_before(rows, token_blocks.end);
      its.begin += BlockRows::rows_before(rows, token_blocks.first);
    }
    if (!in_domain(k.g, s) && is_alone(k.g)) {
      its.to = at(k.g, k.g.rank, k.g.net.relayed[stream].returns);
      its.slot = streams.stream(k.g, stream).slot;
    } else {
      its.to = at(k.g, holder_of(k.g, s), k.g.map.pieces) + piece_place(k.g, stream) * k.g.map.piece_bytes +
               pieces_begin(k.g, window);
    }
  }
  k.crew.sync();
  if (k.crew.warp() == 0) out.most.find(k.g, [&](uint32_t s) { return out.of(k.g, s).end - out.of(k.g, s).begin; });
  k.crew.sync();
}

// In shared memory: tags (FoldTag) plus 1 of rows that warps of the block have folded. A warp puts each into one of
// kBoxes; the warp that tells takes them. In one domain all warps share one for each of its lanes, so that it has
// little code: where rows are few, that takes 3 us less. With several domains each has its own, or kernels spill on
// sm_100a.
template <bool kNet>
constexpr uint32_t kBoxes = kNet ? 8 : kWarp;  // no fewer than a warp puts at once
template <bool kNet, uint32_t kWarps>
struct Boxes {
  static constexpr uint32_t kAll = kBoxes<kNet> * (kNet ? kWarps : 1);
  uint32_t tags[kAll];
  uint32_t ended;  // warps that put nothing more
  // By the first warp of the block; a barrier of all threads follows.
  __device__ void begin() {
    for (uint32_t i = threadIdx.x; i < kAll; i += kWarp) tags[i] = 0;
    if (threadIdx.x == 0) ended = 0;
  }
  // By a warp: those that it uses.
  __device__ __forceinline__ uint32_t* of(uint32_t warp) { return tags + (kNet ? warp * kBoxes<kNet> : 0); }
};

// Rows of other domains come first, because their sums travel farther. A sum is that of a row, or of a part of one.
template <bool kNet, CombineForm kForm>
struct Fold : CombineKernel {
  static constexpr bool kSumsFirst = false, kSplits = kNet, kRehearses = false, kCopies = kForm != CombineForm::kSums,
                        kBegins = false;
  const FoldRange& range;
  uint32_t* const boxes;  // kBoxes
  const uint32_t units;  // of 16 bytes in one of the caller's rows
  mutable uint32_t put = 0;  // the box that is tried first

  __device__ SharedWork shared_work() const { return SharedWork::kFolded; }
  __device__ uint32_t window() const { return range.window; }
  __device__ Dealing dealing() const { return {4}; }
  __device__ uint32_t end() const {
    const uint32_t rows = range.most.far_sum(g) + range.most.near_sum(g);
    return kNet ? range.parted.end(rows) : rows;
  }
  __device__ Sum look_up(uint32_t number_of_sum) const {
    const uint32_t far = range.most.far_sum(g), n = kNet ? range.parted.row(number_of_sum) : number_of_sum;
    const auto [s, number] = n < far ? far_row(g, n) : near_row(g, n - far);
    const uint32_t row = range.of(g, s).begin + number;
    if (row >= range.of(g, s).end) return {};
    const uint64_t bytes = uint64_t{args.hidden} * dtype_bytes(args.wire);
    Sum sum;
    if (plan.compact_width > 0) {
      sum.first = row;
      sum.count = 1;
    } else {
      sum.first = plan.row_pair_begin[row];
      sum.count = plan.row_pair_begin[row + 1] - sum.first;
    }
    if constexpr (kNet) sum.part = range.parted.part(number_of_sum);
    if (kNet && n < far && is_alone(g)) {  // this rank gets all rows of the stream
      sum.tag =
          FoldTag::of_chunk(ring_counter(g, stream_of(g, s), range.of(g, s).slot, number / rows_per_chunk(g, bytes)))
              .word;
      sum.out = range.of(g, s).to + ring_offset(g, range.of(g, s).slot, g.map.return_slots, number, bytes);
    } else {
      sum.tag = FoldTag::of_token_block(s * max_token_blocks(g) + plan.row_token[row] / kTokenBlock,
                                        kNet && n < range.hurried)
                    .word;
      sum.out = range.of(g, s).to + piece_slot(args, plan.row_piece[row]) * bytes;
    }
    if (args.may_drop) drop(sum, bytes);
    return sum;
  }
  // Drops rows that the caller's output does not have; they are the last ones of the sum.
  __device__ void drop(Sum& sum, uint64_t bytes) const {
    while (sum.count > 0 && out_row(sum.first + sum.count - 1) >= plan.num_out_rows) --sum.count;
    if (sum.count > 0) return;
#pragma unroll 1
    for (uint64_t i = 0; i < bytes / 16; ++i) reinterpret_cast<uint4*>(sum.out)[i] = make_uint4(0, 0, 0, 0);
    proxy_fence();
    fence_system();
    if (is_in_ring(sum.tag))
      count_in_ring(sum.tag, sum.part > 0);
    else
      count_and_finish(FoldTag{sum.tag}.counter(), sum.part > 0);
  }
  __device__ uint32_t out_row(uint32_t k) const { return plan.compact_width > 0 ? k : plan.out_rows[k]; }
  __device__ uint32_t place(const Sum&, uint32_t k) const { return out_row(k) * units; }
  __device__ const uint8_t* base() const { return args.rows; }
  template <bool kLooks>
  __device__ bool came(uint32_t) const {
    return true;
  }
  __device__ bool is_in_ring(uint32_t tag) const { return kNet && FoldTag{tag}.is_in_ring(); }
  __device__ bool at_once(uint32_t tag) const {
    return is_in_ring(tag) || !in_domain(g, FoldTag{tag}.counter() / max_token_blocks(g));
  }
  __device__ bool tells() const { return true; }
  __device__ void tell(uint32_t lane, uint32_t count, uint32_t tag) const {
    if (lane < count)
      for (uint32_t looks = 1; !put_shared(boxes + (put + lane + (kNet ? 0 : looks)) % kBoxes<kNet>, tag + 1); ++looks)
        if (looks % 64 == 0 && stopped(g)) break;  // the warp that empties them may have ended
    put += count;
    __syncwarp();
  }
  __device__ void tell_at_once(uint32_t lane, uint32_t tag, bool is_part) const {
    if (!is_in_ring(tag) && !(kNet && FoldTag{tag}.is_hurried()))
      return tell(lane, 1, FoldTag{tag}.as_part(kNet && is_part).word);
    if (lane != 0) return;
    if (is_in_ring(tag)) return count_in_ring(tag, is_part);
    fence_gpu();
    count_and_finish(FoldTag{tag}.counter(), is_part);
  }
  __device__ void count_in_ring(uint32_t tag, bool is_part) const {
    count_some(own_part(g, g.map.relayed_counts) + FoldTag{tag}.counter(), range.parted.num_parts_of(is_part));
  }
  // By one thread, after a fence: counts a piece of a token block, or a part of one, that is in its source's memory.
  // Returns how many parts are counted. After all parts_of(tag) and another fence, finish() follows.
  __device__ uint32_t count(uint32_t tag, bool is_part) const {
    const uint32_t parts = kNet ? range.parted.num_parts_of(is_part) : 1;
    return take_numbers(own_part(g, g.map.token_block_counts) + tag, parts) + parts;
  }
  __device__ void count_and_finish(uint32_t tag, bool is_part) const {
    if (count(tag, is_part) != parts_of(tag)) return;
    fence_system();
    finish(tag);
  }
  __device__ uint32_t parts_of(uint32_t tag) const {
    const uint32_t s = tag / max_token_blocks(g), token_block = tag % max_token_blocks(g);
    const BlockRows* const rows = plan.token_block_rows + s * BlockRows::groups(plan.num_token_blocks);
    return BlockRows::rows(rows, token_block) * (kNet ? range.parted.parts : 1);
  }
  __device__ void finish(uint32_t tag) const {
    const uint32_t s = tag / max_token_blocks(g);
    own_part(g, g.map.token_block_counts)[tag].value = 0;
    publish_after_fence(folded(g, holder_of(g, s), stream_of(g, s), g.rank) + tag % max_token_blocks(g), op.epoch);
  }
};

// By one warp: tells the sources of token blocks whose last row has been folded, by `folding` warps. The warps that
// fold do not wait for its fences, which are slow while the link is full of rows.
template <bool kNet, CombineForm kForm, uint32_t kWarps>
__device__ inline void tell_folded(const Fold<kNet, kForm>& fold, uint32_t folding, Boxes<kNet, kWarps>& boxes) {
  constexpr uint32_t kAll = Boxes<kNet, kWarps>::kAll, kEach = (kAll + kWarp - 1) / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t looks = 1;; ++looks) {
    const bool last_look = __all_sync(kFullWarp, read_shared(&boxes.ended) == folding);
    uint32_t found[kEach], any = 0;
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) {
      const uint32_t i = u * kWarp + lane;
      found[u] = i < kAll ? take_shared(boxes.tags + i) : 0;
      any |= found[u];
    }
    if (!__any_sync(kFullWarp, any != 0)) {
      if (last_look || (looks % 64 == 0 && __any_sync(kFullWarp, stopped(fold.g)))) return;
      device::pause_nsec(50);
      continue;
    }
    fence_gpu();
    // All counts are issued before the first result is used, because each takes long.
    uint32_t counted[kEach], wanted[kEach], complete = 0;
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) {
      const FoldTag its{found[u] - 1};
      counted[u] = found[u] != 0 ? fold.count(its.counter(), its.is_part()) : 0;
      wanted[u] = found[u] != 0 ? fold.parts_of(its.counter()) : 1;
    }
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) complete |= (counted[u] == wanted[u]) << u;
    if (complete == 0) continue;
    fence_system();
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u)
      if ((complete >> u & 1) != 0) fold.finish(FoldTag{found[u] - 1}.counter());
  }
}

// By a warp of each block: sets the flags of token blocks without rows here, for which no piece comes back. Nothing is
// written before them, so they need no fence.
__device__ inline void tell_empty_token_blocks(const CombineKernel& k, uint32_t window) {
  Spread::over(k.crew, workers(k.g)).each(k.g.map.num_ranks, [&](uint32_t s, uint32_t first, uint32_t step) {
    const BlockRows* const rows = k.plan.token_block_rows + s * BlockRows::groups(k.plan.num_token_blocks);
    const TokenBlockRange token_blocks = token_blocks_of(k, window, stream_of(k.g, s), k.plan.token_blocks[s]);
    for (uint32_t c = token_blocks.first + first; c < token_blocks.end; c += step)
      if (BlockRows::rows(rows, c) == 0)
        publish_after_fence(folded(k.g, holder_of(k.g, s), stream_of(k.g, s), k.g.rank) + c, k.op.epoch);
  });
  __syncwarp();
}

// By crews of all blocks: writes a window's weights' gradients to the ranks that merge them. Sources come one after the
// other: with Spread a kernel spills registers on sm_100a.
__device__ inline void fold_weights(const CombineKernel& k, uint32_t window) {
  const uint32_t first = blockIdx.x * k.crew.size + k.crew.thread, step = workers(k.g) * k.crew.size;
  const uint32_t width = k.plan.compact_width;
  const auto [before, until] = weights_of(k, window, k.g.map.most_stream_pairs);
  for (uint32_t s = 0; s < k.g.map.num_ranks; ++s) {
    float* const to = weights_at(k.g, holder_of(k.g, s), stream_of(k.g, s), window);
    const uint32_t offset = k.plan.weight_begin[s] - before;  // of a pair in the window, mod 2^32
    const uint32_t count = until - before;
    if (width > 0) {
      for (uint32_t row = k.plan.row_begin[s] + first; row < k.plan.row_end[s]; row += step)
        for (uint32_t p = k.plan.row_pair_begin[row]; p < k.plan.row_pair_begin[row + 1]; ++p)
          if (p + offset < count)
            to[p + offset] = row < k.plan.num_out_rows
                                 ? k.args.row_weights[uint64_t{row} * width + p - k.plan.row_pair_begin[row]]
                                 : 0.0f;
      continue;
    }
    const uint32_t end = k.plan.row_pair_begin[k.plan.row_end[s]];
    for (uint32_t p = k.plan.row_pair_begin[k.plan.row_begin[s]] + first; p < end; p += step)
      if (p + offset < count)
        to[p + offset] = k.plan.out_rows[p] < k.plan.num_out_rows ? k.args.row_weights[k.plan.out_rows[p]] : 0.0f;
  }
}
// By a warp of each block, when all warps that fold have ended: tells every member that it has our weights' gradients
// of a window and, with the last one, all our pieces.
__device__ inline void tell_all_folded(const CombineKernel& k, uint32_t window) {
  const Phase phase = window % kHalves == 0 ? Phase::kEvenFolded : Phase::kOddFolded;
  if (last_block(k, phase, workers(k.g)) && going(k)) publish_to_members(k, k.g.map.folded_all, k.op.window(window));
}

// By a warp, one rank per lane: whether the pieces of a token block of a stream have arrived. It waits for them, or
// (kLooks) only looks.
template <bool kLooks>
__device__ __forceinline__ bool pieces_came(const Kernel& k, uint32_t stream, uint32_t token_block) {
  bool good = true;
  for (uint32_t r = k.g.first + threadIdx.x % kWarp; r < k.g.end; r += kWarp)
    good &= peer_came<kLooks>(
        k, {folded(k.g, k.g.rank, stream, r) + token_block, k.op.epoch, r, static_cast<int>(token_block)});
  return __all_sync(kFullWarp, good);
}
// By a warp, a rank and a token block per lane: the same for `count` token blocks of ours.
template <bool kLooks>
__device__ __forceinline__ bool several_pieces_came(const Kernel& k, uint32_t token_block, uint32_t count) {
  const uint32_t members = k.g.end - k.g.first;
  bool good = true;
  for (uint32_t i = threadIdx.x % kWarp; i < members * count; i += kWarp) {
    const uint32_t r = k.g.first + i % members, its = token_block + i / members;
    good &= peer_came<kLooks>(k, {folded(k.g, k.g.rank, 0, r) + its, k.op.epoch, r, static_cast<int>(its)});
  }
  return __all_sync(kFullWarp, good);
}

}  // namespace uccl_ep::gpu
