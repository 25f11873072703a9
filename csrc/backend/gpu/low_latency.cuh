// What the low-latency kernels share: numbers of operations, headers, and the beginning and end of their two halves.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/low_latency.h"
#include "backend/gpu/masks.cuh"
#include "backend/gpu/write_row.cuh"

namespace uccl_ep::gpu {

constexpr uint32_t kSlotWarps = warps_by_lanes(16, 8);
constexpr uint32_t kSlotThreads = kSlotWarps * kWarp;
enum class SlotKind : uint32_t { kDispatch, kCombine };

// In shared memory, by warp: where it writes a row.
constexpr uint32_t kSlotPlaces = 32;
struct SlotPlaces {
  uint8_t* of[kSlotWarps][kSlotPlaces];
};

// The context of a crew: as Kernel, without a plan.
template <typename Args>
struct SlotKernel {
  const Group& g;
  const Args& args;
  const SlotKind kind;
  const Crew crew;
  uint64_t number;  // of the operation that it sends, or receives
  uint64_t masked;  // ranks that it does without, a bit each

  __device__ __forceinline__ bool is_masked(uint32_t rank) const { return (masked >> rank & 1) != 0; }
  __device__ __forceinline__ const LowLatencyMap& map() const { return g.map.low_latency; }
  __device__ __forceinline__ LowLatencyState& state() const { return local(g).low_latency; }
  __device__ __forceinline__ uint32_t half() const { return static_cast<uint32_t>(number % kHalves); }
  // This warp's number, of those of all blocks that do the same. Neighbours are in different blocks.
  __device__ __forceinline__ uint32_t warp() const { return blockIdx.x + gridDim.x * crew.warp(); }
  __device__ __forceinline__ uint32_t warps() const { return gridDim.x * crew.warps(); }
  // Of rank `from`, at rank `to`.
  __device__ __forceinline__ SlotHeader& header(uint32_t to, uint32_t from) const {
    const uint32_t first = (static_cast<uint32_t>(kind) * kHalves + half()) * g.map.num_members;
    return at(g, to, map().headers)[first + from];
  }
  __device__ __forceinline__ int32_t* routing(uint32_t to, uint32_t from) const {
    return at(g, to, map().routing) + uint64_t{half() * g.map.num_members + from} * map().places();
  }
  __device__ __forceinline__ uint8_t* row(uint32_t to, uint32_t from, uint32_t token) const {
    const uint64_t index = uint64_t{half() * g.map.num_members + from} * map().tokens + token;
    return at(g, to, map().rows) + index * map().row_bytes;
  }
  __device__ __forceinline__ uint64_t pair_index(uint32_t place) const {
    return uint64_t{half()} * map().places() + place;
  }
  __device__ __forceinline__ uint8_t* pair(uint32_t to, uint32_t place) const {
    return at(g, to, map().pairs) + pair_index(place) * map().pair_bytes;
  }
};

// By every thread of a crew, first of all: begins to send or to receive the next operation.
template <typename Args>
__device__ __forceinline__ SlotKernel<Args> begin_slots(const Group& g, const Args& args, SlotKind kind,
                                                        const Crew& crew, bool sends) {
  const LowLatencyState& state = local(g).low_latency;
  const auto i = static_cast<uint32_t>(kind);
  const SlotKernel<Args> k{g, args, kind, crew, (sends ? state.sent[i] : state.received[i]) + 1, state.masked};
  if (blockIdx.x == 0 && threadIdx.x == 0) local(g).entered = kLowLatencyEpoch | k.number;
  return k;
}
// By a crew: waits until every member has read what we sent two operations ago.
template <typename Args, typename Of>
__device__ inline bool wait_free(SlotKernel<Args>& k, Part<DeviceFlag<Of>> read_by) {
  bool good = !stopped(k.g);
  for (uint32_t r = k.crew.thread; k.number > kHalves && r < k.g.map.num_ranks; r += k.crew.size) {
    const DeviceFlag<Of>* const flag = own_part(k.g, read_by) + r;
    if (!masks(k.g)) {
      good &= wait_flag(k.g, {flag, k.number - kHalves, r});
    } else if (!k.is_masked(r)) {
      const Came came = wait_live(k.g, &flag->value, k.number - kHalves);
      if (came == Came::kNo) or_global(&k.state().suspected, uint64_t{1} << r);
      good &= came != Came::kStopped;
    }
  }
  good = k.crew.all(good);
  if (masks(k.g)) k.masked |= device::load_past_l1(&k.state().suspected);
  return good;
}
// By a crew: calls put(to) for the block's share of the members, by all threads, which writes what they get before
// anything else; then publishes it with a header.
template <typename Args, typename Of, typename Put>
__device__ inline bool send_headers(const SlotKernel<Args>& k, Part<DeviceFlag<Of>> flags, Put put) {
  bool good = true;
  for (uint32_t i = blockIdx.x; i < k.g.map.num_ranks; i += gridDim.x) {
    const uint32_t to = rotated(k.g, i);
    if (k.is_masked(to)) continue;
    good &= k.crew.all(put(to));
    if (k.crew.thread != 0 || !good) continue;
    SlotHeader& header = k.header(to, k.g.rank);
    header.number = k.number;
    header.signature = k.args.signature;
    header.num_blocks = gridDim.x;
    header.num_refused = static_cast<uint32_t>(local(k.g).progress.num_refused);
    if constexpr (std::is_same_v<Args, SlotDispatchArgs>) header.num_tokens = k.args.stage.num_tokens;
    publish(at(k.g, to, flags) + k.g.rank, k.number);
  }
  return good;
}
// By a crew: waits until every member has entered, and block 0 compares their calls with ours.
template <typename Args, typename Of>
__device__ inline bool wait_headers(const SlotKernel<Args>& k, Part<DeviceFlag<Of>> flags) {
  bool good = !stopped(k.g);
  for (uint32_t r = k.crew.thread; r < k.g.map.num_ranks; r += k.crew.size) {
    if (k.is_masked(r)) continue;
    const bool counts = blockIdx.x == 0 && k.args.waited_nsec != nullptr;
    const uint64_t began = counts ? now_nsec() : 0;
    good &= wait_flag(k.g, {own_part(k.g, flags) + r, k.number, r});
    if (counts) k.args.waited_nsec[r] += static_cast<int64_t>(now_nsec() - began);
  }
  if (!k.crew.all(good)) return false;
  // Compared with what we sent: calls may have been refused since.
  const SlotHeader& ours = k.header(k.g.rank, k.g.rank);
  for (uint32_t r = k.crew.thread; blockIdx.x == 0 && r < k.g.map.num_ranks; r += k.crew.size) {
    const SlotHeader& theirs = k.header(k.g.rank, r);
    if (k.is_masked(r) || (theirs.signature == ours.signature && theirs.num_refused == ours.num_refused)) continue;
    report(k.g, {DeviceFault::kMismatch, ErrorKind::kRankMismatch, Step::kExchange, r, static_cast<int>(k.kind)});
    good = false;
  }
  return blockIdx.x != 0 || k.crew.all(good);
}
// By a crew, where ranks may be masked, before it receives: when all that others send has come, and all agree on who
// is masked. wait(gone) is called by block 0; it adds whom it misses. False: an error is known.
template <typename Args, typename Wait>
__device__ inline bool settle(SlotKernel<Args>& k, Wait wait) {
  if (!masks(k.g)) return true;
  __shared__ RankSet gone;
  LowLatencyState& state = k.state();
  const Crew crew = k.crew;
  DeviceFlag<SlotsSettled>* const settled = &state.settled[static_cast<uint32_t>(k.kind)];
  if (blockIdx.x != 0) {
    if (!crew.all(crew.thread != 0 || wait_block(k.g, settled, k.number))) return false;
    k.masked = device::load_past_l1(&state.masked);
    return true;
  }
  if (crew.thread == 0) gone.set(state.masked | device::load_past_l1(&state.suspected));
  crew.sync();
  if (!crew.all(wait(gone)) || !agree(k.g, crew, state.num_settled + 1, gone)) return false;
  crew.sync();
  k.masked = gone.all();
  if (crew.thread != 0) return true;
  state.masked = k.masked;
  state.suspected = 0;
  state.num_settled += 1;
  publish(settled, k.number);
  return true;
}
// By one thread: whether a rank that may be masked has published a number; adds the rank if it has not. False: an error
// is known.
template <typename Args, typename Of>
__device__ inline bool note_missing(const SlotKernel<Args>& k, const DeviceFlag<Of>* flag, uint32_t rank,
                                    RankSet& gone) {
  const Came came = wait_live(k.g, &flag->value, k.number);
  if (came == Came::kNo) gone.add(rank);
  return came != Came::kStopped;
}

// By one thread of a crew that has sent, or received, its share: the last one notes that the operation is over.
template <typename Args>
__device__ inline bool end_slots(const SlotKernel<Args>& k, Phase phase, uint64_t (&numbers)[2]) {
  if (!arrive_last(&local(k.g).arrived[static_cast<uint32_t>(phase)], gridDim.x)) return false;
  numbers[static_cast<uint32_t>(k.kind)] = k.number;
  return true;
}
// By a crew that has received its share: the last one tells all members that it has read what they sent.
template <typename Args, typename Of>
__device__ inline void end_receive(const SlotKernel<Args>& k, Phase phase, Part<DeviceFlag<Of>> read_by) {
  const Crew crew = k.crew;
  crew.sync();
  if (!crew.any(crew.thread == 0 && end_slots(k, phase, k.state().received))) return;
  for (uint32_t r = k.crew.thread; r < k.g.map.num_ranks; r += k.crew.size)
    publish(at(k.g, r, read_by) + k.g.rank, k.number);
}

}  // namespace uccl_ep::gpu
