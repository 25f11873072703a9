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

void bind_captures(py::class_<GpuEngine, Engine, std::shared_ptr<GpuEngine>>& engine) {
  engine.def(
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
  def_topk<5>(m, "gpu_topk_unpack", [](const auto& memory, const auto& sizes) {
    const auto [words, experts, weights] = memory;
    const auto [rows, width, first_expert, num_experts, row_words] = sizes;
    return gpu::TopkUnpack{
        pointer<const uint32_t>(words), rows, width, first_expert, num_experts, row_words, pointer<int64_t>(experts),
        pointer<uint32_t>(weights)};
  });
}

}  // namespace

void bind_gpu(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<GpuEngine, Engine, std::shared_ptr<GpuEngine>> engine(m, "GpuEngine");
  engine.def(py::init<const EngineConfig&, int, uint32_t, uint32_t>(), "config"_a, "device"_a, "num_sms"_a,
             "stage_sms"_a, Release());
  bind_captures(engine);
  bind_measurements(m);
  bind_topk(m);
  bind_trials(m);
  m.def("gpu_memory_plan", &gpu_memory_entries);
  m.def("gpu_least_budget", &gpu_least_budget_bytes);
  m.def("gpu_limits", [](const EngineConfig& config) {
    const GpuLimits its = gpu_limits(config);
    return std::tuple(its.batch_streams, its.stream_batches, its.max_tokens, its.max_pairs, its.window_tokens);
  });
}

}  // namespace uccl_ep
