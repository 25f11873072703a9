// Python face of the CUDA engine. Compiled only where nvcc was found; loads without a GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sched.h>

#include <algorithm>
#include <vector>

#include "backend/cuda/queue_probe.h"
#include "bindings/bindings.h"
#include "engine/cuda/engine.h"
#include "engine/cuda/trial.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace uccl_ep {
namespace {

cudaStream_t stream_of(uintptr_t address) { return reinterpret_cast<cudaStream_t>(address); }

struct PyCudaOp {
  std::shared_ptr<CudaEngine> engine;
  std::shared_ptr<CudaOp> op;
  CudaOutput output;
};

constexpr uint64_t kSpinUsec = 5000;  // then threads that share the core get it, too

// What follows a wait of milliseconds finds cold caches: it took three to five times as long on a virtual machine. So
// that it stays warm, some of it is run this often.
constexpr uint64_t kRehearsalUsec = 250;

bool poll_counts_for(PyCudaOp& self, uint64_t usec, uint64_t started) {
  const uint64_t until = now_usec() + usec;
  while (!self.engine->poll_counts(*self.op)) {
    const uint64_t now = now_usec();
    if (now > until) return false;
    if (now - started > kSpinUsec) sched_yield();
  }
  return true;
}

// Writes the pairs of each local expert, padding included, to `counts`; returns how many rows come. Calls `rehearse`,
// a Python function, again and again: interrupts are seen in it.
uint64_t wait_counts(PyCudaOp& self, uintptr_t counts, const py::function& rehearse) {
  // The step goes on when this thread has seen the counts: it does not sleep.
  const uint64_t started = now_usec();
  wait_with([&](uint64_t usec) { return poll_counts_for(self, usec, started); }, kRehearsalUsec, rehearse);
  const std::vector<uint64_t>& known = self.op->plan->tokens_per_expert;
  std::copy(known.begin(), known.end(), reinterpret_cast<int64_t*>(counts));
  return self.op->plan->sizes.num_rows;
}

PyCudaOp dispatch(std::shared_ptr<CudaEngine> self, const PyDispatchArgs& args, std::shared_ptr<CudaPlan> plan,
                  uintptr_t stream) {
  const py::gil_scoped_release release;
  return {self, self->dispatch(args.native(), {std::move(plan), stream_of(stream)}), {}};
}

PyCudaOp combine(std::shared_ptr<CudaEngine> self, const PyCombineArgs& args, std::shared_ptr<CudaPlan> plan,
                 uintptr_t stream) {
  const py::gil_scoped_release release;
  return {self, self->combine(args.native(), {std::move(plan), stream_of(stream)}), {}};
}

void set_output(PyCudaOp& self, uintptr_t rows, uintptr_t scales, uintptr_t values, uintptr_t plan, uintptr_t stream) {
  CudaOutput& output = self.output;
  output.rows = pointer<uint8_t>(rows);
  output.scales = pointer<float>(scales);
  output.weights = pointer<float>(values);
  output.plan = pointer<uint8_t>(plan);
  output.stream = stream_of(stream);
  const py::gil_scoped_release release;
  self.engine->give_output(*self.op, output);
}

void bind_measurements(py::module_& m) {
  m.def(
      "measure_cuda_queue",
      [](int device, uint32_t capacity, uint64_t commands, uint64_t first, uint32_t pause_usec) {
        cuda::QueueMeasured found;
        {
          const py::gil_scoped_release release;
          found = cuda::measure_queue(device, capacity, commands, first, pause_usec);
        }
        return py::dict("commands_per_s"_a = found.commands_per_s, "wrong"_a = found.wrong,
                        "round_trip_usec"_a = found.round_trip_usec);
      },
      "device"_a, "capacity"_a, "commands"_a, "first"_a = 0, "pause_usec"_a = 0);
}

void bind_trials(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("cuda_pci_address", &pci_address, "device"_a);
  m.def("try_cuda_memory", &try_device_memory, "device"_a, "num_bytes"_a, Release());
  m.def("try_cuda_registration", &try_device_registration, "trial"_a, "device"_a, "num_bytes"_a, Release());
}

void bind_plan(py::module_& m) {
  py::class_<CudaPlan, std::shared_ptr<CudaPlan>>(m, "CudaPlan")
      .def_readonly("plan_id", &CudaPlan::plan_id)
      .def_readonly("expert_alignment", &CudaPlan::expert_alignment)
      .def_readonly("tokens_per_expert", &CudaPlan::tokens_per_expert)
      .def_readonly("tokens_per_expert_exact", &CudaPlan::tokens_per_expert_exact)
      .def_readonly("routing_width", &CudaPlan::routing_width)
      .def_readonly("nbytes", &CudaPlan::storage_bytes)
      .def_readonly("counts_begin", &CudaPlan::counts_begin)
      .def_readonly("counts_end", &CudaPlan::counts_end)
      .def_property_readonly("num_tokens", [](const CudaPlan& p) { return p.view.num_tokens; })
      .def_property_readonly("num_rows", [](const CudaPlan& p) { return p.sizes.num_rows; })
      .def_property_readonly("routing_kind",
                             [](const CudaPlan& p) { return p.routing_kind == RoutingKind::kTopk ? "topk" : "map"; });
}

void bind_op(py::module_& m) {
  py::class_<PyCudaOp>(m, "CudaOp")
      .def("wait_counts", &wait_counts, "counts"_a, "rehearse"_a)
      .def("wait", [](PyCudaOp& self, uintptr_t stream) { self.engine->wait(*self.op, stream_of(stream)); })
      .def("give_up_guess", [](PyCudaOp& self) { self.engine->give_up_guess(*self.op); })
      .def("set_output", &set_output, "rows"_a, "scales"_a, "values"_a, "plan"_a, "stream"_a)
      .def("set_row_experts",
           [](PyCudaOp& self, uintptr_t address) { self.output.row_experts = pointer<int64_t>(address); })
      .def_property_readonly("plan", [](const PyCudaOp& self) { return self.op->plan; })
      .def_property_readonly("counts_known", [](const PyCudaOp& self) { return self.op->counts_known; })
      .def_property_readonly("is_guessed",
                             [](const PyCudaOp& self) { return self.op->place.fit == cuda::Fit::kIfLargeEnough; })
      .def_property_readonly("placed", [](const PyCudaOp& self) { return self.op->placed; })
      .def_property_readonly("done", [](const PyCudaOp& self) {
        // On the caller's own stream memory is given back in the order of the stream.
        return self.op->launched && (self.op->done == nullptr || cudaEventQuery(self.op->done) != cudaErrorNotReady);
      });
}

}  // namespace

void bind_cuda(py::module_& m) {
  bind_plan(m);
  bind_op(m);
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<CudaEngine, std::shared_ptr<CudaEngine>>(m, "CudaEngine")
      .def(py::init<const EngineConfig&, int, uint32_t, uint32_t>(), "config"_a, "device"_a, "num_sms"_a, "stage_sms"_a,
           Release())
      .def("export_handle", [](const CudaEngine& self) { return py::bytes(self.export_handle()); })
      .def("connect", &CudaEngine::connect, Release())
      .def("share_memory",
           [](CudaEngine& self) {
             const py::gil_scoped_release release;
             self.share_memory([] {
               const py::gil_scoped_acquire acquire;
               look_at_interrupts();
             });
           })
      .def("start", &CudaEngine::start, Release())
      .def("dispatch", &dispatch, "args"_a, "plan"_a.none(true), "stream"_a)
      .def("combine", &combine, "args"_a, "plan"_a, "stream"_a)
      .def(
          "refused",
          [](CudaEngine& self, const std::string& why, uintptr_t stream) { self.refused(why, stream_of(stream)); },
          "why"_a, "stream"_a, Release())
      .def("num_calls", &CudaEngine::num_calls, Release())
      .def("fail", &CudaEngine::fail, Release())
      .def("check", &CudaEngine::check, Release())
      .def("wake", &CudaEngine::wake, Release())
      .def("start_trace", &CudaEngine::start_trace, "max_events"_a, Release())
      .def("stop_trace", &stop_trace<CudaEngine>)
      .def("stats",
           [](const CudaEngine& self) {
             py::dict out;
             for (const auto& [name, value] : self.stats()) out[py::str(name)] = value;
             return out;
           })
      .def(
          "close",
          [](CudaEngine& self, bool abort) {
            close_with_signals([&] { self.close(abort); },
                               [&] { self.fail("was interrupted while it closed its buffer"); });
          },
          "abort"_a = false);
  bind_measurements(m);
  bind_trials(m);
  m.def("cuda_memory_plan", &cuda_memory_entries);
  m.def("cuda_least_budget", &cuda_least_budget_bytes);
}

}  // namespace uccl_ep
