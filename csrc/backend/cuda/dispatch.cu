// The two kernels of a dispatch. Their crews run side by side in every block: routing beside staging; staging (or, of
// a new plan, what no row stands for) beside placing.
#include "backend/cuda/exchange.cuh"
#include "backend/cuda/place.cuh"
#include "backend/cuda/plan.cuh"
#include "backend/cuda/stage.cuh"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kRouteWarps = 8;
constexpr uint32_t kExchangeThreads = (kRouteWarps + kStageCrews * kStageWarps) * kWarp;
constexpr uint32_t kTileAlign = 128;

// kBulk: shared memory holds, after a tile, the ring of stage.
template <bool kBulk>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    exchange(const __grid_constant__ Domain d, const __grid_constant__ ExchangeArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Op op = enter(d, OpKind::kDispatch);
  const uint32_t warp = threadIdx.x / kWarp;
  if (warp >= kRouteWarps) {
    const uint32_t first = (warp - kRouteWarps) / kStageWarps * kStageWarps, number = first / kStageWarps;
    const Crew crew = Crew::of(2 + number, kRouteWarps + first, kStageWarps);
    // What the half held before must have been read by all.
    if (!going(crew, d) || !wait_all(crew, d, d.at.read, op.free_after, Step::kStage)) return;
    const uint32_t end = min(args.stage.num_tokens, args.window_tokens);
    const StepClock clock(crew, d, Step::kStage);
    if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
      const uint64_t tile_bytes = round_up(Tile::bytes(d.at.num_experts, d.at.num_ranks), kTileAlign);
      stage_rows_bulk(crew, d, op, args.stage, 0, end, number * gridDim.x + blockIdx.x, kStageCrews * gridDim.x, first,
                      shared + tile_bytes);
#endif
    } else {
      stage_rows(crew, d, op, args.stage, 0, end, number * gridDim.x + blockIdx.x, kStageCrews * gridDim.x);
    }
    if (number == 0) clock.stop();
    return;
  }
  const Crew crew = Crew::of(1, 0, kRouteWarps);
  if (wait_all(crew, d, d.at.read, op.free_after, Step::kStage)) {
    const StepClock clock(crew, d, Step::kExchange);
    if (blockIdx.x == 0 && crew.thread == 0) write_header(d, op, args.signature, args.stage.num_tokens);
    route(crew, d, op, args.routing, args.stage.num_tokens, shared);
    clock.stop();
  }
  if (!last_block(crew, d, Arrival::kRouted)) return;
  uint64_t hash = 0;
  for (uint32_t b = crew.thread; b < gridDim.x; b += crew.size) hash += __ldcg(&local(d).block_hash[b]);
  hash = crew_sum(crew, hash);
  if (crew.thread == 0) {
    keep(d, op, OpKind::kDispatch);
    header(d, d.rank, op.epoch).routing_hash = hash;
    __threadfence_system();
  }
  if (!going(crew, d)) return;
  publish_all(crew, d, d.at.header_full, op.epoch);
  if (args.routing.values != nullptr) publish_all(crew, d, d.at.values_full, op.epoch);
  if (all_alike(crew, d, op.epoch)) count_received(crew, d, op, args.signature.expert_alignment, args.call);
}

// What is left when the rows are in their slots.
__device__ void finish_place(const Crew& crew, const Domain& d, const Op& op, const PlanView& plan,
                             const PlaceArgs& args) {
  if (!last_block(crew, d, Arrival::kPlaced)) return;
  if (!args.fresh && crew.thread == 0) keep(d, op, OpKind::kDispatch);
  if (going(crew, d)) {
    publish_all(crew, d, d.at.read, op.epoch);
    return;
  }
  const uint64_t slots = plan.num_slots, hidden = args.stage.hidden;
  const bool codes = args.scales != nullptr;
  fill_nan(crew, args.rows, slots * hidden * (codes ? 1 : dtype_bytes(args.stage.dtype)));
  if (codes) fill_nan(crew, args.scales, slots * hidden / kFp8Block * sizeof(float));
  const uint64_t width = plan.compact_width > 0 ? plan.compact_width : 1;
  if (args.row_values != nullptr) fill_nan(crew, args.row_values, slots * width * sizeof(float));
  if (args.row_experts != nullptr) fill_nan(crew, args.row_experts, slots * width * sizeof(int64_t));  // all -1
}

constexpr uint32_t kPlaceThreads = (1 + kStageWarps + kMaxPlaceWarps) * kWarp;

template <bool kFresh, bool kBulk>
__global__ void __launch_bounds__(kPlaceThreads, 1)
    place(const __grid_constant__ Domain d, const __grid_constant__ PlanView plan,
          const __grid_constant__ PlaceArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Arrivals arrivals;
  const Op op = kFresh ? current_dispatch(d) : enter(d, OpKind::kDispatch);
  const uint32_t warp = threadIdx.x / kWarp;
  if (warp == 0) {
    const Crew crew = Crew::of(1, 0, 1);
    if (!kFresh && blockIdx.x == 0 && going(crew, d)) {
      if (crew.thread == 0) {
        write_header(d, op, args.signature, args.stage.num_tokens);
        __threadfence_system();
      }
      crew.sync();
      publish_all(crew, d, d.at.header_full, op.epoch);
      all_alike(crew, d, op.epoch);
    }
  } else if (warp <= kStageWarps) {
    const Crew crew = Crew::of(2, 1, kStageWarps);
    if (kFresh) {
      const StepClock clock(crew, d, Step::kPlan);
      if (going(crew, d)) plan_heads(crew, d, op, plan);
      clock.stop();
    } else if (going(crew, d) && wait_all(crew, d, d.at.read, op.free_after, Step::kStage)) {
      const StepClock clock(crew, d, Step::kStage);
      const uint32_t begin = args.window * args.window_tokens;
      stage_rows(crew, d, op, args.stage, begin, min(begin + args.window_tokens, args.stage.num_tokens), blockIdx.x,
                 gridDim.x);
      if (args.window == 0 && args.routing.values != nullptr) stage_values(crew, d, op, plan, args.routing.values);
      if (args.window == 0 && args.routing_compared)
        compare_routing(crew, d, plan, args.routing, args.signature.plan_id);
      clock.stop();
    }
  } else if (const Crew crew = Crew::of(3, 1 + kStageWarps, blockDim.x / kWarp - 1 - kStageWarps); going(crew, d)) {
    const StepClock clock(crew, d, Step::kPlace);
    find_arrivals<kFresh>(crew, d, op, plan, args, arrivals);
    if (args.window == 0 && plan.compact_width == 0)
      fill_padding(crew, d, plan, args, kFresh ? Bases(d).padding : plan.padding);
    if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
      place_rows_bulk<kFresh>(crew, d, op, plan, args, arrivals, shared);
#endif
    } else {
      place_rows<kFresh>(crew, d, op, plan, args, arrivals);
    }
    bool good = true;
    if (args.row_values != nullptr)
      for (uint32_t r = crew.thread; r < d.at.num_ranks; r += crew.size)
        good &= wait_peer(d, at<uint64_t>(d, d.rank, d.at.values_full) + r, op.epoch, Step::kPlace, r, -1);
    if (crew.all(good)) {
      if (args.row_experts != nullptr)
        place_experts<kFresh>(crew, d, op, plan, args);
      else if (args.row_values != nullptr)
        place_values<kFresh>(crew, d, op, plan, args);
    }
    clock.stop();
  }
  __syncthreads();  // what the other crews have found counts
  if (warp > kStageWarps)
    finish_place(Crew::of(3, 1 + kStageWarps, blockDim.x / kWarp - 1 - kStageWarps), d, op, plan, args);
}

template <bool kFresh>
void launch_place_kernel(const Domain& domain, const PlanView& plan, const PlaceArgs& args, uint32_t num_sms,
                         cudaStream_t stream) {
  const uint32_t warp_bytes = place_warp_bytes(args);
  const uint32_t bulk_warps = domain.bulk_copies ? min(kMaxPlaceWarps, domain.shared_bytes / warp_bytes) : 0;
  if (bulk_warps < 2)
    place<kFresh, false><<<num_sms, kPlaceThreads, 0, stream>>>(domain, plan, args);
  else
    place<kFresh, true>
        <<<num_sms, (1 + kStageWarps + bulk_warps) * kWarp, bulk_warps * warp_bytes, stream>>>(domain, plan, args);
}

}  // namespace

cudaError_t launch_exchange(const Domain& domain, const ExchangeArgs& args, uint32_t num_sms, cudaStream_t stream) {
  const uint32_t blocks = min(num_sms, max(1u, (args.stage.num_tokens + kStageRows - 1) / kStageRows));
  const uint32_t tile_bytes = routing_bytes(domain.at.num_experts, domain.at.num_ranks);
  const bool divides = args.stage.wire == Dtype::kFp8 && !args.stage.fp8_pow2;
  if (domain.bulk_copies && !divides && tile_bytes + kStageBytes <= domain.shared_bytes)
    exchange<true><<<blocks, kExchangeThreads, tile_bytes + kStageBytes, stream>>>(domain, args);
  else
    exchange<false><<<blocks, kExchangeThreads, tile_bytes, stream>>>(domain, args);
  return cudaGetLastError();
}

cudaError_t launch_place(const Domain& domain, const PlanView& plan, const PlaceArgs& args, uint32_t num_sms,
                         cudaStream_t stream) {
  if (args.fresh)
    launch_place_kernel<true>(domain, plan, args, num_sms, stream);
  else
    launch_place_kernel<false>(domain, plan, args, num_sms, stream);
  return cudaGetLastError();
}

uint32_t routing_bytes(uint32_t num_experts, uint32_t num_ranks) {
  return static_cast<uint32_t>(round_up(Tile::bytes(num_experts, num_ranks), kTileAlign));
}

cudaError_t load_dispatch(uint32_t shared_bytes) {
  return load_all(shared_bytes, exchange<false>, exchange<true>, place<false, false>, place<false, true>,
                  place<true, false>, place<true, true>);
}

}  // namespace uccl_ep::cuda
