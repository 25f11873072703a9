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
    begin(with_weights);
    EXPECT(op_->wait_counts(kPatienceUsec));
    give_rows();
    EXPECT(op_->wait(nullptr, kPatienceUsec));
    combine();
    EXPECT(first_->wait(nullptr, kPatienceUsec));
    EXPECT(second_->wait(nullptr, kPatienceUsec));
    check();
  }

  // The same without waiting, for who steps engines: makes the next call if the last one is through. True: all is
  // through and was looked at. Throws the error that a call ended with.
  bool advance(bool with_weights) {
    switch (phase_) {
      case Phase::kNone:
        begin(with_weights);
        phase_ = Phase::kCounts;
        return false;
      case Phase::kCounts:
        if (!op_->wait_counts(0)) return false;
        give_rows();
        phase_ = Phase::kRows;
        return false;
      case Phase::kRows:
        if (!op_->wait(nullptr, 0)) return false;
        combine();
        phase_ = Phase::kCombines;
        return false;
      case Phase::kCombines:
        if (!first_->wait(nullptr, 0) || !second_->wait(nullptr, 0)) return false;
        check();
        phase_ = Phase::kNone;
        return true;
    }
    return false;
  }
  bool has_given_rows() const { return phase_ == Phase::kRows || phase_ == Phase::kCombines; }

 private:
  enum class Phase { kNone, kCounts, kRows, kCombines };

  void begin(bool with_weights) {
    with_weights_ = with_weights;
    fill();
    DispatchArgs dispatch;
    dispatch.x = reinterpret_cast<const uint8_t*>(x_.data());
    dispatch.num_tokens = num_tokens_;
    dispatch.hidden = kHidden;
    dispatch.dtype = dispatch.wire = Dtype::kFp32;
    dispatch.has_routing = true;
    dispatch.routing = {RoutingKind::kTopk, idx_.data(), kTopk};
    dispatch.weights = with_weights ? weights_.data() : nullptr;
    op_ = engine_.dispatch(dispatch);
  }
  void give_rows() {
    rows_.assign(op_->plan()->num_rows() * kHidden, -1.0f);
    row_weights_.assign(op_->plan()->num_rows(), -1.0f);
    DispatchOutput output;
    output.rows = reinterpret_cast<uint8_t*>(rows_.data());
    output.weights = row_weights_.data();
    op_->give_output(output);
  }
  void combine() {
    out_.assign(x_.size() + 1, 0);
    out_again_ = out_;
    weights_back_.assign(weights_.size() + 1, 0);
    CombineArgs combine;
    combine.rows = reinterpret_cast<const uint8_t*>(rows_.data());
    combine.hidden = kHidden;
    combine.dtype = combine.wire = Dtype::kFp32;
    combine.plan = op_->plan();
    combine.weights = with_weights_ ? row_weights_.data() : nullptr;
    combine.weights_out = with_weights_ ? weights_back_.data() : nullptr;
    combine.out = reinterpret_cast<uint8_t*>(out_.data());
    first_ = engine_.combine(combine);
    combine.weights = nullptr;
    combine.weights_out = nullptr;
    combine.out = reinterpret_cast<uint8_t*>(out_again_.data());
    second_ = engine_.combine(combine);
  }
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

  void check() const {
    for (uint64_t t = 0; t < num_tokens_; ++t) {
      float experts = 0;
      for (uint64_t k = 0; k < kTopk; ++k) {
        const bool there = idx_[t * kTopk + k] >= 0;
        experts += there ? 1.0f : 0.0f;
        if (with_weights_) EXPECT_EQ(weights_back_[t * kTopk + k], there ? weights_[t * kTopk + k] : 0.0f);
      }
      for (uint64_t h = 0; h < kHidden; ++h) EXPECT_EQ(out_[t * kHidden + h], experts * x_[t * kHidden + h]);
    }
    EXPECT(out_ == out_again_);
  }

  Engine& engine_;
  std::mt19937_64 random_;
  uint64_t num_tokens_ = 0;
  std::vector<float> x_, weights_;
  std::vector<int64_t> idx_;
  // Of the calls that are under way.
  Phase phase_ = Phase::kNone;
  bool with_weights_ = false;
  std::shared_ptr<Operation> op_, first_, second_;
  std::vector<float> rows_, row_weights_, out_, out_again_, weights_back_;
};

using Change = std::function<void(EngineConfig&)>;

// `work(engine, rank)`, by a thread of each rank.
inline void by_engines(const std::vector<int>& domain_of, const LoopOptions& loop,
                       const std::function<void(Engine&, int)>& work, const Change& change = {}) {
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
        work(*engines[rank], rank);
      } catch (const std::exception& failure) {
        failures[rank] = failure.what();
      }
      engines[rank]->close(!failures[rank].empty());
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures)
    if (!failure.empty()) throw std::logic_error(failure);
}
inline void run(const std::vector<int>& domain_of, const LoopOptions& loop, int num_rounds, const Change& change = {}) {
  const auto work = [&](Engine& engine, int rank) {
    RankRun calls(engine, rank);
    for (int round = 0; round < num_rounds; ++round) calls.dispatch_and_combine(round % 2 == 0);
  };
  by_engines(domain_of, loop, work, change);
}

}  // namespace uccl_ep
