// The RDMA NICs of this host, from sysfs, and which of them a rank uses. Nothing here talks to a NIC.
//
// `root` is /sys, or a made-up tree in tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace uccl_ep {

enum class NicFamily : uint32_t { kConnectX, kThor2, kPollara, kEfa, kSoftRoce, kOther };

// Defaults of a family for options that are not set.
struct NicDefaults {
  NicFamily family;
  const char* name;
  const char* drivers;  // of the PCI device, each between spaces
  uint32_t vendor;  // of the PCI device; 0: none of its own
  uint64_t window_bytes;  // in flight per NIC; 0: no limit
  uint32_t window_ops;  // writes in flight per NIC
  int service_level;
  int traffic_class;
};

const NicDefaults& nic_defaults(NicFamily family);

struct HostNic {
  std::string name;  // "mlx5_0"
  NicFamily family = NicFamily::kOther;
  std::string pci_path;  // "pci0000:00/0000:00:01.0/0000:01:00.0"; empty: no PCI device
  std::string driver;  // of its PCI device, "mlx5_core"; empty: none
  uint32_t vendor = 0;  // of its PCI device
  int numa_node = -1;  // -1: not known
  uint32_t port = 1;  // the first ACTIVE one, else the first; the fields below describe it
  std::string link_layer;  // "InfiniBand", "Ethernet" (RoCE), "Unspecified" (EFA)
  std::string state;  // "ACTIVE", "DOWN", ...
  double gbits_per_s = 0;

  bool active() const { return state == "ACTIVE"; }
};

// Sorted by PCI address; NICs without one come last.
std::vector<HostNic> host_nics(const std::string& root = "/sys");

struct NicPlace {
  std::string pci_path;  // as above; empty: no PCI device, or one that sysfs does not show
  int numa_node = -1;  // -1: not known
};

// The place that a rank's NICs should be near to.
struct NicSurroundings {
  NicPlace place;  // of its GPU, or of its CPUs, which have no PCI path
  // The GPUs of this host, sorted by PCI address: all devices of our GPU's vendor and class. They share NICs. Empty if
  // the place is that of CPUs.
  std::vector<NicPlace> gpus;
  std::vector<std::vector<int>> node_distances;  // [from][to], as sysfs has them
};

// `address` as CUDA or lspci write it, "0000:1b:00.0" or "00000000:1B:00.0".
NicSurroundings around_gpu(const std::string& address, const std::string& root = "/sys");
// The place is the NUMA node that has all the CPUs, if there is one.
NicSurroundings around_cpus(const std::vector<int>& cpus, const std::string& root = "/sys");
// The CPUs that this thread may run on.
std::vector<int> allowed_cpus();

// Chooses the nearest NICs with an ACTIVE port. These share the longest part of their PCI path with the GPU; among them
// the least NUMA distance decides. Of equally near NICs, only those with the rate, link layer and family of the fastest
// one are chosen. NICs without a PCI device come last. Ranks with the same nearest NICs share them: each of n ranks
// gets an n-th, at least one, and starts at a different one. n is the number of GPUs with the same nearest NICs, or
// `local_size` if that is less. `wanted` overrides all of this: exactly these NICs, in this order. Throws
// UsageFailure(kConfig) for a wanted NIC that is absent, not ACTIVE or named twice, and if no NIC is left. The error
// names the NICs of the host.
std::vector<HostNic> choose_nics(const std::vector<HostNic>& nics, const NicSurroundings& around, uint32_t local_idx,
                                 uint32_t local_size, const std::vector<std::string>& wanted);

// Does all of the above for a rank of this host, among the NICs that the transport's library offers. A NIC that sysfs
// does not show counts as ACTIVE and as near nothing.
std::vector<HostNic> nics_of_rank(const TransportSetup& setup, const NicOptions& options,
                                  const std::vector<std::string>& offered, const std::string& root = "/sys");

// "mlx5_0 (ConnectX, InfiniBand, ACTIVE, 400 Gb/s)"
std::string describe(const HostNic& nic);

// The options, completed with the family's defaults.
NicOptions with_defaults(NicOptions options, NicFamily family);

}  // namespace uccl_ep
