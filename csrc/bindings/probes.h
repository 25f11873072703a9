// The Python interface to what this host offers: conversions only.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "engine/config.h"
#include "engine/group/choice.h"
#include "engine/group/domains.h"
#include "transport/nics.h"
#include "transport/registry.h"
#include "transport/trial.h"

namespace uccl_ep {

namespace py = pybind11;
using namespace pybind11::literals;

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

constexpr const char* kLinkNames[] = {"memory", "efa", "rdma", "tcp"};  // by LinkKind

// kRdma for an unknown name, which another version may know.
LinkKind link_named(const std::string& name) {
  for (LinkKind link : {LinkKind::kMemory, LinkKind::kEfa, LinkKind::kTcp})
    if (name == kLinkNames[static_cast<size_t>(link)]) return link;
  return LinkKind::kRdma;
}

// What the named transports say about this host: (name, usable, text, link).
std::vector<std::tuple<std::string, bool, std::string, std::string>> probe_named(
    const EngineConfig& config, const std::vector<std::string>& names) {
  std::vector<std::tuple<std::string, bool, std::string, std::string>> found;
  for (const TransportKind& kind : transports()) {
    if (std::find(names.begin(), names.end(), kind.name) == names.end()) continue;
    const Probe probe = kind.probe({config.loop, config.nic});
    found.emplace_back(kind.name, probe.usable, probe.text, kLinkNames[static_cast<size_t>(probe.link)]);
  }
  return found;
}

using Told = std::map<std::string, std::tuple<bool, std::string, std::string>>;

// Returns (name, why, provider). `places`: (host, memory) of each rank. `told`: the probes of each rank, by transport:
// (usable, text, link).
std::tuple<std::string, std::string, std::string> choose(const std::string& wanted,
                                                         const std::vector<std::pair<std::string, std::string>>& places,
                                                         const std::vector<Told>& told, int num_domains, bool on_gpu) {
  std::vector<Place> native;
  for (const auto& [host, memory] : places) native.push_back({host, memory});
  std::vector<Offers> offers(told.size());
  for (size_t rank = 0; rank < told.size(); ++rank)
    for (const auto& [name, probe] : told[rank]) {
      const auto& [usable, text, link] = probe;
      offers[rank][name] = {usable, text, link_named(link)};
    }
  const TransportChoice choice = choose_transport(wanted, native, offers, num_domains, on_gpu);
  return {choice.name, choice.why, choice.provider};
}

}  // namespace

inline void bind_probes(py::module_& m) {
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
  m.def("transports", &probe_named, "config"_a, "names"_a, py::call_guard<py::gil_scoped_release>());
  m.def("choose_transport", &choose, "wanted"_a, "places"_a, "told"_a, "num_domains"_a, "on_gpu"_a);
  py::class_<DomainProbe>(m, "DomainProbe")
      .def(py::init<const std::string&>(), "kernel"_a)
      .def("offer", [](const DomainProbe& self) { return py::bytes(self.offer()); })
      .def(
          "reach",
          [](const DomainProbe& self, int rank, const std::vector<std::string>& offers) {
            return py::bytes(self.reach(rank, offers));
          },
          "rank"_a, "offers"_a);
  m.def("domains_of", &domains_of, "rank"_a, "reached"_a);
  m.def("host_nics", [](const std::string& root) { return list_of(host_nics(root)); }, "root"_a = "/sys");
  m.def("rank_nics", &rank_nics, "trial"_a, "root"_a = "/sys");
  m.def("try_registration", &try_registration, "trial"_a, py::call_guard<py::gil_scoped_release>());
}

}  // namespace uccl_ep
