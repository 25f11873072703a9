// Life of an engine: creation, connection, waiting. Its end: close.cc.
#include "engine/engine.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <numeric>

#include "common/process.h"
#include "common/thread.h"
#include "common/units.h"
#include "engine/handle.h"
#include "transport/registry.h"

namespace uccl_ep {
namespace {

void require(bool holds, const std::string& text) {
  if (!holds) throw UsageFailure(UsageKind::kConfig, text);
}

const EngineConfig& checked(const EngineConfig& c) {
  require(c.num_ranks >= 1 && static_cast<uint32_t>(c.num_ranks) <= kMaxRanks,
          "num_ranks = " + std::to_string(c.num_ranks) + ": allowed 1 to " + std::to_string(kMaxRanks));
  require(c.rank >= 0 && c.rank < c.num_ranks,
          "rank = " + std::to_string(c.rank) + " of " + std::to_string(c.num_ranks));
  require(c.domain_of.size() == static_cast<size_t>(c.num_ranks), "domain_of must name a domain for each of the ranks");
  require(c.num_experts > 0 && c.num_experts % static_cast<uint32_t>(c.num_ranks) == 0,
          "num_experts = " + std::to_string(c.num_experts) + ": a positive multiple of the " +
              std::to_string(c.num_ranks) + " ranks is needed");
  require(c.hidden > 0 && c.hidden % kFp8Block == 0,
          "hidden = " + std::to_string(c.hidden) + ": a multiple of 128 is needed");
  require(c.max_element_bytes == 2 || c.max_element_bytes == 4, "max_element_bytes must be 2 or 4");
  require(c.arrival_timeout_s > 0 && c.progress_timeout_s > 0, "deadlines must be positive");
  std::vector<int> order = c.source_order;
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i)
    require(order.size() == static_cast<size_t>(c.num_ranks) && order[i] == static_cast<int>(i),
            "source_order must be a permutation of the ranks");
  require(c.num_proxies == 1,
          "num_proxies = " + std::to_string(c.num_proxies) + ": the host backend has 1 proxy thread per rank");
  transport_named(c.transport);
  if (c.device_rings) {
    const DeviceRings& rings = *c.device_rings;
    for (uint64_t bytes : {rings.packet_bytes, rings.rows_slot_bytes, rings.return_slot_bytes})
      require(bytes > 0 && bytes % 16 == 0, "device rings: slots of " + std::to_string(bytes) + " bytes");
    for (uint32_t slots : {rings.rows_slots, rings.return_slots})
      require(slots >= 1 && slots < kMaxRingSlots, "device rings: " + std::to_string(slots) + " slots");
  }
  return c;
}

std::vector<int> order_of(const EngineConfig& config) {
  std::vector<int> order = config.source_order;
  if (order.empty()) {
    order.resize(static_cast<size_t>(config.num_ranks));
    std::iota(order.begin(), order.end(), 0);
  }
  return order;
}

uint64_t widest_row_bytes(const EngineConfig& config) {
  // FP8 rows are narrower than BF16 rows for every H; combine_wire_dtype=fp32 on a BF16 buffer is sized by
  // max_element_bytes.
  return uint64_t{config.hidden} * config.max_element_bytes;
}

// Within one domain nobody is connected, whatever the transport would be.
const TransportKind& transport_of(const EngineConfig& config, const Topology& topo) {
  return transport_named(topo.num_domains() > 1 ? config.transport : "loop");
}

// The largest over the ranks, so that all choose the same rings.
uint64_t transport_bytes(const EngineConfig& config, const Topology& topo) {
  size_t smallest = topo.members[0].size();
  for (auto& members : topo.members) smallest = std::min(smallest, members.size());
  return transport_of(config, topo)
      .memory_bytes({config.loop, config.nic}, static_cast<size_t>(topo.num_ranks) - smallest);
}

std::unique_ptr<Transport> make_transport(const EngineConfig& config, const Topology& topo, const Channels& channels,
                                          const RegisteredRegion& region) {
  TransportSetup setup;
  setup.rank = config.rank;
  setup.num_ranks = config.num_ranks;
  for (int rank = 0; rank < config.num_ranks; ++rank)
    if (topo.domain_of[rank] != topo.domain_of[config.rank]) setup.peers.push_back(rank);
  setup.region = region;
  setup.generation = config.generation;
  setup.largest_write_bytes = sizeof(ErrorRecord);
  for (const OutChannel& out : channels.out)
    setup.largest_write_bytes = std::max(setup.largest_write_bytes, out.send.slot_bytes);
  setup.progress_timeout_usec = static_cast<uint64_t>(config.progress_timeout_s * 1e6);
  setup.local_idx = static_cast<uint32_t>(topo.local_of[config.rank]);
  setup.local_size = static_cast<uint32_t>(topo.size_of(topo.domain_of[config.rank]));
  setup.near_pci = config.near_pci;
  return transport_of(config, topo).make(setup, {config.loop, config.nic});
}

MemoryNeeds needs_of(const EngineConfig& config, const Topology& topo) {
  MemoryNeeds needs;
  needs.num_experts = config.num_experts;
  needs.least_row_bytes = widest_row_bytes(config);
  needs.budget_bytes = config.budget_bytes;
  needs.chunk_bytes = config.chunk_bytes;
  needs.window_chunks = config.window_chunks;
  needs.beside_bytes = transport_bytes(config, topo);
  return needs;
}

RegionLayout layout_of(const EngineConfig& config, const Topology& topo, const RingParams& rings, int rank) {
  return config.device_rings ? make_device_layout(topo, *config.device_rings, rank)
                             : make_region_layout(topo, rings, rank);
}

Channels channels_of(const EngineConfig& config, const Topology& topo, const RingParams& rings) {
  return config.device_rings ? make_device_channels(topo, *config.device_rings, config.rank)
                             : make_channels(topo, rings, config.rank);
}

}  // namespace

RingParams ring_params_of(const EngineConfig& config) {
  const Topology topo = Topology::from_labels(checked(config).domain_of);
  return config.device_rings ? RingParams{} : choose_rings(topo, needs_of(config, topo));
}

std::vector<std::pair<std::string, uint64_t>> memory_entries(const EngineConfig& config) {
  const Topology topo = Topology::from_labels(checked(config).domain_of);
  auto entries = layout_of(config, topo, ring_params_of(config), config.rank).entries;
  const size_t others = static_cast<size_t>(topo.num_ranks) - topo.members[topo.domain_of[config.rank]].size();
  entries.emplace_back("transport", transport_of(config, topo).memory_bytes({config.loop, config.nic}, others));
  return entries;
}

uint64_t least_budget_bytes(const EngineConfig& config) {
  const Topology topo = Topology::from_labels(checked(config).domain_of);
  return least_budget_bytes(topo, needs_of(config, topo));
}

Engine::Engine(const EngineConfig& config)
    : config_(checked(config)),
      topo_(Topology::from_labels(config.domain_of)),
      ring_params_(ring_params_of(config)),
      layout_(layout_of(config, topo_, ring_params_, config.rank)),
      channels_(channels_of(config, topo_, ring_params_)),
      regions_(static_cast<size_t>(config.num_ranks)),
      controls_(regions_.size(), nullptr),
      closed_seen_usec_(regions_.size()),
      waited_usec_(regions_.size()) {
  CommandRing::check_limits(channels_.out.size(), ring_params_.slot_bytes);
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
  transport_ = make_transport(config_, topo_, channels_, {region.base(), region.num_bytes(), region.name()});
  controls_[config.rank] = control;
  regions_[config.rank] = std::move(region);
}

Engine::~Engine() { close(true); }

void Engine::register_device(const RegisteredRegion& region) { transport_->register_device(region); }

std::string Engine::export_handle() const {
  const Mapping& region = regions_[config_.rank];
  return encode_handle({region.name(), region.num_bytes(), transport_->address()});
}

void Engine::connect(const std::vector<std::string>& handles) {
  require(handles.size() == static_cast<size_t>(config_.num_ranks), "connect needs one handle per rank");
  std::vector<std::string> addresses(handles.size());
  for (int rank = 0; rank < config_.num_ranks; ++rank) {
    const Handle handle = decode_handle(handles[rank]);
    addresses[rank] = handle.address;
    if (topo_.domain_of[rank] == topo_.domain_of[config_.rank] && rank != config_.rank) {
      require(handle.region_bytes == layout_of(config_, topo_, ring_params_, rank).total_bytes,
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

void Engine::attach_device(DeviceRegions device) { transport_->attach_device(std::move(device)); }

void Engine::note_launched(bool by_replay) {
  {
    const std::lock_guard lock(launch_mutex_);  // a replay of a graph says so by a thread of CUDA's
    launched_.publish(launched_.own() + 1);
    if (by_replay) awaited_.publish(awaited_.own() + 1);
  }
  const std::shared_lock held(memory_mutex_);
  if (!given_back_) control().proxy_bell.ring();
}

void Engine::wake() {
  {
    const std::lock_guard lock(launch_mutex_);
    awaited_.publish(awaited_.own() + 1);
  }
  const std::shared_lock held(memory_mutex_);
  if (!given_back_) control().proxy_bell.ring();
}

void Engine::start() {
  regions_[config_.rank].unlink();
  transport_->sealed();
  std::vector<uint8_t*> bases;
  for (const Mapping& region : regions_) bases.push_back(region.base());
  if (CommandRing::bytes_for(layout_.num_commands) > kLineBytes + layout_.num_commands * kCommandBytes)
    throw std::logic_error("the layout has too little room for the command ring");
  commands_ = std::make_unique<CommandRing>(bases[config_.rank] + layout_.commands_offset, layout_.num_commands);
  if (!config_.device_rings)
    context_ = host::make_context(topo_, ring_params_, channels_, config_.rank, order_of(config_), bases,
                                  {commands_.get(), &control().proxy_bell, &worker_trace_});

  ProxyContext proxy;
  proxy.rank = config_.rank;
  proxy.topo = &topo_;
  proxy.channels = &channels_;
  proxy.layout = &layout_;
  proxy.region = bases[config_.rank];
  proxy.control = &control();
  proxy.domain_controls = controls_;
  proxy.commands = commands_.get();
  proxy.transport = transport_.get();
  if (config_.device_rings) {
    proxy.launched = &launched_;
    proxy.awaited = &awaited_;
    proxy.ended = reinterpret_cast<const Flag*>(proxy.region + layout_.ended_offset);
  }
  proxy.trace = &proxy_trace_;
  proxy.progress_timeout_usec = static_cast<uint64_t>(config_.progress_timeout_s * 1e6);
  proxy_ = std::make_unique<Proxy>(proxy);
  proxy_->start();
  if (context_ != nullptr) worker_ = start_thread("the worker", [this] { work(); });
  std::lock_guard lock(mutex_);
  started_ = true;
}

bool Engine::failed() const {
  const std::shared_lock held(memory_mutex_);
  return given_back_ ? last_error_.has_value() : control().error_claim.claimed();
}

void Engine::check() const {
  const std::shared_lock held(memory_mutex_);
  if (given_back_) {
    if (last_error_) throw CommunicationFailure(*last_error_);
  } else if (control().error_claim.claimed()) {
    throw CommunicationFailure(posted_error(control()));
  }
}

void Engine::wait_for_error(uint64_t timeout_usec) const {
  const std::shared_lock held(memory_mutex_);
  if (given_back_) return;
  const uint32_t ticket = control().worker_bell.ticket();
  if (!control().error_claim.claimed()) control().worker_bell.wait(ticket, timeout_usec);
}

void Engine::check_usable() const {
  if (config_.device_rings) throw std::logic_error("a device engine runs no operations");
  {
    std::lock_guard lock(mutex_);
    if (closed_) throw UsageFailure(UsageKind::kClosed, "the buffer is closed");
    if (!started_) throw UsageFailure(UsageKind::kClosed, "the buffer was not started");
  }
  check();
}

void Engine::check_row(uint32_t hidden, Dtype dtype) const {
  if (hidden == 0 || hidden % kFp8Block != 0)
    throw UsageFailure(UsageKind::kShape,
                       "rows of " + std::to_string(hidden) + " elements: a multiple of 128 is needed");
  if (uint64_t{hidden} * dtype_bytes(dtype) > widest_row_bytes(config_))
    throw UsageFailure(UsageKind::kShape, std::string("rows of ") + std::to_string(hidden) + " " + dtype_name(dtype) +
                                              " elements: this buffer was made for rows of " +
                                              std::to_string(widest_row_bytes(config_)) + " bytes");
}

void Engine::check_plan(const std::shared_ptr<Plan>& plan) const {
  if (plan->engine_generation != config_.generation)
    throw UsageFailure(UsageKind::kInput, "the handle belongs to another buffer");
}

std::shared_ptr<Op> Engine::submit(std::shared_ptr<Op> op) {
  std::lock_guard lock(mutex_);
  if (closed_) throw UsageFailure(UsageKind::kClosed, "the buffer is closed");
  op->epoch = num_queued_ + 1;
  op->num_refused = num_refused_;
  if (num_refused_ > 0) op->refusal = control().refusals[num_refused_ % 2];
  if (op->makes_plan()) op->plan->plan_id = op->epoch;
  queue_.push_back(op);
  ++num_queued_;
  refused_last_ = false;
  queue_changed_.notify_all();
  return op;
}

namespace {

template <typename Condition>
bool wait_until(Op& op, uint64_t timeout_usec, Condition condition) {
  std::unique_lock lock(op.mutex);
  const bool holds =
      op.changed.wait_for(lock, std::chrono::microseconds(timeout_usec), [&] { return op.failed || condition(); });
  if (op.failed) throw CommunicationFailure(op.error);
  return holds;
}

}  // namespace

bool Engine::wait_counts(Op& op, uint64_t timeout_usec) const {
  return wait_until(op, timeout_usec, [&] { return op.counts_known; });
}

bool Engine::wait(Op& op, uint64_t timeout_usec) const {
  return wait_until(op, timeout_usec, [&] { return op.done; });
}

void Engine::give_output(Op& op, const DispatchOutput& output) {
  {
    std::lock_guard lock(op.mutex);
    if (op.failed) throw CommunicationFailure(op.error);
    op.rows_out = output.rows;
    op.scales_out = output.scales;
    op.weights_out = output.weights;
    op.output_given = true;
  }
  const std::shared_lock held(memory_mutex_);
  if (!given_back_) control().worker_bell.ring();
}

void Engine::give_row_experts(Op& op, int64_t* experts) {
  std::lock_guard lock(op.mutex);
  op.experts_out = experts;
}

}  // namespace uccl_ep
