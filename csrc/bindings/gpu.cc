// The Python interface for GPUs: creation of the engine, measurements, trials. Compiled only if nvcc was found; it
// loads without a GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backend/gpu/queue_probe.h"
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

}  // namespace

void bind_gpu(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<GpuEngine, Engine, std::shared_ptr<GpuEngine>>(m, "GpuEngine")
      .def(py::init<const EngineConfig&, int, uint32_t, uint32_t>(), "config"_a, "device"_a, "num_sms"_a, "stage_sms"_a,
           Release());
  bind_measurements(m);
  bind_trials(m);
  m.def("gpu_memory_plan", &gpu_memory_entries);
  m.def("gpu_least_budget", &gpu_least_budget_bytes);
}

}  // namespace uccl_ep
