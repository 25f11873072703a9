// Python face of the engine: conversions only. Whatever waits releases the GIL and looks at signals in between.
#include <pybind11/eval.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "backend/host/numerics.h"
#include "bindings/bindings.h"
#include "common/fields.h"
#include "common/limits.h"
#include "engine/engine.h"
#include "transport/registry.h"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace uccl_ep;

namespace {

const char* class_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kArrivalTimeout:
      return "ArrivalTimeout";
    case ErrorKind::kProgressTimeout:
      return "ProgressTimeout";
    case ErrorKind::kPeerDied:
      return "PeerDied";
    case ErrorKind::kTransport:
      return "TransportError";
    case ErrorKind::kRankMismatch:
      return "RankMismatchError";
    case ErrorKind::kPlanMismatch:
      return "PlanMismatchError";
    default:
      return "PeerFailed";
  }
}

const char* class_of(UsageKind kind) {
  switch (kind) {
    case UsageKind::kConfig:
      return "ConfigError";
    case UsageKind::kBudget:
      return "MemoryBudgetError";
    case UsageKind::kDtype:
      return "DtypeError";
    case UsageKind::kShape:
      return "ShapeError";
    case UsageKind::kRouting:
      return "RoutingError";
    case UsageKind::kClosed:
      return "ClosedError";
    default:
      return "InputError";
  }
}

void raise(const py::object& error) { PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr()); }

void translate(std::exception_ptr failure) {
  if (!failure) return;
  try {
    std::rethrow_exception(failure);
  } catch (const CommunicationFailure& e) {
    const ErrorRecord& r = e.record();
    raise(py::module_::import("uccl_ep_train.errors")
              .attr(class_of(r.kind))(e.what(), "rank"_a = r.rank, "epoch"_a = r.epoch, "step"_a = step_name(r.step),
                                      "chunk"_a = r.chunk, "peer"_a = r.peer, "expected"_a = r.expected,
                                      "seen"_a = r.seen));
  } catch (const LimitFailure& e) {
    raise(
        py::module_::import("uccl_ep_train.limits").attr("refusal")(limit_name(e.limit()), e.what(), e.wanted_bytes()));
  } catch (const UsageFailure& e) {
    raise(py::module_::import("uccl_ep_train.errors").attr(class_of(e.kind()))(e.what()));
  }
}

// An operation together with the engine that runs it.
struct PyOp {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Op> op;
};

// A class with the fields that its structure lists.
template <typename Struct>
py::class_<Struct> bind_fields(py::module_& m, const char* name) {
  py::class_<Struct> bound(m, name);
  bound.def(py::init<>());
  std::apply([&](const auto&... field) { (bound.def_readwrite(field.name, field.member), ...); }, kFields<Struct>);
  return bound;
}

const char* name_of(LinkKind link) {
  switch (link) {
    case LinkKind::kMemory:
      return "memory";
    case LinkKind::kEfa:
      return "efa";
    case LinkKind::kTcp:
      return "tcp";
    default:
      return "rdma";
  }
}

// What the named transports say about this host: (name, usable, text, link).
std::vector<std::tuple<std::string, bool, std::string, std::string>> probe_named(
    const EngineConfig& config, const std::vector<std::string>& names) {
  std::vector<std::tuple<std::string, bool, std::string, std::string>> found;
  for (const TransportKind& kind : transports()) {
    if (std::find(names.begin(), names.end(), kind.name) == names.end()) continue;
    const Probe probe = kind.probe({config.loop, config.nic});
    found.emplace_back(kind.name, probe.usable, probe.text, name_of(probe.link));
  }
  return found;
}

void bind_config(py::module_& m) {
  bind_fields<LoopOptions>(m, "LoopOptions");
  bind_fields<NicOptions>(m, "NicOptions");
  bind_fields<EngineConfig>(m, "EngineConfig");
  m.def("transports", &probe_named, "config"_a, "names"_a, py::call_guard<py::gil_scoped_release>());
  m.def("memory_plan", &memory_entries);
  m.def("least_budget", [](const EngineConfig& config) { return least_budget_bytes(config); });
}

void bind_plan(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def_readonly("plan_id", &Plan::plan_id)
      .def_readonly("num_tokens", &Plan::num_tokens)
      .def_readonly("num_rows", &Plan::num_rows)
      .def_readonly("num_experts", &Plan::num_experts)
      .def_readonly("expert_alignment", &Plan::expert_alignment)
      .def_readonly("tokens_per_expert", &Plan::tokens_per_expert)
      .def_readonly("tokens_per_expert_exact", &Plan::tokens_per_expert_exact)
      .def_readonly("routing_width", &Plan::routing_width)
      .def_property_readonly("routing_kind",
                             [](const Plan& plan) { return plan.routing_kind == RoutingKind::kTopk ? "topk" : "map"; })
      .def_property_readonly("nbytes", &Plan::num_bytes);
}

void bind_args(py::module_& m) {
  // In the order of their fields.
  py::class_<PyDispatchArgs>(m, "DispatchArgs")
      .def(py::init<uintptr_t, uint64_t, uint32_t, uint32_t, std::string, bool, std::string, uintptr_t, uint32_t,
                    uintptr_t, uint32_t, bool, int64_t, bool, bool>(),
           "x_ptr"_a, "num_tokens"_a, "hidden"_a, "element_bytes"_a, "wire"_a, "fp8_pow2"_a, "routing"_a,
           "routing_ptr"_a, "routing_width"_a, "values_ptr"_a, "expert_alignment"_a, "compact"_a, "capacity"_a,
           "pad_to_capacity"_a, "aside"_a)
      .def_readwrite("plan", &PyDispatchArgs::plan);
  py::class_<PyCombineArgs>(m, "CombineArgs")
      .def(py::init<uintptr_t, uint32_t, uint32_t, bool, uintptr_t, uintptr_t, uintptr_t, bool>(), "rows_ptr"_a,
           "hidden"_a, "element_bytes"_a, "wire_fp32"_a, "values_ptr"_a, "out_ptr"_a, "values_out_ptr"_a, "aside"_a)
      .def_readwrite("plan", &PyCombineArgs::plan);
}

void bind_op(py::module_& m) {
  py::class_<PyOp>(m, "Op")
      .def("wait_counts",
           [](PyOp& self) {
             wait_with_signals([&](uint64_t usec) { return self.engine->wait_counts(*self.op, usec); });
           })
      .def("wait",
           [](PyOp& self) { wait_with_signals([&](uint64_t usec) { return self.engine->wait(*self.op, usec); }); })
      .def("set_output",
           [](PyOp& self, uintptr_t rows, uintptr_t scales, uintptr_t values) {
             self.engine->give_output(*self.op,
                                      {pointer<uint8_t>(rows), pointer<float>(scales), pointer<float>(values)});
           })
      .def("set_row_experts",
           [](PyOp& self, uintptr_t experts) { self.engine->give_row_experts(*self.op, pointer<int64_t>(experts)); })
      .def_property_readonly("num_rows", [](const PyOp& self) { return self.op->plan->num_rows; })
      .def_property_readonly("tokens_per_expert", [](const PyOp& self) { return self.op->plan->tokens_per_expert; })
      .def_property_readonly("tokens_per_expert_exact",
                             [](const PyOp& self) { return self.op->plan->tokens_per_expert_exact; })
      .def_property_readonly("plan", [](const PyOp& self) { return self.op->plan; })
      .def_property_readonly("done", [](const PyOp& self) {
        std::lock_guard lock(self.op->mutex);
        return self.op->done;
      });
}

void bind_engine(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init<const EngineConfig&>(), Release())
      .def("export_handle", [](const Engine& self) { return py::bytes(self.export_handle()); })
      .def("connect", &Engine::connect, Release())
      .def("start", &Engine::start, Release())
      .def("dispatch",
           [](std::shared_ptr<Engine> self, const PyDispatchArgs& args) {
             const DispatchArgs native = args.native();
             py::gil_scoped_release release;
             return PyOp{self, self->dispatch(native)};
           })
      .def("combine",
           [](std::shared_ptr<Engine> self, const PyCombineArgs& args) {
             const CombineArgs native = args.native();
             py::gil_scoped_release release;
             return PyOp{self, self->combine(native)};
           })
      .def("refused", &Engine::refused, "why"_a, Release())
      .def("num_calls", &Engine::num_calls, Release())
      .def("fail", &Engine::fail, Release())
      .def("check", &Engine::check, Release())
      .def("start_trace", &Engine::start_trace, "max_events"_a, Release())
      .def("stop_trace", &stop_trace<Engine>)
      .def("stats",
           [](const Engine& self) {
             py::dict out;
             for (const auto& [name, value] : self.stats()) out[py::str(name)] = value;
             return out;
           })
      .def(
          "close",
          [](Engine& self, bool abort) {
            close_with_signals([&] { self.close(abort); },
                               [&] { self.fail("was interrupted while it closed its buffer"); });
          },
          "abort"_a = false);
}

// A function of Python that does nothing. Never freed: threads may wait while the interpreter ends.
PyObject* nothing = nullptr;

}  // namespace

void uccl_ep::look_at_interrupts() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  py::reinterpret_borrow<py::object>(nothing)();
}

py::tuple uccl_ep::trace_tuple(const Trace& trace) {
  py::list events;
  for (const TraceEvent& e : trace.events)
    events.append(py::make_tuple(trace_name(e.kind), ring_name(e.ring), step_name(e.step), e.peer, e.channel, e.serial,
                                 e.num_bytes, e.begin_nsec, e.end_nsec));
  return py::make_tuple(events, trace.lost);
}

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native engine of uccl_ep_train: host backend, command queue, proxies, loop transport.";
  py::register_exception_translator(&translate);
  nothing = py::eval("lambda: None", py::dict()).release().ptr();
  bind_config(m);
  bind_plan(m);
  bind_args(m);
  bind_op(m);
  bind_engine(m);
  bind_probes(m);
#ifdef UCCL_EP_CUDA
  bind_cuda(m);
#endif
  m.def("quantize_fp8", [](uintptr_t src, uint64_t rows, uint32_t hidden, bool pow2, uintptr_t codes,
                           uintptr_t scales) {
    for (uint64_t r = 0; r < rows; ++r)
      host::fp8_quantize_row(pointer<const uint16_t>(src) + r * hidden, hidden, pow2,
                             pointer<uint8_t>(codes) + r * hidden, pointer<float>(scales) + r * (hidden / kFp8Block));
  });
  m.def("dequantize_fp8", [](uintptr_t codes, uintptr_t scales, uint64_t rows, uint32_t hidden, uintptr_t out) {
    for (uint64_t r = 0; r < rows; ++r)
      host::fp8_dequantize_row(pointer<const uint8_t>(codes) + r * hidden,
                               pointer<const float>(scales) + r * (hidden / kFp8Block), hidden,
                               pointer<uint16_t>(out) + r * hidden);
  });
}
