// What the parts of the Python module share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace uccl_ep {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Throws what a signal handler raises, and what another thread has injected (PyThreadState_SetAsyncExc). The
// interpreter looks for injected exceptions only in its own loop, so this function runs a little Python code.
void look_at_interrupts();

// bindings/engine.cc
void bind_engine(pybind11::module_& m);
// bindings/gpu.cc
void bind_gpu(pybind11::module_& m);

}  // namespace uccl_ep
