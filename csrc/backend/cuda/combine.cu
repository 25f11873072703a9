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
__device__ void sum_all(const Summers& by, const Group& g, const Work& work, uint32_t hidden, SumPipeline& pipeline) {
  if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
    sum_rows_bulk(by, g, work, hidden * 2, pipeline);
#endif
  } else {
    sum_rows<In, Out>(by, g, work, hidden);
  }
}

// Between domains: so many first rows of each of so many streams, as far as there are warps for them.
template <bool kBulk>
__device__ __forceinline__ PartedRows parted_rows(const Group& g, const KernelCombineArgs& args, uint32_t streams,
                                                  uint32_t rows) {
  if constexpr (!kBulk) return {};
  return {min(rows * streams, kMergeWarps<kBulk> * workers(g)), segments_of(args.hidden * 2)};
}
// Those that are folded: of the first chunk; whole token blocks where a flag tells of these. A rank that is alone
// is through with it so soon that the next one, too, is wanted before it has been folded row by row.
__device__ __forceinline__ uint32_t first_folded(const Group& g, uint32_t row_bytes) {
  const uint32_t rows = rows_per_chunk(g, row_bytes);
  return is_alone(g) ? 2 * rows : (rows + kTokenBlock - 1) / kTokenBlock * kTokenBlock;
}
// The last of so many tokens, whose addends come with the last chunk: one part for each warp.
template <bool kBulk>
__device__ __forceinline__ PartedRows last_rows(const Group& g, const KernelCombineArgs& args, uint32_t rows) {
  if constexpr (!kBulk) return {};
  const uint32_t parts = segments_of(args.hidden * 2);
  const uint32_t num_parted = min(rows, (kFoldWarps<kBulk> + kMergeWarps<kBulk>)*workers(g) / parts);
  return {num_parted, parts, rows - num_parted};
}

// By both crews: the one that folds joins the other when it has done so.
template <bool kBulk, bool kNet, typename Row, typename Wire>
__device__ void merge_all(const Crew& crew, bool has_folded, const Group& g, const KernelOp& op, const PlanView& plan,
                          const KernelCombineArgs& args, const MergeRange& range, SumPipeline& pipeline) {
  const StepClock clock(crew, g, Step::kMerge, has_folded ? gridDim.x : 0);
  const Summers by{crew, kMergeWarps<kBulk>, has_folded};
  if constexpr (kNet) {
    if (!wait_returns_gone(crew, g)) return;
    if (!is_alone(g)) sum_all<kBulk, Wire, Wire>(by, g, Relay{g, op, plan, args, range}, args.hidden, pipeline);
  }
  const Merge<kNet> merge(g, op, plan, args, range);
  if (!has_folded) merge.fill_empty(crew);
  sum_all<kBulk, Wire, Row>(by, g, merge, args.hidden, pipeline);
  if (!has_folded) finish_merge(crew, g, op, plan, args, range);
  clock.stop();
}

// By a crew, when all sums are written, or (not good) after an error.
__device__ void finish(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan,
                       const KernelCombineArgs& args, bool good) {
  if (crew.thread == 0) {
    keep(g, op, OpKind::kCombine);
    for (SharedWork what : {SharedWork::kFolded, SharedWork::kMerged, SharedWork::kRelayed}) reset_shares(g, what);
  }
  if (good) {
    publish_to_members(crew, g, g.map.merged, op.epoch);
    return;
  }
  fill_nan(crew, args.out, uint64_t{plan.num_tokens} * args.hidden * dtype_bytes(args.dtype));
  if (args.weights != nullptr) fill_nan(crew, args.weights, args.weight_bytes);
}

// By one warp of the block that sees to the network: our sums for other domains, in chunks, and then weights. Not
// inlined, for want of registers.
__device__ __noinline__ void push_returns(const Group& g, const KernelOp& op, const PlanView& plan,
                                          const KernelCombineArgs& args, const MergeRange& range, uint32_t parts) {
  const uint32_t row_bytes = args.hidden * dtype_bytes(args.wire), lane = threadIdx.x % kWarp;
  const Net& net = *g.net;
  for (uint32_t first = 1; first <= net.num_relayed; first += kWarp) {
    const uint32_t k = first + lane;
    Outgoing out;
    if (k <= net.num_relayed)
      out = {net.relayed[k].channel,
             at<uint32_t>(g, g.rank, g.map.relayed_counts) + k * g.map.return_slots,
             range.end_row[k] - range.first_row[k],
             rows_per_chunk(g, row_bytes),
             row_bytes,
             net_state(g).relayed[k],
             0,
             parts};
    push_chunks(g, out, [] { return true; });
  }
  if (args.signature.with_weights == 0 || args.window != 0) return;
  if (!__all_sync(kFullWarp, lane != 0 || wait_block(g, &local(g).weights_relayed, op.epoch))) return;
  __syncwarp();
  for (uint32_t k = 1; k <= net.num_relayed; ++k) {
    const uint32_t row_chunks = part_of(g, range.first_row[k], range.end_row[k], row_bytes).chunks;
    const uint32_t chunks = weight_chunks_of(g, args, plan.relayed_pairs[k]);
    for (uint32_t first = 0; first < chunks; first += kWarp) {
      const uint32_t c = first + lane;
      const uint64_t left = uint64_t{4} * plan.relayed_pairs[k] - c * g.map.slot_bytes;
      push_all(g, c < chunks, [&](uint32_t) {
        return Command{net.relayed[k].channel, min(left, g.map.slot_bytes), net_state(g).relayed[k] + row_chunks + c};
      });
    }
  }
}

// By a crew, at the end: what we have returned, and what came back and has been read.
__device__ void end_returns(const Crew& crew, const Group& g, const PlanView& plan, const KernelCombineArgs& args,
                            const MergeRange& range) {
  const uint32_t row_bytes = args.hidden * dtype_bytes(args.wire);
  NetState& state = net_state(g);
  for (uint32_t k = 1 + crew.thread; k <= g.net->num_relayed; k += crew.size)
    state.relayed[k] += part_of(g, range.first_row[k], range.end_row[k], row_bytes).chunks +
                        weight_chunks_of(g, args, plan.relayed_pairs[k]);
  const TokenBlockRange window = token_blocks_of(args, (plan.num_tokens + kTokenBlock - 1) / kTokenBlock);
  for (uint32_t to = crew.thread; to < g.map.num_domains; to += crew.size) {
    if (to == own_domain(g)) continue;
    const uint32_t* const before = plan.sent_token_blocks + to * (plan.num_token_blocks + 1);
    state.returned[to] +=
        part_of(g, before[window.first], before[window.end], row_bytes).chunks +
        weight_chunks_of(g, args, plan.pair_begin[g.first_of[to + 1]] - plan.pair_begin[g.first_of[to]]);
    publish_flag(g.net->to[to].returns_consumed, state.returned[to]);
  }
}

// By a warp of one block: what this rank has called. False: an error is known.
__device__ inline bool write_packets(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan,
                                     const KernelCombineArgs& args) {
  if (!going(crew, g) || !wait_packets_gone(crew, g, op.epoch)) return false;
  write_headers(crew, g, op, args.signature, plan.num_tokens);
  crew.sync();
  publish_packet(crew, g, g.map.header_full, op.epoch);
  return true;
}

// The block that sees to the network.
template <bool kBulk>
__device__ void serve_network(const Group& g, const KernelOp& op, const PlanView& plan, const KernelCombineArgs& args,
                              MergeRange& range) {
  __shared__ uint32_t poller_ends;
  const uint32_t warp = threadIdx.x / kWarp;
  if (warp == 0) {
    find_merge_range(Crew::of(1, 0, 1), g, plan, args, range);
    if (threadIdx.x == 0) poller_ends = 0;
  }
  __syncthreads();
  if (warp == 0) poll_hosts(g, &poller_ends);
  if (warp == 1) {
    if (write_packets(Crew::of(2, 1, 1), g, op, plan, args)) {
      push_packets(g, op, false, false);
      push_returns(g, op, plan, args, range, parted_rows<kBulk>(g, args, 0, 0).parts);
    }
    __syncwarp();
    if (threadIdx.x % kWarp == 0) count_through(g);
  }
  if (warp == 2) {
    const Crew crew = Crew::of(4, 2, 1);
    if (going(crew, g)) all_alike(crew, g, op.epoch, args.signature);
    if (crew.thread == 0) count_through(g);
  }
  constexpr uint32_t kFold = kFoldWarps<kBulk>;
  if (warp <= kFold) return;
  const Crew crew = Crew::of(3, 1 + kFold, kMergeWarps<kBulk>);
  const bool good = wait_through(crew, g, workers(g) + 2, &poller_ends);
  // As at the end of a dispatch.
  if (crew.warp() == 2 && crew.lane() == 0) tell_ended(g);
  if (good && crew.warp() == 1) end_returns(Crew::of(4, 2 + kFold, 1), g, plan, args, range);
  finish(crew, g, op, plan, args, good);
  if (g.trace == nullptr) return;
  crew.sync();
  if (crew.thread == 0) trace_kernel(g, TraceKind::kKernelEnd, OpKind::kCombine, op.epoch);
}

// kNet: there are several domains.
template <bool kBulk, bool kNet, typename Row, typename Wire>
__global__ void __launch_bounds__(kThreads<kBulk>, 1)
    combine(const __grid_constant__ Group g, const __grid_constant__ PlanView plan,
            const __grid_constant__ KernelCombineArgs args) {
  if constexpr (kBulk && !kHasBulk) return;
  UCCL_EP_DYNAMIC_SHARED(shared);
  __shared__ FoldRange folds;
  __shared__ MergeRange merges;
  __shared__ Boxes<kFoldWarps<kBulk>> boxes;
  __shared__ __align__(8) uint64_t barriers[(kFoldWarps<true> + kMergeWarps<true>)*kSumStages];  // of bulk copies
  constexpr uint32_t kFold = kFoldWarps<kBulk>, kMerge = kMergeWarps<kBulk>;
  if (!kNet) __builtin_assume(g.net == nullptr);
  if (threadIdx.x < kWarp) boxes.begin();
  const KernelOp op = enter(g, OpKind::kCombine);
  if (blockIdx.x == 0 && threadIdx.x == 0) trace_kernel(g, TraceKind::kKernelBegin, OpKind::kCombine, op.epoch);
  if constexpr (kNet) {
    if (blockIdx.x == workers(g)) {
      serve_network<kBulk>(g, op, plan, args, merges);
      return;
    }
  }
  const uint32_t warp = threadIdx.x / kWarp;
  if (warp == 0) {
    const Crew crew = Crew::of(1, 0, 1);
    find_fold_range(crew, g, plan, args, folds);
    find_merge_range(crew, g, plan, args, merges);
    if (kNet && threadIdx.x == 0) {
      const uint32_t row_bytes = args.hidden * dtype_bytes(args.wire);
      folds.parted = parted_rows<kBulk>(g, args, num_far(g), first_folded(g, row_bytes));
      folds.parted.num_parted = min(folds.parted.num_parted, folds.most.far_sum(g));
      folds.hurried = min(first_folded(g, row_bytes) * num_far(g), folds.most.far_sum(g));
      merges.parted = parted_rows<kBulk>(g, args, g.net->num_relayed, rows_per_chunk(g, row_bytes));
      merges.last = last_rows<kBulk>(g, args, merges.end_token - merges.first_token);
    }
    crew.sync();  // as in find_merge_range
    if (!kNet && blockIdx.x == 0) write_packets(crew, g, op, plan, args);
  }
  __syncthreads();
  if (warp == 0) {
    const Crew crew = Crew::of(1, 0, 1);
    if (blockIdx.x == 0 && going(crew, g)) tell_empty_token_blocks(crew, g, op, plan, args);
    tell_folded(Fold<kNet>{g, op, plan, args, folds, nullptr, 0}, boxes);
  } else {
    const bool is_folding = warp <= kFold;
    const Crew crew = is_folding ? Crew::of(2, 1, kFold) : Crew::of(3, 1 + kFold, kMerge);
    SumPipeline pipeline{shared + (warp - 1) * kSumWarpBytes, barriers + (warp - 1) * kSumStages};
#if __CUDA_ARCH__ >= 900
    if (kBulk) begin_pipeline(pipeline, crew.lane());
#endif
    bool good = going(crew, g);
    // Pieces come from ranks that have entered, so this keeps a warp that merges waiting for no longer than those do. A
    // warp that tells of folded rows would keep ranks waiting. With other domains it is the network's block that looks.
    if (!kNet && blockIdx.x == 0 && warp == kFold + kMerge && good)
      all_alike(Crew::of(4, warp, 1), g, op.epoch, args.signature);
    if (is_folding) {
      // The pieces of the last combine must have been merged.
      good = good && wait_members(crew, g, g.map.merged, op.free_after, Step::kFold);
      if constexpr (kNet) good = good && (!is_alone(g) || wait_returns_gone(crew, g));
      if (good) {
        const StepClock clock(crew, g, Step::kFold);
        // Shuffled, or the compiler works it out for every segment.
        const uint32_t units = __shfl_sync(kFullWarp, args.hidden * dtype_bytes(args.dtype) / 16, 0);
        const Fold<kNet> fold{g, op, plan, args, folds, boxes.tags + crew.warp() * kBoxes, units};
        sum_all<kBulk, Row, Wire>({crew, kFold, false}, g, fold, args.hidden, pipeline);
        __syncwarp();
        if (crew.lane() == 0) count_shared(&boxes.ended);
        finish_fold(crew, g, op, plan, args);
        clock.stop();
      }
    }
    if (good) merge_all<kBulk, kNet, Row, Wire>(crew, is_folding, g, op, plan, args, merges, pipeline);
  }
  __syncthreads();  // what the other crews have found counts
  if constexpr (kNet) {
    if (threadIdx.x == 0) count_through(g);
    return;
  }
  if (warp <= kFold) return;
  const Crew crew = Crew::of(3, 1 + kFold, kMerge);
  if (!last_block(crew, g, Phase::kMerged, gridDim.x)) return;
  finish(crew, g, op, plan, args, going(crew, g));
  if (crew.thread == 0) trace_kernel(g, TraceKind::kKernelEnd, OpKind::kCombine, op.epoch);
}

template <bool kBulk, typename Row, typename Wire>
void launch(const Group& group, const PlanView& plan, const KernelCombineArgs& args, uint32_t num_sms,
            cudaStream_t stream) {
  const uint32_t bytes = kBulk ? kBulkBytes : 0;
  const Launch how{num_sms, kThreads<kBulk>, bytes, stream};
  if (group.net == nullptr)
    launch_kernel(combine<kBulk, false, Row, Wire>, how, group, plan, args);
  else
    launch_kernel(combine<kBulk, true, Row, Wire>, how, group, plan, args);
}

}  // namespace

cudaError_t launch_combine(const Group& group, const PlanView& plan, const KernelCombineArgs& args, uint32_t num_sms,
                           cudaStream_t stream) {
  if (args.dtype == Dtype::kFp32)
    launch<false, float, float>(group, plan, args, num_sms, stream);
  else if (args.wire == Dtype::kFp32)
    launch<false, uint16_t, float>(group, plan, args, num_sms, stream);
  else if (!group.bulk_copies || group.shared_bytes < kBulkBytes)
    launch<false, uint16_t, uint16_t>(group, plan, args, num_sms, stream);
  else
    launch<true, uint16_t, uint16_t>(group, plan, args, num_sms, stream);
  return cudaGetLastError();
}

cudaError_t load_combine(uint32_t shared_bytes) {
  return load_all(shared_bytes, combine<false, false, float, float>, combine<false, false, uint16_t, float>,
                  combine<false, false, uint16_t, uint16_t>, combine<true, false, uint16_t, uint16_t>,
                  combine<false, true, float, float>, combine<false, true, uint16_t, float>,
                  combine<false, true, uint16_t, uint16_t>, combine<true, true, uint16_t, uint16_t>);
}

}  // namespace uccl_ep::cuda
