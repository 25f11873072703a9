// A low-latency dispatch and its combine on the host, and what they must give.
#pragma once

#include <algorithm>
#include <bit>
#include <random>
#include <vector>

#include "claims.h"
#include "engine_runs.h"

namespace uccl_ep {

constexpr uint32_t kTokens = 20;  // of a rank at most

// A dispatch and its combine: every token comes back as itself times its experts.
class SlotTry {
 public:
  SlotTry(Engine& engine, uint32_t ranks, std::mt19937_64& random, bool knows)
      : engine_(engine), ranks_(ranks), knows_(knows), num_tokens_(random() % (kTokens + 1)) {
    const uint64_t places = num_tokens_ * kTopk;
    for (uint64_t i = 0; i < num_tokens_ * kHidden; ++i) x_.push_back(bf16(random() % 16));
    for (uint64_t i = 0; i < places; ++i) {
      const uint64_t first = i / kTopk * 7 % kExperts;
      idx_.push_back(random() % 8 == 0 ? -1 : static_cast<int64_t>((first + 5 * (i % kTopk)) % kExperts));
      weights_.push_back(1.0f);
    }
    weights_.reserve(1);  // has an address
    const uint64_t experts = kExperts / ranks_, slots = uint64_t{ranks_} * kTokens;
    rows_.assign(experts * slots * kHidden, 0xFFFF);
    counts_.assign(experts, -1);
    ranges_.assign(experts * ranks_, -1);
    tokens_.assign(experts * slots, -1);
    plan_.assign(slots * kTopk, 0);
    routed_ = plan_;
    out_.assign(num_tokens_ * kHidden + 1, 0xFFFF);
  }

  void dispatch(SlotPhase phase) {
    queue_dispatch(phase);
    wait(OpKind::kLowLatencyDispatch, phase);
  }
  void combine(SlotPhase phase) {
    queue_combine(phase);
    wait(OpKind::kLowLatencyCombine, phase);
  }
  // Without waiting, for who steps engines.
  bool is_over(OpKind kind) const { return engine_.wait_low_latency(kind, SlotPhase::kBoth, 0); }
  void queue_dispatch(SlotPhase phase) {
    LowLatencyDispatch args;
    args.phase = phase;
    args.x = bytes(x_);
    args.topk_idx = idx_.data();
    args.weights = knows_ ? weights_.data() : nullptr;
    args.num_tokens = num_tokens_;
    args.width = kTopk;
    args.hidden = kHidden;
    args.rows = bytes(rows_);
    args.counts = counts_.data();
    args.ranges = ranges_.data();
    args.source_tokens = tokens_.data();
    args.pairs = plan_.data();
    args.routed = knows_ ? routed_.data() : nullptr;
    engine_.low_latency(args);
  }
  void queue_combine(SlotPhase phase) {
    LowLatencyCombine args;
    args.phase = phase;
    args.rows = bytes(rows_);
    args.ranges = ranges_.data();
    args.pairs = plan_.data();
    args.routed = knows_ ? routed_.data() : nullptr;
    args.topk_idx = idx_.data();
    args.weights = weights_.data();
    args.num_tokens = num_tokens_;
    args.width = kTopk;
    args.hidden = kHidden;
    args.out = bytes(out_);
    engine_.low_latency(args);
  }
  // What was sent may be overwritten.
  void spoil() {
    std::fill(x_.begin(), x_.end(), 0xFFFF);
    std::fill(rows_.begin(), rows_.end(), 0xFFFF);
  }
  void keep_input() { kept_ = x_; }

  // `gone`: whether a rank is masked.
  void check(const std::vector<int32_t>& gone) const {
    for (uint64_t t = 0; t < num_tokens_; ++t) {
      uint64_t experts = 0;
      for (uint64_t k = 0; k < kTopk; ++k) {
        const int64_t expert = idx_[t * kTopk + k];
        experts += expert >= 0 && gone[static_cast<uint64_t>(expert) / (kExperts / ranks_)] == 0 ? 1 : 0;
      }
      for (uint64_t h = 0; h < kHidden; ++h)
        EXPECT_EQ(value(out_[t * kHidden + h]), static_cast<float>(experts) * value(kept_[t * kHidden + h]));
    }
  }

 private:
  // Of small integers.
  static uint16_t bf16(uint64_t number) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(number)) >> 16);
  }
  static float value(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
  static uint8_t* bytes(std::vector<uint16_t>& of) { return reinterpret_cast<uint8_t*>(of.data()); }
  void wait(OpKind kind, SlotPhase phase) const {
    const uint64_t deadline = now_usec() + kPatienceUsec;
    while (!engine_.wait_low_latency(kind, phase, 50'000)) EXPECT(now_usec() < deadline);
  }

  Engine& engine_;
  const uint32_t ranks_;
  const bool knows_;
  const uint64_t num_tokens_;
  std::vector<uint16_t> x_, kept_, rows_, out_;
  std::vector<int64_t> idx_, ranges_;
  std::vector<float> weights_;
  std::vector<int32_t> counts_, tokens_;
  std::vector<uint32_t> plan_, routed_;
};

inline void with_slots(EngineConfig& config) {
  config.low_latency_tokens = kTokens;
  config.low_latency_topk = kTopk;
}
inline std::vector<int32_t> masks_of(Engine& engine, size_t ranks) {
  std::vector<int32_t> masks(ranks);
  engine.low_latency_masks(masks.data(), nullptr);
  return masks;
}

}  // namespace uccl_ep
