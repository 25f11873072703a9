// Plan: from the routing of all sources, the slots of every row that comes here, and who returns each of ours.
#include "backend/cuda/device.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kThreads = 256;

// By a whole block: all ranks have entered, with the same signature.
__device__ bool all_alike(const Domain& d, uint64_t epoch) {
  if (!wait_all(d, at<uint64_t>(d, d.rank, d.at.header_full), epoch, Step::kExchange, true)) return false;
  bool good = true;
  for (uint32_t r = threadIdx.x; r < d.at.num_ranks; r += blockDim.x) {
    const OpSignature& own = header(d, d.rank, epoch).signature;
    const OpSignature& other = header(d, r, epoch).signature;
    if (other.plan_use == PlanUse::kDiffers) {
      report(d, DeviceFault::kPlanDiffers, Step::kPlan, static_cast<int>(r), -1, own.plan_id, other.plan_id,
             ErrorKind::kPlanMismatch);
      good = false;
    } else if (own.kind != other.kind || own.dtype != other.dtype || own.wire != other.wire ||
               own.plan_use != other.plan_use || own.hidden != other.hidden || own.with_values != other.with_values ||
               own.fp8_pow2 != other.fp8_pow2 || own.expert_alignment != other.expert_alignment ||
               own.plan_id != other.plan_id) {
      report(d, DeviceFault::kMismatch, Step::kPlan, static_cast<int>(r), -1, 0, 0, ErrorKind::kRankMismatch);
      good = false;
    }
  }
  return __syncthreads_and(good);
}

__global__ void meet(const __grid_constant__ Domain d) { all_alike(d, local(d).op.epoch); }

// One block. Slots are expert-major, then by source in the given order.
__global__ void counts(const __grid_constant__ Domain d, uint32_t alignment) {
  const uint64_t epoch = local(d).op.epoch;
  if (!all_alike(d, epoch)) return;
  const uint32_t ranks = d.at.num_ranks, experts = d.experts_per_rank;
  PlanScratch& plan = scratch(d);
  uint32_t* const base = slot_base(d);               // [ranks][experts]
  uint32_t* const padding = base + ranks * experts;  // [experts][2]
  uint32_t* const exact = reinterpret_cast<uint32_t*>(d.counts + 1);
  uint32_t* const padded = exact + experts;
  for (uint32_t l = threadIdx.x; l < experts; l += blockDim.x) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < ranks; ++i) {
      const uint32_t source = d.source_order[i];
      base[source * experts + l] = sum;  // inside the expert
      sum += header_counts(d, source, epoch)[d.rank * experts + l];
    }
    padding[2 * l] = sum;
  }
  for (uint32_t s = threadIdx.x; s < ranks; s += blockDim.x) {
    const DeviceHeader& h = header(d, s, epoch);
    plan.piece_base[s] = h.row_begin[d.rank];
    plan.row_begin[s + 1] = h.row_begin[d.rank + 1] - h.row_begin[d.rank];
    plan.slot_begin[s + 1] = h.pair_count[d.rank];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t begin = 0;
    for (uint32_t l = 0; l < experts; ++l) {
      const uint32_t count = padding[2 * l];
      const uint32_t size = (count + alignment - 1) / alignment * alignment;
      exact[l] = count;
      padded[l] = size;
      padding[2 * l] = begin;  // for now: where the expert begins
      padding[2 * l + 1] = begin + size;
      begin += size;
    }
    plan.row_begin[0] = plan.slot_begin[0] = 0;
    for (uint32_t s = 0; s < ranks; ++s) {
      plan.row_begin[s + 1] += plan.row_begin[s];
      plan.slot_begin[s + 1] += plan.slot_begin[s];
    }
    const DeviceHeader& own = header(d, d.rank, epoch);
    d.counts->num_rows = begin;
    d.counts->received_rows = plan.row_begin[ranks];
    d.counts->received_pairs = plan.slot_begin[ranks];
    d.counts->sent_rows = own.row_begin[ranks];
    d.counts->sent_pairs = own.num_pairs;
  }
  __syncthreads();
  for (uint32_t l = threadIdx.x; l < experts; l += blockDim.x) {
    const uint32_t begin = padding[2 * l];
    for (uint32_t s = 0; s < ranks; ++s) base[s * experts + l] += begin;
    padding[2 * l] = begin + exact[l];
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) publish_flag(&d.counts->epoch, epoch);
}

// Rows that come from `source`, a thread each.
__device__ void plan_received(const Domain& d, const PlanView& plan, const OpState& op, uint32_t source) {
  const PlanScratch& from = scratch(d);
  const uint32_t* const base = slot_base(d) + source * d.experts_per_rank;
  const ListEntry* const entries = list(d, source, op.half, d.rank);
  const PairEntry* const source_pairs = pairs(d, source, op.half);
  const uint32_t first_row = from.row_begin[source], first_slot = from.slot_begin[source];
  const uint32_t num_rows = from.row_begin[source + 1] - first_row;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < num_rows; i += gridDim.x * blockDim.x) {
    const ListEntry entry = entries[i];
    plan.row_token[first_row + i] = entry.token;
    plan.row_pair[first_row + i] = entry.first_pair;
    plan.row_slot[first_row + i] = first_slot + entry.first_slot;
    for (uint32_t p = 0; p < entry.num_pairs; ++p) {
      const PairEntry pair = source_pairs[entry.first_pair + p];
      plan.slots[first_slot + entry.first_slot + p] = base[pair.expert - d.rank * d.experts_per_rank] + pair.position;
    }
  }
}

// Our rows for `destination`: which piece of our memory each of them comes back as.
__device__ void plan_sent(const Domain& d, const PlanView& plan, const OpState& op, uint32_t destination) {
  const DeviceHeader& head = header(d, d.rank, op.epoch);
  const ListEntry* const entries = list(d, d.rank, op.half, destination);
  const uint32_t* const token_rows = at<uint32_t>(d, d.rank, d.at.token_begin) + d.at.max_tokens + 1;
  const uint32_t begin = head.row_begin[destination], num_rows = head.row_begin[destination + 1] - begin;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < num_rows; i += gridDim.x * blockDim.x)
    plan.piece_rows[token_rows[entries[i].token] + entries[i].order] = begin + i;
}

// Where a token's pieces begin, and where the caller's array has each pair's value.
__device__ void plan_tokens(const Domain& d, const PlanView& plan, const OpState& op, uint32_t width) {
  const uint32_t* const token_pairs = at<uint32_t>(d, d.rank, d.at.token_begin);
  const uint32_t* const token_rows = token_pairs + d.at.max_tokens + 1;
  const PairEntry* const own = pairs(d, d.rank, op.half);
  for (uint32_t t = blockIdx.x * blockDim.x + threadIdx.x; t <= plan.num_tokens; t += gridDim.x * blockDim.x) {
    plan.piece_begin[t] = token_rows[t];
    if (t == plan.num_tokens) break;
    for (uint32_t p = token_pairs[t]; p < token_pairs[t + 1]; ++p) plan.pair_place[p] = t * width + own[p].column;
  }
}

__device__ void plan_heads(const Domain& d, const PlanView& plan) {
  const PlanScratch& from = scratch(d);
  const uint32_t* const padding = slot_base(d) + d.at.num_ranks * d.experts_per_rank;
  for (uint32_t s = threadIdx.x; s <= d.at.num_ranks; s += blockDim.x) {
    plan.row_begin[s] = from.row_begin[s];
    plan.sent_begin[s] = header(d, d.rank, local(d).op.epoch).row_begin[s];
    if (s < d.at.num_ranks) plan.piece_base[s] = from.piece_base[s];
  }
  for (uint32_t i = threadIdx.x; i < 2 * d.experts_per_rank; i += blockDim.x) plan.padding[i] = padding[i];
  if (threadIdx.x == 0) plan.row_slot[plan.received_rows] = plan.received_pairs;
}

// blockIdx.y: what to make; see the calls.
__global__ void make_plan(const __grid_constant__ Domain d, const PlanView plan, uint32_t width) {
  if (stopped(d)) return;
  const OpState op = local(d).op;
  const uint32_t part = blockIdx.y;
  if (part < d.at.num_ranks) {
    plan_received(d, plan, op, rotated(d, part));
  } else if (part < 2 * d.at.num_ranks) {
    plan_sent(d, plan, op, part - d.at.num_ranks);
  } else {
    plan_tokens(d, plan, op, width);
    if (blockIdx.x == 0) plan_heads(d, plan);
  }
}

}  // namespace

cudaError_t launch_meet(const Domain& domain, cudaStream_t stream) {
  meet<<<1, kMaxDomainRanks, 0, stream>>>(domain);
  return cudaGetLastError();
}

cudaError_t launch_counts(const Domain& domain, uint32_t expert_alignment, cudaStream_t stream) {
  counts<<<1, kThreads, 0, stream>>>(domain, expert_alignment);
  return cudaGetLastError();
}

cudaError_t launch_plan(const Domain& domain, const PlanView& plan, uint32_t width, cudaStream_t stream) {
  const uint32_t most = plan.num_tokens > plan.received_rows ? plan.num_tokens : plan.received_rows;
  const uint32_t blocks = most / kThreads / 4 + 1;
  make_plan<<<dim3(blocks, 2 * domain.at.num_ranks + 1), kThreads, 0, stream>>>(domain, plan, width);
  return cudaGetLastError();
}

cudaError_t load_plan() { return load_all(meet, counts, make_plan); }

}  // namespace uccl_ep::cuda
