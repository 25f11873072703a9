// Compiles a function for several instruction sets; the loader picks the best. No FMA contraction on any of them
// (-ffp-contract=off), so the results do not depend on the choice.
#pragma once

// Not under sanitizers: the loader chooses before their run time is set up.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define UCCL_EP_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define UCCL_EP_MULTIVERSION
#endif

// A callee takes its caller's instruction set only when it is inlined.
#define UCCL_EP_INLINE inline __attribute__((always_inline))
