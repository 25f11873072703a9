// How work is divided: in which order rows come, and which warp takes which number.
#pragma once

#include "backend/gpu/device.cuh"

namespace uccl_ep::gpu {

// Rows of several sources in turn. Number n is row n / sources of the n % sources-th source, counted from the one after
// us. The sources are those of our domain (near_row()) or all others (far_row()).
struct SourceRow {
  uint32_t source, row;
};
__device__ __forceinline__ uint32_t num_near(const Group& g) { return g.end - g.first; }
__device__ __forceinline__ uint32_t num_far(const Group& g) { return has_net(g) ? g.map.num_ranks - num_near(g) : 0; }
__device__ __forceinline__ SourceRow near_row(const Group& g, uint32_t n) {
  const uint32_t next = g.rank + 1 + n % num_near(g);
  return {next < g.end ? next : next - num_near(g), n / num_near(g)};
}
__device__ __forceinline__ SourceRow far_row(const Group& g, uint32_t n) {
  const uint32_t next = (g.rank + n) % num_far(g);
  return {next < g.first ? next : next + num_near(g), n / num_far(g)};
}
// The most rows that one source has, in our domain and in the others.
struct MostRows {
  uint32_t near_one, far_one;
  __device__ __forceinline__ uint32_t near_sum(const Group& g) const { return near_one * num_near(g); }
  __device__ __forceinline__ uint32_t far_sum(const Group& g) const { return far_one * num_far(g); }
  // By a warp. Source s has `rows_of(s)` rows.
  template <typename RowsOf>
  __device__ __forceinline__ void find(const Group& g, RowsOf rows_of) {
    const uint32_t lane = threadIdx.x % kWarp;
    uint32_t near = 0, far = 0;
    for (uint32_t s = lane; s < g.map.num_ranks; s += kWarp) {
      uint32_t& most = in_domain(g, s) ? near : far;
      most = max(most, rows_of(s));
    }
    near = warp_max(near);
    far = warp_max(far);
    if (lane == 0) {
      near_one = near;
      far_one = far;
    }
  }
};
// The rows that a window brings from a source.
#pragma pack(push, 4)
struct SourceRows {
  uint32_t begin, end;  // rows of the window
  uint32_t all_end;     // rows of all windows
  uint32_t position;    // in the source's stream, of its first row in the window
  uint32_t slot;        // of another domain: slot of its first chunk in the ring
  uint64_t chunks;      // and how many chunks came before
};
#pragma pack(pop)
static_assert(sizeof(SourceRows) == kSourceEntryBytes);
// Of all sources; in shared memory.
struct Arrivals {
  MostRows most;
  uint32_t window, num_windows;
  static __device__ __forceinline__ SourceRows& of(const Group& g, uint32_t source) {
    return shared_table<SourceRows>(g, 0)[source];
  }
};

// Warps that share sources, streams or domains. Of a few, several warps take the elements of one side by side; of many,
// a warp takes some in turn. No warp walks through all, because each is a chain of loads.
struct Spread {
  uint32_t warp, warps;

  static __device__ __forceinline__ Spread over(const Crew& crew, uint32_t blocks) {
    return {crew.warp() * blocks + blockIdx.x, crew.warps() * blocks};
  }
  // Calls visit(i, first, step) for this warp's share of `count`: its lanes take elements first, first + step, ... of
  // the i-th.
  template <typename Visit>
  __device__ __forceinline__ void each(uint32_t count, Visit visit) const {
    const uint32_t parts = max(warps / max(count, 1), 1);
#pragma unroll 1
    for (uint32_t u = warp; u < count * parts; u += warps)
      visit(u / parts, u % parts * kWarp + threadIdx.x % kWarp, parts * kWarp);
  }
  // The same of parts that lie behind each other, the i-th with size_of(i) elements: visit(i, begin, first, step).
  // Returns the end of the last part.
  template <typename SizeOf, typename Visit>
  __device__ __forceinline__ uint32_t each_behind(uint32_t count, SizeOf size_of, Visit visit) const {
    const uint32_t lane = threadIdx.x % kWarp, parts = max(warps / max(count, 1), 1);
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t batch = 0; batch < count; batch += kWarp) {
      const uint32_t size = batch + lane < count ? size_of(batch + lane) : 0, end = before + warp_prefix(size, lane);
#pragma unroll 1
      for (uint32_t i = 0; i < min(kWarp, count - batch); ++i) {
        const uint32_t begin = __shfl_sync(kFullWarp, end - size, i);
        if (parts > 1 ? batch + i != warp / parts : (batch + i) % warps != warp) continue;
        visit(batch + i, begin, warp % parts * kWarp + lane, parts * kWarp);
      }
      before = __shfl_sync(kFullWarp, end, kWarp - 1);
    }
    return before;
  }
};

// Numbers of rows, some of them in parts. Warps work on the parts of a row side by side, because a row takes one warp
// ten microseconds. The first rows are in parts where another domain waits for the first chunk, or the last rows, for
// which all wait.
struct PartedRows {
  uint32_t num_parted = 0, parts = 1;  // segments of a row
  uint32_t first = 0;                  // the first row in parts, and the number of its first part

  __device__ __forceinline__ uint32_t end(uint32_t rows) const { return rows + min(num_parted, rows) * (parts - 1); }
  __device__ __forceinline__ bool is_part(uint32_t n) const { return n - first < num_parted * parts; }
  __device__ __forceinline__ uint32_t row(uint32_t n) const {
    if (is_part(n)) return first + (n - first) / parts;
    return n < first ? n : n - num_parted * (parts - 1);
  }
  __device__ __forceinline__ uint32_t part(uint32_t n) const { return is_part(n) ? (n - first) % parts + 1 : 0; }
  // How many parts a sum adds to a counter of parts.
  __device__ __forceinline__ uint32_t num_parts_of(bool is_part) const { return is_part ? 1 : parts; }
};

// How many numbers are dealt out to warps in advance: `eighths` of them, but all if there are fewer than `least` for
// each warp.
struct Dealing {
  uint32_t least, eighths = kMostEighths;

  static constexpr uint32_t kMostEighths = 6;
  // To each warp.
  __device__ __forceinline__ uint32_t share(uint32_t end, uint32_t warps) const { return end / warps * eighths / 8; }
  __device__ __forceinline__ uint32_t dealt(uint32_t end, uint32_t warps) const {
    return end / warps < least ? end : share(end, warps) * warps;
  }
};
// The number of warp `warp` of this block among the warps of `blocks` blocks. It is also the first number that is dealt
// out to it. Neighbouring numbers are rows of different peers: warps of a block get different ones, so that every SM
// reads from all peers or writes to all.
__device__ __forceinline__ uint32_t turn_of(uint32_t warp, uint32_t blocks) {
  return warp * blocks + (blockIdx.x + warp) % blocks;
}
// Numbers 0 .. end in the order in which they are wanted. Most are dealt out to the warps of a kernel, number by
// number. Warps that have finished claim the rest, because some numbers take longer than others. They claim a few at
// a time and the last ones one by one, so that no warp still has several when the others have none.
enum class SharedWork : uint32_t { kPlaced, kFolded, kMerged, kRelayed };
// `half`: of the window.
__device__ __forceinline__ DeviceCounter<SharesTaken>& share_counter(const Group& g, SharedWork what, uint32_t half) {
  return local(g).next_share[half][static_cast<uint32_t>(what)];
}
class Shares {
 public:
  // By a warp, number `first` of `warps` that begin together; for one that joins them later `first` is kJoins.
  __device__ Shares(DeviceCounter<SharesTaken>& counter, uint32_t end, uint32_t first, uint32_t warps, Dealing dealing)
      : end_(end),
        dealt_(dealing.dealt(end, warps)),
        step_(warps),
        log_few_(end / warps < 32   ? 0
                 : end / warps < 64 ? 1
                                    : 2),
        counter_(&counter),
        next_(first) {
    claim();
  }
  static constexpr uint32_t kJoins = 0xFFFFFFFFu;

  // A number for each lane, or `end`. False: there are no more.
  __device__ __forceinline__ bool next(uint32_t& number, uint32_t lane) {
    if (next_ < dealt_) {
      number = next_ + lane * step_;
      if (number >= dealt_) number = end_;
      next_ += kWarp * step_;
      return true;
    }
    // The last two for each warp are claimed one by one. Worked out here, because no registers are left to keep it.
    const uint32_t rest = end_ - dealt_, fews = rest > 2 * step_ ? (rest - 2 * step_) >> log_few_ : 0;
    const uint32_t turn = __shfl_sync(kFullWarp, claimed_, 0), earlier = min(turn, fews);
    const uint32_t first = dealt_ + (earlier << log_few_) + (turn - earlier);
    if (first >= end_) return false;
    claim();
    number = lane < (turn < fews ? 1u << log_few_ : 1) ? first + lane : end_;
    return true;
  }

 private:
  // Claims in advance, so that no warp waits for the counter.
  __device__ __forceinline__ void claim() {
    if (dealt_ < end_ && threadIdx.x % kWarp == 0) claimed_ = take_numbers(counter_, 1);
  }
  const uint32_t end_, dealt_, step_, log_few_;
  DeviceCounter<SharesTaken>* const counter_;
  uint32_t next_, claimed_ = 0;
};
// By one thread, when all blocks are through with a window.
__device__ __forceinline__ void reset_shares(const Group& g, SharedWork what, uint32_t half) {
  share_counter(g, what, half).value = 0;
}

}  // namespace uccl_ep::gpu
