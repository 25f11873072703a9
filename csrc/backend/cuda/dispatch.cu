// The kernel of a dispatch. Its crews run side by side in every block: one places the rows that come here (and before
// that, of a new plan, exchanges the routing), one stages ours, a warp tells who waits for that, and one crew sees to
// what no row stands for.
#include "backend/cuda/exchange.cuh"
#include "backend/cuda/place.cuh"
#include "backend/cuda/place_weights.cuh"
#include "backend/cuda/plan.cuh"
#include "backend/cuda/stage.cuh"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kServeWarps = 2;
constexpr uint32_t kFirstStage = kServeWarps + 1, kFirstPlace = kFirstStage + kStageWarps;  // after one that tells
static_assert(kFirstStage == kFirstStageWarp);
// Where there are several domains (kNet) warps know more, so there are fewer, with more registers each.
template <bool kNet>
constexpr uint32_t kPlacing = kNet ? 5 : kPlaceWarps;
template <bool kNet>
constexpr uint32_t kThreads = (kFirstPlace + kPlacing<kNet>)*kWarp;
constexpr uint32_t kTileAlign = 128;
constexpr uint32_t kMostKept = 16;  // tiles of a block

// By the crew that serves: of a plan that is known, what the others wait for; of a new one, its heads; then what rows
// have beside their data.
template <PlanState kState, bool kNet>
__device__ void serve(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan, const PlaceArgs& args,
                      Staged& staged) {
  constexpr bool kFresh = kState != PlanState::kKnown;
  const bool first = args.window == 0;
  if constexpr (kFresh) {
    if (blockIdx.x >= args.num_blocks) return;
    // Counts go ahead of the lists, so that all that follows from them is known when these are there.
    if (kState == PlanState::kNew && blockIdx.x == 0) {
      if (!crew.all(crew.thread != 0 || wait_shared(g, &staged.totals))) return;
      publish_packet(crew, g, g.map.header_full, op.epoch);
      count_received(crew, g, op, args.signature, args.call);
    }
    if (!wait_plan(crew, g, op) || !has_memory<kState>(g, args) || !wait_lists(crew, g, op)) return;
    const StepClock clock(crew, g, Step::kPlan);
    plan_rows(crew, g, op, plan, args.num_blocks,
              args.num_blocks * (args.bulk_warps < 2 ? kPlacing<kNet> : args.bulk_warps));
    plan_heads(crew, g, op, plan, args.num_blocks);
    clock.stop();
  } else {
    const bool with_weights = first && args.routing.weights != nullptr;
    if (!wait_packets_gone(crew, g, op.epoch)) return;
    if (blockIdx.x == 0) {
      write_headers(crew, g, op, args.signature, args.stage.num_tokens);
      crew.sync();
      publish_packet(crew, g, g.map.header_full, op.epoch);
      if (crew.thread == 0 && g.net != nullptr && !with_weights) publish_in_gpu(&local(g).packed, op.epoch);
    }
    if (with_weights) {
      if (!wait_members(crew, g, g.map.read, op.free_after, Step::kStage)) return;
      if (stage_weights(crew, g, op, plan, args.routing.weights) && going(crew, g)) {
        publish_packet(crew, g, g.map.weights_full, op.epoch);
        if (crew.thread == 0 && g.net != nullptr) publish_in_gpu(&local(g).packed, op.epoch);
      }
    }
    if (blockIdx.x == 0 && !all_alike(crew, g, op.epoch, args.signature)) return;
  }
  if (blockIdx.x >= args.num_blocks || !first) return;
  if (plan.compact_width == 0) fill_padding(crew, g, plan, args, kFresh ? Bases(g).padding : plan.padding);
  if (args.row_weights != nullptr) {
    bool good = true;
    for (uint32_t r = crew.thread; r < g.map.num_ranks; r += crew.size)
      good &= wait_peer(g, at<uint64_t>(g, g.rank, g.map.weights_full) + r, op.epoch, op.epoch, Step::kPlace, r, -1);
    if (!crew.all(good)) return;
  }
  if (args.row_experts != nullptr)
    place_experts<kFresh>(crew, g, op, plan, args);
  else if (args.row_weights != nullptr)
    place_weights<kFresh>(crew, g, op, plan, args);
}

// What this block stages. Blocks that do not place do it alone if they are many.
constexpr uint32_t kNothing = 0x0FFFFFFFu;  // row groups that nobody has
__device__ __forceinline__ StageShare stage_share(const Group& g, const PlaceArgs& args) {
  const uint32_t others = workers(g) - args.num_blocks, first_block = others >= args.num_blocks ? args.num_blocks : 0;
  const uint32_t begin = args.window * args.window_tokens;
  const uint32_t end = min(begin + args.window_tokens, args.stage.num_tokens);
  return {begin, end, blockIdx.x < first_block ? kNothing : blockIdx.x - first_block, workers(g) - first_block};
}

// By the crew that stages.
template <PlanState kState, bool kBulk>
__device__ void stage(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan, const PlaceArgs& args,
                      Staged& staged, uint8_t* shared) {
  constexpr bool kFresh = kState != PlanState::kKnown;
  // What the half held before must have been read by all.
  if (!wait_members(crew, g, g.map.read, op.free_after, Step::kStage)) return;
  const StageShare share = stage_share(g, args);
  if (kState == PlanState::kNew && g.net == nullptr && args.stage.wire == Dtype::kFp8 &&
      share.row_groups() >= kManyRowGroups && !crew.all(crew.thread != 0 || wait_shared(g, &staged.routed)))
    return;
  const StepClock clock(crew, g, Step::kStage, workers(g) - share.count);
  // Where rows for other domains go depends on the tiles of all blocks.
  if (kFresh && g.net != nullptr && !crew.all(crew.thread != 0 || wait_block(g, &local(g).packed, op.epoch))) return;
  bool done = false;
  if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
    done = args.copy_pipeline > 0;
    if (done) stage_rows_bulk(crew, g, op, args.stage, share, staged, shared + args.copy_pipeline);
#endif
  }
  if (!done) stage_rows<kFresh>(crew, g, op, plan, args, share, staged);
  clock.stop();
  if (args.routing_compared && args.window == 0) compare_routing(crew, g, plan, args.routing, args.signature.plan_id);
}

// By a crew of each block: its tiles of a new plan. False: an error is known.
__device__ bool exchange_tiles(const Crew& crew, const Group& g, const KernelOp& op, const PlaceArgs& args,
                               Staged& staged, uint8_t* shared) {
  const StepClock clock(crew, g, Step::kExchange);
  const bool good =
      route(crew, g, op, args.signature, args.routing, args.stage.num_tokens, args.kept_tiles, shared, &staged.totals);
  clock.stop();
  return good;
}

// By the crew that will place, when its block's tiles are routed: the exchange. False: an error is known.
__device__ bool exchange(const Crew& crew, const Group& g, const KernelOp& op, const PlaceArgs& args, Staged& staged) {
  if (crew.thread == 0) count_shared(&staged.routed);
  if (last_block(crew, g, Phase::kRouted, workers(g))) {
    if (crew.thread == 0) {
      if (g.net == nullptr)
        keep(g, op, OpKind::kDispatch);  // all blocks have entered
      else
        publish_in_gpu(&local(g).packed, op.epoch);
    }
    // Two warps, for a release takes its time.
    const bool with_weights = args.routing.weights != nullptr;
    for (uint32_t r = g.first + crew.lane(); r < g.end; r += kWarp) {
      if (crew.warp() == 0) publish_flag(member_flag(g, r, g.map.lists_full, g.rank), op.epoch);
      if (crew.warp() == 1 && with_weights) publish_flag(at<uint64_t>(g, r, g.map.weights_full) + g.rank, op.epoch);
    }
    uint64_t hash = 0;
    for (uint32_t b = crew.thread; b < workers(g); b += crew.size) hash += __ldcg(&local(g).block_hash[b]);
    hash = crew_sum(crew, hash);
    if (crew.thread == 0) {
      header(g, g.rank, op.epoch).routing_hash = hash;  // no other rank looks at it
      publish_in_gpu(&local(g).hashed, op.epoch);
    }
  }
  return blockIdx.x >= args.num_blocks || wait_plan(crew, g, op);  // others have nothing left to do
}

template <PlanState kState, bool kBulk>
__device__ void place(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan, const PlaceArgs& args,
                      Arrivals& arrivals, uint8_t* shared) {
  constexpr bool kFresh = kState != PlanState::kKnown;
  const StepClock clock(crew, g, Step::kPlace);
  // Where there are several windows, it looks into the lists.
  const bool windows = plan.num_token_blocks > args.window_tokens / kTokenBlock;
  if (kFresh && windows && !wait_lists(crew, g, op)) return;
  find_arrivals<kFresh>(crew, g, plan, args, arrivals);
  if (kFresh && !windows && !wait_lists(crew, g, op)) return;
  if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
    if (crew.warp() < args.bulk_warps) {
      const Crew bulk_crew{crew.id, args.bulk_warps * kWarp, crew.thread};
      place_rows_bulk<kFresh>(bulk_crew, g, op, plan, args, arrivals, shared);
    }
#endif
  } else {
    place_rows<kFresh>(crew, g, op, plan, args, arrivals);
  }
  crew.sync();
  clock.stop();
}

// By a crew, when all rows are in the output, or (not good) after an error.
__device__ void finish(const Crew& crew, const Group& g, const KernelOp& op, const PlanView& plan,
                       const PlaceArgs& args, bool good) {
  if (crew.thread == 0) reset_shares(g, SharedWork::kPlaced);
  if (good) {
    publish_to_members(crew, g, g.map.read, op.epoch);
    return;
  }
  const uint64_t rows = plan.num_out_rows, hidden = args.stage.hidden;
  const bool codes = args.scales != nullptr;
  if (args.rows != nullptr) fill_nan(crew, args.rows, rows * hidden * (codes ? 1 : dtype_bytes(args.stage.dtype)));
  if (codes) fill_nan(crew, args.scales, rows * hidden / kFp8Block * sizeof(float));
  const uint64_t width = plan.compact_width > 0 ? plan.compact_width : 1;
  if (args.row_weights != nullptr) fill_nan(crew, args.row_weights, rows * width * sizeof(float));
  if (args.row_experts != nullptr) fill_nan(crew, args.row_experts, rows * width * sizeof(int64_t));  // all -1
}

// By a crew, at the end: what we have sent, and if this kernel placed, what came and has been read.
template <PlanState kState>
__device__ void end_streams(const Crew& crew, const Group& g, const PlanView& plan, const PlaceArgs& args,
                            bool placed) {
  constexpr bool kFresh = kState != PlanState::kKnown;
  const uint32_t row_bytes = static_cast<uint32_t>(staged_row_bytes(args.stage.wire, args.stage.hidden));
  const uint32_t per_window = args.window_tokens / kTokenBlock, entries = plan.num_token_blocks + 1;
  NetState& state = net_state(g);
  if (kState != PlanState::kExchanged)
    for (uint32_t to = crew.thread; to < g.map.num_domains; to += crew.size)
      state.sent[to] += sent_part<kFresh>(g, plan, args, to).chunks;
  if (!placed) return;
  for (uint32_t s = crew.thread; s < g.map.num_ranks; s += crew.size) {
    if (in_domain(g, s)) continue;
    const uint32_t token_blocks =
        kFresh ? (scratch(g).num_tokens[s] + kTokenBlock - 1) / kTokenBlock : plan.token_blocks[s];
    const uint32_t* const before = kFresh ? scratch(g).token_block_streams[s] : plan.token_block_streams + s * entries;
    const uint32_t first = min(args.window * per_window, token_blocks), end = min(first + per_window, token_blocks);
    state.received[s] += part_of(g, before[first], before[end], row_bytes).chunks;
    publish_flag(g.net->from[s].rows_consumed, state.received[s]);
  }
}

// The block that sees to the network.
template <PlanState kState>
__device__ void serve_network(const Group& g, const KernelOp& op, const PlanView& plan, const PlaceArgs& args) {
  constexpr bool kFresh = kState != PlanState::kKnown;
  constexpr bool kPushes = kState != PlanState::kExchanged;
  __shared__ uint32_t poller_ends;
  const uint32_t warp = threadIdx.x / kWarp;
  if (threadIdx.x == 0) poller_ends = 0;
  __syncthreads();
  if (warp == 0) poll_hosts(g, &poller_ends);
  if (warp == 1 && kPushes) {
    push_streams<kFresh>(g, op, plan, args);
    __syncwarp();
    if (threadIdx.x % kWarp == 0) count_through(g);
  }
  if (warp < kFirstPlace) return;
  const Crew crew = Crew::of(3, kFirstPlace, kPlacing<true>);
  const bool good = wait_through(crew, g, workers(g) + kPushes, &poller_ends);
  const bool placed = !good || has_memory<kState>(g, args);
  if (kPushes && crew.thread == 0) keep(g, op, OpKind::kDispatch);
  // Flags of the domain, of other domains and of the proxy by a warp each: each has a fence, which takes its time.
  if (crew.warp() == 2 && crew.lane() == 0) tell_ended(g);
  if (good && crew.warp() == 1) end_streams<kState>(Crew::of(4, kFirstPlace + 1, 1), g, plan, args, placed);
  if (placed) finish(crew, g, op, plan, args, good);
  if (g.trace == nullptr) return;
  crew.sync();
  if (crew.thread == 0) trace_kernel(g, TraceKind::kKernelEnd, OpKind::kDispatch, op.epoch);
}

// kBulk: shared memory holds the pipelines of the crew that places, and of the one that stages; before it places, a
// tile.
template <PlanState kState, bool kBulk, bool kNet>
__global__ void __launch_bounds__(kThreads<kNet>, 1)
    dispatch(const __grid_constant__ Group g, const __grid_constant__ PlanView plan,
             const __grid_constant__ PlaceArgs args) {
  if constexpr (kBulk && !kHasBulk) return;
  UCCL_EP_DYNAMIC_SHARED(shared);
  __shared__ Arrivals arrivals;
  __shared__ Staged staged;
  if (!kNet) __builtin_assume(g.net == nullptr);
  if (threadIdx.x < kStageWarps) staged.row_groups[threadIdx.x] = 0;
  if (threadIdx.x == 0) staged.routed = staged.totals = 0;
  const KernelOp op = kState == PlanState::kExchanged ? current_dispatch(g) : enter(g, OpKind::kDispatch);
  if (blockIdx.x == 0 && threadIdx.x == 0) trace_kernel(g, TraceKind::kKernelBegin, OpKind::kDispatch, op.epoch);
  if constexpr (kNet) {
    if (blockIdx.x == workers(g)) {
      serve_network<kState>(g, op, plan, args);
      return;
    }
  }
  const uint32_t warp = threadIdx.x / kWarp;
  bool placed = true;
  bool good = true;
  // Who stages routes, too: it could not begin before all is routed.
  if constexpr (kState == PlanState::kNew && kNet)
    if (warp >= kFirstStage)
      good = exchange_tiles(Crew::of(4, kFirstStage, kStageWarps + kPlacing<kNet>), g, op, args, staged, shared);
  if (warp < kServeWarps) {
    const Crew crew = Crew::of(1, 0, kServeWarps);
    if (going(crew, g)) serve<kState, kNet>(crew, g, op, plan, args, staged);
  } else if (warp < kFirstStage) {
    if (kState != PlanState::kExchanged) tell_staged(g, op, stage_share(g, args), staged);
  } else if (warp < kFirstPlace) {
    const Crew crew = Crew::of(2, kFirstStage, kStageWarps);
    if (kState != PlanState::kExchanged && going(crew, g))
      stage<kState, kBulk>(crew, g, op, plan, args, staged, shared);
  } else {
    const Crew crew = Crew::of(3, kFirstPlace, kPlacing<kNet>);
    if constexpr (kState == PlanState::kNew) {
      if constexpr (!kNet) good = exchange_tiles(crew, g, op, args, staged, shared);
      good = good && exchange(crew, g, op, args, staged);
      placed = !good || blockIdx.x >= args.num_blocks || has_memory<kState>(g, args);
#if __CUDA_ARCH__ >= 900
      if (kBulk) fence_shared();  // pipelines take the place of the tile
#endif
      crew.sync();
    }
    if (good && placed && blockIdx.x < args.num_blocks) place<kState, kBulk>(crew, g, op, plan, args, arrivals, shared);
  }
  __syncthreads();  // what the other crews have found counts
  if constexpr (kNet) {
    if (threadIdx.x == 0) count_through(g);
    return;
  }
  constexpr bool kKnown = kState == PlanState::kKnown;
  if (warp < kFirstPlace || !placed || (!kKnown && blockIdx.x >= args.num_blocks)) return;
  const Crew crew = Crew::of(3, kFirstPlace, kPlacing<kNet>);
  if (!last_block(crew, g, Phase::kPlaced, kKnown ? gridDim.x : args.num_blocks)) return;
  if (kKnown && crew.thread == 0) keep(g, op, OpKind::kDispatch);
  finish(crew, g, op, plan, args, going(crew, g));
  if (crew.thread == 0) trace_kernel(g, TraceKind::kKernelEnd, OpKind::kDispatch, op.epoch);
}

template <PlanState kState, bool kNet>
void launch_one(const Group& group, const PlanView& plan, PlaceArgs& args, uint32_t blocks, cudaStream_t stream) {
  const uint32_t warp_bytes = place_warp_bytes(args);
  uint32_t tile_bytes = kState == PlanState::kNew ? routing_bytes(group.map) : 0;
  const auto warps_beside = [&](uint32_t bytes) {
    return bytes < group.shared_bytes ? min(kPlacing<kNet>, (group.shared_bytes - bytes) / warp_bytes) : 0;
  };
  // Rows that are only copied are staged by bulk copies, too, if that leaves enough for placing and for the tile.
  const bool copies = kState != PlanState::kExchanged && args.stage.wire != Dtype::kFp8 && !kNet &&
                      warps_beside(kStageBytes) >= 2 && tile_bytes + kStageBytes <= group.shared_bytes;
  const uint32_t stage_bytes = copies ? kStageBytes : 0;
  args.bulk_warps = group.bulk_copies ? warps_beside(stage_bytes) : 0;
  if constexpr (kState == PlanState::kNew) {
    const uint32_t tiles = (args.stage.num_tokens + kTileTokens - 1) / kTileTokens;
    const uint32_t routing = blocks - kNet;
    args.kept_tiles = max((tiles + routing - 1) / routing, 1);
    const uint32_t all_bytes = routing_bytes(group.map, args.kept_tiles);
    if (args.kept_tiles <= kMostKept && all_bytes + stage_bytes <= group.shared_bytes)
      tile_bytes = all_bytes;
    else
      args.kept_tiles = 1;
  }
  if (args.bulk_warps < 2) {
    launch_kernel(dispatch<kState, false, kNet>, {blocks, kThreads<kNet>, tile_bytes, stream}, group, plan, args);
    return;
  }
  const uint32_t place_bytes = max(args.bulk_warps * warp_bytes, tile_bytes);
  args.copy_pipeline = copies ? place_bytes : 0;
  launch_kernel(dispatch<kState, true, kNet>, {blocks, kThreads<kNet>, place_bytes + stage_bytes, stream}, group, plan,
                args);
}

template <PlanState kState>
void launch(const Group& group, const PlanView& plan, PlaceArgs& args, uint32_t blocks, cudaStream_t stream) {
  if (group.net == nullptr)
    launch_one<kState, false>(group, plan, args, blocks, stream);
  else
    launch_one<kState, true>(group, plan, args, blocks, stream);
}

}  // namespace

cudaError_t launch_dispatch(const Group& group, const PlanView& plan, const PlaceArgs& given, uint32_t num_sms,
                            uint32_t stage_sms, cudaStream_t stream) {
  PlaceArgs args = given;
  args.num_blocks = num_sms - (group.net != nullptr);  // one sees to the network
  const uint32_t begin = args.window * args.window_tokens, end = min(begin + args.window_tokens, args.stage.num_tokens);
  const uint32_t row_groups = begin < end ? (end - begin + kRowGroup - 1) / kRowGroup : 0;
  const uint32_t blocks = max(num_sms, min(stage_sms, row_groups + (group.net != nullptr)));
  if (args.state == PlanState::kNew)
    launch<PlanState::kNew>(group, plan, args, blocks, stream);
  else if (args.state == PlanState::kExchanged)
    launch<PlanState::kExchanged>(group, plan, args, num_sms, stream);
  else
    launch<PlanState::kKnown>(group, plan, args, blocks, stream);
  return cudaGetLastError();
}

uint32_t routing_bytes(const DeviceMap& map, uint32_t tiles) {
  const uint32_t own = Tile::own_bytes(map.num_experts, map.num_ranks, map.num_domains);
  return static_cast<uint32_t>(round_up(Tile::common_bytes(map.num_ranks, map.num_domains) + tiles * own, kTileAlign));
}

cudaError_t load_dispatch(uint32_t shared_bytes) {
  using enum PlanState;
  return load_all(shared_bytes, dispatch<kKnown, false, false>, dispatch<kKnown, true, false>,
                  dispatch<kNew, false, false>, dispatch<kNew, true, false>, dispatch<kExchanged, false, false>,
                  dispatch<kExchanged, true, false>, dispatch<kKnown, false, true>, dispatch<kKnown, true, true>,
                  dispatch<kNew, false, true>, dispatch<kNew, true, true>, dispatch<kExchanged, false, true>,
                  dispatch<kExchanged, true, true>);
}

}  // namespace uccl_ep::cuda
