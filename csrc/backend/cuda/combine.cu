// The kernel of a combine. Its crews run side by side in every block: folding what came here, merging what comes back.
#include "backend/cuda/fold.cuh"
#include "backend/cuda/merge.cuh"

namespace uccl_ep::cuda {
namespace {

// Warps of the crews, after one that speaks for the block. Sums by bulk copies need shared memory for each.
template <bool kBulk>
constexpr uint32_t kFoldWarps = kBulk ? 7 : 11;
template <bool kBulk>
constexpr uint32_t kMergeWarps = kBulk ? 4 : 8;
template <bool kBulk>
constexpr uint32_t kThreads = (1 + kFoldWarps<kBulk> + kMergeWarps<kBulk>)*kWarp;
constexpr uint32_t kBulkBytes = (kFoldWarps<true> + kMergeWarps<true>)*kSumWarpBytes;

// By a crew. In: dtype of the addends, Out: of the sums.
template <bool kBulk, typename In, typename Out, typename Work>
__device__ void sum_all(const Summers& by, const Domain& d, const Work& work, uint32_t hidden, RingState& ring) {
  if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
    sum_rows_bulk(by, d, work, hidden * 2, ring);
#endif
  } else {
    sum_rows<In, Out>(by, d, work, hidden);
  }
}

// Between domains: so many first rows of each of so many streams, as far as there are warps for them.
template <bool kBulk>
__device__ __forceinline__ PartedRows parted_rows(const Domain& d, const CombineArgs& args, uint32_t streams,
                                                  uint32_t rows) {
  if constexpr (!kBulk) return {};
  return {min(rows * streams, kMergeWarps<kBulk> * workers(d)), segments_of(args.hidden * 2)};
}
// Those that are folded: of the first chunk; whole chunks of tokens where a flag tells of these. A rank that is alone
// is through with it so soon that the next one, too, is wanted before it has been folded row by row.
__device__ __forceinline__ uint32_t first_folded(const Domain& d, uint32_t row_bytes) {
  const uint32_t rows = rows_per_chunk(d, row_bytes);
  return is_alone(d) ? 2 * rows : (rows + kChunkTokens - 1) / kChunkTokens * kChunkTokens;
}
// The last of so many tokens, whose addends come with the last chunk: one part for each warp.
template <bool kBulk>
__device__ __forceinline__ PartedRows last_rows(const Domain& d, const CombineArgs& args, uint32_t rows) {
  if constexpr (!kBulk) return {};
  const uint32_t parts = segments_of(args.hidden * 2);
  const uint32_t num_parted = min(rows, (kFoldWarps<kBulk> + kMergeWarps<kBulk>)*workers(d) / parts);
  return {num_parted, parts, rows - num_parted};
}

// By both crews: the one that folds joins the other when it has done so.
template <bool kBulk, bool kNet, typename Row, typename Wire>
__device__ void merge_all(const Crew& crew, bool has_folded, const Domain& d, const Op& op, const PlanView& plan,
                          const CombineArgs& args, const MergeRange& range, RingState& ring) {
  const StepClock clock(crew, d, Step::kMerge, has_folded ? gridDim.x : 0);
  const Summers by{crew, kMergeWarps<kBulk>, has_folded};
  if constexpr (kNet) {
    if (!wait_returns_gone(crew, d)) return;
    if (!is_alone(d)) sum_all<kBulk, Wire, Wire>(by, d, Relay{d, op, plan, args, range}, args.hidden, ring);
  }
  const Merge<kNet> merge(d, op, plan, args, range);
  if (!has_folded) merge.fill_empty(crew);
  sum_all<kBulk, Wire, Row>(by, d, merge, args.hidden, ring);
  if (!has_folded) finish_merge(crew, d, op, plan, args, range);
  clock.stop();
}

// By a crew, when all sums are written, or (not good) after an error.
__device__ void finish(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan, const CombineArgs& args,
                       bool good) {
  if (crew.thread == 0) {
    keep(d, op, OpKind::kCombine);
    for (Taken what : {Taken::kFolded, Taken::kMerged, Taken::kRelayed}) put_back(d, what);
  }
  if (good) {
    publish_to_members(crew, d, d.at.merged, op.epoch);
    return;
  }
  fill_nan(crew, args.out, uint64_t{plan.num_tokens} * args.hidden * dtype_bytes(args.dtype));
  if (args.values != nullptr) fill_nan(crew, args.values, args.value_bytes);
}

// By one warp of the block that sees to the network: our sums for other domains, in chunks, and then values. Not
// inlined, for want of registers.
__device__ __noinline__ void push_returns(const Domain& d, const Op& op, const PlanView& plan, const CombineArgs& args,
                                          const MergeRange& range, uint32_t parts) {
  const uint32_t row_bytes = args.hidden * dtype_bytes(args.wire), lane = threadIdx.x % kWarp;
  const Net& net = *d.net;
  for (uint32_t first = 1; first <= net.num_relayed; first += kWarp) {
    const uint32_t k = first + lane;
    Outgoing out;
    if (k <= net.num_relayed)
      out = {net.relayed[k].channel,
             at<uint32_t>(d, d.rank, d.at.relayed_counts) + k * d.at.return_slots,
             range.end_row[k] - range.first_row[k],
             rows_per_chunk(d, row_bytes),
             row_bytes,
             net_state(d).relayed[k],
             0,
             parts};
    push_chunks(d, out, [] { return true; });
  }
  if (args.signature.with_values == 0 || args.window != 0) return;
  if (!__all_sync(kFullWarp, lane != 0 || wait_block(d, &local(d).values_relayed, op.epoch))) return;
  __syncwarp();
  for (uint32_t k = 1; k <= net.num_relayed; ++k) {
    const uint32_t row_chunks = part_of(d, range.first_row[k], range.end_row[k], row_bytes).chunks;
    const uint32_t chunks = value_chunks_of(d, args, plan.relayed_pairs[k]);
    for (uint32_t first = 0; first < chunks; first += kWarp) {
      const uint32_t c = first + lane;
      const uint64_t left = uint64_t{4} * plan.relayed_pairs[k] - c * d.at.slot_bytes;
      push_all(d, c < chunks, [&](uint32_t) {
        return Command{net.relayed[k].channel, min(left, d.at.slot_bytes), net_state(d).relayed[k] + row_chunks + c};
      });
    }
  }
}

// By a crew, at the end: what we have returned, and what came back and has been read.
__device__ void end_returns(const Crew& crew, const Domain& d, const PlanView& plan, const CombineArgs& args,
                            const MergeRange& range) {
  const uint32_t row_bytes = args.hidden * dtype_bytes(args.wire);
  NetState& state = net_state(d);
  for (uint32_t k = 1 + crew.thread; k <= d.net->num_relayed; k += crew.size)
    state.relayed[k] += part_of(d, range.first_row[k], range.end_row[k], row_bytes).chunks +
                        value_chunks_of(d, args, plan.relayed_pairs[k]);
  const ChunkRange window = chunks_of(args, (plan.num_tokens + kChunkTokens - 1) / kChunkTokens);
  for (uint32_t to = crew.thread; to < d.at.num_domains; to += crew.size) {
    if (to == own_domain(d)) continue;
    const uint32_t* const before = plan.sent_chunks + to * (plan.num_chunks + 1);
    state.returned[to] +=
        part_of(d, before[window.first], before[window.end], row_bytes).chunks +
        value_chunks_of(d, args, plan.pair_begin[d.first_of[to + 1]] - plan.pair_begin[d.first_of[to]]);
    publish_flag(d.net->to[to].returns_taken, state.returned[to]);
  }
}

// By a warp of one block: what this rank has called. False: an error is known.
__device__ inline bool write_packets(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                                     const CombineArgs& args) {
  if (!going(crew, d) || !wait_packets_gone(crew, d, op.epoch)) return false;
  write_headers(crew, d, op, args.signature, plan.num_tokens);
  crew.sync();
  publish_packet(crew, d, d.at.header_full, op.epoch);
  return true;
}

// The block that sees to the network.
template <bool kBulk>
__device__ void serve_network(const Domain& d, const Op& op, const PlanView& plan, const CombineArgs& args,
                              MergeRange& range) {
  __shared__ uint32_t end_of_relay;
  const uint32_t warp = threadIdx.x / kWarp;
  if (warp == 0) {
    find_merge_range(Crew::of(1, 0, 1), d, plan, args, range);
    if (threadIdx.x == 0) end_of_relay = 0;
  }
  __syncthreads();
  if (warp == 0) relay(d, &end_of_relay);
  if (warp == 1) {
    if (write_packets(Crew::of(2, 1, 1), d, op, plan, args)) {
      push_packets(d, op, false, false);
      push_returns(d, op, plan, args, range, parted_rows<kBulk>(d, args, 0, 0).parts);
    }
    __syncwarp();
    if (threadIdx.x % kWarp == 0) count_through(d);
  }
  if (warp == 2) {
    const Crew crew = Crew::of(4, 2, 1);
    if (going(crew, d)) all_alike(crew, d, op.epoch, args.signature);
    if (crew.thread == 0) count_through(d);
  }
  constexpr uint32_t kFold = kFoldWarps<kBulk>;
  if (warp <= kFold) return;
  const Crew crew = Crew::of(3, 1 + kFold, kMergeWarps<kBulk>);
  const bool good = wait_through(crew, d, workers(d) + 2, &end_of_relay);
  // As at the end of a dispatch.
  if (crew.warp() == 2 && crew.lane() == 0) tell_ended(d);
  if (good && crew.warp() == 1) end_returns(Crew::of(4, 2 + kFold, 1), d, plan, args, range);
  finish(crew, d, op, plan, args, good);
  if (d.trace == nullptr) return;
  crew.sync();
  if (crew.thread == 0) trace_kernel(d, TraceKind::kKernelEnd, OpKind::kCombine, op.epoch);
}

// kNet: there are several domains.
template <bool kBulk, bool kNet, typename Row, typename Wire>
__global__ void __launch_bounds__(kThreads<kBulk>, 1)
    combine(const __grid_constant__ Domain d, const __grid_constant__ PlanView plan,
            const __grid_constant__ CombineArgs args) {
  if constexpr (kBulk && !kHasBulk) return;
  UCCL_EP_DYNAMIC_SHARED(shared);
  __shared__ FoldRange folds;
  __shared__ MergeRange merges;
  __shared__ Boxes<kFoldWarps<kBulk>> boxes;
  __shared__ __align__(8) uint64_t barriers[(kFoldWarps<true> + kMergeWarps<true>)*kRing];  // of bulk copies
  constexpr uint32_t kFold = kFoldWarps<kBulk>, kMerge = kMergeWarps<kBulk>;
  if (!kNet) __builtin_assume(d.net == nullptr);
  if (threadIdx.x < kWarp) boxes.begin();
  const Op op = enter(d, OpKind::kCombine);
  if (blockIdx.x == 0 && threadIdx.x == 0) trace_kernel(d, TraceKind::kKernelBegin, OpKind::kCombine, op.epoch);
  if constexpr (kNet) {
    if (blockIdx.x == workers(d)) {
      serve_network<kBulk>(d, op, plan, args, merges);
      return;
    }
  }
  const uint32_t warp = threadIdx.x / kWarp;
  if (warp == 0) {
    const Crew crew = Crew::of(1, 0, 1);
    find_fold_range(crew, d, plan, args, folds);
    find_merge_range(crew, d, plan, args, merges);
    if (kNet && threadIdx.x == 0) {
      const uint32_t row_bytes = args.hidden * dtype_bytes(args.wire);
      folds.parted = parted_rows<kBulk>(d, args, num_far(d), first_folded(d, row_bytes));
      folds.parted.num_parted = min(folds.parted.num_parted, folds.most.far_sum(d));
      folds.hurried = min(first_folded(d, row_bytes) * num_far(d), folds.most.far_sum(d));
      merges.parted = parted_rows<kBulk>(d, args, d.net->num_relayed, rows_per_chunk(d, row_bytes));
      merges.last = last_rows<kBulk>(d, args, merges.end_token - merges.first_token);
    }
    crew.sync();  // as in find_merge_range
    if (!kNet && blockIdx.x == 0) write_packets(crew, d, op, plan, args);
  }
  __syncthreads();
  if (warp == 0) {
    const Crew crew = Crew::of(1, 0, 1);
    if (blockIdx.x == 0 && going(crew, d)) tell_empty_chunks(crew, d, op, plan, args);
    tell_folded(Fold<kNet>{d, op, plan, args, folds, nullptr, 0}, boxes);
  } else {
    const bool is_folding = warp <= kFold;
    const Crew crew = is_folding ? Crew::of(2, 1, kFold) : Crew::of(3, 1 + kFold, kMerge);
    RingState ring{shared + (warp - 1) * kSumWarpBytes, barriers + (warp - 1) * kRing};
#if __CUDA_ARCH__ >= 900
    if (kBulk) begin_ring(ring, crew.lane());
#endif
    bool good = going(crew, d);
    // Pieces come from ranks that have entered, so this keeps a warp that merges waiting for no longer than those do. A
    // warp that tells of folded rows would keep ranks waiting. With other domains it is the network's block that looks.
    if (!kNet && blockIdx.x == 0 && warp == kFold + kMerge && good)
      all_alike(Crew::of(4, warp, 1), d, op.epoch, args.signature);
    if (is_folding) {
      // The pieces of the last combine must have been merged.
      good = good && wait_members(crew, d, d.at.merged, op.free_after, Step::kFold);
      if constexpr (kNet) good = good && (!is_alone(d) || wait_returns_gone(crew, d));
      if (good) {
        const StepClock clock(crew, d, Step::kFold);
        // Shuffled, or the compiler works it out for every segment.
        const uint32_t units = __shfl_sync(kFullWarp, args.hidden * dtype_bytes(args.dtype) / 16, 0);
        const Fold<kNet> fold{d, op, plan, args, folds, boxes.tags + crew.warp() * kBoxes, units};
        sum_all<kBulk, Row, Wire>({crew, kFold, false}, d, fold, args.hidden, ring);
        __syncwarp();
        if (crew.lane() == 0) count_shared(&boxes.ended);
        finish_fold(crew, d, op, plan, args);
        clock.stop();
      }
    }
    if (good) merge_all<kBulk, kNet, Row, Wire>(crew, is_folding, d, op, plan, args, merges, ring);
  }
  __syncthreads();  // what the other crews have found counts
  if constexpr (kNet) {
    if (threadIdx.x == 0) count_through(d);
    return;
  }
  if (warp <= kFold) return;
  const Crew crew = Crew::of(3, 1 + kFold, kMerge);
  if (!last_block(crew, d, Arrival::kMerged, gridDim.x)) return;
  finish(crew, d, op, plan, args, going(crew, d));
  if (crew.thread == 0) trace_kernel(d, TraceKind::kKernelEnd, OpKind::kCombine, op.epoch);
}

template <bool kBulk, typename Row, typename Wire>
void launch(const Domain& domain, const PlanView& plan, const CombineArgs& args, uint32_t num_sms,
            cudaStream_t stream) {
  const uint32_t bytes = kBulk ? kBulkBytes : 0;
  const Launch how{num_sms, kThreads<kBulk>, bytes, stream};
  if (domain.net == nullptr)
    launch_kernel(combine<kBulk, false, Row, Wire>, how, domain, plan, args);
  else
    launch_kernel(combine<kBulk, true, Row, Wire>, how, domain, plan, args);
}

}  // namespace

cudaError_t launch_combine(const Domain& domain, const PlanView& plan, const CombineArgs& args, uint32_t num_sms,
                           cudaStream_t stream) {
  if (args.dtype == Dtype::kFp32)
    launch<false, float, float>(domain, plan, args, num_sms, stream);
  else if (args.wire == Dtype::kFp32)
    launch<false, uint16_t, float>(domain, plan, args, num_sms, stream);
  else if (!domain.bulk_copies || domain.shared_bytes < kBulkBytes)
    launch<false, uint16_t, uint16_t>(domain, plan, args, num_sms, stream);
  else
    launch<true, uint16_t, uint16_t>(domain, plan, args, num_sms, stream);
  return cudaGetLastError();
}

cudaError_t load_combine(uint32_t shared_bytes) {
  return load_all(shared_bytes, combine<false, false, float, float>, combine<false, false, uint16_t, float>,
                  combine<false, false, uint16_t, uint16_t>, combine<true, false, uint16_t, uint16_t>,
                  combine<false, true, float, float>, combine<false, true, uint16_t, float>,
                  combine<false, true, uint16_t, uint16_t>, combine<true, true, uint16_t, uint16_t>);
}

}  // namespace uccl_ep::cuda
