// Engines of several ranks in one process that dispatch and combine, and look at every value.
#pragma once

#include <algorithm>
#include <barrier>
#include <functional>
#include <random>
#include <thread>

#include "claims.h"
#include "engine/host/engine.h"
#include "fake_copies.h"
#include "transport/registry.h"

namespace uccl_ep {

constexpr uint32_t kHidden = 128;
constexpr uint32_t kExperts = 12;
constexpr uint32_t kTopk = 3;
constexpr uint64_t kPatienceUsec = 30'000'000;

inline EngineConfig config_of(int rank, const std::vector<int>& domain_of, const LoopOptions& loop) {
  EngineConfig config;
  config.rank = rank;
  config.num_ranks = static_cast<int>(domain_of.size());
  config.domain_of = domain_of;
  config.num_experts = kExperts;
  config.hidden = kHidden;
  config.max_element_bytes = 4;
  config.budget_bytes = 64 << 20;
  config.chunk_bytes = 2048;  // a few rows
  config.window_chunks = 2;
  config.generation = 42;
  config.progress_timeout_s = 20;
  config.loop = loop;
  return config;
}

// One rank's calls: every token comes back as the sum of its experts' rows, here (number of experts) x the token.
class RankRun {
 public:
  RankRun(Engine& engine, int rank) : engine_(engine), random_(static_cast<uint64_t>(rank) * 7919 + 1) {}

  void dispatch_and_combine(bool with_weights) {
    fill();
    DispatchArgs dispatch;
    dispatch.x = reinterpret_cast<const uint8_t*>(x_.data());
    dispatch.num_tokens = num_tokens_;
    dispatch.hidden = kHidden;
    dispatch.dtype = dispatch.wire = Dtype::kFp32;
    dispatch.has_routing = true;
    dispatch.routing = {RoutingKind::kTopk, idx_.data(), kTopk};
    dispatch.weights = with_weights ? weights_.data() : nullptr;
    auto op = engine_.dispatch(dispatch);
    EXPECT(op->wait_counts(kPatienceUsec));
    std::vector<float> rows(op->plan()->num_rows() * kHidden, -1.0f);
    std::vector<float> row_weights(op->plan()->num_rows(), -1.0f);
    DispatchOutput output;
    output.rows = reinterpret_cast<uint8_t*>(rows.data());
    output.weights = row_weights.data();
    op->give_output(output);
    EXPECT(op->wait(nullptr, kPatienceUsec));

    std::vector<float> out(x_.size() + 1), out_again(x_.size() + 1), weights_back(weights_.size() + 1, 0.0f);
    CombineArgs combine;
    combine.rows = reinterpret_cast<const uint8_t*>(rows.data());
    combine.hidden = kHidden;
    combine.dtype = combine.wire = Dtype::kFp32;
    combine.plan = op->plan();
    combine.weights = with_weights ? row_weights.data() : nullptr;
    combine.weights_out = with_weights ? weights_back.data() : nullptr;
    combine.out = reinterpret_cast<uint8_t*>(out.data());
    auto first = engine_.combine(combine);
    combine.weights = nullptr;
    combine.weights_out = nullptr;
    combine.out = reinterpret_cast<uint8_t*>(out_again.data());
    auto second = engine_.combine(combine);
    EXPECT(first->wait(nullptr, kPatienceUsec));
    EXPECT(second->wait(nullptr, kPatienceUsec));
    check(out, with_weights ? &weights_back : nullptr);
    EXPECT(out == out_again);
  }

 private:
  void fill() {
    num_tokens_ = random_() % 60;
    x_.resize(num_tokens_ * kHidden + 1);
    idx_.resize(num_tokens_ * kTopk + 1);
    weights_.resize(num_tokens_ * kTopk + 1);
    for (float& value : x_) value = static_cast<float>(random_() % 64);  // sums of these are exact
    for (float& value : weights_) value = static_cast<float>(random_() % 1000);
    for (uint64_t t = 0; t < num_tokens_; ++t) {
      const uint64_t first = random_() % kExperts;
      for (uint64_t k = 0; k < kTopk; ++k)
        idx_[t * kTopk + k] = random_() % 8 == 0 ? -1 : static_cast<int64_t>((first + 5 * k) % kExperts);
    }
  }

  void check(const std::vector<float>& out, const std::vector<float>* weights_back) const {
    for (uint64_t t = 0; t < num_tokens_; ++t) {
      float experts = 0;
      for (uint64_t k = 0; k < kTopk; ++k) {
        const bool there = idx_[t * kTopk + k] >= 0;
        experts += there ? 1.0f : 0.0f;
        if (weights_back != nullptr) EXPECT_EQ((*weights_back)[t * kTopk + k], there ? weights_[t * kTopk + k] : 0.0f);
      }
      for (uint64_t h = 0; h < kHidden; ++h) EXPECT_EQ(out[t * kHidden + h], experts * x_[t * kHidden + h]);
    }
  }

  Engine& engine_;
  std::mt19937_64 random_;
  uint64_t num_tokens_ = 0;
  std::vector<float> x_, weights_;
  std::vector<int64_t> idx_;
};

using Change = std::function<void(EngineConfig&)>;

inline void run(const std::vector<int>& domain_of, const LoopOptions& loop, int num_rounds, const Change& change = {}) {
  const int n = static_cast<int>(domain_of.size());
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::string> handles;
  for (int rank = 0; rank < n; ++rank) {
    EngineConfig config = config_of(rank, domain_of, loop);
    if (change) change(config);
    engines.push_back(std::make_unique<HostEngine>(config));
    handles.push_back(engines.back()->export_handle());
  }
  std::barrier meeting(n);
  std::vector<std::string> failures(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank)
    threads.emplace_back([&, rank] {
      try {
        engines[rank]->connect(handles);
        meeting.arrive_and_wait();
        engines[rank]->start();
        RankRun calls(*engines[rank], rank);
        for (int round = 0; round < num_rounds; ++round) calls.dispatch_and_combine(round % 2 == 0);
      } catch (const std::exception& failure) {
        failures[rank] = failure.what();
      }
      engines[rank]->close(!failures[rank].empty());
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures)
    if (!failure.empty()) throw std::logic_error(failure);
}

}  // namespace uccl_ep
