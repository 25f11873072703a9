// A made-up /sys of a host with NICs and GPUs, as much of it as transport/nics.cc reads. Removed when it goes.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace uccl_ep {

class MadeUpSysfs {
 public:
  MadeUpSysfs() {
    std::string name = (std::filesystem::temp_directory_path() / "uccl_ep_sysfs.XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    root_ = name;
    std::filesystem::create_directories(root_ / "devices");
  }
  MadeUpSysfs(const MadeUpSysfs&) = delete;
  ~MadeUpSysfs() {
    std::error_code none;
    std::filesystem::remove_all(root_, none);
  }
  std::string root() const { return root_.string(); }

  struct Pci {
    std::string path;  // "pci0000:00/0000:00:01.0/0000:01:00.0"
    std::string vendor;  // "0x15b3"
    std::string driver;
    int numa_node = 0;
    std::string device_class = "0x020000";
  };
  struct Port {
    std::string state = "4: ACTIVE";
    std::string link_layer = "InfiniBand";
    std::string rate = "400 Gb/sec (4X NDR)";
  };

  void add_pci(const Pci& pci) {
    const auto folder = root_ / "devices" / pci.path;
    write(folder / "vendor", pci.vendor);
    write(folder / "class", pci.device_class);
    write(folder / "numa_node", std::to_string(pci.numa_node));
    std::filesystem::create_directories(root_ / "bus/pci/drivers" / pci.driver);
    std::filesystem::create_directories(root_ / "bus/pci/devices");
    std::filesystem::create_directory_symlink(root_ / "bus/pci/drivers" / pci.driver, folder / "driver");
    std::filesystem::create_directory_symlink(folder, root_ / "bus/pci/devices" / folder.filename());
  }
  void add_nic(const std::string& name, const Pci& pci, const Port& port) {
    add_pci(pci);
    const auto device = root_ / "devices" / pci.path;
    add_ports(device / "infiniband" / name, port);
    std::filesystem::create_directory_symlink(device, device / "infiniband" / name / "device");
    link_class(name, device / "infiniband" / name);
  }
  void add_nic(const std::string& name, const Pci& pci) { add_nic(name, pci, Port()); }
  void add_gpu(const std::string& path, int numa_node = 0) {
    add_pci({path, "0x10de", "nvidia", numa_node, "0x030200"});
  }
  // soft-RoCE over a network interface.
  void add_rxe(const std::string& name) {
    const auto folder = root_ / "devices/virtual/infiniband" / name;
    add_ports(folder, {"4: ACTIVE", "Ethernet", "2.5 Gb/sec (1X SDR)"});
    write(folder / "parent", "eth0");
    link_class(name, folder);
  }
  void add_port(const std::string& nic, int number, const Port& port) {
    const auto folder = root_ / "class/infiniband" / nic / "ports" / std::to_string(number);
    write(folder / "state", port.state);
    write(folder / "link_layer", port.link_layer);
    write(folder / "rate", port.rate);
  }
  void add_node(int node, const std::string& cpus, const std::string& distances) {
    const auto folder = root_ / "devices/system/node" / ("node" + std::to_string(node));
    write(folder / "cpulist", cpus);
    write(folder / "distance", distances);
  }

 private:
  static void write(const std::filesystem::path& file, const std::string& line) {
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << line << '\n';
  }
  void add_ports(const std::filesystem::path& folder, const Port& port) {
    write(folder / "ports/1/state", port.state);
    write(folder / "ports/1/link_layer", port.link_layer);
    write(folder / "ports/1/rate", port.rate);
  }
  void link_class(const std::string& name, const std::filesystem::path& folder) {
    std::filesystem::create_directories(root_ / "class/infiniband");
    std::filesystem::create_directory_symlink(folder, root_ / "class/infiniband" / name);
  }

  std::filesystem::path root_;
};

}  // namespace uccl_ep
