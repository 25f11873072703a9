// Merge: sums the pieces that our domain's ranks put into our memory, ranks ascending. Sums of our own tokens go into
// the output, together with the sums that other domains return. Sums of the streams that we relay go into the rings to
// their sources.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/fold.cuh"
#include "backend/gpu/net.cuh"
#include "backend/gpu/steps.h"
#include "backend/gpu/sum.cuh"

namespace uccl_ep::gpu {

// What a window merges: of another domain, and of a stream that we relay.
#pragma pack(push, 4)
struct MergeDomain {
  uint32_t rows;    // of our stream, in earlier windows
  uint32_t slot;    // of the first chunk that comes back
  uint64_t chunks;  // that came before
  uint32_t unused;
};
struct MergeStream {
  uint32_t first_row, end_row;
  uint32_t units;   // where its pieces lie, in units of 16 bytes of our region
  uint32_t slot;    // of the first chunk
  uint32_t chunks;  // of this kernel's earlier windows
};
#pragma pack(pop)
// In shared memory. Two windows have tables of domains of their own, because a block merges one while it folds the
// next. They have one table of streams: what a block relays of a window it has relayed before the next one.
struct MergeRange {
  uint32_t window;
  uint32_t own_units;  // where our own pieces lie, in units of 16 bytes of our region
  uint32_t first_token, end_token;
  PartedRows last;    // of our tokens
  uint32_t most;      // rows of a stream
  PartedRows parted;  // of those that we relay
  __device__ __forceinline__ MergeDomain& domain(const Group& g, uint32_t domain) const {
    return shared_table<MergeDomain>(
        g, fold_table_bytes(g.map) + stream_table_bytes(g.map) + window % kHalves * domain_table_bytes(g.map))[domain];
  }
  __device__ __forceinline__ MergeStream& stream(const Group& g, uint32_t stream) const {
    return shared_table<MergeStream>(g, fold_table_bytes(g.map))[stream];
  }
};
static_assert(sizeof(MergeDomain) == kMergeEntryBytes && sizeof(MergeStream) == kMergeEntryBytes);
// The part of a stream that some token blocks have.
__device__ __forceinline__ StreamPart part_of_stream(const CombineKernel& k, const BlockRows* stream,
                                                     const TokenBlockRange& token_blocks) {
  return part_of(k.g, BlockRows::rows_before(stream, token_blocks.first),
                 BlockRows::rows_before(stream, token_blocks.end), k.args.hidden * dtype_bytes(k.args.wire));
}
// The part of a stream that we relay in a window, and its chunks in the ring with those of weights, which follow all
// rows.
__device__ __forceinline__ StreamPart relayed_part(const CombineKernel& k, uint32_t window, uint32_t stream) {
  const uint32_t s = k.g.net.relayed[stream].source;
  const TokenBlockRange token_blocks = token_blocks_of(k, window, stream, k.plan.token_blocks[s]);
  return part_of_stream(k, k.plan.token_block_streams + s * BlockRows::groups(k.plan.num_token_blocks), token_blocks);
}
__device__ __forceinline__ uint32_t weight_chunks_of(const CombineKernel& k, uint32_t window, uint32_t pairs) {
  const PairRange its = weights_of(k, window, pairs);
  return weight_chunks(its.end - its.begin, k.g.map.slot_weights);
}
__device__ __forceinline__ uint32_t relayed_chunks(const CombineKernel& k, uint32_t window, uint32_t stream) {
  return relayed_part(k, window, stream).chunks + weight_chunks_of(k, window, k.plan.relayed_pairs[stream]);
}
// The same of what another domain returns.
__device__ __forceinline__ TokenBlockRange own_token_blocks(const CombineKernel& k, uint32_t window) {
  return token_blocks_of(k, window, 0, (k.plan.num_tokens + kTokenBlock - 1) / kTokenBlock);
}
__device__ __forceinline__ StreamPart returned_part(const CombineKernel& k, uint32_t window, uint32_t to) {
  const TokenBlockRange token_blocks = own_token_blocks(k, window);
  return part_of_stream(k, k.plan.sent_token_blocks + to * BlockRows::groups(k.plan.num_token_blocks), token_blocks);
}
__device__ __forceinline__ uint32_t returned_chunks(const CombineKernel& k, uint32_t window, uint32_t to) {
  const uint32_t pairs = k.plan.pair_begin[first_of(k.g, to + 1)] - k.plan.pair_begin[first_of(k.g, to)];
  return returned_part(k, window, to).chunks + weight_chunks_of(k, window, pairs);
}

// By a warp, window by window. `last`: of the window before.
__device__ inline void find_merge_range(const CombineKernel& k, uint32_t window, const MergeRange& last,
                                        MergeRange& out) {
  const uint32_t groups = BlockRows::groups(k.plan.num_token_blocks);
  const uint32_t num_relayed = has_net(k.g) ? k.g.net.num_relayed : 0;
  const TokenBlockRange own = own_token_blocks(k, window);
  if (k.crew.thread == 0) {
    out.window = window;
    out.own_units = static_cast<uint32_t>((k.g.map.pieces.offset + pieces_begin(k.g, window)) / 16);
    out.first_token = min(own.first * kTokenBlock, k.plan.num_tokens);
    out.end_token = min(own.end * kTokenBlock, k.plan.num_tokens);
  }
  // Without this barrier racecheck reports a race of the writes above with reads behind the block's own barrier.
  k.crew.sync();
  if (!has_net(k.g)) return;
  for (uint32_t to = k.crew.thread; to < k.g.map.num_domains; to += k.crew.size) {
    uint64_t chunks = k.g.net_state.returned[to];
    if (window > 0) chunks = last.domain(k.g, to).chunks + returned_chunks(k, window - 1, to);
    out.domain(k.g, to) = {BlockRows::rows_before(k.plan.sent_token_blocks + to * groups, own.first),
                           static_cast<uint32_t>(chunks % k.g.net.to[to].return_slots), chunks, 0};
  }
  uint32_t most = 0;
  for (uint32_t stream = 1 + k.crew.thread; stream <= num_relayed; stream += k.crew.size) {
    const StreamPart part = relayed_part(k, window, stream);
    const uint32_t chunks = window == 0 ? 0 : last.stream(k.g, stream).chunks + relayed_chunks(k, window - 1, stream);
    const uint64_t begin =
        k.g.map.pieces.offset + pieces_begin(k.g, window) + piece_place(k.g, stream) * k.g.map.piece_bytes;
    out.stream(k.g, stream) = {part.first, part.end, static_cast<uint32_t>(begin / 16),
                               static_cast<uint32_t>((k.g.net_state.relayed[stream] + chunks) % k.g.map.return_slots),
                               chunks};
    most = max(most, part.end - part.first);
  }
  most = warp_max(most);
  if (k.crew.thread == 0) out.most = most;
  k.crew.sync();
}

// The rank of a domain that returns sums to us.
__device__ __forceinline__ uint32_t rail_of(const Group& g, uint32_t domain) {
  const uint32_t first = first_of(g, domain), size = first_of(g, domain + 1) - first;
  return first + (g.rank - g.first) % size;
}
// As pieces_came(), one domain per lane, for the sums of other domains for a token block of ours.
template <bool kLooks>
__device__ __forceinline__ bool returns_came(const Kernel& k, const MergeRange& range, uint32_t row_bytes,
                                             uint32_t token_block) {
  bool good = true;
  for (uint32_t to = threadIdx.x % kWarp; to < k.g.map.num_domains; to += kWarp) {
    if (to == own_domain(k.g)) continue;
    const BlockRows* const sent = k.plan.sent_token_blocks + to * BlockRows::groups(k.plan.num_token_blocks);
    const uint32_t rows_until = BlockRows::rows_before(sent, token_block + 1);
    const uint32_t chunks = part_of(k.g, range.domain(k.g, to).rows, rows_until, row_bytes).chunks;
    if (chunks > 0)
      good &= peer_came<kLooks>(k, {k.g.net_state.returns_there + to, range.domain(k.g, to).chunks + chunks,
                                    rail_of(k.g, to), static_cast<int>(chunks - 1)});
  }
  return __all_sync(kFullWarp, good);
}

// Where a sum of another domain lies, in units of 16 bytes of our region.
__device__ __forceinline__ uint32_t returned_place(const Group& g, const MergeRange& range, const Addend& addend,
                                                   uint32_t row_bytes) {
  const uint32_t to = addend.domain(), row = addend.row() - range.domain(g, to).rows;
  const Net::To& its = g.net.to[to];
  return (its.returns + ring_offset(g, range.domain(g, to).slot, its.return_slots, row, row_bytes)) / 16;
}

// Sums for our tokens of a window: of the pieces that come back and (kNet) of other domains' sums.
template <bool kNet, CombineForm kForm>
struct Merge : CombineKernel {
  // Warps wait for other domains; or for pieces, because all have folded first.
  static constexpr bool kWaits = kNet || kForm == CombineForm::kFoldsFirst;
  static constexpr bool kSumsFirst = kWaits, kSplits = kWaits, kRehearses = kNet, kCopies = false, kBegins = true;
  const MergeRange& range;
  mutable uint32_t arrived = 0;  // token blocks that have come; a warp's sums follow the order of tokens

  __device__ Merge(const CombineKernel& k, const MergeRange& r)
      : CombineKernel(k), range(r), arrived(r.first_token / kTokenBlock) {}

  __device__ uint32_t row_bytes() const { return args.hidden * dtype_bytes(args.wire); }
  __device__ SharedWork shared_work() const { return SharedWork::kMerged; }
  __device__ uint32_t window() const { return range.window; }
  // Warps that fold compact rows are through soon, and then merge, too.
  __device__ Dealing dealing() const {
    if constexpr (kForm == CombineForm::kFoldsFirst) return {8};
    return {0, plan.compact_width == 0 ? Dealing::kMostEighths : kForm == CombineForm::kCopies ? 2 : 3};
  }
  __device__ uint32_t end() const {
    const uint32_t tokens = range.end_token - range.first_token;
    return kSplits ? range.last.end(tokens) : tokens;
  }
  __device__ Sum look_up(uint32_t n) const {
    const uint32_t token = range.first_token + (kSplits ? range.last.row(n) : n);
    Sum sum;
    if constexpr (kSplits) sum.part = range.last.part(n);
    sum.first = plan.addend_begin[token];
    sum.count = plan.addend_begin[token + 1] - sum.first;
    sum.tag = token / kTokenBlock;
    sum.out = args.out + uint64_t{token} * args.hidden * dtype_bytes(args.dtype);
    return sum;
  }
  __device__ uint32_t place(const Sum&, uint32_t k) const {
    if constexpr (!kNet) return range.own_units + piece_slot(args, k) * row_bytes() / 16;
    const Addend addend = plan.addends[k];
    if (!addend.is_returned()) return range.own_units + piece_slot(args, addend.piece()) * row_bytes() / 16;
    return returned_place(g, range, addend, row_bytes());
  }
  __device__ const uint8_t* base() const { return g.own; }
  __device__ bool has_begin() const { return args.bias[0] != nullptr; }
  // Adds to eight values what the biases have in their place, `to` in the output.
  template <typename Row>
  __device__ __forceinline__ void begin(float (&values)[8], const uint8_t* to) const {
#pragma unroll
    for (const uint8_t* bias : args.bias)
      if (bias != nullptr) add_values(values, reinterpret_cast<const Row*>(bias + (to - args.out)));
  }
  // By a warp: whether the addends of a token block have arrived.
  template <bool kLooks>
  __device__ bool came(uint32_t token_block) const {
    if (token_block < arrived || (kRehearses && token_block == kRehearsal)) return true;
    uint32_t count = 1;
    bool good;
    if constexpr (kForm == CombineForm::kFoldsFirst) {
      // All have folded before, so that several come at about the same time. A look takes as long as a sum.
      const uint32_t end = (range.end_token + kTokenBlock - 1) / kTokenBlock;
      count = min(max(kWarp / (g.end - g.first), 1), end - token_block);
      good = several_pieces_came<kLooks>(*this, token_block, count);
    } else {
      good = pieces_came<kLooks>(*this, 0, token_block) &&
             (!kNet || returns_came<kLooks>(*this, range, row_bytes(), token_block));
    }
    __syncwarp();  // orders what the lanes have read before the loads that one of them issues
    proxy_fence();
    if (good) arrived = token_block + count;
    return good;
  }
  __device__ bool at_once(uint32_t) const { return false; }
  __device__ bool tells() const { return false; }
  __device__ void tell(uint32_t, uint32_t, uint32_t) const {}
  __device__ void tell_at_once(uint32_t, uint32_t, bool) const {}

  // By crews of all blocks: writes the sums of tokens that no expert got.
  template <typename Row>
  __device__ void fill_empty() const {
    for (uint32_t t = range.first_token + blockIdx.x * crew.warps() + crew.warp(); t < range.end_token;
         t += workers(g) * crew.warps()) {
      if (plan.addend_begin[t] != plan.addend_begin[t + 1]) continue;
      Row* const row = reinterpret_cast<Row*>(args.out) + uint64_t{t} * args.hidden;
      for (uint32_t i = crew.lane() * 8; i < args.hidden; i += kWarp * 8) {
        float values[8] = {};
        begin<Row>(values, reinterpret_cast<const uint8_t*>(row + i));
        put_values(values, row + i);
      }
    }
  }
};

// Rows of the streams that we relay: row n / streams of each in turn; of other batches there are none. Relay ends
// before Merge begins. Merge waits for other domains, and no rank may do that while it has rows that they wait for.
struct Relay : CombineKernel {
  static constexpr bool kSumsFirst = true, kSplits = true, kRehearses = true, kCopies = false, kBegins = false;
  const MergeRange& range;
  mutable uint32_t arrived = 0xFFFFFFFFu;  // RelayTag::awaited() that came last

  __device__ uint32_t row_bytes() const { return args.hidden * dtype_bytes(args.wire); }
  __device__ SharedWork shared_work() const { return SharedWork::kRelayed; }
  __device__ uint32_t window() const { return range.window; }
  __device__ Dealing dealing() const { return {4}; }
  __device__ uint32_t end() const { return range.parted.end(range.most * g.net.num_relayed); }
  __device__ Sum look_up(uint32_t number) const {
    const uint32_t n = range.parted.row(number), k = 1 + n % g.net.num_relayed, r = n / g.net.num_relayed,
                   row = range.stream(g, k).first_row + r;
    if (row >= range.stream(g, k).end_row) return {};
    const uint32_t* const pieces = plan.relayed_piece + plan.relayed_begin[k] + row;
    Sum sum;
    sum.first = pieces[0];
    sum.count = pieces[1] - pieces[0];
    sum.tag = RelayTag::of(r / rows_per_chunk(g, row_bytes()), k, token_block_of(k, row)).word;
    sum.part = range.parted.part(number);
    sum.out = at(g, g.rank, g.net.relayed[k].returns) +
              ring_offset(g, range.stream(g, k).slot, g.map.return_slots, r, row_bytes());
    return sum;
  }
  // The token block that has a row of its stream.
  __device__ uint32_t token_block_of(uint32_t k, uint32_t row) const {
    const uint32_t s = g.net.relayed[k].source;
    const BlockRows* const groups = plan.token_block_streams + s * BlockRows::groups(plan.num_token_blocks);
    uint32_t low = 0, high = (plan.token_blocks[s] - 1) / BlockRows::kBlocks;
    while (low < high) {
      const uint32_t middle = (low + high + 1) / 2;
      if (groups[middle].before <= row)
        low = middle;
      else
        high = middle - 1;
    }
    return low * BlockRows::kBlocks + groups[low].block_of(row);
  }
  __device__ uint32_t place(const Sum& sum, uint32_t j) const {
    return range.stream(g, RelayTag{sum.tag}.stream()).units + piece_slot(args, j) * row_bytes() / 16;
  }
  __device__ const uint8_t* base() const { return g.own; }
  template <bool kLooks>
  __device__ bool came(uint32_t tag) const {
    const RelayTag its{tag};
    if (its.awaited() == arrived || tag == kRehearsal) return true;
    const bool good = pieces_came<kLooks>(*this, its.stream(), its.token_block());
    __syncwarp();  // as in Merge
    proxy_fence();
    if (good) arrived = its.awaited();
    return good;
  }
  __device__ bool at_once(uint32_t) const { return true; }
  __device__ bool tells() const { return true; }
  __device__ void tell(uint32_t, uint32_t, uint32_t) const {}
  __device__ void tell_at_once(uint32_t lane, uint32_t tag, bool is_part) const {
    const RelayTag its{tag};
    if (lane == 0)
      count_some(own_part(g, g.map.relayed_counts) +
                     ring_counter(g, its.stream(), range.stream(g, its.stream()).slot, its.chunk()),
                 range.parted.num_parts_of(is_part));
  }
};

// By a crew: waits until the slots of the rings to sources that a window takes are free.
__device__ inline bool wait_returns_gone(const CombineKernel& k, const MergeRange& range) {
  bool good = true;
  const NetState& state = k.g.net_state;
  for (uint32_t stream = 1 + k.crew.thread; stream <= k.g.net.num_relayed; stream += k.crew.size) {
    // The first window takes no slot before all earlier operations have left.
    uint64_t gone = state.relayed[stream];
    if (range.window > 0) {
      const uint64_t end = gone + range.stream(k.g, stream).chunks + relayed_chunks(k, range.window, stream);
      gone = max(gone, end - min(end, uint64_t{k.g.map.return_slots}));
    }
    good &= wait_flag(k.g, {state.returns_gone + stream, gone, k.g.net.relayed[stream].source});
  }
  return k.crew.all(good);
}
// By a warp, when all sums of a window have been read: counts the chunks that brought them, and lends their slots
// again.
__device__ inline void note_returned(const CombineKernel& k, uint32_t window) {
  for (uint32_t to = threadIdx.x % kWarp; to < k.g.map.num_domains; to += kWarp) {
    if (to == own_domain(k.g)) continue;
    uint64_t& returned = k.g.net_state.returned[to];
    returned += returned_chunks(k, window, to);
    publish_flag(k.g.net.to[to].returns_consumed, returned);
  }
}

}  // namespace uccl_ep::gpu
