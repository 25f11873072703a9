// One domain of a large group, whose other domains are its mirror images: what a rank sends to its rail in domain d
// comes back as what that rail sends to it. So a few engines run, with their kernels and proxies, and the packets,
// rows, sums, credits and datagrams of thousands of ranks come to them.
//
// That is a group in which member l of domain d has the tokens of member l of domain 0, routed with the two domains
// exchanged: CudaRun::mirrored. Domains have one size and are consecutive ranks.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <utility>

#include "backend/gpu/layout.h"
#include "claims.h"
#include "engine/gpu/sizes.h"
#include "layout/datagram.h"
#include "layout/words.h"
#include "transport/registry.h"

namespace uccl_ep {

// A rank's end of such a network. Nothing is lost, but what comes is in no order.
class Mirror final : public Transport {
 public:
  static constexpr const char* kName = "mirror";
  // Before a rank's engine is made: its channels, by which a mirror knows what comes back where.
  static void prepare(const EngineConfig& config) {
    const Topology topo = Topology::from_labels(config.domain_of);
    ways()[config.rank] = {make_device_channels(topo, gpu_layout_of(config).rings, config.rank), topo.size_of(0),
                           static_cast<int32_t>(config.num_experts) / topo.num_domains()};
  }
  // Flips a bit of the first chunk of rows that comes to this rank. -1: of none.
  static inline int flipped_rank = -1;

  explicit Mirror(const TransportSetup& setup)
      : flips_(setup.rank == flipped_rank), way_(ways().at(setup.rank)), random_(static_cast<uint64_t>(setup.rank)) {
    for (uint32_t c = 0; c < way_.channels.out.size(); ++c) {
      const OutChannel& out = way_.channels.out[c];
      out_to_[{out.peer, out.send.kind}] = c;
      kind_there_[{out.peer, out.peer_channel}] = out.send.kind;
    }
    for (uint32_t c = 0; c < way_.channels.in.size(); ++c) {
      const InChannel& in = way_.channels.in[c];
      in_from_[{in.peer, in.landing.kind}] = c;
      credit_there_[{in.peer, in.peer_channel}] = in.landing.kind;
    }
  }
  const char* name() const override { return kName; }
  void register_device(const RegisteredRegion& region) override { device_ = region; }
  std::string address() const override { return {}; }
  void connect(const std::vector<std::string>&) override {}
  void attach_device(DeviceRegions) override {}
  void sealed() override {}
  bool has_room(uint64_t) const override { return true; }
  void flush() override {}
  uint64_t idle_usec() const override { return coming_.empty() && mail_.empty() ? UINT64_MAX : 0; }
  bool peer_alive(int) const override { return true; }

  PostResult post_write(const WriteRequest& request) override {
    const Imm sent = decode_imm(request.immediate);
    Completion arrival{Completion::Kind::kArrival, request.peer, 0, request.num_bytes, 0, nullptr};
    if (sent.type == ImmType::kData) {
      const RingKind kind = kind_there_.at({request.peer, sent.channel});
      const uint32_t in = in_from_.at({request.peer, kind});
      const uint64_t there = way_.channels.out[out_to_.at({request.peer, kind})].remote_slots_offset;
      const uint64_t offset = way_.channels.in[in].landing.slots_offset + request.remote_offset - there;
      EXPECT(request.memory == Memory::kDevice && offset + request.num_bytes <= device_.bytes);
      auto* const base = static_cast<uint8_t*>(device_.base);
      std::memcpy(base + offset, base + request.local_offset, request.num_bytes);
      const bool has_routing = kind == RingKind::kSlotRouting || kind == RingKind::kSlotWeights;
      if (has_routing && request.num_bytes > sizeof(gpu::SlotHeader)) exchange(base + offset, request.peer);
      if (flips_ && kind == RingKind::kRows) base[offset] ^= 1, flips_ = false;
      arrival.immediate = encode_imm(sent.type, in, sent.serial);
    } else if (sent.type == ImmType::kCredit) {
      const RingKind kind = credit_there_.at({request.peer, sent.channel});
      arrival.immediate = encode_imm(sent.type, out_to_.at({request.peer, kind}), sent.serial);
    } else {
      arrival.immediate = encode_imm(sent.type, 0, static_cast<uint64_t>(request.peer));
    }
    coming_.push_back(arrival);
    coming_.push_back({Completion::Kind::kWriteDone, request.peer, 0, request.num_bytes, request.cookie, nullptr});
    return PostResult::kPosted;
  }
  size_t poll(std::span<Completion> out) override {
    const size_t count = std::min(out.size(), coming_.size());
    for (size_t i = 0; i < count; ++i) {
      std::swap(coming_[0], coming_[random_() % std::min(coming_.size(), kReach)]);
      out[i] = coming_.front();
      coming_.pop_front();
    }
    return count;
  }
  PostResult send_datagram(int, std::span<const uint8_t> bytes) override {
    Datagram datagram;
    std::memcpy(&datagram, bytes.data(), bytes.size());
    std::swap(datagram.header.sender, datagram.header.receiver);
    mail_.push_back(encode_datagram(datagram.header, bytes.subspan(sizeof(DatagramHeader))));
    return PostResult::kPosted;
  }
  size_t receive_datagram(std::span<uint8_t> out) override {
    if (mail_.empty()) return 0;
    const std::span<const uint8_t> bytes = mail_.front().bytes();
    const size_t count = bytes.size();
    std::copy(bytes.begin(), bytes.end(), out.begin());
    mail_.pop_front();
    return count;
  }

 private:
  using Place = std::pair<int, uint32_t>;  // a channel of a peer
  using Kind = std::pair<int, RingKind>;   // our channel to or from it

  struct Way {
    Channels channels;
    int members = 0;
    int32_t experts = 0;  // of a domain
  };
  static std::map<int, Way>& ways() {
    static std::map<int, Way> all;
    return all;
  }
  // Packets of low latency name experts of all domains.
  void exchange(uint8_t* packet, int peer) const {
    const auto& header = *reinterpret_cast<const gpu::SlotHeader*>(packet);
    auto* const routing = reinterpret_cast<int32_t*>(packet + sizeof(header));
    const int32_t domain = peer / way_.members;
    for (uint32_t i = 0; i < header.num_tokens * header.signature.topk; ++i)
      if (const int32_t from = routing[i] / way_.experts; routing[i] >= 0 && (from == 0 || from == domain))
        routing[i] += (from == 0 ? domain : -domain) * way_.experts;
  }

  static constexpr size_t kReach = 64;  // completions, of which any may be the next

  bool flips_;
  const Way way_;
  std::map<Kind, uint32_t> out_to_, in_from_;
  std::map<Place, RingKind> kind_there_, credit_there_;
  RegisteredRegion device_;
  std::mt19937_64 random_;
  std::deque<Completion> coming_;
  std::deque<Datagram> mail_;
};
inline const RegisterTransport kMirror({Mirror::kName,
                                        [](const TransportSetup& setup, const TransportOptions&) {
                                          return std::unique_ptr<Transport>(std::make_unique<Mirror>(setup));
                                        },
                                        [](const TransportOptions&, size_t, size_t) { return uint64_t{0}; },
                                        [](const TransportOptions&) { return Probe{true, "", LinkKind::kMemory}; }});

}  // namespace uccl_ep
