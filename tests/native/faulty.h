// A transport that misbehaves when told, and a world in which every rank has one.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "claims.h"
#include "proxy_world.h"

namespace uccl_ep {

// Stands between a proxy and its transport. Each flag switches one fault on.
class Faulty final : public Transport {
 public:
  explicit Faulty(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  const char* name() const override { return "faulty"; }
  std::string address() const override { return inner_->address(); }
  void register_device(const RegisteredRegion& region) override { inner_->register_device(region); }
  void connect(const std::vector<std::string>& addresses) override { inner_->connect(addresses); }
  void attach_device(DeviceRegions device) override { inner_->attach_device(std::move(device)); }
  void sealed() override { inner_->sealed(); }
  bool has_room(uint64_t num_bytes) const override { return inner_->has_room(num_bytes); }
  PostResult post_write(const WriteRequest& request) override {
    const bool is_data = decode_imm(request.immediate).type == ImmType::kData;
    if (is_data && throws.read() != 0) throw std::runtime_error("the cable is cut");
    if (is_data && refuses.read() != 0) return PostResult::kAgain;
    if (is_data && fails.read() != 0) {
      failed_.push_back({Completion::Kind::kFailure, request.peer, 0, 0, request.cookie, "retries exceeded"});
      return PostResult::kPosted;
    }
    WriteRequest sent = request;
    if (is_data && garbles.read() != 0) sent.immediate = encode_imm(ImmType::kData, kMaxChannels - 1, 0);
    return inner_->post_write(sent);
  }
  void flush() override { inner_->flush(); }
  size_t poll(std::span<Completion> out) override {
    if (!failed_.empty()) {
      out[0] = failed_.back();
      failed_.pop_back();
      return 1;
    }
    return inner_->poll(out);
  }
  uint64_t idle_usec() const override { return inner_->idle_usec(); }
  PostResult send_datagram(int peer, std::span<const uint8_t> bytes) override {
    return inner_->send_datagram(peer, bytes);
  }
  void wake(int peer) override { inner_->wake(peer); }
  size_t receive_datagram(std::span<uint8_t> out) override { return inner_->receive_datagram(out); }
  bool peer_alive(int peer) const override {
    return dead.read() != static_cast<uint64_t>(peer) + 1 && inner_->peer_alive(peer);
  }

  Flag throws, refuses, fails, garbles, dead;

 private:
  std::unique_ptr<Transport> inner_;
  std::vector<Completion> failed_;
};

struct FaultyWorld {
  explicit FaultyWorld(WorldOptions options = {}) {
    options.wrap = [&](int, std::unique_ptr<Transport> inner) {
      auto wrapped = std::make_unique<Faulty>(std::move(inner));
      faulty.push_back(wrapped.get());
      return wrapped;
    };
    world = std::make_unique<World>(options);
  }
  void send_one() {
    Source source(world->nodes[0], out_channel(world->nodes[0], RingKind::kRows, 1));
    EXPECT(source.try_send(64));
  }
  // Both ranks learn that rank `finder` found it.
  void expect_error(int finder, const std::string& part) {
    for (auto& node : world->nodes) {
      EXPECT(eventually([&] { return node.has_error(); }));
      const ErrorRecord& seen = node.control().error;
      if (seen.rank != finder || seen.kind != ErrorKind::kTransport ||
          std::string(seen.message).find(part) == std::string::npos)
        throw std::logic_error("rank " + std::to_string(seen.rank) + " said: " + seen.message);
    }
  }
  std::vector<Faulty*> faulty;
  std::unique_ptr<World> world;
};

}  // namespace uccl_ep
