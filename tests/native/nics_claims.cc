// NICs are found, told apart and given to ranks, on hosts that are made up.
#include <map>
#include <set>
#include <string>
#include <vector>

#include "claims.h"
#include "made_up_sysfs.h"
#include "transport/nics.h"

using namespace uccl_ep;

namespace {

std::string hex2(int number) {
  char text[8];
  std::snprintf(text, sizeof(text), "%02x", number);
  return text;
}

// Switch i of 8 has a GPU and `nics_per_switch` NICs; 4 switches hang on each socket.
struct Host8 {
  explicit Host8(int nics_per_switch, const MadeUpSysfs::Pci& kind, const MadeUpSysfs::Port& port) {
    for (int i = 0; i < 8; ++i) {
      const std::string up = switch_path(i);
      sysfs.add_gpu(up + "/0000:" + hex2(16 * i + 3) + ":00.0", i / 4);
      for (int n = 0; n < nics_per_switch; ++n) {
        MadeUpSysfs::Pci pci = kind;
        pci.path = up + "/0000:" + hex2(16 * i + 4 + n) + ":00.0";
        pci.numa_node = i / 4;
        sysfs.add_nic("nic" + std::to_string(i * nics_per_switch + n), pci, port);
      }
    }
    sysfs.add_node(0, "0-47,96-143", "10 21");
    sysfs.add_node(1, "48-95,144-191", "21 10");
  }
  static std::string switch_path(int i) {
    const std::string bus = hex2(16 * i);
    return "pci0000:" + bus + "/0000:" + bus + ":01.0/0000:" + hex2(16 * i + 1) + ":00.0";
  }
  // As CUDA says it.
  static std::string gpu(int i) { return "00000000:" + hex2(16 * i + 3) + ":00.0"; }
  std::vector<std::string> of_gpu(int i, uint32_t local_idx, uint32_t local_size) const {
    return names(choose_nics(host_nics(sysfs.root()), around_gpu(gpu(i), sysfs.root()), local_idx, local_size, {}));
  }
  static std::vector<std::string> names(const std::vector<HostNic>& nics) {
    std::vector<std::string> list;
    for (const HostNic& nic : nics) list.push_back(nic.name);
    return list;
  }

  MadeUpSysfs sysfs;
};

using Names = std::vector<std::string>;
const MadeUpSysfs::Pci kMlx5{"", "0x15b3", "mlx5_core"};
const MadeUpSysfs::Pci kEfa{"", "0x1d0f", "efa"};

// One storage NIC on each socket, below no GPU's switch, as fast as the others.
Host8 dgx() { return Host8(1, kMlx5, {}); }
void add_storage(MadeUpSysfs& sysfs) {
  for (int socket = 0; socket < 2; ++socket) {
    const std::string bus = hex2(240 + socket);
    sysfs.add_nic("storage" + std::to_string(socket),
                  {"pci0000:" + bus + "/0000:" + bus + ":01.0", "0x15b3", "mlx5_core", socket});
  }
}

std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageFailure& failure) {
    return failure.kind() == UsageKind::kConfig ? failure.what() : "another kind";
  }
  return "nothing was thrown";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::vector<HostNic> of_cpus(const MadeUpSysfs& sysfs, const std::vector<int>& cpus, uint32_t idx, uint32_t size,
                             const Names& wanted = {}) {
  return choose_nics(host_nics(sysfs.root()), around_cpus(cpus, sysfs.root()), idx, size, wanted);
}

}  // namespace

CLAIM("of 8 GPUs and 10 NICs each GPU gets the NIC below its own switch") {
  Host8 host = dgx();
  add_storage(host.sysfs);
  EXPECT_EQ(host_nics(host.sysfs.root()).size(), size_t{10});
  for (int gpu = 0; gpu < 8; ++gpu)
    EXPECT(host.of_gpu(gpu, static_cast<uint32_t>(gpu), 8) == Names{"nic" + std::to_string(gpu)});
  // Which rank has which GPU makes no difference.
  EXPECT(host.of_gpu(5, 0, 8) == Names{"nic5"});
  EXPECT(host.of_gpu(5, 0, 1) == Names{"nic5"});
}

CLAIM("of 8 GPUs and 16 EFA NICs each GPU gets its two") {
  Host8 host(2, kEfa, {"4: ACTIVE", "Unspecified", "200 Gb/sec (4X HDR)"});
  std::set<std::string> given;
  for (int gpu = 0; gpu < 8; ++gpu) {
    const Names own = host.of_gpu(gpu, static_cast<uint32_t>(gpu), 8);
    EXPECT((own == Names{"nic" + std::to_string(2 * gpu), "nic" + std::to_string(2 * gpu + 1)}));
    given.insert(own.begin(), own.end());
  }
  EXPECT_EQ(given.size(), size_t{16});
  EXPECT(host_nics(host.sysfs.root())[0].family == NicFamily::kEfa);
  EXPECT(host_nics(host.sysfs.root())[0].link_layer == "Unspecified");
}

CLAIM("GPUs to which the same NICs are nearest share them out") {
  // A virtual machine: every device is on a root of its own, and only the node tells near from far.
  MadeUpSysfs sysfs;
  sysfs.add_node(0, "0-3", "10 20");
  sysfs.add_node(1, "4-7", "20 10");
  for (int i = 0; i < 8; ++i) {
    sysfs.add_gpu("pci" + hex2(i) + "00:00/" + hex2(i) + "00:00:00.0", i / 4);
    sysfs.add_nic("nic" + std::to_string(i),
                  {"pci" + hex2(i) + "01:00/" + hex2(i) + "01:00:00.0", "0x15b3", "mlx5_core", i / 4});
  }
  std::map<std::string, int> uses;
  for (int i = 0; i < 8; ++i) {
    const auto around = around_gpu(hex2(i) + "00:00:00.0", sysfs.root());
    const auto chosen = choose_nics(host_nics(sysfs.root()), around, static_cast<uint32_t>(i), 8, {});
    EXPECT_EQ(chosen.size(), size_t{1});
    EXPECT_EQ(chosen[0].numa_node, i / 4);
    ++uses[chosen[0].name];
  }
  EXPECT_EQ(uses.size(), size_t{8});
  // Two ranks on GPUs of one socket have two each of its four NICs; the GPUs of nobody take none.
  std::set<std::string> of_two;
  for (uint32_t i = 0; i < 2; ++i)
    for (auto& nic : choose_nics(host_nics(sysfs.root()),
                                 around_gpu(hex2(static_cast<int>(i)) + "00:00:00.0", sysfs.root()), i, 2, {}))
      of_two.insert(nic.name);
  EXPECT((of_two == std::set<std::string>{"nic0", "nic1", "nic2", "nic3"}));
}

CLAIM("memory of a CPU goes to the NICs of its node, and its ranks share them") {
  Host8 host = dgx();
  for (uint32_t idx = 0; idx < 4; ++idx) {
    const auto chosen = of_cpus(host.sysfs, {50, 51, 150}, idx, 4);
    EXPECT(Host8::names(chosen) == Names{"nic" + std::to_string(4 + idx)});
  }
  EXPECT((Host8::names(of_cpus(host.sysfs, {0}, 1, 2)) == Names{"nic2", "nic3"}));
  // A rank that may run anywhere is near to all.
  EXPECT_EQ(of_cpus(host.sysfs, {0, 50}, 0, 1).size(), size_t{8});
  EXPECT((Host8::names(of_cpus(host.sysfs, {0, 50}, 3, 4)) == Names{"nic6", "nic7"}));
  // More ranks than NICs: some have one in common.
  EXPECT(Host8::names(of_cpus(host.sysfs, {0}, 5, 16)) == Names{"nic1"});
}

CLAIM("one NIC serves every rank") {
  MadeUpSysfs sysfs;
  sysfs.add_nic("mlx5_0", {"pci0000:00/0000:00:05.0", "0x15b3", "mlx5_core", -1});
  sysfs.add_gpu("pci0000:00/0000:00:06.0", -1);
  for (uint32_t idx = 0; idx < 3; ++idx) {
    EXPECT(Host8::names(of_cpus(sysfs, {0}, idx, 3)) == Names{"mlx5_0"});
    const auto around = around_gpu("0000:00:06.0", sysfs.root());
    EXPECT(Host8::names(choose_nics(host_nics(sysfs.root()), around, idx, 3, {})) == Names{"mlx5_0"});
    // A GPU that sysfs does not show.
    const auto unknown = around_gpu("0000:77:00.0", sysfs.root());
    EXPECT(Host8::names(choose_nics(host_nics(sysfs.root()), unknown, idx, 3, {})) == Names{"mlx5_0"});
  }
}

CLAIM("a host without NIC says so") {
  MadeUpSysfs sysfs;
  EXPECT(host_nics(sysfs.root()).empty());
  EXPECT(has(text_of([&] { of_cpus(sysfs, {0}, 0, 1); }), "no RDMA NIC"));
  EXPECT(has(text_of([&] { of_cpus(sysfs, {0}, 0, 1, {"mlx5_0"}); }), "nics = mlx5_0: there is no such NIC"));
  EXPECT(host_nics(sysfs.root() + "/nowhere").empty());
}

CLAIM("soft-RoCE needs no PCI device and is the last choice") {
  MadeUpSysfs sysfs;
  sysfs.add_rxe("rxe0");
  const auto alone = of_cpus(sysfs, {0}, 0, 2);
  EXPECT(Host8::names(alone) == Names{"rxe0"});
  EXPECT(alone[0].family == NicFamily::kSoftRoce && alone[0].pci_path.empty() && alone[0].link_layer == "Ethernet");
  EXPECT_EQ(alone[0].numa_node, -1);
  sysfs.add_nic("mlx5_0", {"pci0000:00/0000:00:05.0", "0x15b3", "mlx5_core"});
  EXPECT(Host8::names(of_cpus(sysfs, {0}, 1, 2)) == Names{"mlx5_0"});
  EXPECT(Host8::names(of_cpus(sysfs, {0}, 1, 2, {"rxe0"})) == Names{"rxe0"});
}

CLAIM("a NIC that is down is left out, and refused when it is wanted") {
  Host8 host = dgx();
  host.sysfs.add_port("nic5", 1, {"1: DOWN", "InfiniBand", "10 Gb/sec (4X)"});
  const Names next = host.of_gpu(5, 5, 8);
  EXPECT_EQ(next.size(), size_t{1});
  EXPECT(next[0] == "nic4" || next[0] == "nic6" || next[0] == "nic7");  // of the same socket
  EXPECT(Host8::names(of_cpus(host.sysfs, {0}, 0, 1, {"nic7", "nic2"})) == (Names{"nic7", "nic2"}));
  const std::string down = text_of([&] { of_cpus(host.sysfs, {0}, 0, 1, {"nic2", "nic5"}); });
  EXPECT(has(down, "nics = nic5: its port is DOWN") && has(down, "nic2 (ConnectX, InfiniBand, ACTIVE, 400 Gb/s)"));
  const std::string absent = text_of([&] { of_cpus(host.sysfs, {0}, 0, 1, {"mlx5_9"}); });
  EXPECT(has(absent, "nics = mlx5_9: there is no such NIC") &&
         has(absent, "nic5 (ConnectX, InfiniBand, DOWN, 10 Gb/s)"));
  EXPECT(has(text_of([&] { of_cpus(host.sysfs, {0}, 0, 1, {"nic1", "nic1"}); }), "named twice"));
  for (int i = 0; i < 8; ++i) host.sysfs.add_port("nic" + std::to_string(i), 1, {"1: DOWN", "InfiniBand", "10"});
  EXPECT(has(text_of([&] { of_cpus(host.sysfs, {0}, 0, 1); }), "no RDMA NIC has an ACTIVE port"));
}

CLAIM("the second port is taken where the first is down") {
  MadeUpSysfs sysfs;
  sysfs.add_nic("mlx4_0", {"pci0000:00/0000:00:05.0", "0x15b3", "mlx4_core"}, {"1: DOWN", "InfiniBand", "10 Gb/sec"});
  EXPECT(!host_nics(sysfs.root())[0].active());
  sysfs.add_port("mlx4_0", 2, {"4: ACTIVE", "Ethernet", "40 Gb/sec (4X QDR)"});
  const HostNic nic = host_nics(sysfs.root())[0];
  EXPECT(nic.active() && nic.port == 2 && nic.link_layer == "Ethernet");
  EXPECT_EQ(nic.gbits_per_s, 40.0);
}

CLAIM("NICs of one rank are of one kind: the fastest of the nearest") {
  MadeUpSysfs sysfs;
  sysfs.add_nic("manage", {"pci0000:00/0000:00:04.0", "0x15b3", "mlx5_core"}, {"4: ACTIVE", "Ethernet", "25 Gb/sec"});
  sysfs.add_nic("fast0", {"pci0000:00/0000:00:05.0", "0x15b3", "mlx5_core"});
  sysfs.add_nic("fast1", {"pci0000:00/0000:00:06.0", "0x15b3", "mlx5_core"});
  sysfs.add_nic("fast2", {"pci0000:00/0000:00:07.0", "0x15b3", "mlx5_core"}, {"4: ACTIVE", "Ethernet", "400 Gb/sec"});
  EXPECT((Host8::names(of_cpus(sysfs, {0}, 0, 1)) == Names{"fast0", "fast1"}));
}

CLAIM("families are told by driver or vendor, and have the defaults of their makers") {
  const std::map<std::string, std::pair<MadeUpSysfs::Pci, NicFamily>> kinds = {
      {"a", {{"pci0000:00/0000:00:01.0", "0x15b3", "mlx5_core"}, NicFamily::kConnectX}},
      {"b", {{"pci0000:00/0000:00:02.0", "0x14e4", "bnxt_en"}, NicFamily::kThor2}},
      {"c", {{"pci0000:00/0000:00:03.0", "0x1dd8", "ionic"}, NicFamily::kPollara}},
      {"d", {{"pci0000:00/0000:00:04.0", "0x1d0f", "efa"}, NicFamily::kEfa}},
      {"e", {{"pci0000:00/0000:00:05.0", "0x8086", "irdma"}, NicFamily::kOther}},
      {"f", {{"pci0000:00/0000:00:06.0", "0x15b3", "vfio-pci"}, NicFamily::kConnectX}},
  };
  MadeUpSysfs sysfs;
  for (auto& [name, kind] : kinds) sysfs.add_nic(name, kind.first);
  const std::vector<HostNic> nics = host_nics(sysfs.root());
  EXPECT_EQ(nics.size(), kinds.size());
  for (const HostNic& nic : nics) {
    EXPECT(nic.family == kinds.at(nic.name).second);
    EXPECT(nic.driver == kinds.at(nic.name).first.driver && nic.pci_path == kinds.at(nic.name).first.path);
    EXPECT(nic_defaults(nic.family).family == nic.family);
  }
  EXPECT_EQ(nics[1].vendor, 0x14e4u);
  const NicOptions thor2 = with_defaults({}, NicFamily::kThor2), pollara = with_defaults({}, NicFamily::kPollara);
  EXPECT(thor2.window_bytes == 1572864 && thor2.window_ops == 1 && thor2.service_level == 3 &&
         thor2.traffic_class == 104);
  EXPECT(pollara.window_bytes == 2097152 && pollara.window_ops == 1);
  const NicOptions efa = with_defaults({}, NicFamily::kEfa);
  EXPECT(efa.window_bytes == 0 && efa.window_ops == 8 && efa.service_level == 8 && efa.traffic_class == 0);
  NicOptions told;
  told.window_bytes = 5;
  told.window_ops = 6;
  told.service_level = 0;
  told.traffic_class = 0;
  told = with_defaults(told, NicFamily::kThor2);
  EXPECT(told.window_bytes == 5 && told.window_ops == 6 && told.service_level == 0 && told.traffic_class == 0);
}

CLAIM("a rank of this host gets what its options name, and only what its library offers") {
  Host8 host = dgx();
  const Names offered = {"nic0", "nic3", "nic4", "fake0"};
  TransportSetup setup;
  setup.near_pci = Host8::gpu(3);
  setup.local_size = 8;
  NicOptions options;
  auto chosen = [&] { return Host8::names(nics_of_rank(setup, options, offered, host.sysfs.root())); };
  EXPECT(chosen() == Names{"nic3"});
  setup.near_pci = Host8::gpu(2);
  EXPECT(chosen() != Names{"nic2"});
  options.devices = {"nic0"};
  EXPECT(chosen() == Names{"nic0"});
  options.devices = {"fake0"};  // not in sysfs
  EXPECT(chosen() == Names{"fake0"});
  options.devices = {"nic5"};
  EXPECT(has(text_of([&] { chosen(); }), "nics = nic5: there is no such NIC"));
  const auto unknown = nics_of_rank({}, {}, {"fake0"}, host.sysfs.root());
  EXPECT(unknown[0].family == NicFamily::kOther && unknown[0].active());
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
