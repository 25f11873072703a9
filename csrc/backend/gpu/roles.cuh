// Roles: what warps of a block do side by side. A role is a type with `kWarps` and `Shared`, what it has in shared
// memory. A table of roles gives each its warps, in the order of the table, and its crew a barrier.
#pragma once

#include <type_traits>

#include "backend/gpu/device.cuh"

namespace uccl_ep::gpu {

template <typename... Roles>
struct RoleTable {
  static constexpr uint32_t kWarps = (Roles::kWarps + ...);
  static constexpr uint32_t kThreads = kWarps * kWarp;
  // Barrier 0 is the block's, and this one of crews that stay together for a while only.
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
  // A warp that works on its own, and the warps of a role and of all that follow in the table.
  static __device__ __forceinline__ Crew lone_warp() { return {kSpareBarrier, kWarp, threadIdx.x % kWarp}; }
  template <typename Role>
  static __device__ __forceinline__ Crew crew_from() {
    constexpr uint32_t kFirst = first_warp<Role>();
    return Crew::of(kSpareBarrier, kFirst, kWarps - kFirst);
  }
};

}  // namespace uccl_ep::gpu
