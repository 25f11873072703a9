// Between domains. Rows for another domain are staged packed, in the order of our tokens, into a ring of chunks; one
// block of every kernel, which does nothing else, sees to the network: a warp hands chunks that are complete to the
// proxy, and one warp, the relay, follows what the proxies of our domain say. It alone polls memory of the host.
#pragma once

#include "backend/cuda/device.cuh"
#include "queue/device.cuh"

namespace uccl_ep::cuda {

// Rows of a stream in a chunk of a ring.
__device__ __forceinline__ uint32_t rows_per_chunk(const Domain& d, uint32_t row_bytes) {
  return static_cast<uint32_t>(d.at.slot_bytes) / row_bytes;
}
// Where row `row` of a window lies, whose first chunk has the slot `slot` of a ring of `slots`.
__device__ __forceinline__ uint64_t ring_offset(const Domain& d, uint32_t slot, uint32_t slots, uint32_t row,
                                                uint32_t row_bytes) {
  const uint32_t per_chunk = rows_per_chunk(d, row_bytes), chunk = row / per_chunk;
  uint32_t its = slot + chunk;
  if (its >= slots) its -= slots;
  return its * d.at.slot_bytes + uint64_t{row - chunk * per_chunk} * row_bytes;
}

// The part of a stream that a window ships.
struct StreamPart {
  uint32_t first = 0, end = 0;  // rows
  uint32_t chunks = 0;
};
__device__ __forceinline__ StreamPart part_of(const Domain& d, uint32_t first, uint32_t end, uint32_t row_bytes) {
  const uint32_t per_chunk = rows_per_chunk(d, row_bytes);
  return {first, end, (end - first + per_chunk - 1) / per_chunk};
}

// ---- the relay ------------------------------------------------------------------------------------------------------
// By one warp, until all other blocks of the kernel are through.
__device__ inline void relay(const Domain& d, const uint32_t* arrived, uint32_t others) {
  const Net& net = *d.net;
  const uint32_t lane = threadIdx.x % kWarp;
  while (true) {
    const bool last_look = peek_counter(arrived) >= others;
    for (uint32_t i = lane; i < net.num_polled; i += kWarp) {
      const Net::Polled& polled = net.polled[i];
      if (peek_flag(polled.word) == peek_flag(polled.flag)) continue;
      const uint64_t value = read_flag(polled.word);
      publish_in_gpu(polled.flag, value);
      if (polled.also != nullptr) publish_in_gpu(polled.also, value);
      trace_now(d, TraceKind::kSeenArrived, i, value);
    }
    if (__all_sync(kFullWarp, last_look)) return;
  }
}

// ---- commands -------------------------------------------------------------------------------------------------------
// A channel whose chunks become complete one after the other, as a lane sees it.
struct Outgoing {
  uint32_t channel = 0;
  uint32_t* counts = nullptr;  // by chunk: rows that are there
  uint32_t rows = 0, per_chunk = 1, row_bytes = 0;
  uint64_t serial = 0;  // of the next chunk
  uint32_t chunk = 0;

  __device__ __forceinline__ bool left() const { return chunk * per_chunk < rows; }
  __device__ __forceinline__ uint32_t rows_here() const { return min(per_chunk, rows - chunk * per_chunk); }
};

// By one warp: pushes what each lane has. The command ring is never full: see command_capacity in layout/wire.h.
__device__ inline void push_all(const Domain& d, bool has, const Command& command) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t mask = __ballot_sync(kFullWarp, has);
  if (mask == 0) return;
  fence_system();
  __syncwarp();
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    const uint32_t from = __ffs(left) - 1;
    const Command its{__shfl_sync(kFullWarp, command.channel, from), __shfl_sync(kFullWarp, command.num_bytes, from),
                      __shfl_sync(kFullWarp, command.serial, from)};
    if (lane != 0) continue;
    trace_now(d, TraceKind::kPushed, its.channel, its.serial, its.num_bytes);
    CommandProducer producer(d.net->commands);
    producer.push(its);
    producer.keep();
  }
  __syncwarp();
}

// By one warp, a channel a lane: chunk by chunk as they become complete. Returns when all have been pushed, or after an
// error.
__device__ inline void push_chunks(const Domain& d, Outgoing out) {
  for (uint32_t looks = 1; __any_sync(kFullWarp, out.left()); ++looks) {
    bool complete = false;
    Command command{};
    if (out.left() && read_counter(out.counts + out.chunk) == out.rows_here()) {
      complete = true;
      command = {out.channel, uint64_t{out.rows_here()} * out.row_bytes, out.serial};
      out.counts[out.chunk] = 0;
      ++out.chunk;
      ++out.serial;
    }
    push_all(d, complete, command);
    if (looks % 64 == 0 && __any_sync(kFullWarp, stopped(d))) return;
  }
}

// By one warp: the packets of an operation, when they are complete.
__device__ inline bool push_packets(const Domain& d, const Op& op, bool is_new, bool with_values) {
  const uint32_t lane = threadIdx.x % kWarp;
  if (!__all_sync(kFullWarp, lane != 0 || wait_block(d, &local(d).packed, op.epoch))) return false;
  __syncwarp();
  for (uint32_t first = 0; first < d.at.num_domains; first += kWarp) {
    const uint32_t to = first + lane;
    const bool has = to < d.at.num_domains && to != own_domain(d);
    Command command{};
    if (has) {
      const DeviceHeader& h = *reinterpret_cast<const DeviceHeader*>(own_packet(d, to, op.epoch));
      const uint32_t members = d.first_of[to + 1] - d.first_of[to];
      PacketSizes sizes;
      sizes.with_values = with_values;
      sizes.pairs = h.pair_begin[members];
      if (is_new)
        sizes = {members,       d.experts_per_rank, h.num_tokens, h.row_begin[members], h.pair_begin[members],
                 h.stream_rows, with_values};
      command = {d.net->to[to].packet_channel, packet_parts(sizes).end, op.epoch - 1};
    }
    push_all(d, has, command);
  }
  return true;
}

// By a crew: what the rings to sources held before has left.
__device__ inline bool wait_returns_gone(const Crew& crew, const Domain& d) {
  bool good = true;
  const NetState& state = net_state(d);
  for (uint32_t k = 1 + crew.thread; k <= d.net->num_relayed; k += crew.size)
    good &= wait_flag(d, state.returns_gone + k, state.relayed[k], Step::kShip, d.net->relayed[k].source);
  return crew.all(good);
}

// ---- the end of a kernel --------------------------------------------------------------------------------------------
// By one thread: the proxy may sleep, unless more has been launched.
__device__ inline void tell_ended(const Domain& d) { publish_flag(d.net->ended, ++net_state(d).ended); }

}  // namespace uccl_ep::cuda
