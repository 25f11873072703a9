// Transports that stand before a real one and do to it what a network may do, or what none may do.
#pragma once

#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ranks.h"

namespace conformance {

// Passes everything on.
class Wrapped : public Transport {
 public:
  explicit Wrapped(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  const char* name() const override { return inner_->name(); }
  std::string address() const override { return inner_->address(); }
  void register_device(const RegisteredRegion& region) override { inner_->register_device(region); }
  void connect(const std::vector<std::string>& addresses) override { inner_->connect(addresses); }
  void attach_device(DeviceRegions device) override { inner_->attach_device(std::move(device)); }
  void sealed() override { inner_->sealed(); }
  bool has_room(uint64_t num_bytes) const override { return inner_->has_room(num_bytes); }
  PostResult post_write(const WriteRequest& request) override { return inner_->post_write(request); }
  void flush() override { inner_->flush(); }
  size_t poll(std::span<Completion> out) override { return inner_->poll(out); }
  uint64_t idle_usec() const override { return inner_->idle_usec(); }
  PostResult send_datagram(int peer, std::span<const uint8_t> bytes) override {
    return inner_->send_datagram(peer, bytes);
  }
  void wake(int peer) override { inner_->wake(peer); }
  size_t receive_datagram(std::span<uint8_t> out) override { return inner_->receive_datagram(out); }
  bool peer_alive(int peer) const override { return inner_->peer_alive(peer); }

 protected:
  std::unique_ptr<Transport> inner_;
};

// Breaks the contract: raises the immediate of every `every`-th write before its bytes.
class EarlyImmediate final : public Wrapped {
 public:
  EarlyImmediate(std::unique_ptr<Transport> inner, uint64_t every) : Wrapped(std::move(inner)), every_(every) {}
  static constexpr uint64_t kBytesOnly = UINT32_MAX;  // number of a write that the receiver shall not know

  PostResult post_write(const WriteRequest& request) override {
    if (request.num_bytes == 0 || ++count_ % every_ != 0) return inner_->post_write(request);
    WriteRequest first = request;
    first.num_bytes = 0;
    first.cookie = UINT64_MAX;
    const PostResult result = inner_->post_write(first);
    if (result == PostResult::kPosted) late_.push_back({now_usec() + kLateUsec, request});
    return result;
  }
  size_t poll(std::span<Completion> out) override {
    while (!late_.empty() && late_.front().first < now_usec()) {
      WriteRequest bytes = late_.front().second;
      bytes.immediate = immediate_of(kBytesOnly);
      if (inner_->post_write(bytes) == PostResult::kAgain) break;
      late_.erase(late_.begin());
    }
    inner_->flush();
    size_t kept = 0;
    for (size_t i = 0, count = inner_->poll(out); i < count; ++i)
      if (out[i].kind == Completion::Kind::kArrival || out[i].cookie != UINT64_MAX) out[kept++] = out[i];
    return kept;
  }

 private:
  static constexpr uint64_t kLateUsec = 10'000;
  const uint64_t every_;
  uint64_t count_ = 0;
  std::vector<std::pair<uint64_t, WriteRequest>> late_;  // by when
};

// Keeps the contract: every write is posted twice, payload and all, and is done when both are.
class Twice final : public Wrapped {
 public:
  using Wrapped::Wrapped;
  PostResult post_write(const WriteRequest& request) override {
    const PostResult result = inner_->post_write(request);
    if (result == PostResult::kPosted) {
      again_.push_back(request);
      again_.back().limited = false;
    }
    return result;
  }
  size_t poll(std::span<Completion> out) override {
    while (!again_.empty() && inner_->post_write(again_.back()) == PostResult::kPosted) again_.pop_back();
    inner_->flush();
    size_t kept = 0;
    for (size_t i = 0, count = inner_->poll(out); i < count; ++i) {
      if (out[i].kind != Completion::Kind::kArrival && ++reports_[out[i].cookie] % 2 != 0) continue;
      out[kept++] = out[i];
    }
    return kept;
  }
  uint64_t idle_usec() const override { return again_.empty() ? inner_->idle_usec() : 0; }

 private:
  std::vector<WriteRequest> again_;
  std::map<uint64_t, uint64_t> reports_;  // by cookie; writes with the same one have the same payload: none
};

// Keeps the contract: reports arrivals again, long after the first time.
class Echo final : public Wrapped {
 public:
  explicit Echo(std::unique_ptr<Transport> inner, uint64_t seed) : Wrapped(std::move(inner)), random_(seed) {}
  size_t poll(std::span<Completion> out) override {
    size_t count = inner_->poll(out.first(out.size() - 1));
    if (!past_.empty() && random_() % 2 == 0) out[count++] = past_[random_() % past_.size()];
    for (size_t i = 0; i < count; ++i) {
      if (out[i].kind != Completion::Kind::kArrival) continue;
      if (past_.size() < kPast)
        past_.push_back(out[i]);
      else
        past_[random_() % kPast] = out[i];
    }
    return count;
  }

 private:
  static constexpr size_t kPast = 64;
  std::mt19937_64 random_;
  std::vector<Completion> past_;
};

// Breaks the contract, in one of several ways, at every `every`-th chunk.
enum class Breach : uint32_t { kLosesBytes, kLosesWrite, kReportsTwice, kSwallowsReport };

class Breaching final : public Wrapped {
 public:
  Breaching(std::unique_ptr<Transport> inner, Breach breach, uint64_t every)
      : Wrapped(std::move(inner)), breach_(breach), every_(every) {}
  PostResult post_write(const WriteRequest& request) override {
    const bool hit = request.num_bytes != 0 && ++count_ % every_ == 0;
    WriteRequest sent = request;
    if (hit && breach_ == Breach::kLosesBytes) sent.num_bytes = 0;
    if (hit && breach_ == Breach::kLosesWrite) {
      extra_.push_back({Completion::Kind::kWriteDone, request.peer, 0, request.num_bytes, request.cookie, nullptr});
      return PostResult::kPosted;
    }
    return inner_->post_write(sent);
  }
  size_t poll(std::span<Completion> out) override {
    if (!extra_.empty()) {
      out[0] = extra_.back();
      extra_.pop_back();
      return 1;
    }
    size_t kept = 0;
    for (size_t i = 0, count = inner_->poll(out); i < count; ++i) {
      const bool hit = out[i].kind == Completion::Kind::kWriteDone && ++reports_ % every_ == 0;
      if (hit && breach_ == Breach::kSwallowsReport) continue;
      if (hit && breach_ == Breach::kReportsTwice) extra_.push_back(out[i]);
      out[kept++] = out[i];
    }
    return kept;
  }

 private:
  const Breach breach_;
  const uint64_t every_;
  uint64_t count_ = 0, reports_ = 0;
  std::vector<Completion> extra_;
};

}  // namespace conformance
