// The Python interface for GPUs: creation of the engine, measurements, trials. Compiled only if nvcc was found; it
// loads without a GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "backend/gpu/queue_probe.h"
#include "backend/gpu/topk.h"
#include "bindings/bindings.h"
#include "engine/gpu/engine.h"
#include "engine/gpu/network.h"
#include "engine/gpu/trial.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace uccl_ep {
namespace {

void bind_measurements(py::module_& m) {
  m.def(
      "measure_gpu_queue",
      [](int device, uint32_t capacity, uint64_t commands, uint64_t first, uint32_t pause_usec) {
        gpu::QueueMeasured found;
        {
          const py::gil_scoped_release release;
          found = gpu::measure_queue(device, capacity, commands, first, pause_usec);
        }
        return py::dict("commands_per_s"_a = found.commands_per_s, "wrong"_a = found.wrong,
                        "round_trip_usec"_a = found.round_trip_usec);
      },
      "device"_a, "capacity"_a, "commands"_a, "first"_a = 0, "pause_usec"_a = 0);
}

void bind_trials(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("gpu_pci_address", &gpu::pci_address, "device"_a);
  m.def("try_gpu_memory", &try_device_memory, "device"_a, "num_bytes"_a, Release());
  m.def("try_gpu_registration", &try_device_registration, "trial"_a, "device"_a, "num_bytes"_a, Release());
}

gpu::SlotPhase phase_named(const std::string& name) {
  return name == "send" ? gpu::SlotPhase::kSend : name == "receive" ? gpu::SlotPhase::kReceive : gpu::SlotPhase::kBoth;
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

  LowLatencyDispatch native(gpu::SlotPhase phase, uintptr_t stream) const {
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

  LowLatencyCombine native(gpu::SlotPhase phase, uintptr_t stream) const {
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

void bind_low_latency(py::module_& m, py::class_<GpuEngine, Engine, std::shared_ptr<GpuEngine>>& engine) {
  using Release = py::call_guard<py::gil_scoped_release>;
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
          [](GpuEngine& self, const PyLowLatencyDispatch& args, const std::string& phase, uintptr_t stream) {
            self.low_latency_dispatch(args.native(phase_named(phase), stream));
          },
          "args"_a, "phase"_a, "stream"_a, Release())
      .def(
          "low_latency_combine",
          [](GpuEngine& self, const PyLowLatencyCombine& args, const std::string& phase, uintptr_t stream) {
            self.low_latency_combine(args.native(phase_named(phase), stream));
          },
          "args"_a, "phase"_a, "stream"_a, Release())
      .def(
          "low_latency_masks",
          [](GpuEngine& self, uintptr_t out, uintptr_t stream) {
            self.low_latency_masks(pointer<int32_t>(out), pointer<void>(stream));
          },
          "out"_a, "stream"_a, Release())
      .def(
          "captured_graph",
          [](const GpuEngine&, uintptr_t stream) {
            return reinterpret_cast<uintptr_t>(gpu::captured_graph(stream_of(pointer<void>(stream))));
          },
          "stream"_a);
}

// A kernel's launch, as Python calls it. memory: tensors by address, 0: not given. The stream is one of the device.
template <size_t kSizes, typename ArgsOf>
void def_topk(py::module_& m, const char* name, ArgsOf args_of) {
  m.def(
      name,
      [args_of](int device, uintptr_t stream, std::array<uintptr_t, 3> memory, std::array<uint32_t, kSizes> sizes) {
        const gpu::OnDevice guard(device);
        gpu::must(gpu::launch_topk(args_of(memory, sizes), stream_of(pointer<void>(stream))), "top-k routing");
      },
      "device"_a, "stream"_a, "memory"_a, "sizes"_a);
}

void bind_topk(py::module_& m) {
  def_topk<5>(m, "gpu_topk_layout", [](const auto& memory, const auto& sizes) {
    const auto [topk_idx, counts, in_rank] = memory;
    const auto [tokens, width, experts, ranks, ranks_of_node] = sizes;
    return gpu::TopkLayout{pointer<const int64_t>(topk_idx),
                           tokens,
                           width,
                           experts,
                           ranks,
                           ranks_of_node,
                           pointer<uint32_t>(counts),
                           pointer<bool>(in_rank)};
  });
  def_topk<3>(m, "gpu_topk_pack", [](const auto& memory, const auto& sizes) {
    const auto [topk_idx, weights, words] = memory;
    const auto [rank, rows, width] = sizes;
    return gpu::TopkPack{pointer<const int64_t>(topk_idx), pointer<const uint32_t>(weights), rank, rows, width,
                         pointer<uint32_t>(words)};
  });
  def_topk<4>(m, "gpu_topk_unpack", [](const auto& memory, const auto& sizes) {
    const auto [words, experts, weights] = memory;
    const auto [rows, width, first_expert, num_experts] = sizes;
    return gpu::TopkUnpack{
        pointer<const uint32_t>(words), rows, width, first_expert, num_experts, pointer<int64_t>(experts),
        pointer<uint32_t>(weights)};
  });
}

}  // namespace

void bind_gpu(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<GpuEngine, Engine, std::shared_ptr<GpuEngine>> engine(m, "GpuEngine");
  engine.def(py::init<const EngineConfig&, int, uint32_t, uint32_t>(), "config"_a, "device"_a, "num_sms"_a,
             "stage_sms"_a, Release());
  bind_low_latency(m, engine);
  bind_measurements(m);
  bind_topk(m);
  bind_trials(m);
  m.def("gpu_memory_plan", &gpu_memory_entries);
  m.def("gpu_least_budget", &gpu_least_budget_bytes);
  m.def("gpu_limits", [](const EngineConfig& config) {
    const GpuLimits its = gpu_limits(config);
    return std::tuple(its.batch_streams, its.stream_batches, its.max_tokens, its.max_pairs);
  });
}

}  // namespace uccl_ep
