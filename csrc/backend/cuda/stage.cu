// Stage: one pass over the hidden states, copied or quantised into our region, a flag per chunk of rows.
#include "backend/cuda/device.cuh"
#include "backend/cuda/numerics.cuh"
#include "backend/cuda/steps.h"

namespace uccl_ep::cuda {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / kWarp;

__device__ void copy_row(const uint4* from, uint4* to, uint32_t vectors, uint32_t lane) {
#pragma unroll 4
  for (uint32_t i = lane; i < vectors; i += kWarp) to[i] = from[i];
}

// A warp per row; 16 lanes hold one block of 128 values, 8 each.
__device__ void quantise_row(const uint4* from, uint8_t* to, uint32_t hidden, bool pow2, uint32_t lane) {
  float* const scales = reinterpret_cast<float*>(to + hidden);
  const uint32_t vectors = hidden / 8;
#pragma unroll 4
  for (uint32_t first = 0; first < vectors; first += kWarp) {
    const uint32_t i = first + lane;
    const bool inside = i < vectors;  // the same for all 16 lanes of a block
    const uint4 raw = inside ? from[i] : make_uint4(0, 0, 0, 0);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t most = 0;  // magnitudes of floats order like their bits
#pragma unroll
    for (uint32_t w : words) most = max(most, max(w & 0x7FFF, w >> 16 & 0x7FFF));
#pragma unroll
    for (uint32_t o = 8; o > 0; o /= 2) most = max(most, __shfl_xor_sync(kFullWarp, most, o));
    float scale = 1.0f;
    uint32_t codes[2];
    if (most >= kBf16Inf) {
      codes[0] = codes[1] = 0x01010101u * kE4m3Nan;
    } else if (most == 0) {
      // The signs of zeros.
      codes[0] = __byte_perm(words[0], words[1], 0x7531);
      codes[1] = __byte_perm(words[2], words[3], 0x7531);
    } else {
      const float amax = bf16_to_fp32(static_cast<uint16_t>(most));
      scale = pow2 ? pow2_scale(amax) : fp32_scale(amax);
      // The inverse of a power of two is exact.
      const float inverse = pow2 ? __uint_as_float((254u << 23) - __float_as_uint(scale)) : 0.0f;
      uint32_t packed[4];
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) {
        const float low = __uint_as_float(words[w] << 16), high = __uint_as_float(words[w] & 0xFFFF0000u);
        packed[w] =
            pow2 ? pack_e4m3(low * inverse, high * inverse) : pack_e4m3(__fdiv_rn(low, scale), __fdiv_rn(high, scale));
      }
      codes[0] = packed[0] | packed[1] << 16;
      codes[1] = packed[2] | packed[3] << 16;
    }
    if (!inside) continue;
    *reinterpret_cast<uint2*>(to + i * 8) = make_uint2(codes[0], codes[1]);
    if (lane % 16 == 0) scales[i / 16] = scale;
  }
}

// fp32 per pair, in the order of the plan.
__device__ void put_values(const Domain& d, const OpState& op, const PlanView& plan, const float* from) {
  float* const staged = values(d, d.rank, op.half);
  for (uint32_t p = blockIdx.x * blockDim.x + threadIdx.x; p < plan.sent_pairs; p += gridDim.x * blockDim.x)
    staged[p] = from[plan.pair_place[p]];
  if (last_block(d, Kernel::kStageValues) && !stopped(d)) publish_all(d, d.at.values_full, op.epoch);
}

__global__ void __launch_bounds__(kThreads, 1)
    stage(const __grid_constant__ Domain d, const StageArgs args, const PlanView plan) {
  const OpState op = local(d).op;
  if (stopped(d)) return;
  const uint64_t stride = wire_row_bytes(args.wire, args.hidden);
  const uint32_t in_vectors = args.hidden * dtype_bytes(args.dtype) / 16;
  uint8_t* const staged = rows(d, d.rank, op.half);
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t first = blockIdx.x * kRowsPerChunk; first < args.num_tokens; first += gridDim.x * kRowsPerChunk) {
    const uint32_t end = min(first + kRowsPerChunk, args.num_tokens);
    for (uint32_t t = first + threadIdx.x / kWarp; t < end; t += kWarps) {
      const uint4* const from = reinterpret_cast<const uint4*>(args.x) + uint64_t{t} * in_vectors;
      uint8_t* const to = staged + t * stride;
      if (args.wire == Dtype::kFp8)
        quantise_row(from, to, args.hidden, args.fp8_pow2, lane);
      else
        copy_row(from, reinterpret_cast<uint4*>(to), in_vectors, lane);
    }
    proxy_fence();
    __syncthreads();
    for (uint32_t r = threadIdx.x; r < d.at.num_ranks; r += blockDim.x) {
      __threadfence_system();
      publish_flag(rows_full(d, r, d.rank) + first / kRowsPerChunk, op.epoch);
    }
  }
  if (args.values != nullptr) put_values(d, op, plan, args.values);
}

__global__ void __launch_bounds__(kThreads, 1)
    stage_values(const __grid_constant__ Domain d, const PlanView plan, const float* from) {
  if (!stopped(d)) put_values(d, local(d).op, plan, from);
}

}  // namespace

cudaError_t launch_stage(const Domain& domain, const StageArgs& args, const PlanView& plan, uint32_t num_blocks,
                         cudaStream_t stream) {
  if (args.num_tokens == 0 && args.values == nullptr) return cudaSuccess;
  const uint32_t chunks = max(1u, (args.num_tokens + kRowsPerChunk - 1) / kRowsPerChunk);
  stage<<<min(chunks, num_blocks), kThreads, 0, stream>>>(domain, args, plan);
  return cudaGetLastError();
}

cudaError_t launch_stage_values(const Domain& domain, const PlanView& plan, const float* values, uint32_t num_sms,
                                cudaStream_t stream) {
  const uint32_t blocks = plan.sent_pairs / (4 * kThreads) + 1;
  stage_values<<<min(blocks, num_sms), kThreads, 0, stream>>>(domain, plan, values);
  return cudaGetLastError();
}

cudaError_t load_stage() { return load_all(stage, stage_values); }

}  // namespace uccl_ep::cuda
