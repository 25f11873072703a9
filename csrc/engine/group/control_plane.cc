// Creation, connection and waiting. The end: close.cc.
#include "engine/group/control_plane.h"

#include <unistd.h>

#include <algorithm>

#include "common/clock.h"
#include "common/process.h"
#include "common/units.h"
#include "engine/group/handle.h"
#include "transport/registry.h"

namespace uccl_ep {
namespace {

void require(bool holds, const std::string& text) {
  if (!holds) throw UsageFailure(UsageKind::kConfig, text);
}

template <typename... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
template <typename... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

bool on_device(const Rings& rings) { return std::holds_alternative<DeviceRings>(rings); }

// Within one domain nothing is shipped, and the rings of a device have no size.
const Rings& checked(const Rings& rings, const Topology& topo) {
  if (!on_device(rings) || topo.num_domains() == 1) return rings;
  const auto& device = std::get<DeviceRings>(rings);
  std::vector<uint64_t> slots_of = {device.rows_slot_bytes, device.return_slot_bytes};
  for (const auto& [size, number] : topo.domains_of_size) {
    const auto packet = device.packet_bytes.find(size);
    slots_of.push_back(packet == device.packet_bytes.end() ? 0 : packet->second);
  }
  if (device.tail_slots > 0) slots_of.push_back(device.tail_slot_bytes);
  for (uint64_t bytes : slots_of)
    require(bytes > 0 && bytes % 16 == 0, "device rings: slots of " + std::to_string(bytes) + " bytes");
  std::vector<uint32_t> numbers = {device.rows_slots, device.return_slots};
  for (const auto& [size, weights] : device.weight_slots) numbers.push_back(device.slots_back_from(size));
  for (const auto& [size, chunks] : device.tail_chunks) numbers.insert(numbers.end(), {chunks, device.tail_slots});
  for (uint32_t slots : numbers)
    require(slots >= 1 && slots < kMaxRingSlots, "device rings: " + std::to_string(slots) + " slots");
  return rings;
}

RegionLayout layout_of(const Topology& topo, const Rings& rings, int rank) {
  return std::visit(Overloaded{[&](const RingParams& host) { return make_region_layout(topo, host, rank); },
                               [&](const DeviceRings& device) { return make_device_layout(topo, device, rank); }},
                    rings);
}

Channels channels_of(const Topology& topo, const Rings& rings, int rank) {
  return std::visit(Overloaded{[&](const RingParams& host) { return make_channels(topo, host, rank); },
                               [&](const DeviceRings& device) { return make_device_channels(topo, device, rank); }},
                    rings);
}

uint64_t largest_chunk_bytes(const Rings& rings) {
  return std::visit(Overloaded{[](const RingParams& host) {
                                 return std::max({host.slot_bytes, host.slots.dispatch_bytes, host.slots.weights_bytes,
                                                  host.slots.sums_bytes});
                               },
                               [](const DeviceRings& device) {
                                 uint64_t most =
                                     std::max({device.rows_slot_bytes, device.return_slot_bytes, device.tail_slot_bytes,
                                               device.slots.row_slot_bytes, device.slots.sum_slot_bytes,
                                               device.slots.routing_bytes, device.slots.weights_bytes});
                                 for (const auto& [size, bytes] : device.packet_bytes) most = std::max(most, bytes);
                                 return most;
                               }},
                    rings);
}

// Within one domain nobody is connected, whatever the transport would be.
const TransportKind& transport_of(const EngineConfig& config, const Topology& topo) {
  return transport_named(topo.num_domains() > 1 ? config.transport : "loop");
}

std::unique_ptr<Transport> make_transport(const EngineConfig& config, const Topology& topo, const Channels& channels,
                                          const RegisteredRegion& region, const std::string& near_pci) {
  TransportSetup setup;
  setup.rank = config.rank;
  setup.num_ranks = config.num_ranks;
  setup.rails = topo.rails(config.rank);
  setup.all = topo.others(config.rank);
  setup.region = region;
  setup.generation = config.generation;
  for (const OutChannel& out : channels.out)
    setup.largest_write_bytes = std::max(setup.largest_write_bytes, out.send.slot_bytes);
  setup.progress_timeout_usec = static_cast<uint64_t>(config.progress_timeout_s * 1e6);
  const Topology hosts = config.host_of.empty() ? topo : Topology::from_labels(config.host_of);
  setup.local_idx = static_cast<uint32_t>(hosts.local_of[config.rank]);
  setup.local_size = static_cast<uint32_t>(hosts.size_of(hosts.domain_of[config.rank]));
  setup.near_pci = near_pci;
  return transport_of(config, topo).make(setup, {config.loop, config.nic});
}

}  // namespace

uint64_t transport_bytes(const EngineConfig& config, const Topology& topo, int rank) {
  return transport_of(config, topo)
      .memory_bytes({config.loop, config.nic}, topo.rails(rank).size(), topo.others(rank).size());
}

uint64_t transport_bytes(const EngineConfig& config, const Topology& topo) {
  uint64_t most = 0;
  for (int rank : topo.classes()) most = std::max(most, transport_bytes(config, topo, rank));
  return most;
}

MemoryEntries memory_entries(const EngineConfig& config, const Rings& rings) {
  const Topology topo = Topology::from_labels(checked(config).domain_of);
  MemoryEntries entries = layout_of(topo, rings, config.rank).entries;
  entries.emplace_back("transport", transport_bytes(config, topo, config.rank));
  return entries;
}

ControlPlane::ControlPlane(const EngineConfig& config, const Rings& rings, const std::string& near_pci)
    : config_(checked(config)),
      topo_(Topology::from_labels(config.domain_of)),
      rings_(checked(rings, topo_)),
      layout_(layout_of(topo_, rings, config.rank)),
      channels_(channels_of(topo_, rings, config.rank)),
      regions_(static_cast<size_t>(config.num_ranks)),
      controls_(regions_.size(), nullptr) {
  CommandRing::check_limits(channels_.out.size(), largest_chunk_bytes(rings), channels_.shared_bytes());
  if (CommandRing::bytes_for(layout_.num_commands) > kLineBytes + layout_.num_commands * kCommandBytes)
    throw std::logic_error("the layout has too little room for the command ring");
  Mapping region = Mapping::create();
  region.grow(layout_.total_bytes);  // zero-filled: every flag starts at 0
  region.reserve(0, layout_.total_bytes);
  ControlBlock* control = new (region.base()) ControlBlock;
  control->magic = kControlMagic;
  control->generation = config.generation;
  control->rank = config.rank;
  control->pid = getpid();
  control->pid_namespace = pid_namespace();
  control->heartbeat.publish(now_usec());
  commands_ = std::make_unique<CommandRing>(region.base() + layout_.commands_offset, layout_.num_commands);
  transport_ = make_transport(config_, topo_, channels_, {region.base(), region.num_bytes(), region.name()}, near_pci);
  controls_[config.rank] = control;
  regions_[config.rank] = std::move(region);
}

ControlPlane::~ControlPlane() { close(true); }

void ControlPlane::register_device(const RegisteredRegion& region) { transport_->register_device(region); }

std::string ControlPlane::export_handle() const {
  const Mapping& region = regions_[config_.rank];
  return encode_handle({region.name(), region.num_bytes(), transport_->address()});
}

void ControlPlane::connect(const std::vector<std::string>& handles) {
  require(handles.size() == static_cast<size_t>(config_.num_ranks), "connect needs one handle per rank");
  std::vector<std::string> addresses(handles.size());
  for (int rank = 0; rank < config_.num_ranks; ++rank) {
    const Handle handle = decode_handle(handles[rank]);
    addresses[rank] = handle.address;
    if (topo_.domain_of[rank] == topo_.domain_of[config_.rank] && rank != config_.rank) {
      const bool alike = topo_.num_relayed(rank) == topo_.num_relayed(config_.rank);  // of one domain
      require(handle.region_bytes == (alike ? layout_ : layout_of(topo_, rings_, rank)).total_bytes,
              "rank " + std::to_string(rank) + " has another layout");
      regions_[rank] = Mapping::open(handle.region_name, handle.region_bytes);
      controls_[rank] = reinterpret_cast<ControlBlock*>(regions_[rank].base());
      require(controls_[rank]->magic == kControlMagic && controls_[rank]->generation == config_.generation &&
                  controls_[rank]->rank == rank,
              "the memory of rank " + std::to_string(rank) + " belongs to another engine");
    }
  }
  transport_->connect(addresses);
}

void ControlPlane::attach_device(DeviceRegions device) { transport_->attach_device(std::move(device)); }

void ControlPlane::start(Drive drive) {
  regions_[config_.rank].unlink();
  transport_->sealed();
  ProxyContext proxy;
  proxy.rank = config_.rank;
  proxy.topo = &topo_;
  proxy.channels = &channels_;
  proxy.layout = &layout_;
  proxy.region = region_base(config_.rank);
  proxy.control = &control();
  proxy.domain_controls = controls_;
  proxy.commands = commands_.get();
  proxy.transport = transport_.get();
  if (on_device(rings_) && topo_.num_domains() > 1) {
    proxy.launched = &launched_;
    proxy.awaited = &awaited_;
    proxy.ended = reinterpret_cast<const Flag*>(proxy.region + layout_.ended_offset);
  }
  proxy.trace = &proxy_trace_;
  proxy.outlives_ranks = outlives_ranks();
  proxy.progress_timeout_usec =
      proxy.outlives_ranks ? UINT64_MAX : static_cast<uint64_t>(config_.progress_timeout_s * 1e6);
  proxy_ = std::make_unique<Proxy>(proxy);
  if (drive == Drive::kThreads) proxy_->start();
  std::lock_guard lock(mutex_);
  drive_ = drive;
  started_ = true;
}

// Only operations of low latency can do without a rank.
bool ControlPlane::outlives_ranks() const { return config_.mask_timeout_s > 0 && config_.low_latency_tokens > 0; }

void ControlPlane::ring_worker() const {
  const std::shared_lock held(memory_mutex_);
  if (!given_back_) control().worker_bell.ring();
}

void ControlPlane::note_launched(uint64_t operations, bool by_replay) {
  {
    const std::lock_guard lock(launch_mutex_);  // a replay of a graph says so by a thread of the GPU's runtime
    launched_.publish(launched_.own() + operations);
    if (by_replay) awaited_.publish(awaited_.own() + 1);
  }
  const std::shared_lock held(memory_mutex_);
  if (!given_back_) control().proxy_bell.ring();
}

void ControlPlane::wake() {
  {
    const std::lock_guard lock(launch_mutex_);
    awaited_.publish(awaited_.own() + 1);
  }
  const std::shared_lock held(memory_mutex_);
  if (!given_back_) control().proxy_bell.ring();
}

}  // namespace uccl_ep
