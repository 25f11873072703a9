// Exchange: every rank writes, once, what its routing means for each destination; peers pull it.
//
// Blocks route kTokensPerBlock tokens each. `count` leaves per block: pairs by expert, rows and pairs by destination,
// all pairs, all rows. `route` adds up the blocks before its own, so that positions count tokens in their order without
// any block waiting for another.
#include "backend/cuda/device.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarp;
using Mask = unsigned long long;  // a bit per token of the block

__global__ void enter(const __grid_constant__ Domain d, const OpSignature signature, uint32_t num_tokens,
                      bool publish) {
  if (threadIdx.x == 0) {
    OpState& op = local(d).op;
    op.epoch += 1;
    if (signature.kind == OpKind::kDispatch) {
      op.half = static_cast<uint32_t>(op.num_dispatches++ % kHalves);
      op.free_after = op.half_epoch[op.half];
      op.half_epoch[op.half] = op.epoch;
    } else {
      op.free_after = op.last_combine;
      op.last_combine = op.epoch;
    }
    DeviceHeader& h = header(d, d.rank, op.epoch);
    h.epoch = op.epoch;
    h.signature = signature;
    h.num_tokens = num_tokens;
    __threadfence_system();
  }
  __syncthreads();
  const OpState op = local(d).op;
  if (publish) publish_all(d, d.at.header_full, op.epoch);
  // What the half held before must have been read by all. Waited for here, in one block: the kernels that fill it take
  // every SM they can get, and must not hold them while they wait.
  if (signature.kind == OpKind::kDispatch) wait_all(d, at<uint64_t>(d, d.rank, d.at.read), op.free_after, Step::kStage);
}

// The experts of the block's tokens as masks, in shared memory; one warp per token.
struct BlockRouting {
  Mask* expert;  // [experts] tokens that have it
  Mask* destination;  // [ranks] tokens that go there
  uint32_t* pairs_to;  // [tokens][ranks] pairs of the token
  uint32_t* num_pairs;  // [tokens]
  uint32_t* num_ranks;  // [tokens]

  static __host__ __device__ uint32_t bytes(uint32_t experts, uint32_t ranks) {
    return 8 * (experts + ranks) + 4 * kTokensPerBlock * (ranks + 2);
  }
  __device__ BlockRouting(uint8_t* shared, uint32_t experts, uint32_t ranks)
      : expert(reinterpret_cast<Mask*>(shared)),
        destination(expert + experts),
        pairs_to(reinterpret_cast<uint32_t*>(destination + ranks)),
        num_pairs(pairs_to + kTokensPerBlock * ranks),
        num_ranks(num_pairs + kTokensPerBlock) {}
};

// Calls visit(expert, column) for the experts of `token`, by the lanes of a warp, in no order.
template <typename Visit>
__device__ void visit_experts(const DeviceRouting& r, uint32_t token, uint32_t lane, Visit visit) {
  for (uint32_t column = lane; column < r.width; column += kWarp) {
    const uint64_t place = uint64_t{token} * r.width + column;
    if (r.is_map) {
      if (static_cast<const uint8_t*>(r.data)[place] != 0) visit(static_cast<long long>(column), column);
    } else {
      const long long expert = static_cast<const long long*>(r.data)[place];
      if (expert != -1) visit(expert, column);
    }
  }
}

__device__ void read_routing(const Domain& d, const DeviceRouting& r, uint32_t first, uint32_t count,
                             const BlockRouting& b) {
  const uint32_t ranks = d.at.num_ranks;
  for (uint32_t i = threadIdx.x; i < BlockRouting::bytes(d.at.num_experts, ranks) / 4; i += blockDim.x)
    reinterpret_cast<uint32_t*>(b.expert)[i] = 0;
  __syncthreads();
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t t = threadIdx.x / kWarp; t < count; t += kWarps) {
    visit_experts(r, first + t, lane, [&](long long expert, uint32_t) {
      if (expert < 0 || expert >= d.at.num_experts) {
        report(d, DeviceFault::kExpertRange, Step::kExchange, static_cast<int>(d.rank), static_cast<int>(first + t),
               d.at.num_experts, static_cast<uint64_t>(expert), ErrorKind::kPeerFailed);
        return;
      }
      if (or_shared(&b.expert[expert], Mask{1} << t) >> t & 1)
        report(d, DeviceFault::kExpertTwice, Step::kExchange, static_cast<int>(d.rank), static_cast<int>(first + t), 1,
               static_cast<uint64_t>(expert), ErrorKind::kPeerFailed);
      const uint32_t to = static_cast<uint32_t>(expert) / d.experts_per_rank;
      add_shared(&b.num_pairs[t], 1);
      if (add_shared(&b.pairs_to[t * ranks + to], 1) == 0) {
        add_shared(&b.num_ranks[t], 1);
        or_shared(&b.destination[to], Mask{1} << t);
      }
    });
  }
  __syncthreads();
}

// What `count` leaves of a block.
struct BlockCounts {
  uint32_t *expert, *rows_to, *pairs_to, *pairs, *rows;
  __device__ BlockCounts(const Domain& d, uint32_t block)
      : expert(at<uint32_t>(d, d.rank, d.at.block_counts) +
               uint64_t{block} * (d.at.num_experts + 2 * d.at.num_ranks + 2)),
        rows_to(expert + d.at.num_experts),
        pairs_to(rows_to + d.at.num_ranks),
        pairs(pairs_to + d.at.num_ranks),
        rows(pairs + 1) {}
};

__global__ void count(const __grid_constant__ Domain d, const DeviceRouting r) {
  extern __shared__ __align__(16) uint8_t shared[];
  const BlockRouting b(shared, d.at.num_experts, d.at.num_ranks);
  const uint32_t first = blockIdx.x * kTokensPerBlock;
  read_routing(d, r, first, min(kTokensPerBlock, r.num_tokens - first), b);
  const BlockCounts out(d, blockIdx.x);
  for (uint32_t e = threadIdx.x; e < d.at.num_experts; e += blockDim.x) out.expert[e] = __popcll(b.expert[e]);
  for (uint32_t to = threadIdx.x; to < d.at.num_ranks; to += blockDim.x) {
    uint32_t sum = 0;
    for (uint32_t t = 0; t < kTokensPerBlock; ++t) sum += b.pairs_to[t * d.at.num_ranks + to];
    out.pairs_to[to] = sum;
    out.rows_to[to] = __popcll(b.destination[to]);
  }
  if (threadIdx.x < 2) {
    uint32_t sum = 0;
    for (uint32_t t = 0; t < kTokensPerBlock; ++t) sum += (threadIdx.x == 0 ? b.num_pairs : b.num_ranks)[t];
    *(threadIdx.x == 0 ? out.pairs : out.rows) = sum;
  }
}

// Sum of one number of the blocks before `block`, and over all blocks.
struct Before {
  uint32_t here, total;
};
__device__ Before add_up(const Domain& d, uint64_t offset, uint32_t block, uint32_t num_blocks) {
  const uint64_t stride = d.at.num_experts + 2 * d.at.num_ranks + 2;
  const uint32_t* counts = at<uint32_t>(d, d.rank, d.at.block_counts) + offset;
  Before sum{0, 0};
#pragma unroll 8
  for (uint32_t b = 0; b < num_blocks; ++b) {
    const uint32_t value = counts[b * stride];
    sum.total += value;
    if (b < block) sum.here += value;
  }
  return sum;
}

__global__ void route(const __grid_constant__ Domain d, const DeviceRouting r, uint32_t num_blocks) {
  extern __shared__ __align__(16) uint8_t shared[];
  const uint32_t ranks = d.at.num_ranks, experts = d.at.num_experts;
  const BlockRouting b(shared, experts, ranks);
  uint32_t* const expert_base = reinterpret_cast<uint32_t*>(shared + BlockRouting::bytes(experts, ranks));
  uint32_t* const row_base = expert_base + experts;
  uint32_t* const pair_base = row_base + ranks;
  __shared__ uint32_t first_pair[kTokensPerBlock + 1];  // pairs of earlier tokens
  __shared__ uint32_t first_row[kTokensPerBlock + 1];  // rows of earlier tokens
  const OpState op = local(d).op;
  DeviceHeader& head = header(d, d.rank, op.epoch);
  const uint32_t first = blockIdx.x * kTokensPerBlock;
  const uint32_t tokens = first < r.num_tokens ? min(kTokensPerBlock, r.num_tokens - first) : 0;
  const bool writes_totals = blockIdx.x == gridDim.x - 1;
  bool good = !stopped(d);
  read_routing(d, r, first, tokens, b);

  for (uint32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    const Before sum = add_up(d, e, blockIdx.x, num_blocks);
    expert_base[e] = sum.here;
    if (writes_totals) header_counts(d, d.rank, op.epoch)[e] = sum.total;
  }
  for (uint32_t i = threadIdx.x; i < 2 * ranks; i += blockDim.x) {
    const Before sum = add_up(d, experts + i, blockIdx.x, num_blocks);
    row_base[i] = sum.here;  // then pair_base
    if (writes_totals && i < ranks) head.row_begin[i + 1] = sum.total;
    if (writes_totals && i >= ranks) head.pair_count[i - ranks] = sum.total;
  }
  if (threadIdx.x == 0) {
    const Before sum = add_up(d, experts + 2 * ranks, blockIdx.x, num_blocks);
    first_pair[0] = sum.here;
    for (uint32_t t = 0; t < kTokensPerBlock; ++t) first_pair[t + 1] = first_pair[t] + b.num_pairs[t];
    if (sum.total > d.at.max_pairs) {
      report(d, DeviceFault::kTooManyPairs, Step::kExchange, static_cast<int>(d.rank), -1, d.at.max_pairs, sum.total,
             ErrorKind::kPeerFailed);
      good = false;
    }
    if (writes_totals) head.num_pairs = sum.total;
  }
  if (threadIdx.x == kWarp) {
    first_row[0] = add_up(d, experts + 2 * ranks + 1, blockIdx.x, num_blocks).here;
    for (uint32_t t = 0; t < kTokensPerBlock; ++t) first_row[t + 1] = first_row[t] + b.num_ranks[t];
  }
  good = __syncthreads_and(good);
  if (writes_totals && threadIdx.x == 0) {
    head.row_begin[0] = 0;
    for (uint32_t to = 0; to < ranks; ++to) head.row_begin[to + 1] += head.row_begin[to];
  }
  // From here on pairs_to holds the pairs of earlier tokens.
  uint32_t* const pairs_to = b.pairs_to;
  uint32_t* const own_pairs_to = reinterpret_cast<uint32_t*>(pair_base + ranks);  // [tokens][ranks]
  for (uint32_t to = threadIdx.x; to < ranks; to += blockDim.x) {
    uint32_t sum = pair_base[to];
    for (uint32_t t = 0; t < kTokensPerBlock; ++t) {
      const uint32_t own = pairs_to[t * ranks + to];
      own_pairs_to[t * ranks + to] = own;
      pairs_to[t * ranks + to] = sum;
      sum += own;
    }
  }
  __syncthreads();
  uint32_t* const token_pairs = at<uint32_t>(d, d.rank, d.at.token_begin);
  uint32_t* const token_rows = token_pairs + d.at.max_tokens + 1;
  for (uint32_t t = threadIdx.x; t <= tokens; t += blockDim.x) {
    token_pairs[first + t] = first_pair[t];
    token_rows[first + t] = first_row[t];
  }
  if (good && !stopped(d)) {
    PairEntry* const out = pairs(d, d.rank, op.half);
    const uint32_t lane = threadIdx.x % kWarp;
    for (uint32_t t = threadIdx.x / kWarp; t < tokens; t += kWarps) {
      const Mask bit = Mask{1} << t;
      visit_experts(r, first + t, lane, [&](long long expert, uint32_t column) {
        // How many experts of the token are lower: whole ranks first, then inside the rank.
        const uint32_t to = static_cast<uint32_t>(expert) / d.experts_per_rank;
        uint32_t lower = 0;
        for (uint32_t rank = 0; rank < to; ++rank) lower += own_pairs_to[t * ranks + rank];
        for (uint32_t e = to * d.experts_per_rank; e < expert; ++e) lower += (b.expert[e] & bit) != 0;
        const uint32_t position = expert_base[expert] + __popcll(b.expert[expert] & (bit - 1));
        out[first_pair[t] + lower] = {static_cast<uint16_t>(expert), static_cast<uint16_t>(column), position};
      });
      for (uint32_t to = lane; to < ranks; to += kWarp) {
        if ((b.destination[to] & bit) == 0) continue;
        uint32_t lower = 0, order = 0;
        for (uint32_t rank = 0; rank < to; ++rank) {
          lower += own_pairs_to[t * ranks + rank];
          order += own_pairs_to[t * ranks + rank] != 0;
        }
        list(d, d.rank, op.half, to)[row_base[to] + __popcll(b.destination[to] & (bit - 1))] = {
            first + t, first_pair[t] + lower, pairs_to[t * ranks + to],
            static_cast<uint16_t>(own_pairs_to[t * ranks + to]), static_cast<uint16_t>(order)};
      }
    }
  }
  if (last_block(d, Kernel::kExchange) && !stopped(d)) publish_all(d, d.at.header_full, op.epoch);
}

}  // namespace

cudaError_t launch_enter(const Domain& domain, const OpSignature& signature, uint32_t num_tokens, bool publish,
                         cudaStream_t stream) {
  enter<<<1, 64, 0, stream>>>(domain, signature, num_tokens, publish);
  return cudaGetLastError();
}

cudaError_t launch_exchange(const Domain& domain, const DeviceRouting& routing, cudaStream_t stream) {
  const uint32_t blocks = (routing.num_tokens + kTokensPerBlock - 1) / kTokensPerBlock;
  const uint32_t ranks = domain.at.num_ranks;
  const uint32_t bytes = BlockRouting::bytes(domain.at.num_experts, ranks);
  const uint32_t route_bytes = bytes + 4 * (domain.at.num_experts + 2 * ranks + kTokensPerBlock * ranks);
  cudaError_t status =
      cudaFuncSetAttribute(route, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(route_bytes));
  if (status == cudaSuccess)
    status = cudaFuncSetAttribute(count, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status != cudaSuccess) return status;
  if (blocks > 0) count<<<blocks, kThreads, bytes, stream>>>(domain, routing);
  const uint32_t grid = max(blocks, 1u);  // somebody has to publish
  route<<<grid, kThreads, route_bytes, stream>>>(domain, routing, blocks);
  return cudaGetLastError();
}

cudaError_t load_exchange() { return load_all(enter, count, route); }

}  // namespace uccl_ep::cuda
