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

  static __device__ __forceinline__ void run(const CombineKernel& k) {
    if (write_packets(k)) {
      push_packets(k, false, false);
      push_returns(k);
    }
    __syncwarp();
    if (k.crew.lane() == 0) count_through(k.g);
  }

 private:
  // Pushes our sums for other domains, in chunks, and then weights. Not inlined, because its caller has no registers to
  // spare.
  static __device__ __noinline__ void push_returns(const CombineKernel k) {
    const uint32_t row_bytes = k.args.hidden * dtype_bytes(k.args.wire), lane = k.crew.lane();
    const Net& net = k.g.net;
    PushedChunks pushed{};
    for (uint32_t w = 0; w < k.args.num_windows; ++w) {
      const auto outgoing_of = [&](uint32_t stream) {
        const StreamPart part = relayed_part(k, w, stream);
        return Outgoing<RelayedRows>{net.relayed[stream].channel,
                                     own_part(k.g, k.g.map.relayed_counts) + stream * k.g.map.return_slots,
                                     part.end - part.first,
                                     rows_per_chunk(k.g, row_bytes),
                                     row_bytes,
                                     k.g.map.return_slots,
                                     k.g.net_state.relayed[stream],
                                     kBulk ? segments_of(k.args.hidden * 2) : 1};
      };
      push_chunks(k.g, 1, net.num_relayed + 1, pushed, outgoing_of, [] { return true; });
      if (!has_weights(k.args, w)) continue;
      const bool relayed = lane != 0 || wait_block(k.g, &local(k.g).weights_relayed, k.op.window(w));
      if (!__all_sync(kFullWarp, relayed)) return;
      __syncwarp();
      for (uint32_t stream = 1; stream <= net.num_relayed; ++stream) push_weights(k, w, stream);
    }
  }
  // Those of window w. All rows of the stream have been pushed, and all earlier weights.
  static __device__ __forceinline__ void push_weights(const CombineKernel& k, uint32_t w, uint32_t stream) {
    const PairRange its = weights_of(k, w, k.plan.relayed_pairs[stream]);
    const uint32_t chunks = weight_chunks(its.end - its.begin, k.g.map.slot_weights);
    if (chunks == 0) return;
    uint32_t before = 0;
    for (uint32_t earlier = k.crew.lane(); earlier <= w; earlier += kWarp)
      before += earlier < w ? relayed_chunks(k, earlier, stream) : relayed_part(k, w, stream).chunks;
    before = warp_sum(before);
    for (uint32_t first = 0; first < chunks; first += kWarp) {
      const uint32_t c = first + k.crew.lane();
      const uint64_t left = uint64_t{4} * (its.end - its.begin) - c * k.g.map.slot_bytes;
      push_all(k.g, c < chunks, [&](uint32_t) {
        return Command{k.g.net.relayed[stream].channel, min(left, k.g.map.slot_bytes),
                       k.g.net_state.relayed[stream] + before + c};
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

  static __device__ __forceinline__ void run(const CombineKernel& k, uint32_t* poller_ends) {
    const bool good =
        wait_through(k, workers(k.g) + PushReturnsRole<true>::kWarps + CompareCallsRole::kWarps, poller_ends);
    // Three warps publish the flags of the domain, of other domains and of the proxy, because each needs a slow fence.
    if (k.crew.warp() == 2 && k.crew.lane() == 0) tell_ended(k.g);
    if (good && k.crew.warp() == 1) end_returns(k);
    MergesRows::finish(k, good);
    if (k.g.trace == nullptr) return;
    k.crew.sync();
    if (k.crew.thread == 0) trace_kernel(k.g, TraceKind::kKernelEnd, OpKind::kCombine, k.op.epoch);
  }

 private:
  // By a warp: counts what we have returned, and what came back last and has been read.
  static __device__ void end_returns(const CombineKernel& k) {
    for (uint32_t stream = 1 + k.crew.lane(); stream <= k.g.net.num_relayed; stream += kWarp)
      for (uint32_t w = 0; w < k.args.num_windows; ++w) k.g.net_state.relayed[stream] += relayed_chunks(k, w, stream);
    note_returned(k, k.args.num_windows - 1);
  }
};

// By all warps of the block. Those that have no role have nothing to do.
template <bool kBulk, typename MergesRows>
__device__ __forceinline__ void serve_network(const CombineKernel& kernel) {
  using Pushes = PushReturnsRole<kBulk>;
  using Ends = EndReturnsRole<MergesRows>;
  using Roles = RoleTable<PollRole, Pushes, CompareCallsRole, Ends>;
  __shared__ typename Roles::Shared shared;
  if (threadIdx.x == 0) shared.poller_ends = 0;
  __syncthreads();
  if (Roles::template is_in<PollRole>())
    follow_events(kernel.g, kernel.g.net.followed, &shared.poller_ends);
  else if (Roles::template is_in<Pushes>())
    Pushes::run(kernel.by(Roles::template crew<Pushes>()));
  else if (Roles::template is_in<CompareCallsRole>())
    CompareCallsRole::run(kernel.by(Roles::template crew<CompareCallsRole>()));
  else if (Roles::template is_in<Ends>())
    Ends::run(kernel.by(Roles::template crew<Ends>()), &shared.poller_ends);
}

}  // namespace uccl_ep::gpu
