#include "transport/verbs/nic.h"

#include <endian.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "common/clock.h"
#include "transport/failure.h"
#include "transport/nics.h"

namespace uccl_ep::verbs {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw UsageFailure(UsageKind::kConfig, "verbs: " + text); }

// The list of devices; its destructor frees it.
class DeviceList {
 public:
  DeviceList() {
    if (const std::string missing = load_library(); !missing.empty())
      refuse("libibverbs cannot be loaded (" + missing + "): " + kVerbsPackages +
             (host_nics().empty() ? "; and this host has no RDMA NIC: /sys/class/infiniband is empty" : ""));
    list_ = ibv_get_device_list(&count_);
  }
  ~DeviceList() {
    if (list_ != nullptr) ibv_free_device_list(list_);
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;
  ibv_device** begin() const { return list_; }
  ibv_device** end() const { return list_ + count_; }

 private:
  ibv_device** list_ = nullptr;
  int count_ = 0;
};

ibv_context* open_device(const std::string& name) {
  const DeviceList devices;
  std::string names;
  for (ibv_device* device : devices) {
    if (name == ibv_get_device_name(device)) {
      ibv_context* context = ibv_open_device(device);
      if (context == nullptr) refuse("NIC " + name + " cannot be opened: " + std::strerror(errno));
      return context;
    }
    names += (names.empty() ? "" : ", ") + std::string(ibv_get_device_name(device));
  }
  refuse("there is no NIC " + name + "; there " + (names.empty() ? "is none" : "are " + names));
}

bool file_exists(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0;
}

constexpr uint64_t kGpuPageBytes = 64 << 10;  // drivers pin GPU memory in pages of this size

// What an operator can do about a registration that failed with `error`.
std::string registration_advice(const RegisteredRegion& region, Memory kind, int error) {
  if (kind == Memory::kHost)
    return error == ENOMEM ? "the limit of locked memory is too small: raise it (ulimit -l unlimited)"
                           : "the NIC's driver refuses this memory";
  if (region.dmabuf_fd >= 0)
    return "the NIC's driver takes no dmabuf of this GPU: kernel 5.12 and a recent driver are needed";
  const bool has_peermem = file_exists("/sys/module/nvidia_peermem") || file_exists("/sys/module/nv_peer_mem") ||
                           file_exists("/sys/module/efa_nv_peermem") || file_exists("/sys/module/ib_peer_mem");
  return has_peermem ? "the peer-memory module is loaded, but refuses this memory"
                     : "no kernel module lets the NIC reach GPU memory: load nvidia_peermem (EFA: efa_nv_peermem, AMD: "
                       "ib_peer_mem), or use a driver that gives dmabufs";
}

bool is_mapped_ipv4(const ibv_gid& gid) {
  static const uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
  return std::memcmp(gid.raw, prefix, sizeof(prefix)) == 0;
}

}  // namespace

void fail(int rank, int peer, const std::string& text) { fail_transport("verbs", rank, peer, text); }

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (ibv_device* device : DeviceList()) names.push_back(ibv_get_device_name(device));
  if (!names.empty()) return names;
  std::string shown;
  for (const HostNic& nic : host_nics()) shown += (shown.empty() ? "" : ", ") + describe(nic);
  if (!shown.empty())
    refuse("libibverbs offers none of this host's NICs (" + shown +
           "): their drivers' libraries are missing (Debian, Ubuntu: apt-get install ibverbs-providers), or "
           "/dev/infiniband is, as in a container");
  return names;
}

RegisteredMemory::RegisteredMemory(ibv_pd* pd, Memory kind, const RegisteredRegion& region,
                                   uint64_t largest_write_bytes, int rank, uint64_t most_piece_bytes)
    : base_(static_cast<uint8_t*>(region.base)), num_bytes_(region.bytes) {
  if (largest_write_bytes >= most_piece_bytes)
    refuse("writes of " + std::to_string(largest_write_bytes) + " bytes: memory is registered in pieces of " +
           std::to_string(most_piece_bytes));
  stride_ = most_piece_bytes - largest_write_bytes;
  if (stride_ > kGpuPageBytes) stride_ -= stride_ % kGpuPageBytes;
  // With relaxed ordering data may overtake data. A completion reports the arrival, and a completion overtakes nothing.
  const unsigned int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING;
  for (uint64_t offset = 0; offset == 0 || offset + largest_write_bytes < num_bytes_; offset += stride_) {
    const uint64_t size = std::min(most_piece_bytes, num_bytes_ - offset);
    uint8_t* const start = base_ + offset;
    const uint64_t address = reinterpret_cast<uint64_t>(start);
    errno = 0;
    ibv_mr* piece = region.dmabuf_fd >= 0
                        ? ibv_reg_dmabuf_mr(pd, offset, size, address, region.dmabuf_fd, static_cast<int>(access))
                        : ibv_reg_mr_iova2(pd, start, size, address, access);
    if (piece == nullptr) {
      const int error = errno;
      fail(rank, -1,
           "registering " + std::to_string(size) + " bytes of " + (kind == Memory::kHost ? "host" : "GPU") +
               " memory failed with " + std::strerror(error) + ": " + registration_advice(region, kind, error));
    }
    pieces_.emplace_back(piece);
  }
}

MemoryAddress RegisteredMemory::address() const {
  MemoryAddress a;
  a.base = reinterpret_cast<uint64_t>(base_);
  a.num_bytes = num_bytes_;
  a.stride = stride_;
  for (auto& piece : pieces_) a.keys.push_back(piece->rkey);
  return a;
}

Nic::Nic(const std::string& name, const NicOptions& options, const TransportSetup& setup, uint32_t number)
    : name_(name), rank_(setup.rank), context_(open_device(name)) {
  port_.number = static_cast<uint8_t>(number);
  const std::string called = "port " + std::to_string(number);
  if (ibv_query_device(context_.get(), &limits_) != 0) fail(rank_, -1, "NIC " + name_ + " does not say its limits");
  ibv_port_attr port{};
  if (ibv_query_port(context_.get(), port_.number, &port) != 0) fail(rank_, -1, "NIC " + name_ + " has no " + called);
  if (port.state != IBV_PORT_ACTIVE)
    refuse(called + " of NIC " + name_ + " is not active: is its cable in, its link up?");
  port_.lid = port.lid;
  port_.mtu = port.active_mtu;
  port_.is_ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  constexpr uint32_t kAmazon = 0x1d0f;
  port_.is_efa = limits_.vendor_id == kAmazon;
  choose_gid(options.gid_index);
  if (const int flags = fcntl(context_->async_fd, F_GETFL);
      flags < 0 || fcntl(context_->async_fd, F_SETFL, flags | O_NONBLOCK) < 0)
    fail(rank_, -1, "NIC " + name_ + " tells no events: " + std::strerror(errno));
  pd_.reset(ibv_alloc_pd(context_.get()));
  if (!pd_) fail(rank_, -1, "NIC " + name_ + " gives no protection domain: " + std::strerror(errno));
}

// Prefers RoCE v2 with an IPv4 address, which routers carry; then any RoCE v2; then the first GID.
void Nic::choose_gid(int wanted) {
  std::vector<ibv_gid_entry> entries(256);
  const ssize_t count = ibv_query_gid_table(context_.get(), entries.data(), entries.size(), 0);
  entries.resize(count > 0 ? static_cast<size_t>(count) : 0);
  std::erase_if(entries, [&](const ibv_gid_entry& e) { return e.port_num != port_.number; });
  auto rank_of = [](const ibv_gid_entry& e) {
    return e.gid_type != IBV_GID_TYPE_ROCE_V2 ? 2 : is_mapped_ipv4(e.gid) ? 0 : 1;
  };
  const ibv_gid_entry* best = nullptr;
  std::string indices;
  for (const ibv_gid_entry& e : entries) {
    indices += (indices.empty() ? "" : ", ") + std::to_string(e.gid_index);
    if (wanted >= 0 ? static_cast<int>(e.gid_index) == wanted : best == nullptr || rank_of(e) < rank_of(*best))
      best = &e;
  }
  if (best == nullptr)
    refuse("NIC " + name_ + " has no GID" + (wanted >= 0 ? " of index " + std::to_string(wanted) : "") +
           "; its indices: " + (indices.empty() ? "none" : indices));
  port_.gid = best->gid;
  port_.gid_index = static_cast<uint8_t>(best->gid_index);
}

void Nic::register_memory(Memory kind, const RegisteredRegion& region, uint64_t largest_write_bytes) {
  (kind == Memory::kHost ? host_ : device_) = RegisteredMemory(pd_.get(), kind, region, largest_write_bytes, rank_);
}

NicAddress Nic::address() const {
  NicAddress a;
  a.gid_high = be64toh(port_.gid.global.subnet_prefix);
  a.gid_low = be64toh(port_.gid.global.interface_id);
  a.lid = port_.lid;
  a.mtu = static_cast<uint32_t>(port_.mtu);
  a.is_ethernet = port_.is_ethernet;
  a.host = host_.address();
  if (device_.num_bytes() != 0) a.device = device_.address();
  return a;
}

void Nic::read_events() {
  for (ibv_async_event event{}; ibv_get_async_event(context_.get(), &event) == 0;) {
    ibv_ack_async_event(&event);  // at once: until then the object of the event cannot be destroyed
    take_event(event);
  }
}

// Events of queue pairs are ignored: completions, here or at the peer, report what happens to a queue pair.
void Nic::take_event(const ibv_async_event& event) {
  const uint64_t count = port_events_.own();
  switch (event.event_type) {
    case IBV_EVENT_DEVICE_FATAL:
      fail(rank_, -1, "NIC " + name_ + " has stopped working (its driver reports a fatal error: see dmesg)");
    case IBV_EVENT_CQ_ERR:
    case IBV_EVENT_SRQ_ERR:
      fail(rank_, -1, "NIC " + name_ + " has lost a queue (its driver reports an error of it: see dmesg)");
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_PORT_ACTIVE:
      if (event.element.port_num != port_.number || (count % 2 != 0) == (event.event_type == IBV_EVENT_PORT_ERR))
        return;
      if (count % 2 == 0) down_since_usec_.publish(now_usec());
      port_events_.publish(count + 1);
      return;
    default:
      return;
  }
}

std::string Nic::trouble() const {
  if (port_events_.read() % 2 == 0) return {};
  char ago[32];
  std::snprintf(ago, sizeof(ago), "%.1f s ago", static_cast<double>(now_usec() - down_since_usec_.read()) * 1e-6);
  return "port " + std::to_string(port_.number) + " of NIC " + name_ + " went down " + ago;
}

}  // namespace uccl_ep::verbs
