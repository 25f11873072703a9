// Between domains. Rows for another domain are staged without gaps, in the order of our tokens, into a ring of chunks.
// One block of every kernel sees to the network and does nothing else. One of its warps hands complete chunks to the
// proxy. Another is the poller (poll.cuh).
#pragma once

#include "backend/gpu/device.cuh"
#include "backend/gpu/shares.cuh"
#include "queue/device.cuh"

namespace uccl_ep::gpu {

// Rows of a stream in a chunk of a ring.
__device__ __forceinline__ uint32_t rows_per_chunk(const Group& g, uint32_t row_bytes) {
  return static_cast<uint32_t>(g.map.slot_bytes) / row_bytes;
}
// The slot of a ring of `slots` slots that comes `chunk` slots after another.
__device__ __forceinline__ uint32_t slot_after(uint32_t slot, uint32_t chunk, uint32_t slots) {
  return slot + chunk < slots ? slot + chunk : slot + chunk - slots;
}
// Offset in a ring of `slots` slots of row `row` of a window whose first chunk is in slot `slot`.
__device__ __forceinline__ uint64_t ring_offset(const Group& g, uint32_t slot, uint32_t slots, uint32_t row,
                                                uint32_t row_bytes) {
  const uint32_t per_chunk = rows_per_chunk(g, row_bytes), chunk = row / per_chunk;
  return slot_after(slot, chunk, slots) * g.map.slot_bytes + uint64_t{row - chunk * per_chunk} * row_bytes;
}

// The part of a stream that a window ships.
struct StreamPart {
  uint32_t first = 0, end = 0;  // rows
  uint32_t chunks = 0;
};
__device__ __forceinline__ StreamPart part_of(const Group& g, uint32_t first, uint32_t end, uint32_t row_bytes) {
  const uint32_t per_chunk = rows_per_chunk(g, row_bytes);
  return {first, end, (end - first + per_chunk - 1) / per_chunk};
}

// ---- commands -------------------------------------------------------------------------------------------------------
// A channel whose chunks become complete one after the other, as a lane sees it.
template <typename Of>
struct Outgoing {
  uint32_t channel = 0;
  DeviceCounter<Of>* counts = nullptr;  // by slot: parts of rows that are there
  uint32_t rows = 0, per_chunk = 1, row_bytes = 0;
  uint32_t slots = 0;   // of the ring; 0: counts are by chunk
  uint64_t serial = 0;  // of the next chunk
  uint32_t parts = 1;   // of a row, as they are counted
  uint32_t chunk = 0;   // the next one, of the window's

  // Rows of the `i`-th chunk from here; 0: there is none.
  __device__ __forceinline__ uint32_t rows_in(uint32_t i) const {
    const uint32_t first = (chunk + i) * per_chunk;
    return first < rows ? min(per_chunk, rows - first) : 0;
  }
  __device__ __forceinline__ bool left() const { return rows_in(0) > 0; }
};

// By one warp: pushes the `count` commands of each lane: of(0), of(1) and so on. The lane has seen that their chunks
// are complete; a relaxed load is enough for that. The command ring is never full: see command_capacity in
// layout/wire.h.
template <typename Of>
__device__ __forceinline__ void push_all(const Group& g, uint32_t count, Of of) {
  const uint32_t lane = threadIdx.x % kWarp;
  const LaneMask mask = ballot(count > 0);
  if (mask == 0) return;
  __syncwarp();  // orders what the lanes have read before what one of them writes
  fence_system();
  CommandProducer producer(g.net.commands);
  for (LaneMask left = mask; left != 0; left &= left - 1) {
    const uint32_t from = lowest_lane(left), its_count = __shfl_sync(kFullWarp, count, from);
    for (uint32_t i = 0; i < its_count; ++i) {
      const Command own = of(i);
      const Command its{__shfl_sync(kFullWarp, own.channel, from), __shfl_sync(kFullWarp, own.num_bytes, from),
                        __shfl_sync(kFullWarp, own.serial, from), __shfl_sync(kFullWarp, own.unit, from)};
      if (lane != 0) continue;
      trace_now(g, TraceKind::kPushed, its.channel, its.serial, its.num_bytes);
      producer.push(its);
    }
  }
  if (lane == 0) producer.keep();
  __syncwarp();
}

// By one warp, one channel per lane: pushes the chunks that are complete, in order. Several at a time, because the
// fence takes microseconds on a full link.
template <typename Of>
__device__ __forceinline__ void push_complete(const Group& g, Outgoing<Of>& out) {
  constexpr uint32_t kAhead = 4;
  uint32_t counted[kAhead];
  const bool by_slot = out.slots > 0;
  const uint32_t slots = by_slot ? out.slots : 0xFFFFFFFFu;
  const uint32_t slot = by_slot ? static_cast<uint32_t>(out.serial % slots) : out.chunk;
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i)
    counted[i] = out.rows_in(i) > 0 ? peek(out.counts + slot_after(slot, i, slots)) : 0;
  uint32_t complete = 0;
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i) {
    if (complete != i || counted[i] == 0 || counted[i] != out.rows_in(i) * out.parts) continue;
    out.counts[slot_after(slot, i, slots)].value = 0;
    ++complete;
  }
  push_all(g, complete,
           [&](uint32_t i) { return Command{out.channel, uint64_t{out.rows_in(i)} * out.row_bytes, out.serial + i}; });
  out.chunk += complete;
  out.serial += complete;
}

// By one warp, one channel per lane: pushes chunks in order, as they become complete. Meanwhile it calls `beside()`
// until that returns true. Returns when both are done, or after an error.
template <typename Of, typename Beside>
__device__ __forceinline__ void push_chunks(const Group& g, Outgoing<Of>& out, Beside beside) {
  bool done = beside();
  for (uint32_t looks = 1; !done || __any_sync(kFullWarp, out.left()); ++looks) {
    push_complete(g, out);
    if (!done) done = beside();
    if (looks % 64 == 0 && __any_sync(kFullWarp, stopped(g))) return;
  }
}
// The chunks of a channel that a kernel has pushed.
struct PushedChunks {
  uint32_t window;  // of them: of this window
  uint32_t all;
  uint32_t begun;   // 1: a window before this one has been pushed
};
// The same for channels `first` to `end`, of which there may be more than lanes, window by window. `outgoing_of(i)` has
// the serial of the kernel's first chunk. A lane keeps what has been pushed of its only channel in `own`; if there are
// more channels, a table in shared memory does, which lies where other blocks have one of sources. `own` begins as
// zeros.
template <typename OutgoingOf, typename Beside>
__device__ __forceinline__ void push_chunks(const Group& g, uint32_t first, uint32_t end, PushedChunks& own,
                                            OutgoingOf outgoing_of, Beside beside) {
  using Out = decltype(outgoing_of(first));
  const uint32_t lane = threadIdx.x % kWarp;
  if (end - first <= kWarp) {
    Out out = first + lane < end ? outgoing_of(first + lane) : Out{};
    out.serial += own.all;
    push_chunks(g, out, beside);
    own.all += out.chunk;
    return;
  }
  PushedChunks* const pushed = shared_table<PushedChunks>(g, 0);
  for (uint32_t i = first + lane; i < end; i += kWarp) pushed[i] = {0, own.begun == 0 ? 0 : pushed[i].all, 0};
  own.begun = 1;
  bool done = beside();
  for (bool left = true; !done || left;) {
    left = false;
    for (uint32_t i = first + lane; i - lane < end; i += kWarp) {
      Out out;
      if (i < end) {
        out = outgoing_of(i);
        out.chunk = pushed[i].window;
        out.serial += pushed[i].all;
      }
      const uint32_t before = out.chunk;
      push_complete(g, out);
      if (i < end) pushed[i] = {out.chunk, pushed[i].all + (out.chunk - before), 0};
      left |= __any_sync(kFullWarp, out.left());
    }
    if (!done) done = beside();
    if (__any_sync(kFullWarp, stopped(g))) return;
  }
}

// By one warp: pushes the packets of an operation, which are complete, heads and tails. The proxy keeps what finds no
// free slot, so no kernel waits for a reader.
__device__ inline void push_packets(const Kernel& k, bool is_new, bool with_weights) {
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t first = 0; first < k.g.map.num_domains; first += kWarp) {
    const uint32_t to = first + lane;
    const bool has = to < k.g.map.num_domains && to != own_domain(k.g);
    Command command{};
    if (has) {
      const DeviceHeader& h = *reinterpret_cast<const DeviceHeader*>(own_packet(k.g, to, k.op.epoch));
      const uint32_t members = first_of(k.g, to + 1) - first_of(k.g, to);
      PacketSizes sizes;
      sizes.with_weights = with_weights;
      sizes.pairs = h.num_pairs;
      if (is_new)
        sizes = {members, k.g.experts_per_rank, h.num_tokens, h.num_rows, h.num_pairs, h.stream_rows, with_weights};
      const auto half = static_cast<uint32_t>(packet_half(k.op.epoch) * k.g.net.packets_half_bytes / kPacketUnit);
      command = {k.g.net.to[to].packet_channel, packet_parts(sizes).end, k.op.epoch - 1,
                 half + k.g.net_state.packet_unit[to]};
    }
    if (k.g.map.tail_slots == 0) {
      push_all(k.g, has, [&](uint32_t) { return command; });
      continue;
    }
    const uint64_t end = command.num_bytes, head = has ? k.g.net.to[to].head_bytes : 0, chunk = k.g.map.tail_bytes;
    const uint32_t chunks = has ? tail_chunks(end, head, chunk) : 0;
    const uint64_t sent = chunks > 0 ? k.g.net_state.tails_sent[to] : 0;
    const uint32_t channel = chunks > 0 ? k.g.net.to[to].tail_channel : 0;
    push_all(k.g, has + chunks, [&](uint32_t i) {
      if (i == 0) return Command{command.channel, end < head ? end : head, command.serial, command.unit};
      const uint64_t begin = head + (i - 1) * chunk, left = end > begin ? end - begin : 0;
      return Command{channel, left < chunk ? left : chunk, sent + i - 1,
                     command.unit + static_cast<uint32_t>(begin / kPacketUnit)};
    });
    if (chunks > 0) k.g.net_state.tails_sent[to] = sent + chunks;
  }
}
// By a crew: publishes that the packets are complete.
__device__ __forceinline__ void publish_packed(const Kernel& k) {
  if (!has_net(k.g)) return;
  if (k.crew.thread == 0) publish(&local(k.g).packed, k.op.epoch);
  __syncwarp();  // lanes of this warp will wait for other ranks, which wait for our packets
}
// By one warp: whether the packets are complete.
__device__ __forceinline__ bool are_packed(const Kernel& k) {
  const bool packed = __all_sync(kFullWarp, threadIdx.x % kWarp != 0 || (peek(&local(k.g).packed) >= k.op.epoch &&
                                                                         read(&local(k.g).packed) >= k.op.epoch));
  __syncwarp();  // votes order no memory, and lanes other than the first read the packets
  return packed;
}
// By one warp: waits until the packets are complete. False: an error is known.
__device__ __forceinline__ bool wait_packed(const Kernel& k) {
  const bool packed =
      __all_sync(kFullWarp, threadIdx.x % kWarp != 0 || wait_block(k.g, &local(k.g).packed, k.op.epoch));
  __syncwarp();
  return packed;
}

// Index in relayed_counts of the counter of a chunk of the ring to a source, `chunk` chunks after the one in `slot`. It
// counts parts of rows that are there; the warp that pushes the chunk reads it.
__device__ __forceinline__ uint32_t ring_counter(const Group& g, uint32_t stream, uint32_t slot, uint32_t chunk) {
  return stream * g.map.return_slots + slot_after(slot, chunk, g.map.return_slots);
}

// ---- the end of a kernel --------------------------------------------------------------------------------------------
// By a crew of the block that sees to the network: waits until `others` (blocks, and warps of this block) are through.
// Then the poller may end. Its loads take microseconds, so nobody waits for its last one. Each of the others has
// deadlines. False: an error is known.
__device__ inline bool wait_through(const Kernel& k, uint32_t others, uint32_t* poller_ends) {
  if (k.crew.thread == 0) {
    DeviceCounter<Arrived>* const through = &local(k.g).arrived[static_cast<uint32_t>(Phase::kThrough)];
    while (peek(through) < others) device::pause_nsec(50);
    end_count(through);
    count_shared(poller_ends);
  }
  return going(k);
}
// By one thread: counts itself as through, and releases what its warp has done.
__device__ __forceinline__ void count_through(const Group& g) {
  count_one(&local(g).arrived[static_cast<uint32_t>(Phase::kThrough)]);
}
// By one thread: tells the proxy that it may sleep, unless more has been launched.
__device__ inline void tell_ended(const Group& g) { publish_flag(g.net.ended, ++*g.net_state.ended); }

}  // namespace uccl_ep::gpu
