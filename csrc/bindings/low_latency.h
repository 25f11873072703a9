// The Python interface of low latency, for all engines: conversions only. Part of engine.cc.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "bindings/bindings.h"
#include "bindings/waiting.h"
#include "engine/engine.h"

namespace uccl_ep {

namespace py = pybind11;
using namespace pybind11::literals;

inline SlotPhase phase_named(const std::string& name) {
  return name == "send" ? SlotPhase::kSend : name == "receive" ? SlotPhase::kReceive : SlotPhase::kBoth;
}
// What a low-latency call reads and writes, by address; 0: not given.
struct PyLowLatencyDispatch {
  uintptr_t x = 0, topk_idx = 0, weights = 0;
  uint64_t num_tokens = 0;
  uint32_t width = 0, hidden = 0;
  std::string wire, scale;  // the name of a row format, and its scales
  bool ue8m0 = false;
  // rows, scales, counts, ranges, source_tokens, origins, pairs, routed, total_counts, waited_nsec
  std::array<uintptr_t, 10> out{};

  LowLatencyDispatch native(SlotPhase phase, uintptr_t stream) const {
    const RowFormat* const format = find_row_format(wire, scale);
    if (format == nullptr) throw UsageFailure(UsageKind::kDtype, "no rows travel as " + wire + " with scales " + scale);
    LowLatencyDispatch args;
    args.phase = phase;
    args.x = pointer<const uint8_t>(x);
    args.topk_idx = pointer<const int64_t>(topk_idx);
    args.weights = pointer<const float>(weights);
    args.num_tokens = num_tokens;
    args.width = width;
    args.hidden = hidden;
    args.wire = format->id;
    args.rows = pointer<uint8_t>(out[0]);
    args.scales = pointer<float>(out[1]);
    args.ue8m0 = ue8m0;
    args.counts = pointer<int32_t>(out[2]);
    args.ranges = pointer<int64_t>(out[3]);
    args.source_tokens = pointer<int32_t>(out[4]);
    args.origins = pointer<uint32_t>(out[5]);
    args.pairs = pointer<uint32_t>(out[6]);
    args.routed = pointer<uint32_t>(out[7]);
    args.total_counts = pointer<int32_t>(out[8]);
    args.waited_nsec = pointer<int64_t>(out[9]);
    args.stream = pointer<void>(stream);
    return args;
  }
};
struct PyLowLatencyCombine {
  std::array<uintptr_t, 9> memory{};  // rows, ranges, origins, pairs, routed, topk_idx, weights, out, waited_nsec
  uint64_t num_tokens = 0;
  uint32_t width = 0, hidden = 0;
  bool wire_fp32 = false;

  LowLatencyCombine native(SlotPhase phase, uintptr_t stream) const {
    LowLatencyCombine args;
    args.phase = phase;
    args.rows = pointer<const uint8_t>(memory[0]);
    args.ranges = pointer<const int64_t>(memory[1]);
    args.origins = pointer<const uint32_t>(memory[2]);
    args.pairs = pointer<const uint32_t>(memory[3]);
    args.routed = pointer<const uint32_t>(memory[4]);
    args.topk_idx = pointer<const int64_t>(memory[5]);
    args.weights = pointer<const float>(memory[6]);
    args.num_tokens = num_tokens;
    args.width = width;
    args.hidden = hidden;
    args.wire = wire_fp32 ? Dtype::kFp32 : Dtype::kBf16;
    args.out = pointer<uint8_t>(memory[7]);
    args.waited_nsec = pointer<int64_t>(memory[8]);
    args.stream = pointer<void>(stream);
    return args;
  }
};

// Sends, receives, or both; waits as the engine does. What a caller that is interrupted has given may be in use: the
// engine fails first.
template <typename Args>
void call(Engine& self, OpKind kind, const Args& args) {
  {
    const py::gil_scoped_release release;
    self.low_latency(args);
  }
  const auto wait = [&](uint64_t usec) { return self.wait_low_latency(kind, args.phase, usec); };
  try {
    wait_with_signals(wait);
  } catch (const py::error_already_set&) {
    const py::gil_scoped_release release;
    self.fail("was interrupted in a low-latency operation");
    try {
      constexpr uint64_t kSliceUsec = 50000;
      while (!wait(kSliceUsec)) {
      }
    } catch (const CommunicationFailure&) {
    }
    throw;
  }
}

inline void bind_low_latency(py::module_& m, py::class_<Engine, std::shared_ptr<Engine>>& engine) {
  py::class_<PyLowLatencyDispatch>(m, "LowLatencyDispatch")
      .def(py::init<uintptr_t, uintptr_t, uintptr_t, uint64_t, uint32_t, uint32_t, std::string, std::string, bool,
                    std::array<uintptr_t, 10>>(),
           "x"_a, "topk_idx"_a, "weights"_a, "num_tokens"_a, "width"_a, "hidden"_a, "wire"_a, "scale"_a, "ue8m0"_a,
           "out"_a);
  py::class_<PyLowLatencyCombine>(m, "LowLatencyCombine")
      .def(py::init<std::array<uintptr_t, 9>, uint64_t, uint32_t, uint32_t, bool>(), "memory"_a, "num_tokens"_a,
           "width"_a, "hidden"_a, "wire_fp32"_a);
  engine
      .def(
          "low_latency_dispatch",
          [](Engine& self, const PyLowLatencyDispatch& args, const std::string& phase, uintptr_t stream) {
            call(self, OpKind::kLowLatencyDispatch, args.native(phase_named(phase), stream));
          },
          "args"_a, "phase"_a, "stream"_a)
      .def(
          "low_latency_combine",
          [](Engine& self, const PyLowLatencyCombine& args, const std::string& phase, uintptr_t stream) {
            call(self, OpKind::kLowLatencyCombine, args.native(phase_named(phase), stream));
          },
          "args"_a, "phase"_a, "stream"_a)
      .def(
          "low_latency_masks",
          [](Engine& self, uintptr_t out, uintptr_t stream) {
            self.low_latency_masks(pointer<int32_t>(out), pointer<void>(stream));
          },
          "out"_a, "stream"_a, py::call_guard<py::gil_scoped_release>());
}

}  // namespace uccl_ep
