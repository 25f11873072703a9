// How Python waits for an engine: interrupts are seen meanwhile.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "bindings/bindings.h"

namespace uccl_ep {

// Waits in slices of `slice_usec`. After each slice it calls `between`, with the GIL held.
template <typename Wait, typename Between>
void wait_with(Wait wait, uint64_t slice_usec, Between between) {
  while (true) {
    bool over = false;
    {
      const pybind11::gil_scoped_release release;
      over = wait(slice_usec);
    }
    if (over) return;
    between();
  }
}

// Waits in slices, so that interrupts are seen.
template <typename Wait>
void wait_with_signals(Wait wait) {
  constexpr uint64_t kSliceUsec = 50000;
  wait_with(wait, kSliceUsec, look_at_interrupts);
}

}  // namespace uccl_ep
