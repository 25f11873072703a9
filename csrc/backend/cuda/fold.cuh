// Fold: at the expert, sums a token's rows of this rank in fp32 and puts one row into its source's piece memory.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/net.cuh"
#include "backend/cuda/shares.cuh"
#include "backend/cuda/steps.h"
#include "backend/cuda/sum.cuh"

namespace uccl_ep::cuda {

// Chunks of a source's tokens that a window has.
struct ChunkRange {
  uint32_t first, end;
};
__device__ __forceinline__ ChunkRange chunks_of(const CombineArgs& args, uint32_t chunks) {
  const uint32_t per_window = args.window_tokens / kChunkTokens, first = min(args.window * per_window, chunks);
  return {first, args.is_last ? chunks : min(first + per_window, chunks)};
}

// A rank that is alone in its domain has nothing to merge for others: what it folds for them goes into their rings.
__device__ __forceinline__ bool is_alone(const Domain& d) { return num_near(d) == 1; }

// What a window folds, by source; in shared memory.
struct FoldRange {
  uint32_t begin[kMaxRanks], end[kMaxRanks];  // rows
  uint8_t* to[kMaxRanks];                     // where piece 0 of the source would be; or the ring to it
  uint32_t slot[kMaxRanks];                   // of the ring: of the first chunk
  MostRows most;
  PartedRows parted;
  uint32_t hurried;  // first rows whose warps tell of them themselves
};
__device__ inline void find_fold_range(const Crew& crew, const Domain& d, const PlanView& plan, const CombineArgs& args,
                                       FoldRange& out) {
  const uint32_t entries = plan.num_chunks + 1;
  for (uint32_t s = crew.thread; s < d.at.num_ranks; s += crew.size) {
    const ChunkRange chunks = chunks_of(args, plan.chunks[s]);
    out.begin[s] = plan.row_begin[s] + plan.chunk_rows[s * entries + chunks.first];
    out.end[s] = plan.row_begin[s] + plan.chunk_rows[s * entries + chunks.end];
    const uint32_t k = stream_of(d, s);
    if (!in_domain(d, s) && is_alone(d)) {
      out.to[s] = at<uint8_t>(d, d.rank, d.net->relayed[k].returns);
      out.slot[s] = static_cast<uint32_t>(net_state(d).relayed[k] % d.at.return_slots);
    } else {
      const uint64_t earlier = plan.chunk_pieces[s * entries + chunks.first];
      out.to[s] = at<uint8_t>(d, holder_of(d, s), d.at.pieces) + k * d.at.piece_bytes -
                  earlier * args.hidden * dtype_bytes(args.wire);
    }
  }
  crew.sync();
  if (crew.thread == 0) out.most.find(d, [&](uint32_t s) { return out.end[s] - out.begin[s]; });
  crew.sync();
}

// In shared memory: tags of rows that warps of the block have folded, plus 1, for the one that tells; with kPart, of a
// part of a row. Each warp puts into its own boxes in turn.
constexpr uint32_t kPart = 1u << 31;
// A tag of a row that goes into a ring: with the number of its chunk's counter.
constexpr uint32_t kInRing = 1u << 30;
// Of a row that somebody far away waits for already: its warp tells of it itself, for that is sooner.
constexpr uint32_t kHurried = 1u << 29;
static_assert(uint64_t{kMaxRanks} * (kMaxTokens / kChunkTokens) < kHurried);
constexpr uint32_t kBoxes = 16;  // more than a warp puts at once
template <uint32_t kWarps>
struct Boxes {
  uint32_t tags[kWarps * kBoxes];
  uint32_t ended;  // warps that put nothing more
  // By the first warp of the block; a barrier of all threads follows.
  __device__ void begin() {
    for (uint32_t i = threadIdx.x; i < kWarps * kBoxes; i += kWarp) tags[i] = 0;
    if (threadIdx.x == 0) ended = 0;
  }
};

// Rows of other domains first, for their sums have the longer way to go. A sum is that of a row, or of a part (kNet:
// there are several domains).
template <bool kNet>
struct Fold {
  static constexpr bool kSumsFirst = false, kSplits = kNet, kRehearses = false;
  const Domain& d;
  const Op& op;
  const PlanView& plan;
  const CombineArgs& args;
  const FoldRange& range;
  uint32_t* const boxes;  // this warp's
  const uint32_t units;  // of 16 bytes in one of the caller's rows
  mutable uint32_t put = 0;

  __device__ Taken taken() const { return Taken::kFolded; }
  __device__ uint32_t least() const { return 4; }
  __device__ uint32_t end() const {
    const uint32_t rows = range.most.far_sum(d) + range.most.near_sum(d);
    return kNet ? range.parted.end(rows) : rows;
  }
  __device__ Sum look_up(uint32_t number_of_sum) const {
    const uint32_t far = range.most.far_sum(d), n = kNet ? range.parted.row(number_of_sum) : number_of_sum;
    const auto [s, number] = n < far ? far_row(d, n) : near_row(d, n - far);
    const uint32_t row = range.begin[s] + number;
    if (row >= range.end[s]) return {};
    const uint64_t bytes = uint64_t{args.hidden} * dtype_bytes(args.wire);
    Sum sum;
    if (plan.compact_width > 0) {
      sum.first = row;
      sum.count = 1;
    } else {
      sum.first = plan.row_slot[row];
      sum.count = plan.row_slot[row + 1] - sum.first;
    }
    if constexpr (kNet) sum.part = range.parted.part(number_of_sum);
    if (kNet && n < far && is_alone(d)) {  // the rows that it gets are those of the stream
      sum.tag = kInRing | ring_counter(d, stream_of(d, s), number / rows_per_chunk(d, bytes));
      sum.out = range.to[s] + ring_offset(d, range.slot[s], d.at.return_slots, number, bytes);
    } else {
      sum.tag = s * max_chunks(d) + plan.row_token[row] / kChunkTokens;
      if (kNet && n < range.hurried) sum.tag |= kHurried;
      sum.out = range.to[s] + plan.row_piece[row] * bytes;
    }
    if (args.may_drop) drop(sum, bytes);
    return sum;
  }
  // Slots that the caller's rows do not have; they are the row's last ones.
  __device__ void drop(Sum& sum, uint64_t bytes) const {
    while (sum.count > 0 && slot(sum.first + sum.count - 1) >= plan.num_slots) --sum.count;
    if (sum.count > 0) return;
    for (uint64_t i = 0; i < bytes / 16; ++i) reinterpret_cast<uint4*>(sum.out)[i] = make_uint4(0, 0, 0, 0);
    proxy_fence();
    fence_system();
    if (is_in_ring(sum.tag))
      count_in_ring(sum.tag, sum.part > 0);
    else
      count_and_finish(sum.tag & ~kHurried, sum.part > 0);
  }
  __device__ uint32_t slot(uint32_t k) const { return plan.compact_width > 0 ? k : plan.slots[k]; }
  __device__ uint32_t place(const Sum&, uint32_t k) const { return slot(k) * units; }
  __device__ const uint8_t* base() const { return args.rows; }
  template <bool kLooks>
  __device__ bool came(uint32_t) const {
    return true;
  }
  __device__ bool is_in_ring(uint32_t tag) const { return kNet && (tag & kInRing) != 0; }
  __device__ bool at_once(uint32_t tag) const {
    return is_in_ring(tag) || !in_domain(d, (tag & ~kHurried) / max_chunks(d));
  }
  __device__ bool tells() const { return true; }
  __device__ void tell(uint32_t lane, uint32_t count, uint32_t tag) const {
    if (lane < count)
      for (uint32_t looks = 1; !put_shared(boxes + (put + lane) % kBoxes, tag + 1); ++looks)
        if (looks % 64 == 0 && stopped(d)) break;  // nobody may be left to empty it
    put += count;
    __syncwarp();
  }
  __device__ void tell_at_once(uint32_t lane, uint32_t tag, bool is_part) const {
    if (!is_in_ring(tag) && !(kNet && (tag & kHurried) != 0)) return tell(lane, 1, tag | (kNet && is_part ? kPart : 0));
    if (lane != 0) return;
    if (is_in_ring(tag)) return count_in_ring(tag, is_part);
    fence_gpu();
    count_and_finish(tag & ~kHurried, is_part);
  }
  __device__ void count_in_ring(uint32_t tag, bool is_part) const {
    count_some(at<uint32_t>(d, d.rank, d.at.relayed_counts) + (tag & ~kInRing), range.parted.weight(is_part));
  }
  // A piece of a chunk, or a part of one, is in its source's memory. By one thread, after a fence: how many parts are.
  // After all parts_of(tag), and another fence, finish() follows.
  __device__ uint32_t count(uint32_t tag, bool is_part) const {
    const uint32_t weight = kNet ? range.parted.weight(is_part) : 1;
    return take_numbers(at<uint32_t>(d, d.rank, d.at.chunk_counts) + tag, weight) + weight;
  }
  __device__ void count_and_finish(uint32_t tag, bool is_part) const {
    if (count(tag, is_part) != parts_of(tag)) return;
    fence_system();
    finish(tag);
  }
  __device__ uint32_t parts_of(uint32_t tag) const {
    const uint32_t s = tag / max_chunks(d), chunk = tag % max_chunks(d);
    const uint32_t* const rows_before = plan.chunk_rows + s * (plan.num_chunks + 1) + chunk;
    return (rows_before[1] - rows_before[0]) * (kNet ? range.parted.parts : 1);
  }
  __device__ void finish(uint32_t tag) const {
    const uint32_t s = tag / max_chunks(d);
    *(at<uint32_t>(d, d.rank, d.at.chunk_counts) + tag) = 0;
    store_flag(folded(d, holder_of(d, s), stream_of(d, s), d.rank) + tag % max_chunks(d), op.epoch);
  }
};

// By one warp: tells the sources of chunks whose last row has been folded. Those that fold do not wait for its fences,
// which take their time while the link is full of rows.
template <bool kNet, uint32_t kWarps>
__device__ inline void tell_folded(const Fold<kNet>& fold, Boxes<kWarps>& boxes) {
  constexpr uint32_t kEach = (kWarps * kBoxes + kWarp - 1) / kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t looks = 1;; ++looks) {
    const bool last_look = __all_sync(kFullWarp, read_shared(&boxes.ended) == kWarps);
    uint32_t found[kEach], any = 0;
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) {
      const uint32_t i = u * kWarp + lane;
      found[u] = i < kWarps * kBoxes ? take_shared(boxes.tags + i) : 0;
      any |= found[u];
    }
    if (!__any_sync(kFullWarp, any != 0)) {
      if (last_look || (looks % 64 == 0 && __any_sync(kFullWarp, stopped(fold.d)))) return;
      __nanosleep(50);
      continue;
    }
    fence_gpu();
    // All on their way before the first is looked at: each takes its time.
    uint32_t counted[kEach], wanted[kEach], complete = 0;
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) {
      const bool is_part = (found[u] & kPart) != 0;
      found[u] &= ~kPart;
      counted[u] = found[u] != 0 ? fold.count(found[u] - 1, is_part) : 0;
      wanted[u] = found[u] != 0 ? fold.parts_of(found[u] - 1) : 1;
    }
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u) complete |= (counted[u] == wanted[u]) << u;
    if (complete == 0) continue;
    fence_system();
#pragma unroll
    for (uint32_t u = 0; u < kEach; ++u)
      if ((complete >> u & 1) != 0) fold.finish(found[u] - 1);
  }
}

// By a warp of one block: nothing comes back of these chunks, and nobody waits for it.
__device__ inline void tell_empty_chunks(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                         const CombineArgs& args) {
  for (uint32_t s = 0; s < d.at.num_ranks; ++s) {
    const uint32_t* const before = plan.chunk_rows + s * (plan.num_chunks + 1);
    const ChunkRange chunks = chunks_of(args, plan.chunks[s]);
    for (uint32_t c = chunks.first + crew.lane(); c < chunks.end; c += kWarp)
      if (before[c] == before[c + 1]) publish_flag(folded(d, holder_of(d, s), stream_of(d, s), d.rank) + c, op.epoch);
  }
}

// By crews of all blocks: weights' gradients, to those that merge them.
__device__ inline void fold_values(const Crew& crew, const Domain& d, const PlanView& plan, const CombineArgs& args) {
  const uint32_t first = blockIdx.x * crew.size + crew.thread, step = workers(d) * crew.size;
  const uint32_t width = plan.compact_width;
  for (uint32_t s = 0; s < d.at.num_ranks; ++s) {
    float* const to = at<float>(d, holder_of(d, s), d.at.piece_values) + uint64_t{stream_of(d, s)} * d.at.max_pairs;
    const uint32_t offset = plan.value_begin[s];
    if (width > 0) {
      for (uint32_t row = plan.row_begin[s] + first; row < plan.row_end[s]; row += step)
        for (uint32_t p = plan.row_slot[row]; p < plan.row_slot[row + 1]; ++p)
          to[p + offset] =
              row < plan.num_slots ? args.row_values[uint64_t{row} * width + p - plan.row_slot[row]] : 0.0f;
      continue;
    }
    const uint32_t end = plan.row_slot[plan.row_end[s]];
    for (uint32_t p = plan.row_slot[plan.row_begin[s]] + first; p < end; p += step)
      to[p + offset] = plan.slots[p] < plan.num_slots ? args.row_values[plan.slots[p]] : 0.0f;
  }
}
// When the rows are folded, too: every member learns that it has all of both.
__device__ inline void finish_fold(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                   const CombineArgs& args) {
  if (args.row_values != nullptr && args.window == 0) fold_values(crew, d, plan, args);
  if (last_block(crew, d, Arrival::kFolded, workers(d)) && going(crew, d))
    publish_to_members(crew, d, d.at.folded_all, op.epoch);
}

}  // namespace uccl_ep::cuda
