// Traits of the architecture that kernels are compiled for. Kernels ask for these traits, never for its number.
#pragma once

#include <cstdint>

namespace uccl_ep::gpu {

struct Arch {
  bool converts_fp8;  // in one instruction
  bool bulk_copies;   // between global and shared memory, with barriers that count their bytes
  uint32_t vectors_ahead;  // that a warp loads at a time to quantise, as far as registers allow
  uint32_t rows_ahead;  // the same to sum
};
// number: 90 for compute_90. A later architecture has what an earlier one has; 120 has bulk copies, too, but sums by
// them would need more registers than it gives.
constexpr Arch arch_of(int number) {
  return {.converts_fp8 = number >= 89,
          .bulk_copies = number >= 90 && number < 120,
          .vectors_ahead = number < 90    ? 1u
                           : number < 120 ? 4u
                                          : 2u,
          .rows_ahead = number < 100 ? 4u : 3u};
}

#ifdef __CUDA_ARCH__
constexpr Arch kArch = arch_of(__CUDA_ARCH__ / 10);
#else
constexpr Arch kArch = arch_of(90);  // the host's pass over a kernel
#endif

// On architectures without bulk copies, conversions to FP8 leave no registers for functions that are inlined elsewhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define UCCL_EP_INLINE_WHERE_ROOM __noinline__
#else
#define UCCL_EP_INLINE_WHERE_ROOM __forceinline__
#endif
// On Blackwell a combine's loops leave none; on Hopper a call takes more than it spares.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define UCCL_EP_INLINE_BEFORE_100 __noinline__
#else
#define UCCL_EP_INLINE_BEFORE_100 __forceinline__
#endif

}  // namespace uccl_ep::gpu
