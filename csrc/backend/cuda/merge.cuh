// Merge: sums the pieces that our domain's ranks put into our memory, ranks ascending. Of our own tokens into the
// output, together with the sums that other domains return; of the streams that we relay into the rings to their
// sources.
#pragma once

#include "backend/cuda/device.cuh"
#include "backend/cuda/fold.cuh"
#include "backend/cuda/net.cuh"
#include "backend/cuda/steps.h"
#include "backend/cuda/sum.cuh"

namespace uccl_ep::cuda {

// What a window merges, in shared memory.
struct MergeRange {
  uint32_t first_token, end_token;
  PartedRows last;  // of our tokens
  uint32_t pieces;  // of ours in our domain, in earlier windows
  // By domain: rows of our stream in earlier windows, where the first chunk that comes back lies, how many came before.
  uint32_t returned_rows[kMaxRanks], returned_slot[kMaxRanks];
  uint64_t returned_chunks[kMaxRanks];
  // By stream that we relay: rows, pieces in earlier windows, where the first chunk lies.
  uint32_t first_row[kMaxRanks], end_row[kMaxRanks], relayed_pieces[kMaxRanks], relayed_slot[kMaxRanks];
  uint32_t most;  // rows of a stream
  PartedRows parted;  // of those that we relay
};
__device__ inline void find_merge_range(const Crew& crew, const Domain& d, const PlanView& plan,
                                        const CombineArgs& args, MergeRange& out) {
  const uint32_t entries = plan.num_chunks + 1;
  const uint32_t num_relayed = d.net != nullptr ? d.net->num_relayed : 0;
  const ChunkRange own = chunks_of(args, (plan.num_tokens + kChunkTokens - 1) / kChunkTokens);
  if (crew.thread == 0) {
    out.first_token = min(own.first * kChunkTokens, plan.num_tokens);
    out.end_token = min(own.end * kChunkTokens, plan.num_tokens);
    out.pieces = plan.chunk_pieces[d.rank * entries + own.first];
  }
  // Without it racecheck reports the writes above against reads beyond the block's own barrier.
  crew.sync();
  if (d.net == nullptr) return;
  for (uint32_t to = crew.thread; to < d.at.num_domains; to += crew.size) {
    out.returned_rows[to] = plan.sent_chunks[to * entries + own.first];
    out.returned_chunks[to] = net_state(d).returned[to];
    out.returned_slot[to] = static_cast<uint32_t>(out.returned_chunks[to] % d.at.return_slots);
  }
  for (uint32_t k = 1 + crew.thread; k <= num_relayed; k += crew.size) {
    const uint32_t s = d.net->relayed[k].source;
    const ChunkRange chunks = chunks_of(args, plan.chunks[s]);
    out.first_row[k] = plan.chunk_streams[s * entries + chunks.first];
    out.end_row[k] = plan.chunk_streams[s * entries + chunks.end];
    out.relayed_pieces[k] = plan.chunk_pieces[s * entries + chunks.first];
    out.relayed_slot[k] = static_cast<uint32_t>(net_state(d).relayed[k] % d.at.return_slots);
  }
  crew.sync();
  if (crew.thread == 0) {
    out.most = 0;
    for (uint32_t k = 1; k <= num_relayed; ++k) out.most = max(out.most, out.end_row[k] - out.first_row[k]);
  }
  crew.sync();
}

// The rank that returns sums of a domain to us.
__device__ __forceinline__ uint32_t rail_of(const Domain& d, uint32_t domain) {
  const uint32_t first = d.first_of[domain], size = d.first_of[domain + 1] - first;
  return first + (d.rank - d.first) % size;
}
// By a warp: the pieces of a chunk of tokens of a stream have arrived, a rank a lane. Waits for them, or only looks.
template <bool kLooks>
__device__ __forceinline__ bool pieces_came(const Domain& d, const Op& op, uint32_t stream, uint32_t chunk) {
  bool good = true;
  for (uint32_t r = d.first + threadIdx.x % kWarp; r < d.end; r += kWarp)
    good &= peer_came<kLooks>(d, folded(d, d.rank, stream, r) + chunk, op.epoch, op.epoch, Step::kMerge, r,
                              static_cast<int>(chunk));
  return __all_sync(kFullWarp, good);
}

// By a warp: the sums of other domains for a chunk of our tokens have arrived, a domain a lane. As above.
template <bool kLooks>
__device__ __forceinline__ bool returns_came(const Domain& d, const PlanView& plan, const MergeRange& range,
                                             uint64_t epoch, uint32_t row_bytes, uint32_t chunk) {
  bool good = true;
  for (uint32_t to = threadIdx.x % kWarp; to < d.at.num_domains; to += kWarp) {
    if (to == own_domain(d)) continue;
    const uint32_t rows_until = plan.sent_chunks[to * (plan.num_chunks + 1) + chunk + 1];
    const uint32_t chunks = part_of(d, range.returned_rows[to], rows_until, row_bytes).chunks;
    if (chunks > 0)
      good &= peer_came<kLooks>(d, net_state(d).returns_there + to, range.returned_chunks[to] + chunks, epoch,
                                Step::kMerge, rail_of(d, to), static_cast<int>(chunks - 1));
  }
  return __all_sync(kFullWarp, good);
}

// Where a sum of another domain lies, in units of 16 bytes of our region.
__device__ __forceinline__ uint32_t returned_place(const Domain& d, const MergeRange& range, uint32_t addend,
                                                   uint32_t row_bytes) {
  const uint32_t to = (addend & ~kReturned) >> 16, row = (addend & 0xFFFF) - range.returned_rows[to];
  return (d.net->to[to].returns + ring_offset(d, range.returned_slot[to], d.at.return_slots, row, row_bytes)) / 16;
}

// Our tokens of a window, as sums of the pieces that come back, and (kNet) of other domains' sums.
template <bool kNet>
struct Merge {
  static constexpr bool kSumsFirst = kNet, kSplits = kNet, kRehearses = kNet;
  const Domain& d;
  const Op& op;
  const PlanView& plan;
  const CombineArgs& args;
  const MergeRange& range;
  mutable uint32_t arrived = 0;  // chunks that have; a warp's sums come in the order of tokens

  __device__ Merge(const Domain& domain, const Op& o, const PlanView& p, const CombineArgs& a, const MergeRange& r)
      : d(domain), op(o), plan(p), args(a), range(r), arrived(r.first_token / kChunkTokens) {}

  __device__ uint32_t row_bytes() const { return args.hidden * dtype_bytes(args.wire); }
  __device__ Taken taken() const { return Taken::kMerged; }
  __device__ uint32_t least() const { return 0; }
  __device__ uint32_t end() const {
    const uint32_t tokens = range.end_token - range.first_token;
    return kNet ? range.last.end(tokens) : tokens;
  }
  __device__ Sum look_up(uint32_t n) const {
    const uint32_t token = range.first_token + (kNet ? range.last.row(n) : n);
    Sum sum;
    if constexpr (kNet) sum.part = range.last.part(n);
    sum.first = plan.addend_begin[token];
    sum.count = plan.addend_begin[token + 1] - sum.first;
    sum.tag = token / kChunkTokens;
    sum.out = args.out + uint64_t{token} * args.hidden * dtype_bytes(args.dtype);
    return sum;
  }
  __device__ uint32_t place(const Sum&, uint32_t k) const {
    if constexpr (!kNet) return (d.at.pieces + uint64_t{k - range.pieces} * row_bytes()) / 16;
    const uint32_t addend = plan.addends[k];
    if ((addend & kReturned) == 0) return (d.at.pieces + uint64_t{addend - range.pieces} * row_bytes()) / 16;
    return returned_place(d, range, addend, row_bytes());
  }
  __device__ const uint8_t* base() const { return d.base[d.rank]; }
  // By a warp: what the chunk's tokens need has arrived.
  template <bool kLooks>
  __device__ bool came(uint32_t chunk) const {
    if (chunk < arrived || (kNet && chunk == kRehearsal)) return true;
    bool good = pieces_came<kLooks>(d, op, 0, chunk) &&
                (!kNet || returns_came<kLooks>(d, plan, range, op.epoch, row_bytes(), chunk));
    __syncwarp();  // orders what the lanes have read before the loads that one of them issues
    proxy_fence();
    if (good) arrived = chunk + 1;
    return good;
  }
  __device__ bool at_once(uint32_t) const { return false; }
  __device__ bool tells() const { return false; }
  __device__ void tell(uint32_t, uint32_t, uint32_t) const {}
  __device__ void tell_at_once(uint32_t, uint32_t, bool) const {}

  // By crews of all blocks: tokens that no expert got.
  __device__ void fill_empty(const Crew& crew) const {
    const uint64_t vectors = uint64_t{args.hidden} * dtype_bytes(args.dtype) / 16;
    for (uint32_t t = range.first_token + blockIdx.x * crew.warps() + crew.warp(); t < range.end_token;
         t += workers(d) * crew.warps()) {
      if (plan.addend_begin[t] != plan.addend_begin[t + 1]) continue;
      for (uint64_t i = crew.lane(); i < vectors; i += kWarp)
        reinterpret_cast<uint4*>(args.out)[t * vectors + i] = make_uint4(0, 0, 0, 0);
    }
  }
};

// Rows of the streams that we relay: row n / streams of each in turn. It ends before Merge begins, which waits for
// other domains: nobody may wait for them and have rows that they wait for.
struct Relay {
  static constexpr bool kSumsFirst = true, kSplits = true, kRehearses = true;
  const Domain& d;
  const Op& op;
  const PlanView& plan;
  const CombineArgs& args;
  const MergeRange& range;
  mutable uint32_t arrived = 0xFFFFFFFFu;  // a stream and chunk that has

  // A tag: chunk of the ring, stream, chunk of tokens.
  static constexpr uint32_t kChunkBits = 11, kStreamBits = 7;
  static_assert(kMaxTokens / kChunkTokens <= 1u << kChunkBits && kMaxRanks < 1u << kStreamBits);

  __device__ uint32_t row_bytes() const { return args.hidden * dtype_bytes(args.wire); }
  __device__ Taken taken() const { return Taken::kRelayed; }
  __device__ uint32_t least() const { return 4; }
  __device__ uint32_t end() const { return range.parted.end(range.most * d.net->num_relayed); }
  __device__ Sum look_up(uint32_t number) const {
    const uint32_t n = range.parted.row(number), k = 1 + n % d.net->num_relayed, r = n / d.net->num_relayed,
                   row = range.first_row[k] + r;
    if (row >= range.end_row[k]) return {};
    const uint32_t* const pieces = plan.relayed_piece + plan.relayed_begin[k] + row;
    Sum sum;
    sum.first = pieces[0];
    sum.count = pieces[1] - pieces[0];
    sum.tag = (r / rows_per_chunk(d, row_bytes()) << kStreamBits | k) << kChunkBits | chunk_of(k, row);
    sum.part = range.parted.part(number);
    sum.out = at<uint8_t>(d, d.rank, d.net->relayed[k].returns) +
              ring_offset(d, range.relayed_slot[k], d.at.return_slots, r, row_bytes());
    return sum;
  }
  // The chunk of the source's tokens that has a row of its stream.
  __device__ uint32_t chunk_of(uint32_t k, uint32_t row) const {
    const uint32_t s = d.net->relayed[k].source;
    const uint32_t* const before = plan.chunk_streams + s * (plan.num_chunks + 1);
    uint32_t low = 0, high = plan.chunks[s] - 1;
    while (low < high) {
      const uint32_t middle = (low + high + 1) / 2;
      if (before[middle] <= row)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }
  __device__ uint32_t place(const Sum& sum, uint32_t j) const {
    const uint32_t k = sum.tag >> kChunkBits & (1u << kStreamBits) - 1;
    return (d.at.pieces + k * d.at.piece_bytes + uint64_t{j - range.relayed_pieces[k]} * row_bytes()) / 16;
  }
  __device__ const uint8_t* base() const { return d.base[d.rank]; }
  template <bool kLooks>
  __device__ bool came(uint32_t tag) const {
    const uint32_t which = tag & (1u << kChunkBits + kStreamBits) - 1;
    if (which == arrived || tag == kRehearsal) return true;
    const bool good = pieces_came<kLooks>(d, op, which >> kChunkBits, which & (1u << kChunkBits) - 1);
    __syncwarp();  // as in Merge
    proxy_fence();
    if (good) arrived = which;
    return good;
  }
  __device__ bool at_once(uint32_t) const { return true; }
  __device__ bool tells() const { return true; }
  __device__ void tell(uint32_t, uint32_t, uint32_t) const {}
  __device__ void tell_at_once(uint32_t lane, uint32_t tag, bool is_part) const {
    const uint32_t k = tag >> kChunkBits & (1u << kStreamBits) - 1, chunk = tag >> kChunkBits + kStreamBits;
    if (lane == 0)
      count_some(at<uint32_t>(d, d.rank, d.at.relayed_counts) + ring_counter(d, k, chunk),
                 range.parted.weight(is_part));
  }
};

// Chunks of a ring that the values of a combine take after its rows.
__device__ __forceinline__ uint32_t value_chunks_of(const Domain& d, const CombineArgs& args, uint32_t pairs) {
  return args.signature.with_values != 0 && args.window == 0 ? value_chunks(pairs, d.at.slot_bytes) : 0;
}
// Value `p` of a stream in a ring, behind the rows of a window.
__device__ __forceinline__ uint64_t value_offset(const Domain& d, uint32_t slot, uint32_t row_chunks, uint32_t p) {
  const uint32_t per_chunk = static_cast<uint32_t>(d.at.slot_bytes) / 4, chunk = row_chunks + p / per_chunk;
  uint32_t its = slot + chunk;
  if (its >= d.at.return_slots) its -= d.at.return_slots;
  return its * d.at.slot_bytes + uint64_t{p % per_chunk} * 4;
}

// By crews of all blocks, where there are several domains: weights' gradients, to their sources.
__device__ inline void relay_values(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                    const CombineArgs& args, const MergeRange& range) {
  const uint32_t row_bytes = args.hidden * dtype_bytes(args.wire);
  for (uint32_t k = 1; k <= d.net->num_relayed; ++k) {
    const float* const from = at<float>(d, d.rank, d.at.piece_values) + uint64_t{k} * d.at.max_pairs;
    const uint32_t chunks = part_of(d, range.first_row[k], range.end_row[k], row_bytes).chunks;
    uint8_t* const to = at<uint8_t>(d, d.rank, d.net->relayed[k].returns);
    for (uint32_t p = blockIdx.x * crew.size + crew.thread; p < plan.relayed_pairs[k]; p += workers(d) * crew.size)
      *reinterpret_cast<float*>(to + value_offset(d, range.relayed_slot[k], chunks, p)) = __ldcg(from + p);
  }
  if (last_block(crew, d, Arrival::kRelayed, workers(d)) && crew.thread == 0)
    publish_in_gpu(&local(d).values_relayed, op.epoch);
}

// By crews of all blocks: what came back of the weights' gradients.
__device__ inline void merge_values(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                    const CombineArgs& args, const MergeRange& range) {
  const uint32_t row_bytes = args.hidden * dtype_bytes(args.wire);
  for (uint32_t to = 0; to < d.at.num_domains; ++to) {
    const uint32_t begin = plan.pair_begin[d.first_of[to]], end = plan.pair_begin[d.first_of[to + 1]];
    const bool own = to == own_domain(d);
    const uint8_t* from = at<uint8_t>(d, d.rank, own ? d.at.piece_values : d.net->to[to].returns);
    uint32_t chunks = 0;
    if (!own) {
      const ChunkRange window = chunks_of(args, (plan.num_tokens + kChunkTokens - 1) / kChunkTokens);
      const uint32_t* const before = plan.sent_chunks + to * (plan.num_chunks + 1);
      chunks = part_of(d, before[window.first], before[window.end], row_bytes).chunks;
      const uint64_t all = range.returned_chunks[to] + chunks + value_chunks_of(d, args, end - begin);
      const bool good = crew.thread != 0 ||
                        wait_peer(d, net_state(d).returns_there + to, all, op.epoch, Step::kMerge, rail_of(d, to), -1);
      if (!crew.all(good)) return;
    }
    for (uint32_t p = begin + blockIdx.x * crew.size + crew.thread; p < end; p += workers(d) * crew.size) {
      const uint64_t offset =
          own ? uint64_t{p - begin} * 4 : value_offset(d, range.returned_slot[to], chunks, p - begin);
      args.values[plan.pair_place[p]] = __ldcg(reinterpret_cast<const float*>(from + offset));
    }
  }
}

// By crews of all blocks, with nothing left to do but the weights' gradients.
__device__ inline void finish_merge(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                    const CombineArgs& args, const MergeRange& range) {
  bool good = true;
  for (uint32_t r = d.first + crew.thread; r < d.end; r += crew.size)
    good &= wait_peer(d, member_flag(d, d.rank, d.at.folded_all, r), op.epoch, op.epoch, Step::kMerge, r, -1);
  if (!crew.all(good) || args.signature.with_values == 0 || args.window != 0) return;
  if (d.net != nullptr) relay_values(crew, d, op, plan, args, range);
  if (args.values != nullptr) merge_values(crew, d, op, plan, args, range);
}

}  // namespace uccl_ep::cuda
