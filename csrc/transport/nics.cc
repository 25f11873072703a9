#include "transport/nics.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <system_error>
#include <tuple>

namespace uccl_ep {
namespace {

namespace fs = std::filesystem;

constexpr int kFarthest = 1000;  // beyond any distance that firmware states

// UCCL-EP's default is 8 writes and no limit on bytes; for Thor2 and Pollara it recommends the values below. Service
// level and traffic class are also UCCL-EP's.
constexpr NicDefaults kDefaults[] = {
    {NicFamily::kConnectX, "ConnectX", " mlx5_core mlx4_core ", 0x15b3, 0, 8, 3, 104},
    // With more in flight its retries run out: the rate drops to a tenth, then completion error 12 follows.
    {NicFamily::kThor2, "Thor2", " bnxt_en bnxt_re ", 0x14e4, 1'572'864, 1, 3, 104},
    {NicFamily::kPollara, "Pollara", " ionic ionic_rdma ", 0x1dd8, 2'097'152, 1, 3, 104},
    {NicFamily::kEfa, "EFA", " efa ", 0x1d0f, 0, 8, 8, 0},
    {NicFamily::kSoftRoce, "soft-RoCE", " ", 0, 0, 8, 3, 104},
    {NicFamily::kOther, "other", " ", 0, 0, 8, 3, 104},
};

// The first line; empty if there is no such file.
std::string line_of(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
  return line;
}

// A file that holds a number in C's notation.
long number_of(const fs::path& path, long otherwise) {
  const std::string line = line_of(path);
  char* end = nullptr;
  const long value = std::strtol(line.c_str(), &end, 0);
  return end == line.c_str() ? otherwise : value;
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::error_code none;
  std::vector<fs::path> paths;
  for (fs::directory_iterator it(folder, none), end; !none && it != end; it.increment(none)) paths.push_back(*it);
  std::sort(paths.begin(), paths.end());
  return paths;
}

bool is_pci_address(const std::string& text) {
  unsigned domain, bus, device, function;
  int length = 0;
  return std::sscanf(text.c_str(), "%x:%x:%x.%x%n", &domain, &bus, &device, &function, &length) == 4 &&
         static_cast<size_t>(length) == text.size();
}

// The path below <root>/devices; empty if it is no PCI device.
std::string pci_path_of(const fs::path& link, const fs::path& root) {
  std::error_code none;
  const fs::path device = fs::canonical(link, none);
  if (none || !is_pci_address(device.filename())) return {};
  const fs::path devices = fs::canonical(root / "devices", none);
  return none ? std::string() : device.lexically_relative(devices).string();
}

NicFamily family_of(const fs::path& folder, const HostNic& nic) {
  // A soft-RoCE device names the network interface that it runs on. Old kernels show the interface's PCI device as that
  // of the soft-RoCE device.
  std::error_code none;
  if (fs::exists(folder / "parent", none) || nic.name.rfind("rxe", 0) == 0) return NicFamily::kSoftRoce;
  for (const NicDefaults& row : kDefaults) {
    const bool of_driver =
        !nic.driver.empty() && std::string(row.drivers).find(" " + nic.driver + " ") != std::string::npos;
    if (of_driver || (row.vendor != 0 && row.vendor == nic.vendor)) return row.family;
  }
  return NicFamily::kOther;
}

// "4: ACTIVE"
std::string state_of(const fs::path& port) {
  const std::string line = line_of(port / "state");
  const size_t at = line.find(": ");
  return at == std::string::npos ? line : line.substr(at + 2);
}

void read_port(const fs::path& folder, HostNic& nic) {
  bool first = true;
  for (const fs::path& port : entries(folder / "ports")) {
    const std::string state = state_of(port);
    if (!first && (nic.active() || state != "ACTIVE")) continue;
    first = false;
    nic.port = static_cast<uint32_t>(std::atoi(port.filename().c_str()));
    nic.state = state;
    nic.link_layer = line_of(port / "link_layer");
    nic.gbits_per_s = std::atof(line_of(port / "rate").c_str());  // "400 Gb/sec (4X NDR)"
  }
}

HostNic read_nic(const fs::path& folder, const fs::path& root) {
  HostNic nic;
  nic.name = folder.filename();
  const fs::path device = folder / "device";
  nic.pci_path = pci_path_of(device, root);
  std::error_code none;
  nic.driver = fs::canonical(device / "driver", none).filename();
  nic.vendor = static_cast<uint32_t>(number_of(device / "vendor", 0));
  nic.numa_node = static_cast<int>(number_of(device / "numa_node", -1));
  nic.family = family_of(folder, nic);
  if (nic.family == NicFamily::kSoftRoce) nic.pci_path.clear();
  read_port(folder, nic);
  return nic;
}

// With four digits of domain and lower-case letters, as in sysfs.
std::string normal_address(const std::string& address) {
  unsigned domain, bus, device, function;
  if (std::sscanf(address.c_str(), "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) return address;
  char text[40];
  std::snprintf(text, sizeof(text), "%04x:%02x:%02x.%x", domain, bus, device, function);
  return text;
}

// Whether a list such as "0-3,8" has all the CPUs.
bool has_all(const std::string& list, const std::vector<int>& cpus) {
  std::set<int> members;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    int first = 0, last = 0;
    const int read = std::sscanf(range.c_str(), "%d-%d", &first, &last);
    for (int cpu = first; read >= 1 && cpu <= (read == 2 ? last : first); ++cpu) members.insert(cpu);
  }
  return std::all_of(cpus.begin(), cpus.end(), [&](int cpu) { return members.count(cpu) != 0; });
}

NicPlace place_at(const fs::path& device, const fs::path& root) {
  return {pci_path_of(device, root), static_cast<int>(number_of(device / "numa_node", -1))};
}

std::vector<NicPlace> devices_like(const fs::path& gpu, const fs::path& root) {
  std::vector<NicPlace> places;
  const std::string vendor = line_of(gpu / "vendor"), device_class = line_of(gpu / "class");
  for (const fs::path& device : entries(root / "bus/pci/devices"))
    if (line_of(device / "vendor") == vendor && line_of(device / "class") == device_class)
      places.push_back(place_at(device, root));
  return places;
}

// Ids of the nodes that are online, ascending: the columns of a node's distances.
std::vector<int> online_nodes(const fs::path& root) {
  std::vector<int> nodes;
  for (const fs::path& node : entries(root / "devices/system/node")) {
    int id = -1;
    if (std::sscanf(node.filename().c_str(), "node%d", &id) == 1 && id >= 0) nodes.push_back(id);
  }
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

fs::path node_folder(const fs::path& root, int node) {
  return root / "devices/system/node" / ("node" + std::to_string(node));
}

std::vector<std::vector<int>> distances_of(const fs::path& root) {
  const std::vector<int> nodes = online_nodes(root);
  const size_t num_ids = nodes.empty() ? 0 : static_cast<size_t>(nodes.back()) + 1;
  std::vector<std::vector<int>> distances(num_ids, std::vector<int>(num_ids, kFarthest));
  for (int from : nodes) {
    std::istringstream columns(line_of(node_folder(root, from) / "distance"));
    for (int to : nodes) {
      int distance = kFarthest;
      if (columns >> distance) distances[static_cast<size_t>(from)][static_cast<size_t>(to)] = distance;
    }
  }
  return distances;
}

// ------------------------------------------------------------------------------------------ choosing

size_t common_ancestors(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return 0;
  const fs::path left(a), right(b);
  const auto [at, unused] = std::mismatch(left.begin(), left.end(), right.begin(), right.end());
  return static_cast<size_t>(std::distance(left.begin(), at));
}

int node_distance(const NicSurroundings& around, int from, int to) {
  const int num_nodes = static_cast<int>(around.node_distances.size());
  if (from < 0 || from >= num_nodes) return 0;  // all are equally near
  return to < 0 || to >= num_nodes ? kFarthest
                                   : around.node_distances[static_cast<size_t>(from)][static_cast<size_t>(to)];
}

// The least is the nearest.
using Distance = std::tuple<bool, int, int>;

Distance distance(const NicSurroundings& around, const NicPlace& place, const HostNic& nic) {
  return {nic.pci_path.empty(), -static_cast<int>(common_ancestors(place.pci_path, nic.pci_path)),
          node_distance(around, place.numa_node, nic.numa_node)};
}

// Indices of the NICs nearest to a place. All are of one kind: NICs of different link layers cannot reach the same
// peers.
std::vector<size_t> nearest(const std::vector<HostNic>& nics, const NicSurroundings& around, const NicPlace& place) {
  std::vector<size_t> best;
  for (size_t i = 0; i < nics.size(); ++i) {
    const Distance ours = distance(around, place, nics[i]);
    const bool nearer = best.empty() || ours < distance(around, place, nics[best.front()]);
    if (nearer) best.clear();
    if (nearer || ours == distance(around, place, nics[best.front()])) best.push_back(i);
  }
  const size_t fastest = *std::max_element(
      best.begin(), best.end(), [&](size_t a, size_t b) { return nics[a].gbits_per_s < nics[b].gbits_per_s; });
  std::erase_if(best, [&](size_t i) {
    return nics[i].gbits_per_s != nics[fastest].gbits_per_s || nics[i].link_layer != nics[fastest].link_layer ||
           nics[i].family != nics[fastest].family;
  });
  return best;
}

struct Share {
  size_t idx;  // of the rank, among the ranks that share
  size_t count;  // NICs of each rank
};

Share share_of(const std::vector<HostNic>& active, const NicSurroundings& around, const std::vector<size_t>& near,
               size_t local_idx, size_t local_size) {
  std::vector<std::string> sharers;
  for (const NicPlace& gpu : around.gpus)
    if (nearest(active, around, gpu) == near) sharers.push_back(gpu.pci_path);
  if (sharers.empty() || sharers.size() > local_size) return {local_idx, std::max<size_t>(1, near.size() / local_size)};
  // If a GPU's own NIC is down, its nearest NICs are those of other GPUs, and it may be alone in that. They do not
  // become its own.
  const size_t fair = active.size() / std::min(around.gpus.size(), local_size);
  const auto own = std::find(sharers.begin(), sharers.end(), around.place.pci_path);
  return {static_cast<size_t>(std::distance(sharers.begin(), own)),
          std::max<size_t>(1, std::min(near.size() / sharers.size(), fair))};
}

std::string list_of(const std::vector<HostNic>& nics) {
  std::string text;
  for (const HostNic& nic : nics) text += (text.empty() ? "" : ", ") + describe(nic);
  return text.empty() ? "no RDMA NIC" : text;
}

std::vector<HostNic> named(const std::vector<HostNic>& nics, const std::vector<std::string>& wanted) {
  std::vector<HostNic> chosen;
  for (const std::string& name : wanted) {
    auto called = [&](const HostNic& nic) { return nic.name == name; };
    auto refuse = [&](const std::string& why) {
      throw UsageFailure(UsageKind::kConfig, "nics = " + name + ": " + why + "; this host has " + list_of(nics));
    };
    const auto found = std::find_if(nics.begin(), nics.end(), called);
    if (found == nics.end()) refuse("there is no such NIC");
    if (!found->active()) refuse("its port is " + (found->state.empty() ? "missing" : found->state));
    if (std::any_of(chosen.begin(), chosen.end(), called)) refuse("it is named twice");
    chosen.push_back(*found);
  }
  return chosen;
}

}  // namespace

const NicDefaults& nic_defaults(NicFamily family) {
  return *std::find_if(std::begin(kDefaults), std::end(kDefaults),
                       [&](const NicDefaults& row) { return row.family == family; });
}

std::vector<HostNic> host_nics(const std::string& root) {
  std::vector<HostNic> nics;
  for (const fs::path& folder : entries(fs::path(root) / "class/infiniband")) nics.push_back(read_nic(folder, root));
  std::sort(nics.begin(), nics.end(), [](const HostNic& a, const HostNic& b) {
    return std::make_tuple(a.pci_path.empty(), fs::path(a.pci_path).filename().string(), a.name) <
           std::make_tuple(b.pci_path.empty(), fs::path(b.pci_path).filename().string(), b.name);
  });
  return nics;
}

NicSurroundings around_gpu(const std::string& address, const std::string& root) {
  const fs::path gpu = fs::path(root) / "bus/pci/devices" / normal_address(address);
  NicSurroundings around;
  around.place = place_at(gpu, root);
  if (!around.place.pci_path.empty()) around.gpus = devices_like(gpu, root);
  around.node_distances = distances_of(root);
  return around;
}

NicSurroundings around_cpus(const std::vector<int>& cpus, const std::string& root) {
  NicSurroundings around;
  around.node_distances = distances_of(root);
  for (int node : online_nodes(root))
    if (!cpus.empty() && has_all(line_of(node_folder(root, node) / "cpulist"), cpus)) around.place.numa_node = node;
  return around;
}

std::vector<int> allowed_cpus() {
  // With more CPUs than a cpu_set_t holds, the call fails. The node is then unknown, and every NIC is equally near.
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

std::vector<HostNic> choose_nics(const std::vector<HostNic>& nics, const NicSurroundings& around, uint32_t local_idx,
                                 uint32_t local_size, const std::vector<std::string>& wanted) {
  if (!wanted.empty()) return named(nics, wanted);
  std::vector<HostNic> active;
  std::copy_if(nics.begin(), nics.end(), std::back_inserter(active), [](const HostNic& nic) { return nic.active(); });
  if (active.empty())
    throw UsageFailure(UsageKind::kConfig, nics.empty()
                                               ? "this host has no RDMA NIC: /sys/class/infiniband is empty"
                                               : "no RDMA NIC has an ACTIVE port; this host has " + list_of(nics));
  const std::vector<size_t> near = nearest(active, around, around.place);
  const Share share = share_of(active, around, near, local_idx, std::max(local_size, 1u));
  std::vector<HostNic> chosen;
  for (size_t i = 0; i < share.count; ++i) chosen.push_back(active[near[(share.idx * share.count + i) % near.size()]]);
  return chosen;
}

std::vector<HostNic> nics_of_rank(const TransportSetup& setup, const NicOptions& options,
                                  const std::vector<std::string>& offered, const std::string& root) {
  std::vector<HostNic> nics = host_nics(root);
  std::erase_if(
      nics, [&](const HostNic& nic) { return std::find(offered.begin(), offered.end(), nic.name) == offered.end(); });
  for (const std::string& name : offered) {
    if (std::any_of(nics.begin(), nics.end(), [&](const HostNic& nic) { return nic.name == name; })) continue;
    HostNic unknown;
    unknown.name = name;
    unknown.state = "ACTIVE";
    nics.push_back(unknown);
  }
  const NicSurroundings around =
      setup.near_pci.empty() ? around_cpus(allowed_cpus(), root) : around_gpu(setup.near_pci, root);
  return choose_nics(nics, around, setup.local_idx, setup.local_size, options.devices);
}

std::string describe(const HostNic& nic) {
  std::ostringstream text;
  text << nic.name << " (" << nic_defaults(nic.family).name << ", " << (nic.link_layer.empty() ? "?" : nic.link_layer)
       << ", " << (nic.state.empty() ? "no port" : nic.state) << ", " << nic.gbits_per_s << " Gb/s)";
  return text.str();
}

NicOptions with_defaults(NicOptions options, NicFamily family) {
  const NicDefaults& row = nic_defaults(family);
  if (options.service_level < 0) options.service_level = row.service_level;
  if (options.traffic_class < 0) options.traffic_class = row.traffic_class;
  if (options.window_bytes == 0) options.window_bytes = row.window_bytes;
  if (options.window_ops == 0) options.window_ops = row.window_ops;
  return options;
}

}  // namespace uccl_ep
