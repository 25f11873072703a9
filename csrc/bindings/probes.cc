// Python face of what this host offers: conversions only.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "transport/nics.h"
#include "transport/registry.h"
#include "transport/trial.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace uccl_ep {
namespace {

py::dict dict_of(const HostNic& nic) {
  return py::dict("name"_a = nic.name, "family"_a = nic_defaults(nic.family).name, "pci_path"_a = nic.pci_path,
                  "driver"_a = nic.driver, "numa_node"_a = nic.numa_node, "port"_a = nic.port,
                  "link_layer"_a = nic.link_layer, "state"_a = nic.state, "gbits_per_s"_a = nic.gbits_per_s);
}

py::list list_of(const std::vector<HostNic>& nics) {
  py::list all;
  for (const HostNic& nic : nics) all.append(dict_of(nic));
  return all;
}

// Which NICs a rank would use, of those that sysfs shows.
py::list rank_nics(const Trial& trial, const std::string& root) {
  TransportSetup setup;
  setup.local_idx = trial.local_idx;
  setup.local_size = trial.local_size;
  setup.near_pci = trial.near_pci;
  std::vector<std::string> offered;
  for (const HostNic& nic : host_nics(root)) offered.push_back(nic.name);
  return list_of(nics_of_rank(setup, trial.options.nic, offered, root));
}

}  // namespace

void bind_probes(py::module_& m) {
  py::class_<Trial>(m, "Trial")
      .def(py::init<>())
      .def_readwrite("transport", &Trial::transport)
      .def_property(
          "nic", [](const Trial& t) { return t.options.nic; }, [](Trial& t, const NicOptions& v) { t.options.nic = v; })
      .def_readwrite("host_bytes", &Trial::host_bytes)
      .def_readwrite("rank", &Trial::rank)
      .def_readwrite("local_idx", &Trial::local_idx)
      .def_readwrite("local_size", &Trial::local_size)
      .def_readwrite("near_pci", &Trial::near_pci);
  m.def("host_nics", [](const std::string& root) { return list_of(host_nics(root)); }, "root"_a = "/sys");
  m.def("rank_nics", &rank_nics, "trial"_a, "root"_a = "/sys");
  m.def("try_registration", &try_registration, "trial"_a, py::call_guard<py::gil_scoped_release>());
}

}  // namespace uccl_ep
