// The Python module: errors, configuration, FP8 rows. Conversions only.
#include <pybind11/eval.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "backend/host/numerics.h"
#include "bindings/bindings.h"
#include "bindings/probes.h"
#include "common/fields.h"
#include "common/limits.h"
#include "engine/config.h"
#include "engine/host/engine.h"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace uccl_ep;

namespace {

void raise(const py::object& error) { PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr()); }

void translate(std::exception_ptr failure) {
  if (!failure) return;
  try {
    std::rethrow_exception(failure);
  } catch (const CommunicationFailure& e) {
    const ErrorRecord& r = e.record();
    raise(py::module_::import("uccl_ep_train.errors")
              .attr(error_name(r.kind))(e.what(), "rank"_a = r.rank, "epoch"_a = r.epoch, "step"_a = step_name(r.step),
                                        "chunk"_a = r.chunk, "peer"_a = r.peer, "expected"_a = r.expected,
                                        "seen"_a = r.seen));
  } catch (const LimitFailure& e) {
    raise(py::module_::import("uccl_ep_train.common.limits")
              .attr("refusal")(limit_name(e.limit()), e.what(), e.wanted_bytes()));
  } catch (const UsageFailure& e) {
    raise(py::module_::import("uccl_ep_train.errors").attr(error_name(e.kind()))(e.what()));
  }
}

// A class with the fields that its structure lists.
template <typename Struct>
py::class_<Struct> bind_fields(py::module_& m, const char* name) {
  py::class_<Struct> bound(m, name);
  bound.def(py::init<>());
  std::apply([&](const auto&... field) { (bound.def_readwrite(field.name, field.member), ...); }, kFields<Struct>);
  return bound;
}

void bind_config(py::module_& m) {
  bind_fields<LoopOptions>(m, "LoopOptions");
  bind_fields<NicOptions>(m, "NicOptions");
  bind_fields<EngineConfig>(m, "EngineConfig");
  m.def("memory_plan", &host_memory_entries);
  m.def("least_budget", &host_least_budget_bytes);
}

// A Python function that does nothing. Never freed: threads may wait while the interpreter ends.
PyObject* nothing = nullptr;

}  // namespace

void uccl_ep::look_at_interrupts() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  py::reinterpret_borrow<py::object>(nothing)();
}

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native engine of uccl_ep_train: host backend, command queue, proxies, loop transport.";
  py::register_exception_translator(&translate);
  nothing = py::eval("lambda: None", py::dict()).release().ptr();
  bind_config(m);
  bind_engine(m);
  bind_probes(m);
#ifdef UCCL_EP_CUDA
  bind_gpu(m);
#endif
  m.def("row_formats", [] {
    std::vector<std::tuple<std::string, std::string, uint32_t, uint32_t, uint32_t>> formats;
    for (const RowFormat& format : kRowFormats)
      formats.emplace_back(format.name, format.scale, format.code_bits, format.block, format.scale_bytes);
    return formats;
  });
  m.def("quantize_fp8",
        [](uintptr_t src, uint64_t rows, uint32_t hidden, const std::string& scale, uintptr_t codes, uintptr_t scales) {
          const RowFormat* const format = find_row_format("fp8", scale);
          if (format == nullptr) throw UsageFailure(UsageKind::kConfig, "no FP8 rows with scales \"" + scale + "\"");
          for (uint64_t r = 0; r < rows; ++r)
            host::fp8_quantize_row(pointer<const uint16_t>(src) + r * hidden, hidden, format->id,
                                   pointer<uint8_t>(codes) + r * hidden,
                                   pointer<float>(scales) + r * format->num_scales(hidden));
        });
  m.def("dequantize_fp8", [](uintptr_t codes, uintptr_t scales, uint64_t rows, uint32_t hidden, uintptr_t out) {
    for (uint64_t r = 0; r < rows; ++r)
      host::fp8_dequantize_row(pointer<const uint8_t>(codes) + r * hidden,
                               pointer<const float>(scales) + r * row_format(Dtype::kFp8).num_scales(hidden), hidden,
                               pointer<uint16_t>(out) + r * hidden);
  });
}
