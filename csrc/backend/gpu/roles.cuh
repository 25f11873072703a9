// Roles: the tasks that crews of a block do side by side. A role is a type with `kWarps` and with `Shared`, its part of
// shared memory. A table of roles gives each role its warps, in the order of the table, and each crew a barrier.
#pragma once

#include <type_traits>

#include "backend/gpu/device.cuh"

namespace uccl_ep::gpu {

template <typename... Roles>
struct RoleTable {
  static constexpr uint32_t kWarps = (Roles::kWarps + ...);
  static constexpr uint32_t kThreads = kWarps * kWarp;
  // Barrier 0 is the block's. This one is for crews that stay together only for a while.
  static constexpr uint32_t kSpareBarrier = sizeof...(Roles) + 1;
  static_assert(kThreads <= 1024 && kSpareBarrier < 16);

  struct Shared : Roles::Shared... {};

  template <typename Role>
  static constexpr uint32_t first_warp() {
    uint32_t warps = 0;
    const bool found = ((std::is_same_v<Role, Roles> || (warps += Roles::kWarps, false)) || ...);
    return found ? warps : kWarps;
  }
  template <typename Role>
  static constexpr uint32_t barrier() {
    uint32_t number = 1;
    const bool found = ((std::is_same_v<Role, Roles> || (++number, false)) || ...);
    return found ? number : 0;
  }
  template <typename Role>
  static __device__ __forceinline__ Crew crew() {
    constexpr uint32_t kFirst = first_warp<Role>(), kBarrier = barrier<Role>();
    static_assert(kFirst < kWarps);
    return Crew::of(kBarrier, kFirst, Role::kWarps);
  }
  // The calling warp has the role.
  template <typename Role>
  static __device__ __forceinline__ bool is_in() {
    constexpr uint32_t kFirst = first_warp<Role>();
    return threadIdx.x / kWarp - kFirst < Role::kWarps;
  }
  // Crews for a while: one warp on its own, or the warps of a role and of all roles behind it in the table.
  static __device__ __forceinline__ Crew lone_warp() { return {kSpareBarrier, kWarp, threadIdx.x % kWarp}; }
  template <typename Role>
  static __device__ __forceinline__ Crew crew_from() {
    constexpr uint32_t kFirst = first_warp<Role>();
    return Crew::of(kSpareBarrier, kFirst, kWarps - kFirst);
  }
};

}  // namespace uccl_ep::gpu
