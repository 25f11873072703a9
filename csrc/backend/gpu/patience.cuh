// How long a kernel waits: its deadlines, which do not count pauses of its host.
#pragma once

#include <cstdint>

#include "backend/gpu/group.h"
#include "sync/device.cuh"

namespace uccl_ep::gpu {

// The deadline of a thread's wait. It begins anew after a pause of our host; a progress deadline also does when bytes
// move between domains. Only when the deadline is over does the thread read the host's words, across PCIe. It waits for
// a beat first, because a host that stands still does not update its words.
//
// A time is a 32-bit number of ticks of 2^20 ns, and only differences are compared: kernels have no registers to spare.
struct KernelPatience {
  static constexpr uint32_t kTickShift = 20, kBeatTicks = 128;
  const uint32_t started = ticks(now_nsec());

  // `since`: Local's patient_since.
  __device__ __forceinline__ bool over(const Group& g, uint32_t* since, bool is_arrival) const {
    return over(g, since + is_arrival, is_arrival ? g.arrival_nsec : g.progress_nsec,
                is_arrival ? &g.pulse->alive_nsec : &g.pulse->still_nsec);
  }
  // Of a wait for a rank that may be masked: after so many times that long.
  __device__ __forceinline__ bool over_mask(const Group& g, uint32_t* since, uint32_t times = 1) const {
    return over(g, since + 2, times * g.mask_nsec, &g.pulse->alive_nsec);
  }
  __device__ __forceinline__ bool lasts(uint64_t nsec) const { return ticks(now_nsec()) - started > ticks(nsec); }

  static __device__ __forceinline__ uint32_t ticks(uint64_t nsec) { return static_cast<uint32_t>(nsec >> kTickShift); }

 private:
  __device__ __forceinline__ bool over(const Group& g, uint32_t* since, uint64_t limit_nsec,
                                       const uint64_t* lived_nsec) const {
    const uint32_t now = ticks(now_nsec()), limit = ticks(limit_nsec) + 1;
    if (now - started <= limit || now - peek_counter(since) <= limit) return false;
    const uint64_t before = read_flag(&g.pulse->beats);
    while (read_flag(&g.pulse->beats) == before && ticks(now_nsec()) - now <= kBeatTicks) device::pause_nsec(1'000'000);
    const bool beats = read_flag(&g.pulse->beats) != before;
    const uint32_t lived = beats ? ticks(read_flag(lived_nsec)) : 0;
    put_word(since, now - lived);
    return lived > limit;
  }
};

}  // namespace uccl_ep::gpu
