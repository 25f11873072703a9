// What the low-latency kernels share: numbers of operations, headers, and the beginning and end of their two halves.
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/low_latency.h"
#include "backend/gpu/masks.cuh"
#include "backend/gpu/numerics.cuh"
#include "backend/gpu/tile.cuh"
#include "backend/gpu/write_row.cuh"

namespace uccl_ep::gpu {

constexpr uint32_t kSlotWarps = warps_by_lanes(16, 8);
constexpr uint32_t kSlotThreads = kSlotWarps * kWarp;
enum class SlotKind : uint32_t { kDispatch, kCombine };
constexpr uint32_t kNobody = 0xFFFFFFFF;  // no rank, or no domain

__device__ __forceinline__ uint32_t tokens_of(const SlotDispatchArgs& args) { return args.stage.num_tokens; }
__device__ __forceinline__ uint32_t tokens_of(const SlotCombineArgs& args) { return args.num_tokens; }

// In shared memory, by warp: where it writes a row.
constexpr uint32_t kSlotPlaces = 32;
struct SlotPlaces {
  uint8_t* of[kSlotWarps][kSlotPlaces];
};

// The context of a crew: as Kernel, without a plan. kNetwork: there are other domains.
template <typename Args, bool kNetwork>
struct SlotKernel {
  static constexpr bool kNet = kNetwork;
  const Group& g;
  const Args& args;
  const SlotKind kind;
  const Crew crew;
  uint64_t number;  // of the operation that it sends, or receives
  RankSet& masked;  // ranks that it does without; filled only where ranks may be masked

  // Ranks of our domain, and blocks that work.
  __device__ __forceinline__ uint32_t first() const { return kNet ? g.first : 0; }
  __device__ __forceinline__ uint32_t end() const { return kNet ? g.end : g.map.num_ranks; }
  __device__ __forceinline__ uint32_t members() const { return end() - first(); }
  __device__ __forceinline__ bool is_near(uint32_t rank) const { return !kNet || (rank >= g.first && rank < g.end); }
  __device__ __forceinline__ uint32_t workers() const { return gridDim.x - kNet; }
  // The `i`-th member of our domain after this rank.
  __device__ __forceinline__ uint32_t member_after(uint32_t i) const {
    const uint32_t r = g.rank + 1 + i;
    return r < end() ? r : r - members();
  }
  __device__ __forceinline__ bool is_masked(uint32_t rank) const { return masks(g) && masked.has(rank); }
  __device__ __forceinline__ const LowLatencyMap& map() const { return g.map.low_latency; }
  __device__ __forceinline__ LowLatencyState& state() const { return local(g).low_latency; }
  __device__ __forceinline__ uint32_t half() const { return static_cast<uint32_t>(number % kHalves); }
  // This warp's number, of those of all blocks that do the same. Neighbours are in different blocks.
  __device__ __forceinline__ uint32_t warp() const { return blockIdx.x + workers() * crew.warp(); }
  __device__ __forceinline__ uint32_t warps() const { return workers() * crew.warps(); }
  // Of rank `from`, at rank `to`.
  __device__ __forceinline__ SlotHeader& header(uint32_t to, uint32_t from) const {
    const uint32_t first = (static_cast<uint32_t>(kind) * kHalves + half()) * g.map.num_ranks;
    return at(g, to, map().headers)[first + from];
  }
  __device__ __forceinline__ int32_t* routing(uint32_t to, uint32_t from) const {
    return at(g, to, map().routing) + uint64_t{half() * g.map.num_ranks + from} * map().places();
  }
  __device__ __forceinline__ uint32_t* routed(uint32_t to, uint32_t from) const {
    return at(g, to, map().routed) + uint64_t{half() * g.map.num_ranks + from} * map().places();
  }
  __device__ __forceinline__ uint8_t* row(uint32_t to, uint32_t from, uint32_t token) const {
    const uint64_t index = uint64_t{half() * members() + (from - first())} * map().tokens + token;
    return at(g, to, map().rows) + index * map().row_bytes;
  }
  // Of a pair of the source whose stream the holder numbers so; of its own tokens 0.
  __device__ __forceinline__ uint64_t pair_index(uint32_t stream, uint32_t place) const {
    return uint64_t{half() * (kNet ? g.map.num_streams : 1) + stream} * map().places() + place;
  }
  __device__ __forceinline__ uint8_t* pair(uint32_t holder, uint32_t stream, uint32_t place) const {
    return at(g, holder, map().pairs) + pair_index(stream, place) * map().pair_bytes;
  }
  __device__ __forceinline__ uint32_t* weights(uint32_t to, uint32_t from) const {
    return at(g, to, map().weights) + uint64_t{half() * g.map.num_ranks + from} * map().places();
  }
  // The group's rank of a number, and the other way round.
  __device__ __forceinline__ uint32_t rank_of(uint32_t number) const { return kNet ? g.rank_of[number] : number; }
  __device__ __forceinline__ uint32_t number_of(uint32_t rank) const { return kNet ? g.number_of[rank] : rank; }
  __device__ __forceinline__ uint32_t domain_of(uint32_t number) const { return kNet ? g.domain_of[number] : 0; }
  __device__ __forceinline__ uint32_t first_of(uint32_t domain) const { return kNet ? g.first_of[domain] : 0; }
  // The number of the caller's expert; below 0: none.
  __device__ __forceinline__ int32_t numbered(int64_t expert) const {
    if (!kNet || expert < 0 || expert >= g.map.num_experts) return static_cast<int32_t>(expert);
    const auto its = static_cast<uint32_t>(expert);
    return static_cast<int32_t>(expert_number(g, its, number_of(its / g.experts_per_rank)));
  }
};

// By one thread: as wait_flag(), which is called only for what has not come. A call takes longer than to look, and code
// in many places takes longer to fetch than to run.
static __device__ __noinline__ bool wait_long(const Group& g, const Awaited what) { return wait_flag(g, what); }
__device__ __forceinline__ bool wait_for(const Group& g, const Awaited& what) {
  return has_come(what) || wait_long(g, what);
}

// By every thread of a crew, first of all: begins to send or to receive the next operation. find_masked() follows.
template <bool kNet, typename Args>
__device__ __forceinline__ SlotKernel<Args, kNet> begin_slots(const Group& g, const Args& args, SlotKind kind,
                                                              const Crew& crew, bool sends) {
  const LowLatencyState& state = local(g).low_latency;
  const auto i = static_cast<uint32_t>(kind);
  const SlotKernel<Args, kNet> k{
      g, args, kind, crew, (sends ? state.sent[i] : state.received[i]) + 1, masked_of_block(sends)};
  if (blockIdx.x != 0 || threadIdx.x != 0) return k;
  local(g).entered = kLowLatencyEpoch | k.number;
  if (sends || args.phase == SlotPhase::kReceive)
    trace_kernel(g, TraceKind::kKernelBegin, args.signature.kind, k.number);
  return k;
}
// By a crew.
template <typename K>
__device__ __forceinline__ void find_masked(const K& k) {
  if (!masks(k.g)) return;
  take_masked(k.g, k.masked, k.crew.thread, k.crew.size);
  k.crew.sync();
}
// By every thread of a crew: in a trace, what block 0 does from begin_step() to end_step() is a step. `began` is in
// shared memory, because registers are scarce.
template <typename K>
__device__ __forceinline__ bool notes_steps(const K& k) {
  return k.g.trace != nullptr && blockIdx.x == 0 && k.crew.thread == 0;
}
template <typename K>
__device__ __forceinline__ void begin_step(const K& k, uint64_t& began) {
  if (notes_steps(k)) began = now_nsec();
}
template <typename K>
__device__ __forceinline__ void end_step(const K& k, const uint64_t& began, Step step) {
  if (notes_steps(k))
    note(k.g,
         {began, now_nsec(), k.number, 0, static_cast<uint32_t>(TraceKind::kKernelStep), static_cast<uint32_t>(step)});
}
// By one thread: as wait_for(), but a peer that may be masked is suspected when it takes too long. What only such
// groups need is not inlined: kernels of the others take longer to fetch it than to skip it.
static __device__ __noinline__ Came wait_suspecting(const Group& g, const RankSet& masked, const Awaited what) {
  if (masked.has(what.peer)) return Came::kNo;
  const Came came = wait_live(g, what.flag, what.value, KernelPatience::ticks(now_nsec()),
                              local(g).low_latency.num_settled + 1, false);
  if (came == Came::kNo) or_global(&local(g).low_latency.suspected[word_of(what.peer)], bit_of(what.peer));
  return came;
}
template <typename K>
__device__ __forceinline__ Came wait_or_suspect(const K& k, const Awaited& what) {
  if (!masks(k.g)) return wait_for(k.g, what) ? Came::kYes : Came::kStopped;
  return wait_suspecting(k.g, k.masked, what);
}
// By a crew: waits until every member has read what we sent two operations ago.
template <typename K, typename Of>
__device__ inline bool wait_free(const K& k, Part<DeviceFlag<Of>> read_by) {
  bool good = !stopped(k.g);
  for (uint32_t r = k.first() + k.crew.thread; k.number > kHalves && r < k.end(); r += k.crew.size)
    good &= wait_or_suspect(k, {own_part(k.g, read_by) + (r - k.first()), k.number - kHalves, r}) != Came::kStopped;
  good = k.crew.all(good);
  if (!masks(k.g)) return good;
  take_suspected(k.g, k.masked, k.crew.thread, k.crew.size);
  k.crew.sync();
  return good;
}
// Rules of low_latency.h. A dispatch does not fold.
template <typename Args, bool kNet>
__device__ __forceinline__ bool folds(const SlotKernel<Args, kNet>& k) {
  if constexpr (kNet || std::is_same_v<Args, SlotDispatchArgs>)
    return false;
  else
    return folds(k.g, k.args);
}

constexpr uint32_t kNoWeight = 0xFFFFFFFF;  // of a pair that adds nothing
// The bits of our weight of a place, or kNoWeight.
template <typename K>
__device__ __forceinline__ uint32_t own_weight(const K& k, uint32_t place) {
  if (k.args.topk_idx[place] < 0) return kNoWeight;
  const uint32_t bits = __float_as_uint(k.args.weights[place]);
  return bits == kNoWeight ? kFp32Nan : bits;
}

// By one thread: our header.
template <typename K>
__device__ __forceinline__ void write_header(const K& k, SlotHeader& header) {
  header.number = k.number;
  header.signature = k.args.signature;
  header.num_blocks = k.workers();
  header.num_refused = static_cast<uint32_t>(local(k.g).progress.num_refused);
  header.num_tokens = tokens_of(k.args);
  header.folds = folds(k);
}
// By a crew of each block, or of the one that sees to the network: calls put(to) for its share of the members, by all
// threads, which writes what they get before anything else; then publishes it with a header.
template <typename K, typename Of, typename Put>
__device__ inline bool send_headers(const K& k, Part<DeviceFlag<Of>> flags, Put put) {
  bool good = true;
  const bool by_one = K::kNet && blockIdx.x == k.workers();  // it sees to the network
  for (uint32_t i = by_one ? 0 : blockIdx.x; i < k.members(); i += by_one ? 1 : k.workers()) {
    const uint32_t to = k.member_after(i);
    if (k.is_masked(to)) continue;
    good &= k.crew.all(put(to));
    if (k.crew.thread != 0 || !good) continue;
    write_header(k, k.header(to, k.g.rank));
    publish(at(k.g, to, flags) + k.g.rank, k.number);
  }
  return good;
}
// By one warp of a block, one member after the other: as send_headers(), where only the header is to be told.
template <typename K, typename Of>
__device__ inline void tell_entered(const K& k, Part<DeviceFlag<Of>> flags) {
  for (uint32_t i = blockIdx.x; i < k.members(); i += k.workers()) {
    const uint32_t to = k.member_after(i);
    if (k.is_masked(to) || k.crew.lane() != 0) continue;
    write_header(k, k.header(to, k.g.rank));
    publish(at(k.g, to, flags) + k.g.rank, k.number);
  }
  __syncwarp();
}
// By some threads: waits until every rank has entered, one rank for each thread. They have to combine the results.
template <typename K, typename Of>
__device__ inline bool wait_entries(const K& k, Part<DeviceFlag<Of>> flags, uint32_t thread, uint32_t threads) {
  bool good = !stopped(k.g);
  for (uint32_t r = thread; r < k.g.map.num_ranks; r += threads) {
    if (k.is_masked(r)) continue;
    const bool counts = blockIdx.x == 0 && k.args.waited_nsec != nullptr;
    const uint64_t began = counts ? now_nsec() : 0;
    good &= wait_for(k.g, {own_part(k.g, flags) + r, k.number, r});
    if (counts) k.args.waited_nsec[k.rank_of(r)] += static_cast<int64_t>(now_nsec() - began);
  }
  return good;
}
// The same when they have entered: compares their calls with ours.
template <typename K>
__device__ inline bool compare_headers(const K& k, uint32_t thread, uint32_t threads) {
  // Compared with what we sent: calls may have been refused since.
  const SlotHeader& ours = k.header(k.g.rank, k.g.rank);
  bool good = true;
  for (uint32_t r = thread; r < k.g.map.num_ranks; r += threads) {
    const SlotHeader& theirs = k.header(k.g.rank, r);
    if (k.is_masked(r) || (theirs.signature == ours.signature && theirs.num_refused == ours.num_refused)) continue;
    report(k.g, {DeviceFault::kMismatch, ErrorKind::kRankMismatch, Step::kExchange, r, static_cast<int>(k.kind)});
    good = false;
  }
  return good;
}
// By a crew: waits until every member has entered, and block 0 compares their calls with ours.
template <typename K, typename Of>
__device__ inline bool wait_headers(const K& k, Part<DeviceFlag<Of>> flags) {
  if (!k.crew.all(wait_entries(k, flags, k.crew.thread, k.crew.size))) return false;
  return blockIdx.x != 0 || k.crew.all(compare_headers(k, k.crew.thread, k.crew.size));
}
// By a warp: both.
template <typename K, typename Of>
__device__ inline bool all_entered_alike(const K& k, Part<DeviceFlag<Of>> flags) {
  if (!__all_sync(kFullWarp, wait_entries(k, flags, k.crew.lane(), kWarp))) return false;
  __syncwarp();
  return __all_sync(kFullWarp, compare_headers(k, k.crew.lane(), kWarp));
}
// By the crew of a block that has sent its share: tells every member that.
template <typename K, typename Of>
__device__ inline void tell_sent(const K& k, Part<DeviceFlag<Of>> sent) {
  k.crew.sync();
  for (uint32_t i = k.crew.thread; i < k.members(); i += k.crew.size)
    publish(at(k.g, k.member_after(i), sent) + (k.g.rank - k.first()) * kMaxSlotBlocks + blockIdx.x, k.number);
  __syncwarp();  // other lanes of this warp may wait for it next
}
// By a crew: waits for what all blocks of all members have sent. A member may not have entered yet. The crew has to
// combine the results.
template <typename K, typename Entered, typename Of>
__device__ inline bool wait_sent(const K& k, Part<DeviceFlag<Entered>> entered, Part<DeviceFlag<Of>> sent) {
  bool good = !stopped(k.g);
  for (uint32_t i = k.crew.warp(); i < k.members() * (kMaxSlotBlocks / kWarp); i += k.crew.warps()) {
    const uint32_t member = i % k.members(), r = k.first() + member, block = i / k.members() * kWarp + k.crew.lane();
    const Came came = wait_or_suspect(k, {own_part(k.g, entered) + r, k.number, r});
    good &= came != Came::kStopped;
    if (came != Came::kYes || block >= k.header(k.g.rank, r).num_blocks) continue;
    good &= wait_or_suspect(k, {own_part(k.g, sent) + member * kMaxSlotBlocks + block, k.number, r,
                                static_cast<int>(block)}) != Came::kStopped;
  }
  return good;
}
// By a crew, where ranks may be masked, before it receives: when all that others send has come, and all agree on who
// is masked. wait(settling) is called by block 0; it adds whom it misses. False: an error is known.
template <typename K, typename Wait>
__device__ inline bool settle(const K& k, Wait wait) {
  if (!masks(k.g)) return true;
  __shared__ Settling settling;
  RankSet& gone = settling.gone;
  LowLatencyState& state = k.state();
  const Crew crew = k.crew;
  DeviceFlag<SlotsSettled>* const settled = &state.settled[static_cast<uint32_t>(k.kind)];
  if (blockIdx.x != 0) {
    if (!crew.all(crew.thread != 0 || wait_block(k.g, settled, k.number))) return false;
    find_masked(k);
    return true;
  }
  if (crew.thread == 0) {
    take_masked(k.g, gone, 0, 1);
    take_suspected(k.g, gone, 0, 1);
    settling.before = gone;
    settling.settlement = state.num_settled + 1;
    settling.began = KernelPatience::ticks(now_nsec());
  }
  crew.sync();
  if (!crew.all(wait(settling))) return false;
  const uint32_t words = rank_words(k.g);
  for (uint32_t i = crew.thread; i < words; i += crew.size)
    gone.words[i] = state.named[i] | (gone.words[i] & ~state.masked[i]);
  if (!agree(k.g, crew, settling.settlement, gone)) return false;
  for (uint32_t i = crew.thread; i < words; i += crew.size) k.masked.words[i] = gone.words[i];
  crew.sync();
  add_domains(k.g, k.masked, crew.thread, crew.size);
  crew.sync();
  if (crew.thread != 0) return true;
#pragma unroll 1
  for (uint32_t i = 0; i < words; ++i) {
    clear_global(&state.suspected[i], settling.before.words[i]);  // but not those that are suspected since
    state.masked[i] = k.masked.words[i];
    state.named[i] = gone.words[i];
  }
  state.num_settled += 1;
  publish(settled, k.number);
  return true;
}
// By one thread: whether a rank that may be masked has published a number; adds the rank if it has not.
template <typename K, typename Of>
__device__ inline Came note_missing(const K& k, const DeviceFlag<Of>* flag, uint64_t number, uint32_t rank,
                                    Settling& settling) {
  const Came came = wait_live(k.g, &flag->value, number, settling.began, settling.settlement, true);
  if (came == Came::kNo) settling.gone.add(rank);
  return came;
}

// By block 0, where ranks may be masked: waits for all that comes from our domain.
template <typename K, typename Entered, typename Of>
__device__ inline bool wait_live_blocks(const K& k, Settling& settling, Part<DeviceFlag<Entered>> entered,
                                        Part<DeviceFlag<Of>> sent) {
  bool good = true;
  for (uint32_t r = k.first() + k.crew.thread; r < k.end(); r += k.crew.size)
    if (!settling.gone.has(r))
      good &= note_missing(k, own_part(k.g, entered) + r, k.number, r, settling) != Came::kStopped;
  if (!k.crew.all(good)) return false;
  for (uint32_t i = k.crew.thread; i < k.members() * kMaxSlotBlocks; i += k.crew.size) {
    const uint32_t r = k.first() + i / kMaxSlotBlocks, block = i % kMaxSlotBlocks;
    if (settling.gone.has(r) || block >= k.header(k.g.rank, r).num_blocks) continue;
    good &= note_missing(k, own_part(k.g, sent) + i, k.number, r, settling) != Came::kStopped;
  }
  return good;
}

// By one thread, when all blocks are through. Between domains the block that sees to the network keeps the number.
template <typename K>
__device__ __forceinline__ void note_through(const K& k, bool sends) {
  const auto kind = static_cast<uint32_t>(k.kind);
  if (!sends || k.args.phase == SlotPhase::kSend)
    trace_kernel(k.g, TraceKind::kKernelEnd, k.args.signature.kind, k.number);
  if (!K::kNet)
    (sends ? k.state().sent : k.state().received)[kind] = k.number;
  else
    publish(&k.state().through[kind][sends ? 0 : 1], k.number);
}
// By a crew that has sent its share: the last one notes that.
template <typename K>
__device__ inline void end_send(const K& k, Phase phase) {
  k.crew.sync();
  if (k.crew.thread == 0 && arrive_last(&local(k.g).arrived[static_cast<uint32_t>(phase)], k.workers()))
    note_through(k, true);
}
// By a crew that has received its share: the last one tells all members that it has read what they sent, and calls
// tell_others(), which tells the other domains.
template <typename K, typename Of, typename Tell>
__device__ inline void end_receive(const K& k, Phase phase, Part<DeviceFlag<Of>> read_by, Tell tell_others) {
  const Crew crew = k.crew;
  crew.sync();
  if (!crew.any(crew.thread == 0 && arrive_last(&local(k.g).arrived[static_cast<uint32_t>(phase)], k.workers())))
    return;
  if (crew.thread == 0) note_through(k, false);
  tell_others();
  for (uint32_t r = k.first() + k.crew.thread; r < k.end(); r += k.crew.size)
    publish(at(k.g, r, read_by) + (k.g.rank - k.first()), k.number);
}

}  // namespace uccl_ep::gpu
