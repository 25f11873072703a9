// The roles of the block of a dispatch that sees to the network.
#pragma once

#include "backend/gpu/roles/place.cuh"
#include "backend/gpu/roles/poll.cuh"

namespace uccl_ep::gpu {

// Hands packets and staged rows to the proxy.
template <PlanState kState>
struct PushStreamsRole {
  static constexpr uint32_t kWarps = 1;
  struct Shared {};

  static __device__ __forceinline__ void run(const DispatchKernel& k) {
    push_streams<kState>(k);
    __syncwarp();
    if (k.crew.lane() == 0) count_through(k.g);
  }
};

// Ends the kernel when all other blocks and roles are through.
template <PlanState kState, typename Places>
struct EndStreamsRole {
  static constexpr uint32_t kWarps = Places::kWarps;
  struct Shared {};

  static __device__ __forceinline__ void run(const DispatchKernel& k, uint32_t* poller_ends) {
    const bool good = wait_through(k, workers(k.g) + PushStreamsRole<kState>::kWarps, poller_ends);
    const bool placed = !good || has_memory<kState>(k.g, k.args);
    if (kState != PlanState::kExchanged && k.crew.thread == 0) keep_epoch(k.g, k.op);
    // Three warps publish the flags of the domain, of other domains and of the proxy, because each needs a slow fence.
    if (k.crew.warp() == 2 && k.crew.lane() == 0) tell_ended(k.g);
    if (good && k.crew.warp() == 1) end_streams(k, placed);
    if (placed) Places::finish(k, good);
    if (k.g.trace == nullptr) return;
    k.crew.sync();
    if (k.crew.thread == 0) trace_kernel(k.g, TraceKind::kKernelEnd, OpKind::kDispatch, k.op.epoch);
  }

 private:
  // By a warp: counts what we have sent and, if this kernel placed rows, what came last and has been read.
  static __device__ void end_streams(const DispatchKernel& k, bool placed) {
    constexpr bool kFresh = kState != PlanState::kKnown;
    for (uint32_t to = k.crew.lane(); to < k.g.map.num_domains; to += kWarp)
      // Of the windows that have been staged.
      for (uint32_t w = kFirstStaged<kState>; (w == 0 || placed) && has_window<kState>(k, w); ++w)
        k.g.net_state.sent[to] += sent_part<kFresh>(k.g, k.plan, k.args, w, to).chunks;
    if (placed) note_received<kFresh>(k, num_windows<kFresh>(k) - 1);
  }
};

// By all warps of the block. Those that have no role have nothing to do.
template <PlanState kState, typename Places>
__device__ __forceinline__ void serve_network(const DispatchKernel& kernel) {
  using Pushes = PushStreamsRole<kState>;
  using Ends = EndStreamsRole<kState, Places>;
  using Roles = RoleTable<PollRole, Pushes, Ends>;
  __shared__ typename Roles::Shared shared;
  if (threadIdx.x == 0) shared.poller_ends = 0;
  __syncthreads();
  if (Roles::template is_in<PollRole>()) {
    follow_events(kernel.g, kernel.g.net.followed, &shared.poller_ends);
  } else if (Roles::template is_in<Pushes>()) {
    Pushes::run(kernel.by(Roles::template crew<Pushes>()));
  } else if (Roles::template is_in<Ends>()) {
    Ends::run(kernel.by(Roles::template crew<Ends>()), &shared.poller_ends);
  }
}

}  // namespace uccl_ep::gpu
