// The kernel of a low-latency combine. Every block sends its share of the slots' rows, and then, perhaps in a later
// launch, sums its share of the tokens. Side by side both took longer: few warps do not fill the links.
//
// `a ..> b`: b waits for a. `a --> b`: b is published when a is done.
//
// send     pairs_read (of two ago) ..> header --> pairs_entered | rows of slots | --> pairs_full
// receive  pairs_full of all blocks ..> the tokens' sums | last block --> pairs_read
//
// A flag for each row would take longer: each needs a fence, and rows of all tokens come until the end.
//
// In one domain a launch that does both, or knows the weights from the dispatch, sums what it sends
// (low_latency_fold.cuh):
//
// fold     pairs_read (of two ago) ..> header, weights --> pairs_entered | sums of our own tokens | (pairs_entered of
//          all ..>) sums of their tokens | --> pairs_full
//
// Between domains (low_latency_net.cuh, low_latency_relay.cuh) rows for a source elsewhere go to its rail here, and one
// more block sees to the network, as in a dispatch:
//
// push     weights of ours --> command | parts of a chunk's sums are there ..> --> command
// receive  first: (weights_there,) pairs_full ..> sums for other domains; then sums_there ..> the token's sum
//
// In brackets: what is not waited for where the weights are known.
#include "backend/gpu/low_latency_fold.cuh"
#include "backend/gpu/low_latency_relay.cuh"

namespace uccl_ep::gpu {
namespace {

// ---- send -----------------------------------------------------------------------------------------------------------
// In dynamic shared memory, by source, and for each source by expert: ranges of our slots. Sources come in the order of
// rotated(), so our own rows, which cross no link, are last.
struct PairRanges {
  uint32_t* first;  // [ranks * L + 1] pairs of earlier ranges
  uint32_t* begin;  // [ranks * L] slot of the expert

  static __host__ __device__ uint64_t bytes(uint32_t experts) {
    return round_up(sizeof(uint32_t) * (2 * uint64_t{experts} + 1), sizeof(Mask));
  }
  __device__ PairRanges(const Group& g, uint8_t* shared)
      : first(reinterpret_cast<uint32_t*>(shared)), begin(first + g.map.num_experts + 1) {}
};

// The i-th range, as the dispatch gave it; beyond the last 0.
template <typename Combine>
__device__ __forceinline__ int64_t given_range(const Combine& k, uint32_t i) {
  const uint32_t experts = k.g.experts_per_rank;
  if (i >= k.g.map.num_experts) return 0;
  return k.args.ranges[i % experts * k.g.map.num_ranks + k.rank_of(rotated(k.g, i / experts))];
}
// By a crew. `first`: the range of this thread's number, which was loaded before.
template <typename Combine>
__device__ inline void fill_ranges(const Combine& k, const PairRanges& ranges, int64_t first) {
  const uint32_t experts = k.g.experts_per_rank, all = k.g.map.num_experts, lane = threadIdx.x % kWarp;
  for (uint32_t i = k.crew.thread; i < all; i += k.crew.size) {
    const uint32_t source = rotated(k.g, i / experts);
    const auto range = static_cast<uint64_t>(i < k.crew.size ? first : given_range(k, i));
    ranges.begin[i] = static_cast<uint32_t>(range >> 32);
    ranges.first[i] = k.is_masked(source) ? 0 : static_cast<uint32_t>(range);  // for now their number
  }
  k.crew.sync();
  if (k.crew.warp() == 0) {
    uint32_t before = 0;
    for (uint32_t i = 0; i < all; i += kWarp) {
      const uint32_t count = i + lane < all ? ranges.first[i + lane] : 0;
      const uint32_t end = before + warp_prefix(count, lane);
      if (i + lane < all) ranges.first[i + lane] = end - count;
      before = __shfl_sync(kFullWarp, end, kWarp - 1);
    }
    if (lane == 0) ranges.first[all] = before;
  }
  k.crew.sync();
}

// A pair as its expert's rank has it.
struct SentPair {
  uint64_t slot;  // of all experts
  uint32_t to, place;  // its source
  uint32_t holder, stream;  // who sums for the source: itself, or its rail in our domain
};
template <typename Combine>
__device__ __forceinline__ SentPair pair_of(const Combine& k, const PairRanges& ranges, uint32_t i) {
  const uint32_t experts = k.g.experts_per_rank;
  uint32_t low = 0, high = k.g.map.num_experts;  // first[low] <= i < first[high]
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (ranges.first[middle] <= i ? low : high) = middle;
  }
  const uint64_t slots = uint64_t{k.g.map.num_ranks} * k.map().tokens;
  SentPair pair{};
  pair.slot = low % experts * slots + ranges.begin[low] + (i - ranges.first[low]);
  pair.to = rotated(k.g, low / experts);
  pair.place = SlotOrigin{k.args.origins[pair.slot]}.place();
  pair.holder = pair.to;
  if constexpr (Combine::kNet)
    if (!k.is_near(pair.to)) {
      pair.holder = k.g.net.from[pair.to].holder;
      pair.stream = k.g.net.from[pair.to].stream;
    }
  return pair;
}

// The first of our own tokens' pairs, which are the last.
template <typename Combine>
__device__ __forceinline__ uint32_t own_pairs(const Combine& k, const PairRanges& ranges) {
  return ranges.first[(k.g.map.num_ranks - 1) * k.g.experts_per_rank];
}
// By a crew: sends its share of the rows. Few rows are shared by several warps, because a warp takes four round trips
// to memory for a row of 14 KiB.
template <typename Combine>
__device__ inline void send_pairs(const Combine& k, const PairRanges& ranges) {
  constexpr uint32_t kMostShares = 4;
  const uint32_t lane = threadIdx.x % kWarp, vectors = k.args.hidden / 8;
  const bool own_stay = stays(k, k.g.rank, k.g.rank);
  const uint32_t rows = own_stay ? own_pairs(k, ranges) : ranges.first[k.g.map.num_experts];
  const uint32_t shares = min(max(k.warps() / max(rows, 1), 1), kMostShares),
                 of_share = (vectors + shares - 1) / shares;
  for (uint32_t i = k.warp(); i < rows * shares; i += k.warps()) {
    const SentPair pair = pair_of(k, ranges, i / shares);
    if (stays(k, k.g.rank, pair.holder)) continue;
    const uint4* const row = reinterpret_cast<const uint4*>(k.args.rows) + pair.slot * vectors;
    const uint32_t first = i % shares * of_share;
    copy_row<8>(row, {k.pair(pair.holder, pair.stream, pair.place), 0, nullptr}, min(first + of_share, vectors), lane,
                first);
  }
}
// By a crew: writes where those rows are that stay.
template <typename Combine>
__device__ inline void name_pairs(const Combine& k, const PairRanges& ranges) {
  if (!stays(k, k.g.rank, k.g.rank)) return;
  const uint32_t first = Combine::kNet ? 0 : own_pairs(k, ranges), all = ranges.first[k.g.map.num_experts];
  // By the last warps of all blocks, which send the fewest rows.
  const uint32_t thread = k.crew.size - 1 - k.crew.thread;
  for (uint32_t i = first + blockIdx.x + k.workers() * thread; i < all; i += k.workers() * k.crew.size) {
    const SentPair pair = pair_of(k, ranges, i);
    if (!stays(k, k.g.rank, pair.holder)) continue;
    *reinterpret_cast<uint32_t*>(k.pair(pair.holder, pair.stream, pair.place)) = static_cast<uint32_t>(pair.slot);
  }
}

template <typename Combine>
__device__ inline bool send(Combine k, uint8_t* dynamic) {
  __shared__ uint64_t began;
  const int64_t range = given_range(k, k.crew.thread);
  find_masked(k);
  if (!wait_free(k, k.map().pairs_read)) return false;
  const PairRanges ranges(k.g, dynamic);
  fill_ranges(k, ranges, range);
  begin_step(k, began);
  tell_call(k);
  name_pairs(k, ranges);
  send_pairs(k, ranges);
  tell_sent(k, k.map().pairs_full);
  end_step(k, began, Step::kFold);
  end_send(k, Phase::kPairsSent);
  return true;
}

// ---- receive -------------------------------------------------------------------------------------------------------
template <typename Combine>
__device__ inline bool receive(Combine k, EnteredRanks& entered, const Streams& relayed, const Streams& sent) {
  __shared__ uint64_t began;
  const Sources sources{entered, sent};
  find_masked(k);
  // Weights that are known are not waited for. Where ranks may be masked, it is first settled who is.
  const bool adopts_first = !masks(k.g) && k.args.routed == nullptr;
  if constexpr (Combine::kNet) {
    if (!open_rings(k, relayed.rings) || !k.crew.all(wait_sent(k, k.map().pairs_entered, k.map().pairs_full)))
      return false;
    if (adopts_first && !adopt_packets(k, k.map().pairs_entered)) return false;
    if (!fill_relayed_streams(k, relayed.masks)) return false;
    begin_step(k, began);
    if (!k.crew.all(relay_sums(k, relayed, sources))) return false;
    end_step(k, began, Step::kShip);
#pragma unroll 1
    for (uint32_t d = k.crew.thread; d < k.g.map.num_domains; d += k.crew.size)
      if (d != own_domain(k.g)) sent.rings[d] = returned_ring(k, d);
    fill_sent_streams(k, sent.masks);
  }
  const auto wait_all = [&](Settling& settling) {
    bool good = wait_live_blocks(k, settling, k.map().pairs_entered, k.map().pairs_full);
    if constexpr (Combine::kNet) good &= wait_live_sums(k, settling, sent);
    return good;
  };
  if (!settle(k, wait_all)) return false;
  if constexpr (Combine::kNet)
    if (!adopts_first && !adopt_packets(k, k.map().pairs_entered)) return false;
  begin_step(k, began);
  const auto wait = [&] {
    bool good = blockIdx.x != 0 || !k.crew.is_last_warp() || all_entered_alike(k, k.map().pairs_entered);
    if (!Combine::kNet) good = good && wait_pairs(k, entered, folds(k) && k.args.routed == nullptr);
    if (!k.crew.all(good)) return false;
    end_step(k, began, Step::kExchange);
    begin_step(k, began);
    return true;
  };
  if (!k.crew.all(merge_tokens(k, sources, wait))) return false;
  end_step(k, began, Step::kMerge);
  end_receive(k, Phase::kPairsReceived, k.map().pairs_read, [&] {
    if constexpr (Combine::kNet) end_rings(k, sent);
    if (folds(k) && k.crew.thread == 0) k.state().sent[static_cast<uint32_t>(k.kind)] += 1;
  });
  return true;
}

// What a kernel has the code to send. A kernel of few pairs takes longer if it has more.
enum class SlotSends : uint32_t { kNothing, kPairs, kSums, kBulkSums };

template <bool kNet, SlotSends kSends>
__global__ void __launch_bounds__(kSlotThreads, 1)
    low_latency_combine(const __grid_constant__ Group g, const __grid_constant__ SlotCombineArgs args) {
  UCCL_EP_DYNAMIC_SHARED(dynamic);
  __shared__ EnteredRanks entered;
  // Dynamic shared memory: ranges of what is sent, then streams that we relay, then ours.
  uint8_t* const behind = dynamic + PairRanges::bytes(g.map.num_experts);
  const Streams relayed = Streams::in(g.map, behind, g.map.num_streams);
  const Streams sent = Streams::in(g.map, behind + Streams::bytes(g.map, g.map.num_streams), g.map.num_domains);
  if constexpr (kNet) {
    if (blockIdx.x == workers(g)) {
      __shared__ SlotNetShared shared;
      serve_network(g, args, relayed.masks, shared);
      return;
    }
  }
  constexpr SlotKind kKind = SlotKind::kCombine;
  const Crew crew = Crew::of(1, 0, kSlotWarps);
  for (uint32_t i = threadIdx.x; i < kMaxMembers / 32; i += kSlotThreads) entered.folds[i] = 0;
  crew.sync();
  bool good = true;
  if constexpr (kSends != SlotSends::kNothing) {
    if (args.phase != SlotPhase::kReceive) {
      const auto k = begin_slots<kNet>(g, args, kKind, crew, true);
      if constexpr (kSends == SlotSends::kBulkSums) {
        __shared__ FoldBarriers barriers;
        good = fold<true>(k, entered, dynamic, &barriers);
      } else if constexpr (kSends == SlotSends::kSums) {
        good = fold<false>(k, entered, nullptr, nullptr);
      } else {
        good = send(k, dynamic);
      }
    }
    if (args.phase == SlotPhase::kSend) return;
  }
  good = good && receive(begin_slots<kNet>(g, args, kKind, crew, false), entered, relayed, sent);
  // After an error nothing is valid: neither here, nor in a block that is through before another finds one.
  if (!good || stopped(g)) fill_nan(crew, args.out, uint64_t{2} * args.num_tokens * args.hidden);
}

__global__ void tell_masks(const __grid_constant__ Group g, int32_t* out) {
  const LowLatencyState& state = local(g).low_latency;
  for (uint32_t r = threadIdx.x; r < g.map.num_ranks; r += kSlotThreads)
    out[g.rank_of[r]] = masks(g) && (state.masked[word_of(r)] & bit_of(r)) != 0;
}

}  // namespace

uint32_t slot_combine_bytes(const DeviceMap& map) {
  return static_cast<uint32_t>(PairRanges::bytes(map.num_experts) + Streams::bytes(map, map.num_streams) +
                               Streams::bytes(map, map.num_domains));
}

Status load_low_latency_combine(uint32_t shared_bytes) {
  using enum SlotSends;
  return load_all(shared_bytes, low_latency_combine<false, kNothing>, low_latency_combine<false, kPairs>,
                  low_latency_combine<false, kSums>, low_latency_combine<false, kBulkSums>,
                  low_latency_combine<true, kPairs>, tell_masks);
}

Status launch_masks(const Group& group, int32_t* out, StreamHandle stream) {
  launch_kernel(tell_masks, {1, kSlotThreads, 0, stream}, group, out);
  return launch_status();
}

Status launch_low_latency(const Group& group, const SlotCombineArgs& args, uint32_t num_sms, StreamHandle stream) {
  using enum SlotSends;
  const bool bulk = folds(group, args) && group.bulk_copies && group.shared_bytes >= kFoldBytes;
  launch_kernel(has_net(group)                      ? low_latency_combine<true, kPairs>
                : args.phase == SlotPhase::kReceive ? low_latency_combine<false, kNothing>
                : bulk                              ? low_latency_combine<false, kBulkSums>
                : folds(group, args)                ? low_latency_combine<false, kSums>
                                                    : low_latency_combine<false, kPairs>,
                {num_sms, kSlotThreads, bulk ? kFoldBytes : slot_combine_bytes(group.map), stream}, group, args);
  return launch_status();
}

}  // namespace uccl_ep::gpu
