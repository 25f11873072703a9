// Rank 0 of five with its proxy, and a wire on which the others are whatever the input says.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
#include <new>
#include <vector>

#include "common/units.h"
#include "layout/region.h"
#include "proxy/post.h"
#include "proxy/proxy.h"
#include "target.h"

namespace fuzz {

using namespace uccl_ep;

struct Place {
  Topology topo = Topology::from_labels({0, 0, 1, 1, 2});  // two readers, two rails, a domain of one
  std::vector<RegionLayout> layouts;  // by rank
  Channels channels;                  // of rank 0
};

inline Place make_place(bool device) {
  constexpr RingParams kHostRings = {1024, 256, 2, 10};
  const DeviceRings kDeviceRings = {{{1, 512}, {2, 512}}, 1024, 3, 1024, 2, {}};
  Place p;
  for (int r = 0; r < p.topo.num_ranks; ++r)
    p.layouts.push_back(device ? make_device_layout(p.topo, kDeviceRings, r)
                               : make_region_layout(p.topo, kHostRings, r));
  p.channels = device ? make_device_channels(p.topo, kDeviceRings, 0) : make_channels(p.topo, kHostRings, 0);
  return p;
}

inline const Place& place(bool device) {
  static const Place places[2] = {make_place(false), make_place(true)};
  return places[device ? 1 : 0];
}

// Takes every write that stays within bounds and every datagram that its receiver would take, and delivers one
// completion at a time.
class Wire final : public Transport {
 public:
  explicit Wire(const Place& at) : at_(at) {}
  const char* name() const override { return "wire"; }
  std::string address() const override { return ""; }
  void register_device(const RegisteredRegion&) override {}
  void connect(const std::vector<std::string>&) override {}
  void attach_device(DeviceRegions) override {}
  void sealed() override {}
  bool has_room(uint64_t) const override { return true; }
  void flush() override {}
  uint64_t idle_usec() const override { return 0; }
  bool peer_alive(int) const override { return true; }

  PostResult post_write(const WriteRequest& request) override {
    must(request.peer >= 2 && request.peer < 5, "a write goes to a rank of another domain");
    if (refuses) return PostResult::kAgain;
    const bool host = request.memory == Memory::kHost;
    const auto within = [&](uint64_t offset, int rank) {
      const RegionLayout& layout = at_.layouts[static_cast<size_t>(rank)];
      const uint64_t bytes = host ? layout.total_bytes : layout.device_bytes;
      return request.num_bytes == 0 || (request.num_bytes <= bytes && offset <= bytes - request.num_bytes);
    };
    must(within(request.local_offset, 0) && within(request.remote_offset, request.peer), "a write stays within bounds");
    must(request.num_bytes <= 1024, "a write fits its slot");
    in_flight.push_back(request);
    return PostResult::kPosted;
  }
  size_t poll(std::span<Completion> out) override {
    if (due.empty()) return 0;
    out[0] = due.front();
    due.pop_front();
    return 1;
  }
  PostResult send_datagram(int peer, std::span<const uint8_t> bytes) override {
    must(peer >= 2 && peer < 5, "a datagram goes to a rank of another domain");
    Datagram sent;
    must(decode_datagram(bytes, {kNonce, static_cast<uint32_t>(peer), 5}, sent), "a datagram has its form");
    must(sent.header.sender == 0, "a datagram names its sender");
    num_acknowledged += sent.header.acknowledges;
    return refuses ? PostResult::kAgain : PostResult::kPosted;
  }
  size_t receive_datagram(std::span<uint8_t> out) override {
    if (mail.empty()) return 0;
    const std::vector<uint8_t> next = mail.front();
    mail.pop_front();
    must(out.size() >= kMaxDatagramBytes, "there is room for a datagram");
    std::copy(next.begin(), next.end(), out.begin());
    return next.size();
  }
  void complete(size_t index, bool delivered) {
    if (in_flight.empty()) return;
    const auto its = in_flight.begin() + static_cast<ptrdiff_t>(index % in_flight.size());
    due.push_back({delivered ? Completion::Kind::kWriteDone : Completion::Kind::kFailure, its->peer, 0, its->num_bytes,
                   its->cookie, delivered ? nullptr : "cut"});
    in_flight.erase(its);
  }
  void arrive(int peer, uint32_t immediate) {
    due.push_back({Completion::Kind::kArrival, peer, immediate, 64, 0, nullptr});
  }

  static constexpr uint64_t kNonce = 0x5eed;
  bool refuses = false;
  uint64_t num_acknowledged = 0;  // messages
  std::deque<std::vector<uint8_t>> mail;
  std::deque<Completion> due;
  std::vector<WriteRequest> in_flight;

 private:
  const Place& at_;
};

class LoneProxy {
 public:
  explicit LoneProxy(bool on_device)
      : at(place(on_device)),
        layout(at.layouts[0]),
        wire(at),
        memory_(static_cast<uint8_t*>(std::aligned_alloc(kLineBytes, round_up(layout.total_bytes, kLineBytes))),
                &std::free) {
    std::memset(region(), 0, layout.total_bytes);
    for (ControlBlock* block : {new (region()) ControlBlock, &neighbour()}) {
      block->pid = getpid();
      block->generation = Wire::kNonce;
    }
    commands = std::make_unique<CommandRing>(region() + layout.commands_offset, layout.num_commands);
    for (const InChannel& in : at.channels.in)
      rings_.push_back({in.landing, std::vector<uint64_t>(in.landing.num_slots)});
    for (const OutChannel& out : at.channels.out)
      rings_.push_back({out.send, std::vector<uint64_t>(out.send.num_slots)});
    ProxyContext context;
    context.rank = 0;
    context.topo = &at.topo;
    context.channels = &at.channels;
    context.layout = &layout;
    context.region = region();
    context.control = &control();
    context.domain_controls = {&control(), &neighbour(), nullptr, nullptr, nullptr};
    context.commands = commands.get();
    context.transport = &wire;
    proxy_ = std::make_unique<Proxy>(context);
  }

  // One pass. False: the proxy found an error, as it may; nothing else may have happened.
  bool step() {
    bool good = true;
    try {
      proxy_->step();
    } catch (const CommunicationFailure& failure) {
      must(is_printable(failure.what(), sizeof(ErrorRecord::message)), "an error is printable");
      good = false;
    }
    check_stamps();
    check_error();
    return good;
  }

  // It leaves; it has found an error.
  void leave() { proxy_->announce_close(); }
  void find_error() {
    ErrorRecord record;
    record.kind = ErrorKind::kPeerFailed;
    record.rank = 0;
    post_error(control(), record);
  }
  bool error_delivered() const { return proxy_->error_delivered(); }
  MessageStats messages() const { return proxy_->stats().messages; }

  uint8_t* region() { return memory_.get(); }
  ControlBlock& control() { return *reinterpret_cast<ControlBlock*>(region()); }
  // A reader is done with the next chunk of a landing ring, if it is there.
  void read(size_t in, uint32_t reader) {
    const RingLayout& ring = at.channels.in[in].landing;
    Flag& consumed = reinterpret_cast<FlagLine*>(region() + ring.consumed_offset)[reader % ring.num_readers].flag;
    if (stamp(ring, consumed.own() % ring.num_slots) != consumed.own() + 1) return;
    consumed.publish(consumed.own() + 1);
    control().proxy_bell.ring();
  }
  // The producer of an outgoing channel pushes its next chunk, if its slot is free.
  bool send(uint32_t out, uint64_t num_bytes) {
    Counted& ring = rings_[at.channels.in.size() + out];
    if (ring.pushed >= ring.layout.num_slots && stamp(ring.layout, ring.pushed % ring.layout.num_slots) == 0)
      return false;
    if (ring.pushed - ring.prefix >= ring.layout.num_slots) return false;
    return commands->push({out, num_bytes % (ring.layout.slot_bytes + 1), ring.pushed++});
  }
  // Chunks of a landing ring that are there, such that none before them is missing.
  uint64_t arrived(size_t in) const { return rings_[in].prefix; }
  uint64_t num_stamps() const { return num_stamps_; }

  const Place& at;
  const RegionLayout& layout;
  Wire wire;
  std::unique_ptr<CommandRing> commands;

 private:
  struct Counted {
    RingLayout layout;
    std::vector<uint64_t> stamps;
    uint64_t prefix = 0, pushed = 0;
  };

  uint64_t stamp(const RingLayout& ring, uint64_t slot) {
    return reinterpret_cast<const Flag*>(region() + ring.stamps_offset)[slot].read();
  }
  // A stamp says that a chunk is there: it goes from one lap to the next, and one at a time.
  void check_stamps() {
    uint64_t num_new = 0;
    for (size_t r = 0; r < rings_.size(); ++r) {
      Counted& ring = rings_[r];
      for (uint64_t slot = 0; slot < ring.layout.num_slots; ++slot) {
        const uint64_t now = stamp(ring.layout, slot), before = ring.stamps[slot];
        if (now == before) continue;
        must(now == (before == 0 ? slot + 1 : before + ring.layout.num_slots), "a stamp skips no lap");
        ring.stamps[slot] = now;
        ++num_new;
      }
      while (ring.stamps[ring.prefix % ring.layout.num_slots] > ring.prefix) ++ring.prefix;
      if (layout.board_offset != 0)
        must(reinterpret_cast<const Flag*>(region() + layout.board_offset)[r].read() == ring.prefix,
             "the board says what the stamps say");
    }
    must(num_new <= 1, "a completion makes one stamp");
    num_stamps_ += num_new;
  }
  void check_error() {
    for (const ControlBlock* block : {&control(), &neighbour()}) {
      if (!block->error_claim.published()) continue;
      const ErrorRecord& error = block->error;
      must(error.kind > ErrorKind::kNone && error.kind <= ErrorKind::kPeerFailed, "an error has a kind");
      must(error.step <= Step::kClose, "an error has a step");
      must(error.rank >= 0 && error.rank < 5 && error.peer >= -1 && error.peer < 5, "an error names ranks");
      must(is_printable(error.message, sizeof(error.message)), "an error is printable");
    }
  }

  std::unique_ptr<uint8_t, decltype(&std::free)> memory_;
  ControlBlock& neighbour() { return neighbour_.control; }
  struct {
    alignas(kPageBytes) ControlBlock control;
    alignas(kPageBytes) RemoteSigns signs[8];
  } neighbour_;
  std::vector<Counted> rings_;  // as on the board: incoming channels, then outgoing ones
  uint64_t num_stamps_ = 0;
  std::unique_ptr<Proxy> proxy_;
};

}  // namespace fuzz
