// The kernel of a dispatch: its roles run side by side in every block.
#include "backend/gpu/roles/place.cuh"
#include "backend/gpu/roles/serve.cuh"
#include "backend/gpu/roles/stage.cuh"
#include "backend/gpu/roles/streams.cuh"

namespace uccl_ep::gpu {
namespace {

constexpr uint32_t kMostKept = 16;  // tiles of a block

// clang-format off
// Who does what, here of a new plan in one domain, by warps of 32 lanes.
// `a ..> b`: b waits for a. `a --> b`: b is published when a is done.
//
// warps  role   time ---->
// 8 (5)  place  read tiles --> counted ..> positions --> totals; lists --> routed; last block --> lists_full, weights_full
//                 | planned, lists_full ..> rows_full ..> place rows | last block --> read
// 2      serve  block 0: totals ..> --> header_full ..> plan --> planned; lists_full ..> counts for the host
//                 | planned, lists_full ..> plan rows --> rows_planned; heads; padding | weights_full ..> weights
// 8      stage  read (of two ago) ..> (FP8, many rows: routed ..>) copy or quantise a row for each warp --> staged
// 1      tell                                                         staged ..> one fence --> rows_full at every member
//
// Of a known plan `serve` writes headers and weights (--> header_full, weights_full) and `place` begins with rows. Of an
// exchanged one nothing is routed, and the first window is staged. Rows that need more memory than there is go in windows:
// each role turns to the next one by itself. Where there are several domains (in brackets) `stage` and `place` route
// together, --> packed, and one more block sees to the network:
//
// 1      poll   words of hosts ..> --> rows_there, header_full, weights_full; until all blocks are through
// 1      push   packed ..> packets --> commands; chunks complete ..> --> commands
// 5      end    all blocks are through ..> --> read, rows_consumed, ended
//
// staged, routed and totals are words of the block (Staged); counted, planned, rows_planned and packed of the GPU
// (Local); the others are flags of peers (DeviceMap).
// clang-format on
template <PlanState kState, bool kBulk, bool kNet>
struct Dispatch {
  using Places = PlaceRole<kState, kBulk, kNet>;
  using Stages = StageRole<kState, kBulk, kNet>;
  using Tells = TellStagedRole<kState>;
  using Serves = ServeRole<kState, kNet, Places::kWarps>;
  using Roles = RoleTable<Serves, Tells, Stages, Places>;
};

// kBulk: dynamic shared memory holds, behind the tables of ranks and windows, the pipelines of the placing role and of
// the staging role. Until a block's tiles are routed, they lie where tables of windows and the placing role's part
// will.
template <PlanState kState, bool kBulk, bool kNet, typename Tile = TableTile>
__global__ void __launch_bounds__(Dispatch<kState, kBulk, kNet>::Roles::kThreads, 1)
    dispatch(const __grid_constant__ Group g, const __grid_constant__ PlanView plan,
             const __grid_constant__ PlaceArgs args) {
  if constexpr (kBulk && !kArch.bulk_copies) return;  // never launched: see has_bulk_copies()
  using Table = Dispatch<kState, kBulk, kNet>;
  using Roles = typename Table::Roles;
  using Serves = typename Table::Serves;
  using Stages = typename Table::Stages;
  using Places = typename Table::Places;
  constexpr bool kKnown = kState == PlanState::kKnown, kNew = kState == PlanState::kNew;
  UCCL_EP_DYNAMIC_SHARED(dynamic);
  __shared__ KernelOp op;
  __shared__ typename Roles::Shared shared;
  if (!kNet) __builtin_assume(g.map.num_domains == 1);
  uint8_t* const tiles = dynamic + g.table_bytes;
  uint8_t* const memory = tiles + windows_bytes(g.map);
  if (threadIdx.x < kStageWarps) shared.row_groups[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.routed = shared.totals = 0;
  if (kState == PlanState::kExchanged)
    enter_again(g, op, Roles::kThreads);
  else
    enter(g, OpKind::kDispatch, op, Roles::kThreads);
  const DispatchKernel kernel{{g, plan, op, {}}, args};
  if (blockIdx.x == 0 && threadIdx.x == 0) trace_kernel(g, TraceKind::kKernelBegin, OpKind::kDispatch, kernel.op.epoch);
  if constexpr (kNet) {
    if (blockIdx.x == workers(g)) {
      serve_network<kState, Places>(kernel);
      return;
    }
  }
  Routed routed;
  // With several domains the staging role routes, too: it cannot begin before all is routed.
  if constexpr (kNew && kNet)
    if (Roles::template is_in<Stages>() || Roles::template is_in<Places>())
      routed.good = exchange_tiles<Tile>(kernel.by(Roles::template crew_from<Stages>()), shared, tiles);
  // The compiler emits the code of the roles in this order, and the first code is fetched first. All ranks wait for the
  // routing of a new plan: behind the other roles it took 7 us longer. With a known plan they wait for staged rows.
  const auto serve = [&](const DispatchKernel& k) {
    if (going(k)) Serves::run(k, shared);
  };
  if (Roles::template is_in<Places>()) {
    Places::run(kernel.by(Roles::template crew<Places>()), shared, shared, tiles, memory, routed);
  } else if (kNew && Roles::template is_in<Serves>()) {
    serve(kernel.by(Roles::template crew<Serves>()));
  } else if (Roles::template is_in<Stages>()) {
    const DispatchKernel k = kernel.by(Roles::template crew<Stages>());
    if (going(k)) Stages::run(k, shared, memory);
  } else if (!kNew && Roles::template is_in<Serves>()) {
    serve(kernel.by(Roles::template crew<Serves>()));
  } else {
    Table::Tells::run(kernel, shared);
  }
  __syncthreads();  // errors that other crews of the block found are seen from here on
  if constexpr (kNet) {
    if (threadIdx.x == 0) count_through(g);
    return;
  }
  if (!Roles::template is_in<Places>() || !routed.placed || (!kKnown && blockIdx.x >= args.num_blocks)) return;
  const DispatchKernel k = kernel.by(Roles::template crew<Places>());
  if (!last_block(k, Phase::kPlaced, kKnown ? gridDim.x : args.num_blocks)) return;
  if (kKnown && k.crew.thread == 0) keep_epoch(g, k.op);
  Places::finish(k, going(k));
  if (k.crew.thread == 0) trace_kernel(g, TraceKind::kKernelEnd, OpKind::kDispatch, k.op.epoch);
}

// With the kind of tiles that the group has.
template <PlanState kState, bool kBulk, bool kNet>
void launch_kind(const Group& group, const PlanView& plan, const PlaceArgs& args, uint32_t blocks,
                 uint32_t shared_bytes, StreamHandle stream) {
  const Launch how{blocks, Dispatch<kState, kBulk, kNet>::Roles::kThreads, shared_bytes, stream};
  if constexpr (kState == PlanState::kNew && kNet)
    if (tile_kind(group.map) == TileKind::kMasks)
      return launch_kernel(dispatch<kState, kBulk, kNet, MaskTile>, how, group, plan, args);
  launch_kernel(dispatch<kState, kBulk, kNet>, how, group, plan, args);
}

template <PlanState kState, bool kNet>
void launch_one(const Group& group, const PlanView& plan, PlaceArgs& args, uint32_t blocks, StreamHandle stream) {
  const uint32_t warp_bytes = place_warp_bytes(args), table_bytes = group.table_bytes + windows_bytes(group.map);
  const uint32_t room = group.shared_bytes - table_bytes;
  // What tiles need beyond the tables of windows.
  const auto beyond = [&](uint32_t bytes) { return bytes - min(bytes, windows_bytes(group.map)); };
  uint32_t tile_bytes = kState == PlanState::kNew ? beyond(routing_bytes(group.map)) : 0;
  const auto warps_beside = [&](uint32_t bytes) {
    return bytes < room ? min(Dispatch<kState, false, kNet>::Places::kWarps, (room - bytes) / warp_bytes) : 0;
  };
  // Rows that are only copied are also staged by bulk copies, if enough shared memory is left for placing and for the
  // tile.
  const bool copies = kState != PlanState::kExchanged && !args.stage.quantises() && !kNet &&
                      warps_beside(kStageBytes) >= 2 && tile_bytes + kStageBytes <= room;
  const uint32_t stage_bytes = copies ? kStageBytes : 0;
  args.bulk_warps = group.bulk_copies ? warps_beside(stage_bytes) : 0;
  if constexpr (kState == PlanState::kNew) {
    const uint32_t tiles = (args.stage.num_tokens + kTileTokens - 1) / kTileTokens;
    const uint32_t routing = blocks - kNet;
    args.kept_tiles = max((tiles + routing - 1) / routing, 1);
    const uint32_t all_bytes = beyond(routing_bytes(group.map, args.kept_tiles));
    if (args.kept_tiles <= kMostKept && all_bytes + stage_bytes <= room)
      tile_bytes = all_bytes;
    else
      args.kept_tiles = 1;
  }
  if (args.bulk_warps < 2) {
    launch_kind<kState, false, kNet>(group, plan, args, blocks, table_bytes + tile_bytes, stream);
    return;
  }
  const uint32_t place_bytes = max(args.bulk_warps * warp_bytes, tile_bytes);
  args.copy_pipeline = copies ? place_bytes : 0;
  launch_kind<kState, true, kNet>(group, plan, args, blocks, table_bytes + place_bytes + stage_bytes, stream);
}

template <PlanState kState>
void launch(const Group& group, const PlanView& plan, PlaceArgs& args, uint32_t blocks, StreamHandle stream) {
  if (!has_net(group))
    launch_one<kState, false>(group, plan, args, blocks, stream);
  else
    launch_one<kState, true>(group, plan, args, blocks, stream);
}

}  // namespace

Status launch_dispatch(const Group& group, const PlanView& plan, const PlaceArgs& given, uint32_t num_sms,
                       uint32_t stage_sms, StreamHandle stream) {
  PlaceArgs args = given;
  args.num_blocks = num_sms - has_net(group);  // one sees to the network
  const uint32_t row_groups = (min(args.windows.first, args.stage.num_tokens) + kRowGroup - 1) / kRowGroup;
  const uint32_t blocks = max(num_sms, min(stage_sms, row_groups + has_net(group)));
  if (args.state == PlanState::kNew)
    launch<PlanState::kNew>(group, plan, args, blocks, stream);
  else if (args.state == PlanState::kExchanged)
    launch<PlanState::kExchanged>(group, plan, args, num_sms, stream);
  else
    launch<PlanState::kKnown>(group, plan, args, blocks, stream);
  return launch_status();
}

Status load_dispatch(uint32_t shared_bytes) {
  using enum PlanState;
  return load_all(shared_bytes, dispatch<kKnown, false, false>, dispatch<kKnown, true, false>,
                  dispatch<kNew, false, false>, dispatch<kNew, true, false>, dispatch<kExchanged, false, false>,
                  dispatch<kExchanged, true, false>, dispatch<kKnown, false, true>, dispatch<kKnown, true, true>,
                  dispatch<kNew, false, true>, dispatch<kNew, true, true>, dispatch<kExchanged, false, true>,
                  dispatch<kExchanged, true, true>, dispatch<kNew, false, true, MaskTile>,
                  dispatch<kNew, true, true, MaskTile>);
}

}  // namespace uccl_ep::gpu
