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
__device__ __forceinline__ T* at(const Domain& d, uint32_t rank, uint64_t offset) {
  return reinterpret_cast<T*>(d.base[rank] + offset);
}
__device__ __forceinline__ Local& local(const Domain& d) { return *at<Local>(d, d.rank, d.at.local); }
__device__ __forceinline__ PlanScratch& scratch(const Domain& d) {
  return *at<PlanScratch>(d, d.rank, d.at.plan_scratch);
}
__device__ __forceinline__ uint32_t* slot_base(const Domain& d) { return reinterpret_cast<uint32_t*>(&scratch(d) + 1); }
__device__ __forceinline__ NetState& net_state(const Domain& d) { return *at<NetState>(d, d.rank, d.at.net_state); }
__device__ __forceinline__ bool in_domain(const Domain& d, uint32_t rank) {
  return d.net == nullptr || (rank >= d.first && rank < d.end);
}
__device__ __forceinline__ uint32_t own_domain(const Domain& d) { return d.domain_of[d.rank]; }
// A rank's packet for us, and ours for a domain.
__device__ __forceinline__ uint8_t* packet(const Domain& d, uint32_t source, uint64_t epoch) {
  const uint64_t slot = packet_slot(epoch) * d.at.packet_bytes;
  if (in_domain(d, source)) return at<uint8_t>(d, source, d.at.packets + slot);
  const Net::From& from = d.net->from[source];
  return at<uint8_t>(d, from.holder, from.packets + slot);
}
__device__ __forceinline__ uint8_t* own_packet(const Domain& d, uint32_t domain, uint64_t epoch) {
  const uint64_t slot = packet_slot(epoch) * d.at.packet_bytes;
  return at<uint8_t>(d, d.rank, (domain == own_domain(d) ? d.at.packets : d.net->to[domain].packets) + slot);
}
__device__ __forceinline__ DeviceHeader& header(const Domain& d, uint32_t rank, uint64_t epoch) {
  return *reinterpret_cast<DeviceHeader*>(packet(d, rank, epoch));
}
__device__ __forceinline__ uint8_t* rows(const Domain& d, uint32_t rank, uint32_t half) {
  return at<uint8_t>(d, rank, d.at.rows) + uint64_t{half} * d.at.half_bytes;
}
__device__ __forceinline__ uint32_t max_chunks(const Domain& d) { return d.at.max_tokens / kChunkTokens; }
// Rank `rank` in the memory of a member of its domain.
__device__ __forceinline__ uint64_t* member_flag(const Domain& d, uint32_t owner, uint64_t flags, uint32_t rank) {
  return at<uint64_t>(d, owner, flags) + (rank - d.first);
}
__device__ __forceinline__ uint64_t* folded(const Domain& d, uint32_t owner, uint32_t stream, uint32_t folder) {
  return at<uint64_t>(d, owner, d.at.folded) +
         (uint64_t{stream} * d.at.num_members + (folder - d.first)) * max_chunks(d);
}
__device__ __forceinline__ uint64_t* rows_full(const Domain& d, uint32_t owner, uint32_t source) {
  return at<uint64_t>(d, owner, d.at.rows_full) + uint64_t{source - d.first} * (d.at.max_tokens / kStageRows);
}
// Who has the rows of a rank for our domain, and as which stream it merges them.
__device__ __forceinline__ uint32_t holder_of(const Domain& d, uint32_t source) {
  return in_domain(d, source) ? source : d.net->from[source].holder;
}
__device__ __forceinline__ uint32_t stream_of(const Domain& d, uint32_t source) {
  return in_domain(d, source) ? 0 : d.net->from[source].stream;
}
// Blocks of this kernel that work; one more sees to the network where there are other domains.
__device__ __forceinline__ uint32_t workers(const Domain& d) { return gridDim.x - (d.net != nullptr); }
// The source that comes `i`-th after this rank: ranks start at different peers, so that no link is crowded.
__device__ __forceinline__ uint32_t rotated(const Domain& d, uint32_t i) {
  const uint32_t r = d.rank + 1 + i;
  return r < d.at.num_ranks ? r : r - d.at.num_ranks;
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
  const Domain& d;
  const Step step;
  const bool counts;
  uint64_t started = 0;

  __device__ StepClock(const Crew& crew, const Domain& domain, Step s, uint32_t block = 0)
      : d(domain), step(s), counts(blockIdx.x == block && crew.thread == 0) {
    if (counts) started = now_nsec();
  }
  __device__ void stop() const {
    if (!counts) return;
    const uint64_t now = now_nsec();
    const uint32_t what = static_cast<uint32_t>(step);
    local(d).step_nsec[what] += now - started;
    if (d.trace != nullptr)
      note(d, {started, now, local(d).entered, 0, static_cast<uint32_t>(TraceKind::kKernelStep), what});
  }
};

// ---- operations -----------------------------------------------------------------------------------------------------
struct Op {
  uint64_t epoch;
  uint64_t free_after;  // epoch whose "read" (dispatch) or "merged" (combine) it waits for
  uint32_t half;
};
// By every thread of a block of an operation's first kernel, before anything else. Every block works it out.
__device__ __forceinline__ Op enter(const Domain& d, OpKind kind) {
  const Progress& last = local(d).progress;
  const uint32_t half = static_cast<uint32_t>(last.num_dispatches % kHalves);
  const uint64_t free_after = kind == OpKind::kCombine ? last.last_combine : last.half_epoch[half];
  const Op op{last.epoch + 1, free_after, half};
  if (threadIdx.x == 0) local(d).entered = op.epoch;
  __syncthreads();
  return op;
}
// By one thread, when all blocks have entered.
__device__ __forceinline__ void keep(const Domain& d, const Op& op, OpKind kind) {
  Progress& progress = local(d).progress;
  progress.epoch = op.epoch;
  if (kind == OpKind::kCombine) {
    progress.last_combine = op.epoch;
  } else {
    progress.half_epoch[op.half] = op.epoch;
    progress.num_dispatches += 1;
  }
}
// In a later kernel of a dispatch.
__device__ __forceinline__ Op current_dispatch(const Domain& d) {
  const Progress& progress = local(d).progress;
  return {progress.epoch, 0, static_cast<uint32_t>((progress.num_dispatches - 1) % kHalves)};
}

__device__ __forceinline__ bool stopped(const Domain& d) { return read_flag(&local(d).stop) != 0; }
// By a crew, whose threads must all decide alike.
__device__ __forceinline__ bool going(const Crew& crew, const Domain& d) {
  return crew.all(crew.thread != 0 || !stopped(d));
}

// The first fault of this rank; the host takes it from pinned memory and tells every rank.
__device__ inline void report(const Domain& d, DeviceFault code, Step step, int peer, int chunk, uint64_t expected,
                              uint64_t seen, ErrorKind kind) {
  if (take_claim(&d.error->claim)) {
    HostError& e = *d.error;
    e.kind = static_cast<uint32_t>(kind);
    e.step = static_cast<uint32_t>(step);
    e.peer = peer;
    e.chunk = chunk;
    e.epoch = local(d).entered;
    e.num_refused = local(d).progress.num_refused;
    e.expected = expected;
    e.seen = seen;
    e.code = static_cast<uint32_t>(code);
    publish_flag(&e.published, 1);
  }
  publish_flag(&local(d).stop, 1);
}

// By one thread. False: an error is known (perhaps this wait's own deadline) and the kernel has to return.
__device__ inline bool wait_flag(const Domain& d, const uint64_t* flag, uint64_t value, Step step, uint32_t peer,
                                 int chunk = -1, bool arrival = false) {
  if (read_flag(flag) >= value) return true;
  const Patience patience;
  for (uint32_t looks = 1;; ++looks) {
    const uint64_t seen = peek_flag(flag);
    if (seen >= value) return read_flag(flag) >= value;
    if (looks % 64 != 0) continue;
    if (stopped(d)) return false;
    if (patience.over(d, local(d).patient_since, arrival)) {
      report(d, DeviceFault::kTimeout, step, static_cast<int>(peer), chunk, value, seen,
             arrival ? ErrorKind::kArrivalTimeout : ErrorKind::kProgressTimeout);
      return false;
    }
  }
}
// The same for a flag that gets to `value` when `peer` is in operation `epoch`, which it may not have entered yet.
__device__ inline bool wait_peer(const Domain& d, const uint64_t* flag, uint64_t value, uint64_t epoch, Step step,
                                 uint32_t peer, int chunk) {
  if (read_flag(flag) >= value) return true;
  return wait_flag(d, at<uint64_t>(d, d.rank, d.at.header_full) + peer, epoch, Step::kExchange, peer, -1, true) &&
         wait_flag(d, flag, value, step, peer, chunk);
}
// The same, or only a look (kLooks).
template <bool kLooks>
__device__ __forceinline__ bool peer_came(const Domain& d, const uint64_t* flag, uint64_t value, uint64_t epoch,
                                          Step step, uint32_t peer, int chunk) {
  if constexpr (kLooks) return peek_flag(flag) >= value && read_flag(flag) >= value;
  return wait_peer(d, flag, value, epoch, step, peer, chunk);
}
// By one thread, for what other blocks of this kernel do: they have the deadlines.
__device__ inline bool wait_block(const Domain& d, const uint64_t* flag, uint64_t value) {
  for (uint32_t looks = 1; peek_flag(flag) < value; ++looks)
    if (looks % 64 == 0 && stopped(d)) return false;
  return read_flag(flag) >= value;
}
// By one thread, for what another crew of this block does, once. False: an error is known.
__device__ inline bool wait_shared(const Domain& d, uint32_t* word) {
  for (uint32_t looks = 1; read_shared(word) == 0; ++looks) {
    if (looks % 64 == 0 && stopped(d)) return false;
    __nanosleep(50);
  }
  return true;
}
// By every thread of a crew, which has to decide together: flags of its share of the members.
__device__ inline bool wait_some_members(const Crew& crew, const Domain& d, uint64_t flags, uint64_t value, Step step) {
  bool good = true;
  for (uint32_t r = d.first + crew.thread; r < d.end; r += crew.size)
    good &= wait_flag(d, member_flag(d, d.rank, flags, r), value, step, r);
  return good;
}
// By a crew: flags of every member.
__device__ inline bool wait_members(const Crew& crew, const Domain& d, uint64_t flags, uint64_t value, Step step) {
  return crew.all(wait_some_members(crew, d, flags, value, step));
}
// By one thread: rank `r` has entered. One of all threads of a kernel counts how long that took.
__device__ inline bool wait_rank(const Domain& d, uint64_t epoch, uint32_t r, bool counts) {
  const uint64_t* const flag = at<uint64_t>(d, d.rank, d.at.header_full) + r;
  if (read_flag(flag) >= epoch) return true;
  const uint64_t started = now_nsec();
  const bool good = wait_flag(d, flag, epoch, Step::kExchange, r, -1, true);
  if (counts) local(d).waited_nsec[r] += now_nsec() - started;
  return good;
}
// By one crew of a kernel: every rank has entered.
__device__ inline bool wait_entered(const Crew& crew, const Domain& d, uint64_t epoch) {
  bool good = true;
  for (uint32_t r = crew.thread; r < d.at.num_ranks; r += crew.size) good &= wait_rank(d, epoch, r, true);
  return crew.all(good);
}
// By every thread of a crew, which has to decide together: the transport has let go of its share of our packets of two
// operations ago.
__device__ inline bool wait_some_packets_gone(const Crew& crew, const Domain& d, uint64_t epoch) {
  bool good = true;
  if (d.net != nullptr && epoch > kHalves)
    for (uint32_t to = crew.thread; to < d.at.num_domains; to += crew.size)
      if (to != own_domain(d))
        good &= wait_flag(d, net_state(d).packets_gone + to, epoch - kHalves, Step::kShip, d.first_of[to]);
  return good;
}
__device__ inline bool wait_packets_gone(const Crew& crew, const Domain& d, uint64_t epoch) {
  return crew.all(wait_some_packets_gone(crew, d, epoch));
}

enum class Arrival : uint32_t {
  kCounted,
  kRouted,
  kRowsPlanned,
  kValues,
  kHashed,
  kPlaced,
  kFolded,
  kMerged,
  kRelayed,
  kThrough
};
// By a crew of each of `num_blocks`, at the end of its work: true in the last, which publishes the writes of all.
__device__ inline bool last_block(const Crew& crew, const Domain& d, Arrival what, uint32_t num_blocks) {
  crew.sync();
  bool last = false;
  if (crew.thread == 0) last = arrive_last(&local(d).arrived[static_cast<uint32_t>(what)], num_blocks);
  return crew.any(last);
}

// By a crew: our flag at every member.
__device__ inline void publish_to_members(const Crew& crew, const Domain& d, uint64_t flags, uint64_t value) {
  for (uint32_t r = d.first + crew.thread; r < d.end; r += crew.size)
    publish_flag(member_flag(d, r, flags, d.rank), value);
}
// By a crew: header_full or values_full, at every member; the proxies tell the other domains.
__device__ inline void publish_packet(const Crew& crew, const Domain& d, uint64_t flags, uint64_t epoch) {
  for (uint32_t r = d.first + crew.thread; r < d.end; r += crew.size)
    publish_flag(at<uint64_t>(d, r, flags) + d.rank, epoch);
}

// By a crew: after an error, outputs hold nothing but NaN (all ones in every dtype).
__device__ inline void fill_nan(const Crew& crew, void* to, uint64_t num_bytes) {
  for (uint64_t i = crew.thread; i < num_bytes / 4; i += crew.size) static_cast<uint32_t*>(to)[i] = 0xFFFFFFFFu;
}

// By a crew: the headers that tell what this rank has called, for every domain.
__device__ inline void write_headers(const Crew& crew, const Domain& d, const Op& op, const OpSignature& signature,
                                     uint32_t num_tokens) {
  for (uint32_t to = crew.thread; to < d.at.num_domains; to += crew.size) {
    DeviceHeader& h = *reinterpret_cast<DeviceHeader*>(own_packet(d, to, op.epoch));
    h.epoch = op.epoch;
    h.signature = signature;
    h.num_tokens = num_tokens;
    h.num_refused = static_cast<uint32_t>(local(d).progress.num_refused);
  }
}
// By one thread, when rank r has entered: whether with our signature, and after as many calls that it refused.
__device__ inline bool is_alike(const Domain& d, uint64_t epoch, const OpSignature& own, uint32_t r) {
  const DeviceHeader& theirs = header(d, r, epoch);
  const uint32_t refused = theirs.num_refused;
  const OpSignature other = theirs.signature;  // a copy: loaded at once
  if (own.kind == other.kind && own.dtype == other.dtype && own.wire == other.wire && own.plan_use == other.plan_use &&
      own.hidden == other.hidden && own.with_values == other.with_values && own.fp8_pow2 == other.fp8_pow2 &&
      own.compact_width == other.compact_width && own.with_capacity == other.with_capacity &&
      own.expert_alignment == other.expert_alignment && own.plan_id == other.plan_id &&
      refused == static_cast<uint32_t>(local(d).progress.num_refused))
    return true;
  report(d, DeviceFault::kMismatch, Step::kPlan, static_cast<int>(r), -1, 0, 0, ErrorKind::kRankMismatch);
  return false;
}
// By a crew: all ranks have entered, and are alike.
__device__ inline bool all_alike(const Crew& crew, const Domain& d, uint64_t epoch, const OpSignature& own) {
  if (!wait_entered(crew, d, epoch)) return false;
  bool good = true;
  for (uint32_t r = crew.thread; r < d.at.num_ranks; r += crew.size) good &= is_alike(d, epoch, own, r);
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
