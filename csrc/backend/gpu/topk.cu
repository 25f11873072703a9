#include "backend/gpu/topk.h"

#include <algorithm>

#include "device/launch.cuh"
#include "sync/device.cuh"

namespace uccl_ep::gpu {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kBlockCounts = 1024;  // that a block adds up before it adds them to all; more go there at once

// The k-th expert of a token; num_experts: none.
__device__ __forceinline__ uint32_t expert_of(const TopkLayout& args, uint64_t token, uint32_t k) {
  const auto given = static_cast<uint64_t>(args.topk_idx[token * args.width + k]);
  return given < args.num_experts ? static_cast<uint32_t>(given) : args.num_experts;
}

// By a thread: calls add(i) for each count of a token.
template <typename Add>
__device__ __forceinline__ void count_token(const TopkLayout& args, uint64_t token, Add add) {
  const uint32_t of_rank = args.num_experts / args.num_ranks, of_node = of_rank * args.ranks_of_node;
  const uint32_t nodes = of_node == 0 ? 0 : args.num_experts / of_node;
  bool* const in_rank = args.in_rank + token * args.num_ranks;
#pragma unroll 1
  for (uint32_t r = 0; r < args.num_ranks; ++r) in_rank[r] = false;
#pragma unroll 1
  for (uint32_t k = 0; k < args.width; ++k) {
    const uint32_t expert = expert_of(args, token, k);
    if (expert == args.num_experts) continue;
    bool is_new = true, to_new_node = of_node != 0;
#pragma unroll 1
    for (uint32_t earlier = 0; earlier < k; ++earlier) {
      const uint32_t other = expert_of(args, token, earlier);
      if (other == args.num_experts) continue;
      is_new &= other != expert;
      to_new_node = to_new_node && other / of_node != expert / of_node;
    }
    const uint32_t rank = expert / of_rank;
    if (is_new) add(args.num_ranks + nodes + expert);
    if (to_new_node) add(args.num_ranks + expert / of_node);
    if (!in_rank[rank]) add(rank);
    in_rank[rank] = true;
  }
}

__global__ void __launch_bounds__(kThreads) topk_layout(const __grid_constant__ TopkLayout args, uint32_t num_counts) {
  __shared__ uint32_t sums[kBlockCounts];
  const bool fits = num_counts <= kBlockCounts;
  if (fits)
    for (uint32_t i = threadIdx.x; i < num_counts; i += kThreads) sums[i] = 0;
  __syncthreads();
  for (uint64_t token = blockIdx.x * kThreads + threadIdx.x; token < args.num_tokens; token += gridDim.x * kThreads)
    count_token(args, token, [&](uint32_t i) {
      if (fits)
        add_shared(&sums[i], 1);
      else
        add_global(&args.counts[i], 1);
    });
  __syncthreads();
  if (fits)
    for (uint32_t i = threadIdx.x; i < num_counts; i += kThreads)
      if (sums[i] != 0) add_global(&args.counts[i], sums[i]);
}

__global__ void __launch_bounds__(kThreads) topk_pack(const __grid_constant__ TopkPack args) {
  const uint32_t width = args.width, row_words = topk_words(width, args.weights != nullptr);
  const uint64_t all = uint64_t{args.num_rows} * row_words;
  for (uint64_t i = blockIdx.x * kThreads + threadIdx.x; i < all; i += gridDim.x * kThreads) {
    const uint64_t row = i / row_words;
    const uint32_t word = static_cast<uint32_t>(i % row_words), of_experts = word - 2,
                   of_weights = of_experts - 2 * width;
    uint32_t value = 0;
    if (word < 2) {
      value = word == 0 ? args.rank + 1 : static_cast<uint32_t>(row);
    } else if (of_experts < 2 * width) {
      const auto expert = static_cast<uint64_t>(args.topk_idx[row * width + of_experts / 2] + 1);
      value = static_cast<uint32_t>(of_experts % 2 == 0 ? expert : expert >> 32);
    } else if (of_weights < width) {
      value = args.weights[row * width + of_weights];
    }
    args.words[i] = value;
  }
}

__global__ void __launch_bounds__(kThreads) topk_unpack(const __grid_constant__ TopkUnpack args) {
  const uint32_t width = args.width;
  const uint64_t all = uint64_t{args.num_rows} * width;
  for (uint64_t i = blockIdx.x * kThreads + threadIdx.x; i < all; i += gridDim.x * kThreads) {
    const uint32_t k = static_cast<uint32_t>(i % width);
    const uint32_t* const row = args.words + i / width * args.row_words;
    const uint64_t number = (uint64_t{row[3 + 2 * k]} << 32 | row[2 + 2 * k]) - 1 - args.first_expert;
    const bool is_local = number < args.num_experts;
    args.experts[i] = is_local ? static_cast<int64_t>(number) : -1;
    if (args.weights != nullptr) args.weights[i] = is_local ? row[2 + 2 * width + k] : 0;
  }
}

template <typename Kernel, typename... Arguments>
Status launch_over(Kernel kernel, uint64_t elements, StreamHandle stream, const Arguments&... arguments) {
  constexpr uint64_t kMostBlocks = 1024;
  if (elements == 0) return Status{};
  const auto blocks = static_cast<uint32_t>(std::min((elements + kThreads - 1) / kThreads, kMostBlocks));
  launch_kernel(kernel, {blocks, kThreads, 0, stream}, arguments...);
  return launch_status();
}

}  // namespace

Status launch_topk(const TopkLayout& args, StreamHandle stream) {
  const uint32_t nodes = args.ranks_of_node == 0 ? 0 : args.num_ranks / args.ranks_of_node;
  return launch_over(topk_layout, args.num_tokens, stream, args, args.num_ranks + nodes + args.num_experts);
}

Status launch_topk(const TopkPack& args, StreamHandle stream) {
  return launch_over(topk_pack, uint64_t{args.num_rows} * topk_words(args.width, args.weights != nullptr), stream,
                     args);
}

Status launch_topk(const TopkUnpack& args, StreamHandle stream) {
  return launch_over(topk_unpack, uint64_t{args.num_rows} * args.width, stream, args);
}

Status load_topk(uint32_t) {
  Status status = load_kernel(topk_layout);
  if (status == Status{}) status = load_kernel(topk_pack);
  return status == Status{} ? load_kernel(topk_unpack) : status;
}

}  // namespace uccl_ep::gpu
