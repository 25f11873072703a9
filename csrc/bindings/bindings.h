// What the faces of the engines share: arguments as Python gives them, waiting that looks at signals.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <system_error>

#include "engine/engine.h"
#include "transport/trial.h"

namespace uccl_ep {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline Dtype tensor_dtype(uint32_t element_bytes) {
  if (element_bytes == 2) return Dtype::kBf16;
  if (element_bytes == 4) return Dtype::kFp32;
  throw UsageFailure(UsageKind::kDtype,
                     "element_bytes = " + std::to_string(element_bytes) + ": allowed 2 (bf16) and 4 (fp32)");
}

// Throws what a signal's handler raises, and what another thread has injected (PyThreadState_SetAsyncExc): the
// interpreter looks for the latter only in its own loop, so some of it is run.
void look_at_interrupts();

// Waits in slices of so long, and calls `between` after each, with the GIL.
template <typename Wait, typename Between>
void wait_with(Wait wait, uint64_t slice_usec, Between between) {
  while (true) {
    bool over = false;
    {
      pybind11::gil_scoped_release release;
      over = wait(slice_usec);
    }
    if (over) return;
    between();
  }
}

// So that interrupts are seen.
template <typename Wait>
void wait_with_signals(Wait wait) {
  constexpr uint64_t kSliceUsec = 50000;
  wait_with(wait, kSliceUsec, look_at_interrupts);
}

// Closes on another thread, so that an interrupt can end the wait for operations and ranks: the others then raise.
// Where no thread is to be had, on this one, and interrupts come after it.
template <typename Close, typename Fail>
void close_with_signals(Close close, Fail fail) {
  std::future<void> closed;
  try {
    closed = std::async(std::launch::async, close);
  } catch (const std::system_error&) {
    const pybind11::gil_scoped_release release;
    close();
    return;
  }
  try {
    wait_with_signals(
        [&](uint64_t usec) { return closed.wait_for(std::chrono::microseconds(usec)) == std::future_status::ready; });
  } catch (const pybind11::error_already_set&) {
    pybind11::gil_scoped_release release;
    fail();
    closed.wait();
    throw;
  }
  closed.get();
}

struct PyDispatchArgs {
  uintptr_t x_ptr = 0;
  uint64_t num_tokens = 0;
  uint32_t hidden = 0;
  uint32_t element_bytes = 2;
  std::string wire = "same";
  bool fp8_pow2 = true;
  std::string routing = "plan";
  uintptr_t routing_ptr = 0;
  uint32_t routing_width = 0;
  uintptr_t values_ptr = 0;
  uint32_t expert_alignment = 1;
  bool compact = false;
  int64_t capacity = -1;
  bool pad_to_capacity = false;
  bool aside = false;
  std::shared_ptr<Plan> plan;  // of the host backend

  DispatchArgs native() const {
    DispatchArgs args;
    args.x = pointer<const uint8_t>(x_ptr);
    args.num_tokens = num_tokens;
    args.hidden = hidden;
    args.dtype = tensor_dtype(element_bytes);
    args.wire = wire == "fp8" ? Dtype::kFp8 : args.dtype;
    args.fp8_pow2 = fp8_pow2;
    args.has_routing = routing != "plan";
    args.routing = {routing == "topk" ? RoutingKind::kTopk : RoutingKind::kMap, pointer<const void>(routing_ptr),
                    routing_width};
    args.weights = pointer<const float>(values_ptr);
    args.plan = plan;
    args.expert_alignment = expert_alignment;
    args.compact = compact;
    args.capacity = capacity;
    args.pad_to_capacity = pad_to_capacity;
    args.aside = aside;
    return args;
  }
};

struct PyCombineArgs {
  uintptr_t rows_ptr = 0;
  uint32_t hidden = 0;
  uint32_t element_bytes = 2;
  bool wire_fp32 = false;
  uintptr_t values_ptr = 0;
  uintptr_t out_ptr = 0;
  uintptr_t values_out_ptr = 0;
  bool aside = false;
  std::shared_ptr<Plan> plan;  // of the host backend

  CombineArgs native() const {
    CombineArgs args;
    args.rows = pointer<const uint8_t>(rows_ptr);
    args.hidden = hidden;
    args.dtype = tensor_dtype(element_bytes);
    args.wire = wire_fp32 ? Dtype::kFp32 : args.dtype;
    args.plan = plan;
    args.weights = pointer<const float>(values_ptr);
    args.out = pointer<uint8_t>(out_ptr);
    args.weights_out = pointer<float>(values_out_ptr);
    args.aside = aside;
    return args;
  }
};

// (kind, ring, step, peer, channel, serial, num_bytes, begin_nsec, end_nsec) of each event, and how many were lost.
pybind11::tuple trace_tuple(const Trace& trace);
template <typename AnyEngine>
pybind11::tuple stop_trace(AnyEngine& engine) {
  Trace trace;
  {
    const pybind11::gil_scoped_release release;
    trace = engine.stop_trace();
  }
  return trace_tuple(trace);
}

// bindings/probes.cc
void bind_probes(pybind11::module_& m);
// bindings/cuda.cc
void bind_cuda(pybind11::module_& m);

}  // namespace uccl_ep
