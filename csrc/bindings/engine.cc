// The Python interface of the engines: conversions only. Every wait releases the GIL and checks for signals in between.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/low_latency.h"
#include "bindings/waiting.h"
#include "engine/engine.h"
#include "engine/host/engine.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace uccl_ep {
namespace {

inline Dtype tensor_dtype(uint32_t element_bytes) {
  if (element_bytes == 1) return Dtype::kFp8Fp32;  // codes, with the caller's scales
  if (element_bytes == 2) return Dtype::kBf16;
  if (element_bytes == 4) return Dtype::kFp32;
  throw UsageFailure(UsageKind::kDtype,
                     "element_bytes = " + std::to_string(element_bytes) + ": allowed 1 (fp8), 2 (bf16) and 4 (fp32)");
}

inline Dtype row_format_named(const std::string& name, const std::string& scale) {
  const RowFormat* const format = find_row_format(name, scale);
  if (format == nullptr) throw UsageFailure(UsageKind::kDtype, "no rows travel as " + name + " with scales " + scale);
  return format->id;
}

// Closes on another thread, so that an interrupt can end the wait for operations and ranks; the other ranks then raise.
// If no thread can be created, it closes on this one, and interrupts are seen afterwards.
template <typename Close, typename Fail>
void close_with_signals(Close close, Fail fail) {
  std::future<void> closed;
  try {
    closed = std::async(std::launch::async, close);
  } catch (const std::system_error&) {
    const py::gil_scoped_release release;
    close();
    return;
  }
  try {
    wait_with_signals(
        [&](uint64_t usec) { return closed.wait_for(std::chrono::microseconds(usec)) == std::future_status::ready; });
  } catch (const py::error_already_set&) {
    py::gil_scoped_release release;
    fail();
    closed.wait();
    throw;
  }
  closed.get();
}

struct PyDispatchArgs {
  uintptr_t x_ptr = 0;
  uintptr_t scales_ptr = 0;
  uintptr_t metadata_ptr = 0;
  uint64_t num_tokens = 0;
  uint32_t hidden = 0;
  uint32_t num_metadata = 0;
  uint32_t element_bytes = 2;
  std::string wire = "same";  // or the name of a row format, also of codes; `scale` is that format's
  std::string scale;
  std::string routing = "plan";
  uintptr_t routing_ptr = 0;
  uint32_t routing_width = 0;
  uintptr_t values_ptr = 0;
  uint32_t expert_alignment = 1;
  bool compact = false;
  int64_t capacity = -1;
  bool pad_to_capacity = false;
  uint64_t max_tokens = 0;
  bool aside = false;

  DispatchArgs native(std::shared_ptr<SavedPlan> plan, uintptr_t stream) const {
    DispatchArgs args;
    args.x = pointer<const uint8_t>(x_ptr);
    args.scales = pointer<const float>(scales_ptr);
    args.metadata = pointer<const uint32_t>(metadata_ptr);
    args.num_metadata = num_metadata;
    args.num_tokens = num_tokens;
    args.hidden = hidden;
    args.wire = wire == "same" ? tensor_dtype(element_bytes) : row_format_named(wire, scale);
    args.dtype = element_bytes == 1 ? args.wire : tensor_dtype(element_bytes);
    args.has_routing = routing != "plan";
    args.routing = {routing == "topk" ? RoutingKind::kTopk : RoutingKind::kMap, pointer<const void>(routing_ptr),
                    routing_width};
    args.weights = pointer<const float>(values_ptr);
    args.plan = std::move(plan);
    args.stream = pointer<void>(stream);
    args.expert_alignment = expert_alignment;
    args.compact = compact;
    args.capacity = capacity;
    args.pad_to_capacity = pad_to_capacity;
    args.max_tokens = max_tokens;
    args.aside = aside;
    return args;
  }
};

struct PyCombineArgs {
  uintptr_t rows_ptr = 0;
  uint32_t hidden = 0;
  uint32_t element_bytes = 2;
  bool wire_fp32 = false, rounds_sums = false;
  uintptr_t values_ptr = 0;
  std::array<uintptr_t, kMostBiases> bias_ptrs{};
  uintptr_t out_ptr = 0;
  uintptr_t values_out_ptr = 0;
  bool aside = false;

  CombineArgs native(std::shared_ptr<SavedPlan> plan, uintptr_t stream) const {
    CombineArgs args;
    args.rows = pointer<const uint8_t>(rows_ptr);
    args.hidden = hidden;
    args.dtype = tensor_dtype(element_bytes);
    args.wire = wire_fp32 ? Dtype::kFp32 : args.dtype;
    args.rounds_sums = rounds_sums;
    args.plan = std::move(plan);
    args.stream = pointer<void>(stream);
    args.weights = pointer<const float>(values_ptr);
    std::transform(bias_ptrs.begin(), bias_ptrs.end(), args.bias.begin(), pointer<const uint8_t>);
    args.out = pointer<uint8_t>(out_ptr);
    args.weights_out = pointer<float>(values_out_ptr);
    args.aside = aside;
    return args;
  }
};

py::tuple trace_tuple(const Trace& trace) {
  py::list events;
  for (const TraceEvent& e : trace.events)
    events.append(py::make_tuple(trace_name(e.kind), ring_name(e.ring), step_name(e.step), e.peer, e.channel, e.serial,
                                 e.num_bytes, e.begin_nsec, e.end_nsec));
  return py::make_tuple(events, trace.lost);
}

// Code that runs after a wait of milliseconds finds cold caches: on a virtual machine it took three to five times as
// long. To keep it warm, some of it runs at this interval.
constexpr uint64_t kRehearsalUsec = 250;

// Writes the number of pairs of each local expert, padding included, to `counts`, if given. Returns the number of rows.
// While it waits, it calls the Python function `rehearse` repeatedly; interrupts are seen there.
uint64_t wait_counts(Operation& self, uintptr_t counts, const py::object& rehearse) {
  const auto wait = [&](uint64_t usec) { return self.wait_counts(usec); };
  if (rehearse.is_none())
    wait_with_signals(wait);
  else
    wait_with(wait, kRehearsalUsec, rehearse);
  const std::shared_ptr<SavedPlan> plan = self.plan();
  if (counts != 0)
    std::copy(plan->tokens_per_expert().begin(), plan->tokens_per_expert().end(), pointer<int64_t>(counts));
  return plan->num_rows();
}

void bind_plan(py::module_& m) {
  const auto fact = [](auto member) { return [member](const SavedPlan& p) { return p.facts().*member; }; };
  py::class_<SavedPlan, std::shared_ptr<SavedPlan>>(m, "Plan")
      .def_property_readonly("plan_id", fact(&PlanFacts::plan_id))
      .def_property_readonly("num_tokens", fact(&PlanFacts::num_tokens))
      .def_property_readonly("num_rows", &SavedPlan::num_rows)
      .def_property_readonly("expert_alignment", fact(&PlanFacts::expert_alignment))
      .def_property_readonly("tokens_per_expert", &SavedPlan::tokens_per_expert)
      .def_property_readonly("tokens_per_expert_exact", &SavedPlan::tokens_per_expert_exact)
      .def_property_readonly("routing_width", fact(&PlanFacts::routing_width))
      .def_property_readonly(
          "routing_kind",
          [](const SavedPlan& p) { return p.facts().routing_kind == RoutingKind::kTopk ? "topk" : "map"; })
      .def_property_readonly("nbytes", &SavedPlan::num_bytes)
      .def_property_readonly("counts_begin", fact(&PlanFacts::counts_begin))
      .def_property_readonly("counts_end", fact(&PlanFacts::counts_end));
}

void bind_args(py::module_& m) {
  // The parameters are in the order of the fields.
  py::class_<PyDispatchArgs>(m, "DispatchArgs")
      .def(py::init<uintptr_t, uintptr_t, uintptr_t, uint64_t, uint32_t, uint32_t, uint32_t, std::string, std::string,
                    std::string, uintptr_t, uint32_t, uintptr_t, uint32_t, bool, int64_t, bool, uint64_t, bool>(),
           "x_ptr"_a, "scales_ptr"_a, "metadata_ptr"_a, "num_tokens"_a, "hidden"_a, "num_metadata"_a, "element_bytes"_a,
           "wire"_a, "scale"_a, "routing"_a, "routing_ptr"_a, "routing_width"_a, "values_ptr"_a, "expert_alignment"_a,
           "compact"_a, "capacity"_a, "pad_to_capacity"_a, "max_tokens"_a, "aside"_a);
  py::class_<PyCombineArgs>(m, "CombineArgs")
      .def(py::init<uintptr_t, uint32_t, uint32_t, bool, bool, uintptr_t, std::array<uintptr_t, kMostBiases>, uintptr_t,
                    uintptr_t, bool>(),
           "rows_ptr"_a, "hidden"_a, "element_bytes"_a, "wire_fp32"_a, "rounds_sums"_a, "values_ptr"_a, "bias_ptrs"_a,
           "out_ptr"_a, "values_out_ptr"_a, "aside"_a);
}

void bind_op(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Operation, std::shared_ptr<Operation>>(m, "Op")
      .def("wait_counts", &wait_counts, "counts"_a = 0, "rehearse"_a = py::none())
      .def(
          "wait",
          [](Operation& self, uintptr_t stream) {
            wait_with_signals([&](uint64_t usec) { return self.wait(pointer<void>(stream), usec); });
          },
          "stream"_a)
      .def("give_up_guess", &Operation::give_up_guess, Release())
      .def(
          "set_output",
          // Memory of rows, scales, weights, row_experts, metadata and the plan.
          [](Operation& self, const std::array<uintptr_t, 6>& memory, uintptr_t stream) {
            self.give_output({pointer<uint8_t>(memory[0]), pointer<float>(memory[1]), pointer<float>(memory[2]),
                              pointer<int64_t>(memory[3]), pointer<uint32_t>(memory[4]), pointer<uint8_t>(memory[5]),
                              pointer<void>(stream)});
          },
          "memory"_a, "stream"_a, Release())
      .def_property_readonly("plan", &Operation::plan)
      .def_property_readonly("counts_known", &Operation::counts_known)
      .def_property_readonly("is_guessed", &Operation::is_guessed)
      .def_property_readonly("placed", &Operation::placed)
      .def_property_readonly("done", &Operation::done);
}

void bind_calls(py::class_<Engine, std::shared_ptr<Engine>>& bound) {
  using Release = py::call_guard<py::gil_scoped_release>;
  // An operation keeps its engine alive.
  bound
      .def(
          "dispatch",
          [](Engine& self, const PyDispatchArgs& args, std::shared_ptr<SavedPlan> plan, uintptr_t stream) {
            return self.dispatch(args.native(std::move(plan), stream));
          },
          "args"_a, "plan"_a.none(true), "stream"_a, py::keep_alive<0, 1>(), Release())
      .def(
          "combine",
          [](Engine& self, const PyCombineArgs& args, std::shared_ptr<SavedPlan> plan, uintptr_t stream) {
            return self.combine(args.native(std::move(plan), stream));
          },
          "args"_a, "plan"_a, "stream"_a, py::keep_alive<0, 1>(), Release())
      .def(
          "refused",
          [](Engine& self, const std::string& why, uintptr_t stream) { self.refused(why, pointer<void>(stream)); },
          "why"_a, "stream"_a, Release())
      .def("num_calls", &Engine::num_calls, Release())
      .def("wake", &Engine::wake, Release());
}

void share_memory(Engine& self) {
  const py::gil_scoped_release release;
  self.share_memory([] {
    const py::gil_scoped_acquire acquire;
    look_at_interrupts();
  });
}

py::tuple stop_trace(Engine& self) {
  Trace trace;
  {
    const py::gil_scoped_release release;
    trace = self.stop_trace();
  }
  return trace_tuple(trace);
}

py::dict stats(const Engine& self) {
  py::dict out;
  for (const auto& [name, value] : self.stats()) out[py::str(name)] = value;
  return out;
}

void close(Engine& self, bool abort) {
  close_with_signals([&] { self.close(abort); }, [&] { self.fail("was interrupted while it closed its buffer"); });
}

// The engine of a parent process, inherited by fork, must never end here: its end would stop threads that do not exist,
// and tell the ranks of the parent that it leaves.
void never_end(std::shared_ptr<Engine> self) {
  static auto* const kept = new std::vector<std::shared_ptr<Engine>>;
  kept->push_back(std::move(self));
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_plan(m);
  bind_args(m);
  bind_op(m);
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Engine, std::shared_ptr<Engine>> bound(m, "Engine");
  bound.def("export_handle", [](const Engine& self) { return py::bytes(self.export_handle()); })
      .def("connect", &Engine::connect, "handles"_a, Release())
      .def("share_memory", &share_memory)
      .def("start", &Engine::start, Release());
  bind_calls(bound);
  bind_low_latency(m, bound);
  bound.def("fail", &Engine::fail, "text"_a, Release())
      .def("check", &Engine::check, Release())
      .def("start_trace", &Engine::start_trace, "max_events"_a, Release())
      .def("stop_trace", &stop_trace)
      .def("stats", &stats)
      .def("close", &close, "abort"_a = false)
      .def("never_end", &never_end);
  py::class_<HostEngine, Engine, std::shared_ptr<HostEngine>>(m, "HostEngine")
      .def(py::init<const EngineConfig&>(), "config"_a, Release());
}

}  // namespace uccl_ep
