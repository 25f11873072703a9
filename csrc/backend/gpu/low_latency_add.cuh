// Adding in a low-latency combine: what is added for a token, in which order, and where it lies.
#pragma once

#include "backend/gpu/low_latency_net.cuh"
#include "backend/gpu/numerics.cuh"

namespace uccl_ep::gpu {

constexpr uint32_t kVectors = 2;  // of a lane, that a warp sums at a time
constexpr uint32_t kPartBytes = kVectors * kWarp * 16;  // of a row
constexpr uint32_t kValues = kVectors * 8;
constexpr uint32_t kAhead = kArch.rows_ahead;

// Parts of a row, each of kPartBytes of BF16.
template <typename Combine>
__device__ __forceinline__ uint32_t parts_of(const Combine& k) {
  return (2 * k.args.hidden + kPartBytes - 1) / kPartBytes;
}

// What is added to a token's sum, one for each lane below `count`: pairs, by ascending number of the expert. Where a
// token's own rank sums, a domain that returns a row has the place of its first pair.
struct Addends {
  uint32_t count = 0;
  uint32_t row = 0;  // kOwnSlot with a slot, or where it is in our region
  float weight = 0;
  LaneMask ends = 0;  // those after which a rank's sum is complete
  LaneMask returned = 0;  // by other domains
  uint32_t domain = 0;  // that returns it
  bool folded = false;  // all ranks have folded
};
constexpr uint32_t kOwnSlot = 1u << 31;
constexpr uint32_t kRowUnit = 128;  // rows begin at multiples of it
static_assert(kRowUnit == 128);
__device__ __forceinline__ uint32_t row_at(const Group& g, const uint8_t* row) {
  return static_cast<uint32_t>(static_cast<uint64_t>(row - g.own) / kRowUnit);
}
__device__ __forceinline__ const uint8_t* row_of(const Group& g, const SlotCombineArgs& args, uint32_t row) {
  return (row & kOwnSlot) != 0 ? args.rows + uint64_t{row & ~kOwnSlot} * 2 * args.hidden
                               : g.own + uint64_t{row} * kRowUnit;
}
// Where a sum goes: kOwnToken with a token of ours, or a row of our region.
constexpr uint32_t kOwnToken = kOwnSlot;
__device__ __forceinline__ uint8_t* sum_at(const Group& g, const SlotCombineArgs& args, uint32_t sum) {
  return (sum & kOwnToken) != 0 ? args.out + uint64_t{sum & ~kOwnToken} * 2 * args.hidden
                                : g.own + uint64_t{sum} * kRowUnit;
}

template <uint32_t kNumber>
__device__ __forceinline__ void add_weighted(float (&sum)[8 * kNumber], const uint4 (&row)[kNumber], float weight) {
#pragma unroll
  for (uint32_t v = 0; v < kNumber; ++v) {
    const uint32_t words[4] = {row[v].x, row[v].y, row[v].z, row[v].w};
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      sum[v * 8 + 2 * w] += weight * __uint_as_float(words[w] << 16);
      sum[v * 8 + 2 * w + 1] += weight * __uint_as_float(words[w] & 0xFFFF0000u);
    }
  }
}
// The same of a returned row of fp32.
__device__ __forceinline__ void add_fp32(float (&sum)[kValues], const uint8_t* row, uint32_t vector, uint32_t vectors) {
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    if (vector + v * kWarp >= vectors) continue;
    const float* const values = reinterpret_cast<const float*>(row) + uint64_t{vector + v * kWarp} * 8;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) sum[v * 8 + i] += device::load_once(values + i);
  }
}

// Rounded to BF16. A NaN stays one, of whatever bits.
__device__ __forceinline__ void round_values(float (&values)[kValues]) {
#pragma unroll
  for (uint32_t i = 0; i < kValues; i += 2) {
    const uint32_t both = pack_finite_bf16(values[i], values[i + 1]);
    values[i] = __uint_as_float(both << 16);
    values[i + 1] = __uint_as_float(both & 0xFFFF0000u);
  }
}

__device__ __forceinline__ uint4 packed(const float* of) {
  return make_uint4(pack_bf16(of[0], of[1]), pack_bf16(of[2], of[3]), pack_bf16(of[4], of[5]), pack_bf16(of[6], of[7]));
}

// Rows, a lane each below `count`, as Addends has them.
struct LaneRows {
  uint32_t count, row;
  float weight;
};
struct SumPlace {
  uint32_t sum;  // sum_at()
  bool wide;  // in fp32, else BF16
};
// By a warp: a part of a sum. Experts of a rank are summed first and rounded to the wire, then ranks and what other
// domains return.
template <typename Combine>
__device__ __forceinline__ void sum_part(const Combine& k, const Addends& addends, const SumPlace& to, uint32_t part) {
  const Group& g = k.g;
  const SlotCombineArgs& args = k.args;
  const uint32_t lane = threadIdx.x % kWarp, begin = part * kVectors * kWarp, vectors = args.hidden / 8;
  const bool exact = args.signature.wire == Dtype::kFp32, wide = Combine::kNet && exact;
  const uint32_t count = addends.count;
  float of_rank[kValues] = {}, total[kValues] = {};
  const auto end_rank = [&] {
    if (!exact) round_values(of_rank);
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) {
      total[i] += of_rank[i];
      of_rank[i] = 0.0f;
    }
  };
#pragma unroll 1
  for (uint32_t first = 0; first < count; first += kAhead) {
    uint4 rows[kAhead][kVectors];
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u) {
      const uint32_t its = __shfl_sync(kFullWarp, addends.row, min(first + u, count - 1));
      const uint4* const row = reinterpret_cast<const uint4*>(row_of(g, args, its)) + begin + lane;
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v)
        rows[u][v] = first + u < count && begin + v * kWarp + lane < vectors ? device::load_once(row + v * kWarp)
                                                                             : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u) {
      const uint32_t from = min(first + u, count - 1);
      const float weight = __shfl_sync(kFullWarp, addends.weight, from);
      const uint32_t row = wide ? __shfl_sync(kFullWarp, addends.row, from) : 0;
      if (first + u >= count) continue;
      if (wide && (addends.returned >> from & 1) != 0)
        add_fp32(of_rank, row_of(g, args, row), begin + lane, vectors);
      else
        add_weighted(of_rank, rows[u], weight);
      if ((addends.ends >> from & 1) != 0) end_rank();
    }
  }
  uint8_t* const out = sum_at(g, args, to.sum);
#pragma unroll
  for (uint32_t v = 0; v < kVectors; ++v) {
    const uint32_t vector = begin + v * kWarp + lane;
    if (vector >= vectors) continue;
    const float* const of = total + v * 8;
    if (to.wide) {
      float4* const wide_out = reinterpret_cast<float4*>(out) + uint64_t{vector} * 2;
      wide_out[0] = make_float4(of[0], of[1], of[2], of[3]);
      wide_out[1] = make_float4(of[4], of[5], of[6], of[7]);
    } else {
      reinterpret_cast<uint4*>(out)[vector] = packed(of);
    }
  }
}

// By a warp: as sum_part(), of parts of one rank's rows, or of what ranks that fold have sent, which is rounded. Not
// inlined: a launch does the one and then the other, and has the code.
static __device__ __noinline__ void sum_rows(const Group& g, const SlotCombineArgs& args, const LaneRows of,
                                             uint8_t* out, uint32_t part, uint32_t end_part) {
  const uint32_t lane = threadIdx.x % kWarp, end = min(end_part * kVectors * kWarp, args.hidden / 8);
#pragma unroll 1
  for (uint32_t begin = part * kVectors * kWarp + lane; begin < end + lane; begin += kVectors * kWarp) {
    float sum[8 * kVectors] = {};
#pragma unroll 1
    for (uint32_t first = 0; first < of.count; first += kAhead) {
      uint4 rows[kAhead][kVectors];
#pragma unroll
      for (uint32_t u = 0; u < kAhead; ++u) {
        const uint32_t its = __shfl_sync(kFullWarp, of.row, min(first + u, of.count - 1));
        const uint4* const from = reinterpret_cast<const uint4*>(row_of(g, args, its)) + begin;
#pragma unroll
        for (uint32_t v = 0; v < kVectors; ++v)
          rows[u][v] = first + u < of.count && begin + v * kWarp < end ? device::load_once(from + v * kWarp)
                                                                       : make_uint4(0, 0, 0, 0);
      }
      // Those beyond the last add 0, which changes no sum that began with +0.
#pragma unroll
      for (uint32_t u = 0; u < kAhead; ++u) {
        const float its = __shfl_sync(kFullWarp, of.weight, min(first + u, of.count - 1));
        add_weighted(sum, rows[u], first + u < of.count ? its : 0.0f);
      }
    }
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      if (begin + v * kWarp < end) reinterpret_cast<uint4*>(out)[begin + v * kWarp] = packed(sum + v * 8);
    }
  }
}

}  // namespace uccl_ep::gpu
