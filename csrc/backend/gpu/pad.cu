// Padding up to a capacity: how many rows came is known on the GPU only.
#include "backend/gpu/pad.cuh"
#include "device/launch.cuh"

namespace uccl_ep::gpu {
namespace {

constexpr uint32_t kThreads = 512;

// Rows of the plan, those that were dropped included.
__device__ __forceinline__ uint32_t rows_of(const Group& g, const PlanView& plan) {
  return plan.compact_width > 0 ? plan.row_end[g.source_order[g.map.num_ranks - 1]]
                                : plan.padding[2 * g.experts_per_rank - 1];
}

__global__ void __launch_bounds__(kThreads) pad(const __grid_constant__ Group g, const __grid_constant__ PlanView plan,
                                                const __grid_constant__ PlaceArgs args) {
  // If the dispatch has failed, the output holds NaN and the plan may hold anything.
  if (stopped(g)) return;
  const uint64_t first = rows_of(g, plan), end = plan.num_out_rows;
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads;
  const uint32_t width = max(plan.compact_width, 1);
  pad_rows(args, first, end, width, thread, threads);
  if (args.row_experts != nullptr)
    for (uint64_t i = first * width + thread; i < end * width; i += threads) args.row_experts[i] = -1;
}

}  // namespace

Status launch_pad(const Group& group, const PlanView& plan, const PlaceArgs& args, uint32_t num_sms,
                  StreamHandle stream) {
  launch_kernel(pad, {num_sms, kThreads, 0, stream}, group, plan, args);
  return launch_status();
}

Status load_pad(uint32_t) { return load_kernel(pad); }

}  // namespace uccl_ep::gpu
