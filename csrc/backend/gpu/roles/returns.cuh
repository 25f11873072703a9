// The roles of the block of a combine that sees to the network.
#pragma once

#include "backend/gpu/merge.cuh"
#include "backend/gpu/roles/poll.cuh"
#include "backend/gpu/roles/tell_folded.cuh"

namespace uccl_ep::gpu {

// Hands packets and the sums for other domains to the proxy.
template <bool kBulk>
struct PushReturnsRole {
  static constexpr uint32_t kWarps = 1;
  struct Shared {};

  static __device__ __forceinline__ void run(const CombineKernel& k, const MergeRange& range) {
    if (write_packets(k)) {
      push_packets(k, false, false);
      push_returns(k, range);
    }
    __syncwarp();
    if (k.crew.lane() == 0) count_through(k.g);
  }

 private:
  // Pushes our sums for other domains, in chunks, and then weights. Not inlined, because its caller has no registers to
  // spare.
  static __device__ __noinline__ void push_returns(const CombineKernel k, const MergeRange& range) {
    const uint32_t row_bytes = k.args.hidden * dtype_bytes(k.args.wire), lane = k.crew.lane();
    const Net& net = k.g.net;
    const auto outgoing_of = [&](uint32_t stream) {
      const MergeStream& part = range.stream(k.g, stream);
      return Outgoing<RelayedRows>{net.relayed[stream].channel,
                                   own_part(k.g, k.g.map.relayed_counts) + stream * k.g.map.return_slots,
                                   part.end_row - part.first_row,
                                   rows_per_chunk(k.g, row_bytes),
                                   row_bytes,
                                   k.g.net_state.relayed[stream],
                                   0,
                                   kBulk ? segments_of(k.args.hidden * 2) : 1};
    };
    push_chunks(k.g, 1, net.num_relayed + 1, outgoing_of, [] { return true; });
    if (k.args.signature.with_weights == 0 || k.args.window != 0) return;
    if (!__all_sync(kFullWarp, lane != 0 || wait_block(k.g, &local(k.g).weights_relayed, k.op.epoch))) return;
    __syncwarp();
    for (uint32_t stream = 1; stream <= net.num_relayed; ++stream) push_weights(k, range, stream);
  }
  static __device__ __forceinline__ void push_weights(const CombineKernel& k, const MergeRange& range,
                                                      uint32_t stream) {
    const uint32_t row_bytes = k.args.hidden * dtype_bytes(k.args.wire), pairs = k.plan.relayed_pairs[stream];
    const uint32_t row_chunks =
        part_of(k.g, range.stream(k.g, stream).first_row, range.stream(k.g, stream).end_row, row_bytes).chunks;
    const uint32_t chunks = weight_chunks_of(k.g, k.args, pairs);
    for (uint32_t first = 0; first < chunks; first += kWarp) {
      const uint32_t c = first + k.crew.lane();
      const uint64_t left = uint64_t{4} * pairs - c * k.g.map.slot_bytes;
      push_all(k.g, c < chunks, [&](uint32_t) {
        return Command{k.g.net.relayed[stream].channel, min(left, k.g.map.slot_bytes),
                       k.g.net_state.relayed[stream] + row_chunks + c};
      });
    }
  }
};

// Checks that all ranks have made the same call.
struct CompareCallsRole {
  static constexpr uint32_t kWarps = 1;
  struct Shared {};

  static __device__ __forceinline__ void run(const CombineKernel& k) {
    if (going(k)) all_alike(k, k.args.signature);
    if (k.crew.thread == 0) count_through(k.g);
  }
};

// Ends the kernel when all other blocks and roles are through.
template <typename MergesRows>
struct EndReturnsRole {
  static constexpr uint32_t kWarps = MergesRows::kWarps;
  struct Shared {};

  static __device__ __forceinline__ void run(const CombineKernel& k, const MergeRange& range, uint32_t* poller_ends) {
    const bool good =
        wait_through(k, workers(k.g) + PushReturnsRole<true>::kWarps + CompareCallsRole::kWarps, poller_ends);
    // Three warps publish the flags of the domain, of other domains and of the proxy, because each needs a slow fence.
    if (k.crew.warp() == 2 && k.crew.lane() == 0) tell_ended(k.g);
    if (good && k.crew.warp() == 1) end_returns(k, range);
    MergesRows::finish(k, good);
    if (k.g.trace == nullptr) return;
    k.crew.sync();
    if (k.crew.thread == 0) trace_kernel(k.g, TraceKind::kKernelEnd, OpKind::kCombine, k.op.epoch);
  }

 private:
  // By a warp: counts what we have returned, and what came back and has been read.
  static __device__ void end_returns(const CombineKernel& k, const MergeRange& range) {
    const uint32_t row_bytes = k.args.hidden * dtype_bytes(k.args.wire), lane = k.crew.lane();
    const NetState& state = k.g.net_state;
    for (uint32_t stream = 1 + lane; stream <= k.g.net.num_relayed; stream += kWarp)
      state.relayed[stream] +=
          part_of(k.g, range.stream(k.g, stream).first_row, range.stream(k.g, stream).end_row, row_bytes).chunks +
          weight_chunks_of(k.g, k.args, k.plan.relayed_pairs[stream]);
    const TokenBlockRange window = token_blocks_of(k.args, (k.plan.num_tokens + kTokenBlock - 1) / kTokenBlock);
    for (uint32_t to = lane; to < k.g.map.num_domains; to += kWarp) {
      if (to == own_domain(k.g)) continue;
      const uint32_t* const before = k.plan.sent_token_blocks + to * (k.plan.num_token_blocks + 1);
      const uint32_t pairs = k.plan.pair_begin[first_of(k.g, to + 1)] - k.plan.pair_begin[first_of(k.g, to)];
      state.returned[to] += part_of(k.g, before[window.first], before[window.end], row_bytes).chunks +
                            weight_chunks_of(k.g, k.args, pairs);
      publish_flag(k.g.net.to[to].returns_consumed, state.returned[to]);
    }
  }
};

// By all warps of the block. Those that have no role have nothing to do.
template <bool kBulk, typename MergesRows>
__device__ __forceinline__ void serve_network(const CombineKernel& kernel, MergeRange& range) {
  using Pushes = PushReturnsRole<kBulk>;
  using Ends = EndReturnsRole<MergesRows>;
  using Roles = RoleTable<PollRole, Pushes, CompareCallsRole, Ends>;
  __shared__ typename Roles::Shared shared;
  if (Roles::template is_in<PollRole>()) {
    find_merge_range(kernel.by(Roles::template crew<PollRole>()), range);
    if (threadIdx.x == 0) shared.poller_ends = 0;
  }
  __syncthreads();
  if (Roles::template is_in<PollRole>())
    poll_hosts(kernel.g, &shared.poller_ends);
  else if (Roles::template is_in<Pushes>())
    Pushes::run(kernel.by(Roles::template crew<Pushes>()), range);
  else if (Roles::template is_in<CompareCallsRole>())
    CompareCallsRole::run(kernel.by(Roles::template crew<CompareCallsRole>()));
  else if (Roles::template is_in<Ends>())
    Ends::run(kernel.by(Roles::template crew<Ends>()), range, &shared.poller_ends);
}

}  // namespace uccl_ep::gpu
