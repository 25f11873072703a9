// What the kernels share: where things lie, crews of warps, flags between GPUs, waiting with deadlines.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/layout.h"
#include "backend/cuda/net.h"
#include "backend/cuda/packet.h"
#include "backend/cuda/patience.cuh"
#include "backend/cuda/trace.cuh"
#include "sync/device.cuh"

namespace uccl_ep::cuda {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

// ---- where things lie -----------------------------------------------------------------------------------------------
template <typename T>
__device__ __forceinline__ T* at(const Group& g, uint32_t rank, uint64_t offset) {
  return reinterpret_cast<T*>(g.base[rank] + offset);
}
__device__ __forceinline__ Local& local(const Group& g) { return *at<Local>(g, g.rank, g.map.local); }
__device__ __forceinline__ PlanScratch& scratch(const Group& g) {
  return *at<PlanScratch>(g, g.rank, g.map.plan_scratch);
}
__device__ __forceinline__ uint32_t* out_row_base(const Group& g) {
  return reinterpret_cast<uint32_t*>(&scratch(g) + 1);
}
__device__ __forceinline__ NetState& net_state(const Group& g) { return *at<NetState>(g, g.rank, g.map.net_state); }
__device__ __forceinline__ bool in_domain(const Group& g, uint32_t rank) {
  return g.net == nullptr || (rank >= g.first && rank < g.end);
}
__device__ __forceinline__ uint32_t own_domain(const Group& g) { return g.domain_of[g.rank]; }
// A rank's packet for us, and ours for a domain.
__device__ __forceinline__ uint8_t* packet(const Group& g, uint32_t source, uint64_t epoch) {
  const uint64_t half_begin = packet_half(epoch) * g.map.packet_bytes;
  if (in_domain(g, source)) return at<uint8_t>(g, source, g.map.packets + half_begin);
  const Net::From& from = g.net->from[source];
  return at<uint8_t>(g, from.holder, from.packets + half_begin);
}
__device__ __forceinline__ uint8_t* own_packet(const Group& g, uint32_t domain, uint64_t epoch) {
  const uint64_t half_begin = packet_half(epoch) * g.map.packet_bytes;
  return at<uint8_t>(g, g.rank, (domain == own_domain(g) ? g.map.packets : g.net->to[domain].packets) + half_begin);
}
__device__ __forceinline__ DeviceHeader& header(const Group& g, uint32_t rank, uint64_t epoch) {
  return *reinterpret_cast<DeviceHeader*>(packet(g, rank, epoch));
}
__device__ __forceinline__ uint8_t* rows(const Group& g, uint32_t rank, uint32_t half) {
  return at<uint8_t>(g, rank, g.map.rows) + uint64_t{half} * g.map.half_bytes;
}
__device__ __forceinline__ uint32_t max_token_blocks(const Group& g) { return g.map.max_tokens / kTokenBlock; }
// Rank `rank` in the memory of a member of its domain.
__device__ __forceinline__ uint64_t* member_flag(const Group& g, uint32_t owner, uint64_t flags, uint32_t rank) {
  return at<uint64_t>(g, owner, flags) + (rank - g.first);
}
__device__ __forceinline__ uint64_t* folded(const Group& g, uint32_t owner, uint32_t stream, uint32_t folder) {
  return at<uint64_t>(g, owner, g.map.folded) +
         (uint64_t{stream} * g.map.num_members + (folder - g.first)) * max_token_blocks(g);
}
__device__ __forceinline__ uint64_t* rows_full(const Group& g, uint32_t owner, uint32_t source) {
  return at<uint64_t>(g, owner, g.map.rows_full) + uint64_t{source - g.first} * (g.map.max_tokens / kRowGroup);
}
// Who has the rows of a rank for our domain, and as which stream it merges them.
__device__ __forceinline__ uint32_t holder_of(const Group& g, uint32_t source) {
  return in_domain(g, source) ? source : g.net->from[source].holder;
}
__device__ __forceinline__ uint32_t stream_of(const Group& g, uint32_t source) {
  return in_domain(g, source) ? 0 : g.net->from[source].stream;
}
// Blocks of this kernel that work; one more sees to the network where there are other domains.
__device__ __forceinline__ uint32_t workers(const Group& g) { return gridDim.x - (g.net != nullptr); }
// The source that comes `i`-th after this rank: ranks start at different peers, so that no link is crowded.
__device__ __forceinline__ uint32_t rotated(const Group& g, uint32_t i) {
  const uint32_t r = g.rank + 1 + i;
  return r < g.map.num_ranks ? r : r - g.map.num_ranks;
}

// ---- crews ----------------------------------------------------------------------------------------------------------
// Warps of a block that do the same thing, beside other crews of the block.
struct Crew {
  uint32_t id;      // of its barrier, 1 .. 15
  uint32_t size;    // threads
  uint32_t thread;  // this one

  // Warps `first` to `first + count` of the block.
  static __device__ __forceinline__ Crew of(uint32_t id, uint32_t first, uint32_t count) {
    return {id, count * kWarp, threadIdx.x - first * kWarp};
  }
  __device__ __forceinline__ uint32_t lane() const { return thread % kWarp; }
  __device__ __forceinline__ uint32_t warp() const { return thread / kWarp; }
  __device__ __forceinline__ uint32_t warps() const { return size / kWarp; }
  __device__ __forceinline__ void sync() const { ptx::barrier(id, size); }
  __device__ __forceinline__ bool all(bool good) const { return ptx::barrier_and(id, size, good); }
  __device__ __forceinline__ bool any(bool good) const { return !all(!good); }
};

__device__ __forceinline__ uint32_t warp_prefix(uint32_t value, uint32_t lane) {  // inclusive
#pragma unroll
  for (uint32_t o = 1; o < kWarp; o *= 2) {
    const uint32_t below = __shfl_up_sync(kFullWarp, value, o);
    if (lane >= o) value += below;
  }
  return value;
}
// By a crew: the sum of all threads' values, in thread 0.
__device__ inline uint64_t crew_sum(const Crew& crew, uint64_t value) {
  __shared__ unsigned long long sums[16];
  if (crew.thread == 0) sums[crew.id] = 0;
  for (uint32_t o = kWarp / 2; o > 0; o /= 2) value += __shfl_xor_sync(kFullWarp, value, o);
  crew.sync();
  if (crew.lane() == 0) add_shared(&sums[crew.id], value);
  crew.sync();
  return sums[crew.id];
}

// By every thread of a crew: the time from here to stop() counts as the step's, in one block.
struct StepClock {
  const Group& g;
  const Step step;
  const bool counts;
  uint64_t started = 0;

  __device__ StepClock(const Crew& crew, const Group& group, Step s, uint32_t block = 0)
      : g(group), step(s), counts(blockIdx.x == block && crew.thread == 0) {
    if (counts) started = now_nsec();
  }
  __device__ void stop() const {
    if (!counts) return;
    const uint64_t now = now_nsec();
    const uint32_t what = static_cast<uint32_t>(step);
    local(g).step_nsec[what] += now - started;
    if (g.trace != nullptr)
      note(g, {started, now, local(g).entered, 0, static_cast<uint32_t>(TraceKind::kKernelStep), what});
  }
};

// ---- operations -----------------------------------------------------------------------------------------------------
struct KernelOp {
  uint64_t epoch;
  uint64_t free_after;  // epoch whose "read" (dispatch) or "merged" (combine) it waits for
  uint32_t half;
};
// By every thread of a block of an operation's first kernel, before anything else. Every block works it out.
__device__ __forceinline__ KernelOp enter(const Group& g, OpKind kind) {
  const Progress& last = local(g).progress;
  const uint32_t half = static_cast<uint32_t>(last.num_dispatches % kHalves);
  const uint64_t free_after = kind == OpKind::kCombine ? last.last_combine : last.half_epoch[half];
  const KernelOp op{last.epoch + 1, free_after, half};
  if (threadIdx.x == 0) local(g).entered = op.epoch;
  __syncthreads();
  return op;
}
// By one thread, when all blocks have entered.
__device__ __forceinline__ void keep(const Group& g, const KernelOp& op, OpKind kind) {
  Progress& progress = local(g).progress;
  progress.epoch = op.epoch;
  if (kind == OpKind::kCombine) {
    progress.last_combine = op.epoch;
  } else {
    progress.half_epoch[op.half] = op.epoch;
    progress.num_dispatches += 1;
  }
}
// In a later kernel of a dispatch.
__device__ __forceinline__ KernelOp current_dispatch(const Group& g) {
  const Progress& progress = local(g).progress;
  return {progress.epoch, 0, static_cast<uint32_t>((progress.num_dispatches - 1) % kHalves)};
}

__device__ __forceinline__ bool stopped(const Group& g) { return read_flag(&local(g).stop) != 0; }
// By a crew, whose threads must all decide alike.
__device__ __forceinline__ bool going(const Crew& crew, const Group& g) {
  return crew.all(crew.thread != 0 || !stopped(g));
}

// The first fault of this rank; the host takes it from pinned memory and tells every rank.
__device__ inline void report(const Group& g, DeviceFault code, Step step, int peer, int chunk, uint64_t expected,
                              uint64_t seen, ErrorKind kind) {
  if (take_claim(&g.error->claim)) {
    HostError& e = *g.error;
    e.kind = static_cast<uint32_t>(kind);
    e.step = static_cast<uint32_t>(step);
    e.peer = peer;
    e.chunk = chunk;
    e.epoch = local(g).entered;
    e.num_refused = local(g).progress.num_refused;
    e.expected = expected;
    e.seen = seen;
    e.code = static_cast<uint32_t>(code);
    publish_flag(&e.published, 1);
  }
  publish_flag(&local(g).stop, 1);
}

// By one thread. False: an error is known (perhaps this wait's own deadline) and the kernel has to return.
__device__ inline bool wait_flag(const Group& g, const uint64_t* flag, uint64_t value, Step step, uint32_t peer,
                                 int chunk = -1, bool arrival = false) {
  if (read_flag(flag) >= value) return true;
  const KernelPatience patience;
  for (uint32_t looks = 1;; ++looks) {
    const uint64_t seen = peek_flag(flag);
    if (seen >= value) return read_flag(flag) >= value;
    if (looks % 64 != 0) continue;
    if (stopped(g)) return false;
    if (patience.over(g, local(g).patient_since, arrival)) {
      report(g, DeviceFault::kTimeout, step, static_cast<int>(peer), chunk, value, seen,
             arrival ? ErrorKind::kArrivalTimeout : ErrorKind::kProgressTimeout);
      return false;
    }
  }
}
// The same for a flag that gets to `value` when `peer` is in operation `epoch`, which it may not have entered yet.
__device__ inline bool wait_peer(const Group& g, const uint64_t* flag, uint64_t value, uint64_t epoch, Step step,
                                 uint32_t peer, int chunk) {
  if (read_flag(flag) >= value) return true;
  return wait_flag(g, at<uint64_t>(g, g.rank, g.map.header_full) + peer, epoch, Step::kExchange, peer, -1, true) &&
         wait_flag(g, flag, value, step, peer, chunk);
}
// The same, or only a look (kLooks).
template <bool kLooks>
__device__ __forceinline__ bool peer_came(const Group& g, const uint64_t* flag, uint64_t value, uint64_t epoch,
                                          Step step, uint32_t peer, int chunk) {
  if constexpr (kLooks) return peek_flag(flag) >= value && read_flag(flag) >= value;
  return wait_peer(g, flag, value, epoch, step, peer, chunk);
}
// By one thread, for what other blocks of this kernel do: they have the deadlines.
__device__ inline bool wait_block(const Group& g, const uint64_t* flag, uint64_t value) {
  for (uint32_t looks = 1; peek_flag(flag) < value; ++looks)
    if (looks % 64 == 0 && stopped(g)) return false;
  return read_flag(flag) >= value;
}
// By one thread, for what another crew of this block does, once. False: an error is known.
__device__ inline bool wait_shared(const Group& g, uint32_t* word) {
  for (uint32_t looks = 1; read_shared(word) == 0; ++looks) {
    if (looks % 64 == 0 && stopped(g)) return false;
    __nanosleep(50);
  }
  return true;
}
// By every thread of a crew, which has to decide together: flags of its share of the members.
__device__ inline bool wait_some_members(const Crew& crew, const Group& g, uint64_t flags, uint64_t value, Step step) {
  bool good = true;
  for (uint32_t r = g.first + crew.thread; r < g.end; r += crew.size)
    good &= wait_flag(g, member_flag(g, g.rank, flags, r), value, step, r);
  return good;
}
// By a crew: flags of every member.
__device__ inline bool wait_members(const Crew& crew, const Group& g, uint64_t flags, uint64_t value, Step step) {
  return crew.all(wait_some_members(crew, g, flags, value, step));
}
// By one thread: rank `r` has entered. One of all threads of a kernel counts how long that took.
__device__ inline bool wait_rank(const Group& g, uint64_t epoch, uint32_t r, bool counts) {
  const uint64_t* const flag = at<uint64_t>(g, g.rank, g.map.header_full) + r;
  if (read_flag(flag) >= epoch) return true;
  const uint64_t started = now_nsec();
  const bool good = wait_flag(g, flag, epoch, Step::kExchange, r, -1, true);
  if (counts) local(g).waited_nsec[r] += now_nsec() - started;
  return good;
}
// By one crew of a kernel: every rank has entered.
__device__ inline bool wait_entered(const Crew& crew, const Group& g, uint64_t epoch) {
  bool good = true;
  for (uint32_t r = crew.thread; r < g.map.num_ranks; r += crew.size) good &= wait_rank(g, epoch, r, true);
  return crew.all(good);
}
// By every thread of a crew, which has to decide together: the transport has let go of its share of our packets of two
// operations ago.
__device__ inline bool wait_some_packets_gone(const Crew& crew, const Group& g, uint64_t epoch) {
  bool good = true;
  if (g.net != nullptr && epoch > kHalves)
    for (uint32_t to = crew.thread; to < g.map.num_domains; to += crew.size)
      if (to != own_domain(g))
        good &= wait_flag(g, net_state(g).packets_gone + to, epoch - kHalves, Step::kShip, g.first_of[to]);
  return good;
}
__device__ inline bool wait_packets_gone(const Crew& crew, const Group& g, uint64_t epoch) {
  return crew.all(wait_some_packets_gone(crew, g, epoch));
}

enum class Phase : uint32_t {
  kCounted,
  kRouted,
  kRowsPlanned,
  kWeights,
  kHashed,
  kPlaced,
  kFolded,
  kMerged,
  kRelayed,
  kThrough
};
// By a crew of each of `num_blocks`, at the end of its work: true in the last, which publishes the writes of all.
__device__ inline bool last_block(const Crew& crew, const Group& g, Phase what, uint32_t num_blocks) {
  crew.sync();
  bool last = false;
  if (crew.thread == 0) last = arrive_last(&local(g).arrived[static_cast<uint32_t>(what)], num_blocks);
  return crew.any(last);
}

// By a crew: our flag at every member.
__device__ inline void publish_to_members(const Crew& crew, const Group& g, uint64_t flags, uint64_t value) {
  for (uint32_t r = g.first + crew.thread; r < g.end; r += crew.size)
    publish_flag(member_flag(g, r, flags, g.rank), value);
}
// By a crew: header_full or weights_full, at every member; the proxies tell the other domains.
__device__ inline void publish_packet(const Crew& crew, const Group& g, uint64_t flags, uint64_t epoch) {
  for (uint32_t r = g.first + crew.thread; r < g.end; r += crew.size)
    publish_flag(at<uint64_t>(g, r, flags) + g.rank, epoch);
}

// By a crew: after an error, outputs hold nothing but NaN (all ones in every dtype).
__device__ inline void fill_nan(const Crew& crew, void* to, uint64_t num_bytes) {
  for (uint64_t i = crew.thread; i < num_bytes / 4; i += crew.size) static_cast<uint32_t*>(to)[i] = 0xFFFFFFFFu;
}

// By a crew: the headers that tell what this rank has called, for every domain.
__device__ inline void write_headers(const Crew& crew, const Group& g, const KernelOp& op, const OpSignature& signature,
                                     uint32_t num_tokens) {
  for (uint32_t to = crew.thread; to < g.map.num_domains; to += crew.size) {
    DeviceHeader& h = *reinterpret_cast<DeviceHeader*>(own_packet(g, to, op.epoch));
    h.epoch = op.epoch;
    h.signature = signature;
    h.num_tokens = num_tokens;
    h.num_refused = static_cast<uint32_t>(local(g).progress.num_refused);
  }
}
// By one thread, when rank r has entered: whether with our signature, and after as many calls that it refused.
__device__ inline bool is_alike(const Group& g, uint64_t epoch, const OpSignature& own, uint32_t r) {
  const DeviceHeader& theirs = header(g, r, epoch);
  const uint32_t refused = theirs.num_refused;
  const OpSignature other = theirs.signature;  // a copy: loaded at once
  if (own.kind == other.kind && own.dtype == other.dtype && own.wire == other.wire && own.plan_use == other.plan_use &&
      own.hidden == other.hidden && own.with_weights == other.with_weights && own.fp8_pow2 == other.fp8_pow2 &&
      own.compact_width == other.compact_width && own.with_capacity == other.with_capacity &&
      own.expert_alignment == other.expert_alignment && own.plan_id == other.plan_id &&
      refused == static_cast<uint32_t>(local(g).progress.num_refused))
    return true;
  report(g, DeviceFault::kMismatch, Step::kPlan, static_cast<int>(r), -1, 0, 0, ErrorKind::kRankMismatch);
  return false;
}
// By a crew: all ranks have entered, and are alike.
__device__ inline bool all_alike(const Crew& crew, const Group& g, uint64_t epoch, const OpSignature& own) {
  if (!wait_entered(crew, g, epoch)) return false;
  bool good = true;
  for (uint32_t r = crew.thread; r < g.map.num_ranks; r += crew.size) good &= is_alike(g, epoch, own, r);
  return crew.all(good);
}

// Loads kernels on the current device and lets their blocks have `shared_bytes`. One that is loaded at its first launch
// may have to wait for kernels that run, and those for it (contract 12).
template <typename... Kernels>
cudaError_t load_all(uint32_t shared_bytes, Kernels... kernels) {
  cudaFuncAttributes attributes{};
  cudaError_t status = cudaSuccess;
  const auto load = [&](const auto kernel) {
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, kernel);
    const uint32_t free = shared_bytes - static_cast<uint32_t>(attributes.sharedSizeBytes);
    if (status == cudaSuccess)
      status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(free));
  };
  (load(kernels), ...);
  return status;
}

}  // namespace uccl_ep::cuda
