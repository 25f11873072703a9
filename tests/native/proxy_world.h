// Ranks with proxies in one process, and the two ends that a backend would put on their channels.
#pragma once

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chunk_place.h"
#include "common/clock.h"
#include "common/units.h"
#include "fake_copies.h"
#include "fixture.h"
#include "layout/region.h"
#include "proxy/proxy.h"

namespace uccl_ep {

constexpr uint64_t kPatienceUsec = 30'000'000;

// The condition holds within the limit.
template <typename Condition>
bool eventually(Condition condition, uint64_t limit_usec = kPatienceUsec) {
  const uint64_t deadline = now_usec() + limit_usec;
  while (!condition()) {
    if (now_usec() > deadline) return false;
    usleep(200);
  }
  return true;
}

// What a test may do to the rank's transport: stand between it and the proxy.
using Wrap = std::function<std::unique_ptr<Transport>(int rank, std::unique_ptr<Transport>)>;

struct WorldOptions {
  std::string kind = "loop";
  std::vector<int> labels = {0, 1};
  RingParams rings = {4096, 1024, 2, 16};
  std::optional<DeviceRings> device;  // chunks lie in a "device" region of ordinary memory; else `rings` holds
  uint64_t copy_usec = 0;             // the most that a copy between those takes
  LoopOptions loop;
  NicOptions nic;
  std::vector<std::string> devices;  // rank r uses the (r mod n)-th alone; empty: as `nic` says
  uint64_t progress_timeout_usec = 20'000'000;
  Wrap wrap;
  std::function<void(int rank, Channels&)> change_channels;
};

struct Node {
  RegionLayout layout;
  Channels channels;
  std::unique_ptr<TestRegion> region;
  std::vector<Mapping> devices;  // by rank, the device regions as this one has mapped them
  std::unique_ptr<FakeCopies> copies;
  std::unique_ptr<Flag> launched = std::make_unique<Flag>(), awaited = std::make_unique<Flag>();
  std::unique_ptr<uint8_t, decltype(&std::free)> command_memory{nullptr, &std::free};
  std::unique_ptr<CommandRing> commands;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Proxy> proxy;

  ControlBlock& control() const { return *region->control; }
  bool has_error() const { return control().error_claim.published(); }
  bool on_device() const { return !devices.empty(); }
  uint8_t* slots() const { return on_device() ? devices[static_cast<size_t>(layout.rank)].base() : region->base(); }
  Flag& ended() const { return *reinterpret_cast<Flag*>(region->base() + layout.ended_offset); }
  // What the board says of an incoming channel, of an outgoing one.
  const Flag& arrived(uint32_t in) const {
    return reinterpret_cast<const Flag*>(region->base() + layout.board_offset)[in];
  }
  const Flag& flushed(uint32_t out) const { return arrived(static_cast<uint32_t>(channels.in.size()) + out); }
};

class World {
 public:
  explicit World(const WorldOptions& options) : topo(Topology::from_labels(options.labels)) {
    const size_t num_ranks = options.labels.size();
    std::vector<std::unique_ptr<TestRegion>> regions;
    nodes.resize(num_ranks);
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      make_layout(nodes[rank], static_cast<int>(rank), options);
      if (options.change_channels) options.change_channels(static_cast<int>(rank), nodes[rank].channels);
      regions.push_back(std::make_unique<TestRegion>(nodes[rank].layout.total_bytes));
      regions.back()->control->rank = static_cast<int>(rank);
    }
    std::vector<TransportOptions> wanted(num_ranks, {options.loop, options.nic});
    for (size_t rank = 0; rank < num_ranks && !options.devices.empty(); ++rank)
      wanted[rank].nic.devices = {options.devices[rank % options.devices.size()]};
    auto transports = connect_all(regions, wanted, options.kind, options.progress_timeout_usec, &topo);
    if (options.device) attach(transports);
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      nodes[rank].region = std::move(regions[rank]);
      nodes[rank].transport = std::move(transports[rank]);
      if (options.wrap) nodes[rank].transport = options.wrap(static_cast<int>(rank), std::move(nodes[rank].transport));
    }
    for (size_t rank = 0; rank < num_ranks; ++rank) make_proxy(static_cast<int>(rank), options);
  }
  ~World() { stop(); }

  void start() {
    for (auto& node : nodes) node.proxy->start();
  }
  void stop() {
    for (auto& node : nodes) node.proxy->stop();
  }
  // One pass of every proxy, for tests without threads.
  bool step() {
    bool moved = false;
    for (auto& node : nodes) moved |= node.proxy->step();
    return moved;
  }

  Topology topo;
  std::vector<Node> nodes;

 private:
  void make_layout(Node& node, int rank, const WorldOptions& options) {
    if (!options.device) {
      node.layout = make_region_layout(topo, options.rings, rank);
      node.channels = make_channels(topo, options.rings, rank);
      return;
    }
    node.layout = make_device_layout(topo, *options.device, rank);
    node.channels = make_device_channels(topo, *options.device, rank);
    node.copies = std::make_unique<FakeCopies>(options.copy_usec, static_cast<uint64_t>(rank));
  }
  void attach(const std::vector<std::unique_ptr<Transport>>& transports) {
    std::vector<Mapping> owned;
    for (Node& node : nodes) {
      owned.push_back(Mapping::create());
      owned.back().grow(node.layout.device_bytes);
    }
    for (size_t rank = 0; rank < nodes.size(); ++rank) {
      nodes[rank].devices = map_devices(owned);
      transports[rank]->attach_device(device_regions(nodes[rank].devices, nodes[rank].copies.get()));
    }
  }
  void make_proxy(int rank, const WorldOptions& options) {
    constexpr uint32_t kCommands = 1024;
    Node& node = nodes[static_cast<size_t>(rank)];
    const uint64_t bytes = round_up(CommandRing::bytes_for(kCommands), kLineBytes);
    node.command_memory.reset(static_cast<uint8_t*>(std::aligned_alloc(kLineBytes, bytes)));
    std::memset(node.command_memory.get(), 0, bytes);
    node.commands = std::make_unique<CommandRing>(node.command_memory.get(), kCommands);
    ProxyContext context;
    context.rank = rank;
    context.topo = &topo;
    context.channels = &node.channels;
    context.layout = &node.layout;
    context.region = node.region->base();
    context.control = node.region->control;
    for (int peer = 0; peer < topo.num_ranks; ++peer) {
      const bool near = topo.domain_of[static_cast<size_t>(peer)] == topo.domain_of[static_cast<size_t>(rank)];
      context.domain_controls.push_back(near ? nodes[static_cast<size_t>(peer)].region->control : nullptr);
    }
    context.commands = node.commands.get();
    context.transport = node.transport.get();
    if (options.device) {
      context.launched = node.launched.get();
      context.awaited = node.awaited.get();
      context.ended = &node.ended();
    }
    context.progress_timeout_usec = options.progress_timeout_usec;
    node.proxy = std::make_unique<Proxy>(context);
  }
};

// What chunk `serial` of stream `key` must contain.
inline void fill_chunk(uint8_t* slot, uint64_t num_bytes, uint64_t key, uint64_t serial) {
  auto* words = reinterpret_cast<uint64_t*>(slot);
  for (uint64_t i = 0; i < num_bytes / 8; ++i) words[i] = (serial + 1) * 0x9E3779B97F4A7C15u + key * 1000003 + i;
}
inline bool chunk_is_intact(const uint8_t* slot, uint64_t num_bytes, uint64_t key, uint64_t serial) {
  auto* words = reinterpret_cast<const uint64_t*>(slot);
  for (uint64_t i = 0; i < num_bytes / 8; ++i)
    if (words[i] != (serial + 1) * 0x9E3779B97F4A7C15u + key * 1000003 + i) return false;
  return true;
}

// The producer of one outgoing channel.
class Source {
 public:
  Source(Node& node, uint32_t channel) : node_(node), channel_(channel), ring_(node.channels.out[channel].send) {}
  uint64_t key() const { return chunk_key(ring_.kind, node_.channels.out[channel_].peer_channel); }
  uint64_t serial() const { return serial_; }
  // As a GPU sees it, where one would: by the board.
  bool flushed(uint64_t serial) const {
    return (node_.on_device() ? node_.flushed(channel_) : stamp(serial)).read() > serial;
  }
  bool free() const { return serial_ < ring_.num_slots || flushed(serial_ - ring_.num_slots); }
  bool try_send(uint64_t num_bytes) {
    if (!free()) return false;
    fill_chunk(node_.slots() + chunk_offset(node_.channels, channel_, serial_), num_bytes, key(), serial_);
    return push(num_bytes);
  }
  bool push(uint64_t num_bytes) {
    const uint32_t unit = chunk_unit(node_.channels, channel_, serial_);
    if (!node_.commands->push({channel_, num_bytes, serial_, unit})) return false;
    ++serial_;
    if (!node_.on_device()) node_.control().proxy_bell.ring();  // a GPU cannot
    return true;
  }

 private:
  const Flag& stamp(uint64_t serial) const {
    return reinterpret_cast<const Flag*>(node_.region->base() + ring_.stamps_offset)[serial % ring_.num_slots];
  }
  Node& node_;
  uint32_t channel_;
  RingLayout ring_;
  uint64_t serial_ = 0;
};

// One reader of one landing ring.
// ThreadSanitizer does not see these reads: to it a second write of the same bytes is a data race. What the writer of
// the chunk does is still watched.
__attribute__((no_sanitize_thread)) inline std::vector<uint8_t> copied_while_rewritten(const uint8_t* bytes,
                                                                                       uint64_t num_bytes) {
  std::vector<uint8_t> copy(num_bytes);
  const volatile uint8_t* from = bytes;  // volatile: no call of memcpy, which ThreadSanitizer would see
  for (uint64_t i = 0; i < num_bytes; ++i) copy[i] = from[i];
  return copy;
}

class Sink {
 public:
  Sink(Node& node, uint32_t channel, uint32_t reader)
      : node_(node), channel_(channel), reader_(reader), ring_(node.channels.in[channel].landing) {}
  uint64_t serial() const { return serial_; }
  bool ready() const {
    if (node_.on_device()) return node_.arrived(channel_).read() > serial_;
    return reinterpret_cast<const Flag*>(node_.region->base() + ring_.stamps_offset)[serial_ % ring_.num_slots].read() >
           serial_;
  }
  bool intact(uint64_t num_bytes) const {
    return chunk_is_intact(node_.slots() + ring_.slot_offset(serial_), num_bytes, chunk_key(ring_.kind, channel_),
                           serial_);
  }
  // The same for a chunk whose bytes the network may write again, until its write is done. Both writes have the same
  // bytes, so a reader need not wait.
  bool intact_while_rewritten(uint64_t num_bytes) const {
    const std::vector<uint8_t> copy = copied_while_rewritten(node_.slots() + ring_.slot_offset(serial_), num_bytes);
    return chunk_is_intact(copy.data(), num_bytes, chunk_key(ring_.kind, channel_), serial_);
  }
  void release() {
    ++serial_;
    reinterpret_cast<FlagLine*>(node_.region->base() + ring_.consumed_offset)[reader_].flag.publish(serial_);
    if (!node_.on_device()) node_.control().proxy_bell.ring();
  }

 private:
  Node& node_;
  uint32_t channel_;
  uint32_t reader_;
  RingLayout ring_;
  uint64_t serial_ = 0;
};

inline uint32_t out_channel(const Node& node, RingKind kind, int peer) {
  for (uint32_t c = 0; c < node.channels.out.size(); ++c)
    if (node.channels.out[c].send.kind == kind && node.channels.out[c].peer == peer) return c;
  return UINT32_MAX;
}

}  // namespace uccl_ep
