// What the kernels share: flags between GPUs, waiting with deadlines, errors.
#pragma once

#include "backend/gpu/kernel.cuh"
#include "backend/gpu/patience.cuh"
#include "backend/gpu/signals.cuh"
#include "backend/gpu/words.h"

namespace uccl_ep::gpu {

// Without order: who stops reads nothing that was written before.
__device__ __forceinline__ bool stopped(const Group& g) { return peek(&local(g).stop) != 0; }
// By a crew, whose threads must all decide alike.
__device__ __forceinline__ bool going(const Kernel& k) { return k.crew.all(k.crew.thread != 0 || !stopped(k.g)); }

// What an error record says.
struct FaultRecord {
  DeviceFault code;
  ErrorKind kind;
  Step step;
  uint32_t peer;
  int chunk = -1;
  uint64_t expected = 0, seen = 0;
};
// The first fault of this rank; the host takes it from pinned memory and tells every rank.
__device__ inline void report(const Group& g, const FaultRecord& fault) {
  if (take_claim(&g.error->claim)) {
    HostError& e = *g.error;
    e.kind = static_cast<uint32_t>(fault.kind);
    e.step = static_cast<uint32_t>(fault.step);
    e.peer = static_cast<int>(fault.peer);
    e.chunk = fault.chunk;
    e.epoch = local(g).entered;
    e.num_refused = local(g).progress.num_refused;
    e.expected = fault.expected;
    e.seen = fault.seen;
    e.code = static_cast<uint32_t>(fault.code);
    publish(&e.published, 1);
  }
  publish(&local(g).stop, 1);
}

// A flag that has to reach `value`, and what an error names if it does not. The step is that of the flag's declaration
// unless another is given.
struct Awaited {
  const uint64_t* flag;
  uint64_t value;
  uint32_t peer;
  int chunk;
  Step step;
  bool is_arrival;  // the deadline is that of a rank's entry

  template <typename Of>
  __device__ __forceinline__ Awaited(const DeviceFlag<Of>* of, uint64_t v, uint32_t p, int c = -1,
                                     Step s = Of::kIs.step)
      : flag(&of->value), value(v), peer(p), chunk(c), step(s), is_arrival(Of::kIs.deadline == Deadline::kArrival) {
    static_assert(Of::kIs.deadline == Deadline::kArrival || Of::kIs.deadline == Deadline::kProgress);
  }
};
__device__ __forceinline__ bool has_come(const Awaited& what) { return read_flag(what.flag) >= what.value; }
// By one thread. False: an error is known (perhaps this wait's own deadline) and the kernel has to return.
__device__ inline bool wait_flag(const Group& g, const Awaited& what) {
  if (has_come(what)) return true;
  const KernelPatience patience;
  for (uint32_t looks = 1;; ++looks) {
    const uint64_t seen = peek_flag(what.flag);
    if (seen >= what.value) return has_come(what);
    if (looks % 64 != 0) continue;
    if (stopped(g)) return false;
    if (patience.over(g, local(g).patient_since, what.is_arrival)) {
      report(g, {DeviceFault::kTimeout, what.is_arrival ? ErrorKind::kArrivalTimeout : ErrorKind::kProgressTimeout,
                 what.step, what.peer, what.chunk, what.value, seen});
      return false;
    }
  }
}
__device__ __forceinline__ Awaited entry_of(const Group& g, uint32_t rank, uint64_t epoch) {
  return {own_part(g, g.map.header_full) + rank, epoch, rank};
}
// As wait_flag(), for a flag that a peer publishes in this operation. The peer may not have entered the operation yet.
__device__ inline bool wait_peer(const Kernel& k, const Awaited& what) {
  if (has_come(what)) return true;
  return wait_flag(k.g, entry_of(k.g, what.peer, k.op.epoch)) && wait_flag(k.g, what);
}
// As wait_peer(); with kLooks it only looks.
template <bool kLooks>
__device__ __forceinline__ bool peer_came(const Kernel& k, const Awaited& what) {
  if constexpr (kLooks) return peek_flag(what.flag) >= what.value && has_come(what);
  return wait_peer(k, what);
}
// By one thread: waits for other blocks of this kernel. It has no deadline, because those blocks have theirs.
template <typename Of>
__device__ inline bool wait_block(const Group& g, const DeviceFlag<Of>* flag, uint64_t value) {
  static_assert(Of::kIs.deadline == Deadline::kBlocks);
  for (uint32_t looks = 1; peek(flag) < value; ++looks)
    if (looks % 64 == 0 && stopped(g)) return false;
  return read(flag) >= value;
}
// By one thread: waits for another crew of this block, which sets the word once. False: an error is known.
__device__ inline bool wait_shared(const Group& g, uint32_t* word) {
  for (uint32_t looks = 1; read_shared(word) == 0; ++looks) {
    if (looks % 64 == 0 && stopped(g)) return false;
    device::pause_nsec(50);
  }
  return true;
}
// By every thread of a crew: waits for the flags of its share of the members. The crew has to combine the results.
template <typename Of>
__device__ inline bool wait_some_members(const Kernel& k, Part<DeviceFlag<Of>> flags, uint64_t value,
                                         Step step = Of::kIs.step) {
  bool good = true;
  for (uint32_t r = k.g.first + k.crew.thread; r < k.g.end; r += k.crew.size)
    good &= wait_flag(k.g, {member_flag(k.g, k.g.rank, flags, r), value, r, -1, step});
  return good;
}
// By a crew: waits for the flags of all members.
template <typename Of>
__device__ inline bool wait_members(const Kernel& k, Part<DeviceFlag<Of>> flags, uint64_t value) {
  return k.crew.all(wait_some_members(k, flags, value));
}
// By one thread: waits until rank `r` has entered. For each rank one thread of a kernel counts how long that took.
__device__ inline bool wait_rank(const Group& g, uint64_t epoch, uint32_t r, bool counts) {
  const Awaited entry = entry_of(g, r, epoch);
  if (has_come(entry)) return true;
  const uint64_t started = now_nsec();
  const bool good = wait_flag(g, entry);
  if (counts) own_part(g, g.map.waited_nsec)[r] += now_nsec() - started;
  return good;
}
// By one crew of a kernel: waits until every rank has entered.
__device__ inline bool wait_entered(const Kernel& k) {
  bool good = true;
  for (uint32_t r = k.crew.thread; r < k.g.map.num_ranks; r += k.crew.size) good &= wait_rank(k.g, k.op.epoch, r, true);
  return k.crew.all(good);
}
// By every thread of a crew: waits until the transport no longer needs its share of our packets of two operations ago,
// nor of any tail. The crew has to combine the results. A tail leaves when its readers unpack it, which they do in the
// operation that it belongs to.
__device__ inline bool wait_some_packets_gone(const Kernel& k) {
  bool good = true;
  if (!has_net(k.g)) return good;
  const NetState& state = k.g.net_state;
  for (uint32_t to = k.crew.thread; to < k.g.map.num_domains; to += k.crew.size) {
    if (to == own_domain(k.g)) continue;
    if (k.op.epoch > kHalves)
      good &= wait_flag(k.g, {state.packets_gone + to, k.op.epoch - kHalves, first_of(k.g, to)});
    if (k.g.map.tail_slots > 0)
      good &= wait_flag(k.g, {state.tails_gone + to, state.tails_sent[to], first_of(k.g, to)});
  }
  return good;
}
__device__ inline bool wait_packets_gone(const Kernel& k) { return k.crew.all(wait_some_packets_gone(k)); }

enum class Phase : uint32_t {
  kCounted,
  kRouted,
  kRowsPlanned,
  kWeights,
  kHashed,
  kPlaced,
  kEvenFolded,  // by windows
  kOddFolded,
  kMerged,
  kEvenRelayed,
  kOddRelayed,
  kThrough,
  kEvenWindow,  // of an operation, but its last
  kOddWindow,
  kSlotsSent,
  kSlotsReceived,
  kPairsSent,
  kPairsReceived
};
static_assert(static_cast<uint32_t>(Phase::kPairsReceived) + 1 == kNumPhases);
// By a crew of each of `num_blocks` blocks, at the end of its work. True in the last block, which publishes the writes
// of all.
__device__ inline bool last_block(const Kernel& k, Phase what, uint32_t num_blocks) {
  k.crew.sync();
  bool last = false;
  if (k.crew.thread == 0) last = arrive_last(&local(k.g).arrived[static_cast<uint32_t>(what)], num_blocks);
  return k.crew.any(last);
}

// By a crew: publishes our flag at every member.
template <typename Of>
__device__ inline void publish_to_members(const Kernel& k, Part<DeviceFlag<Of>> flags, uint64_t value) {
  for (uint32_t r = k.g.first + k.crew.thread; r < k.g.end; r += k.crew.size)
    publish(member_flag(k.g, r, flags, k.g.rank), value);
  __syncwarp();  // lanes of this warp may wait for such a flag in this kernel
}
// By a crew: publishes header_full or weights_full at every member. The proxies tell the other domains.
template <typename Of>
__device__ inline void publish_packet(const Kernel& k, Part<DeviceFlag<Of>> flags) {
  for (uint32_t r = k.g.first + k.crew.thread; r < k.g.end; r += k.crew.size)
    publish(at(k.g, r, flags) + k.g.rank, k.op.epoch);
  __syncwarp();  // lanes of this warp will wait for what others of it publish here
}

// By a crew, after an error: fills an output with NaN (all ones in every dtype).
__device__ inline void fill_nan(const Crew& crew, void* to, uint64_t num_bytes) {
  for (uint64_t i = crew.thread; i < num_bytes / 4; i += crew.size) static_cast<uint32_t*>(to)[i] = 0xFFFFFFFFu;
}

// With a known plan: where our packet for another domain lies.
__device__ __forceinline__ uint32_t known_packet_unit(const Kernel& k, uint32_t to, bool with_weights) {
  return known_packet_unit(to, with_weights ? k.plan.pair_begin[first_of(k.g, to)] : 0);
}
// By the crew that writes the headers, before that: tells it, and whoever ships the packets.
__device__ inline void place_packets(const Kernel& k, bool with_weights) {
  if (!has_net(k.g)) return;
  for (uint32_t to = k.crew.thread; to < k.g.map.num_domains; to += k.crew.size)
    k.g.net_state.packet_unit[to] = known_packet_unit(k, to, with_weights);
  k.crew.sync();
}
// By a crew: writes the headers that tell every domain what this rank has called.
__device__ inline void write_headers(const Kernel& k, const OpSignature& signature, uint32_t num_tokens) {
  for (uint32_t to = k.crew.thread; to < k.g.map.num_domains; to += k.crew.size) {
    DeviceHeader& h = *reinterpret_cast<DeviceHeader*>(own_packet(k.g, to, k.op.epoch));
    h.epoch = k.op.epoch;
    h.signature = signature;
    h.num_tokens = num_tokens;
    h.num_refused = static_cast<uint32_t>(local(k.g).progress.num_refused);
  }
}
// By one thread, after rank r has entered: whether its call has our signature, and whether it has refused as many calls
// as we have.
__device__ inline bool is_alike(const Group& g, uint64_t epoch, const OpSignature& own, uint32_t r) {
  const DeviceHeader& theirs = header(g, r, epoch);
  const uint32_t refused = theirs.num_refused;
  const OpSignature other = theirs.signature;  // a copy: loaded at once
  if (own == other && refused == static_cast<uint32_t>(local(g).progress.num_refused)) return true;
  report(g, {DeviceFault::kMismatch, ErrorKind::kRankMismatch, Step::kPlan, r});
  return false;
}
// By a crew: waits until all ranks have entered, and compares their calls with ours.
__device__ inline bool all_alike(const Kernel& k, const OpSignature& own) {
  if (!wait_entered(k)) return false;
  bool good = true;
  for (uint32_t r = k.crew.thread; r < k.g.map.num_ranks; r += k.crew.size) good &= is_alike(k.g, k.op.epoch, own, r);
  return k.crew.all(good);
}

}  // namespace uccl_ep::gpu
