// Low latency on the host, ranks as threads of one process, under sanitizers: two operations of a kind under way, every
// fault of the loop transport, a thread that leaves, other calls beside it.
#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "claims.h"
#include "engine_runs.h"

using namespace uccl_ep;

namespace {

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
    wait(OpKind::kLowLatencyDispatch, phase);
  }
  void combine(SlotPhase phase) {
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
    wait(OpKind::kLowLatencyCombine, phase);
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

void with_slots(EngineConfig& config) {
  config.low_latency_tokens = kTokens;
  config.low_latency_topk = kTopk;
}
std::vector<int32_t> masks_of(Engine& engine, size_t ranks) {
  std::vector<int32_t> masks(ranks);
  engine.low_latency_masks(masks.data(), nullptr);
  return masks;
}

// Two of each kind are sent before the first is received.
void try_rounds(Engine& engine, int rank, uint32_t ranks, int rounds) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) + 1);
  for (int round = 0; round < rounds; ++round) {
    std::vector<SlotTry> tries;
    for (int i = 0; i < 2; ++i) tries.emplace_back(engine, ranks, random, round % 2 == 0);
    for (SlotTry& one : tries) {
      one.keep_input();
      one.dispatch(SlotPhase::kSend);
    }
    for (SlotTry& one : tries) one.dispatch(SlotPhase::kReceive);
    for (SlotTry& one : tries) {
      one.combine(SlotPhase::kSend);
      one.spoil();
    }
    for (SlotTry& one : tries) one.combine(SlotPhase::kReceive);
    for (SlotTry& one : tries) one.check(masks_of(engine, ranks));
  }
}
void try_slots(const std::vector<int>& domain_of, const LoopOptions& loop, const Change& change = with_slots) {
  const auto ranks = static_cast<uint32_t>(domain_of.size());
  by_engines(domain_of, loop, [&](Engine& engine, int rank) { try_rounds(engine, rank, ranks, 6); }, change);
}
LoopOptions faulty() {
  LoopOptions loop;
  loop.seed = 23;
  loop.refuse_rate = 0.2;
  loop.duplicate_rate = 0.2;
  loop.latency_usec = 50;
  return loop;
}
void masking(EngineConfig& config) {
  with_slots(config);
  config.mask_timeout_s = 1.5;
}

}  // namespace

CLAIM("one domain of 4 ranks gives every token back") { try_slots({0, 0, 0, 0}, {}); }
CLAIM("2 domains of 2 ranks give every token back where posts are refused") {
  LoopOptions loop = faulty();
  loop.duplicate_rate = 0;
  try_slots({0, 0, 1, 1}, loop);
}
CLAIM("slots of uneven domains, and of one rank each, have every token when writes are duplicated") {
  try_slots({0, 1, 0, 0}, faulty());
  try_slots({0, 1, 2, 3}, faulty());
}
CLAIM("where ranks may be masked and all come, every token comes back") {
  try_slots({0, 0, 1, 1}, {}, masking);
  try_slots({0, 0, 0}, {}, masking);
}
CLAIM("the others go on without a rank that leaves") {
  for (const auto& domains : {std::vector{0, 0, 0}, {0, 1, 1}, {0, 1}}) {
    const auto ranks = static_cast<uint32_t>(domains.size());
    const auto work = [&](Engine& engine, int rank) {
      try_rounds(engine, rank, ranks, 2);
      if (rank == 0) return engine.close(true);
      try_rounds(engine, rank, ranks, 2);
      for (uint32_t other = 0; other < ranks; ++other) EXPECT_EQ(masks_of(engine, ranks)[other], other == 0 ? 1 : 0);
    };
    by_engines(domains, {}, work, masking);
  }
}
CLAIM("other calls of the buffer go on beside it, by another thread") {
  const auto work = [](Engine& engine, int rank) {
    std::string failure;
    std::thread beside([&] {
      try {
        RankRun calls(engine, rank);
        for (int round = 0; round < 6; ++round) calls.dispatch_and_combine(round % 2 == 0);
      } catch (const std::exception& error) {
        failure = error.what();
      }
    });
    std::string ours;
    try {
      try_rounds(engine, rank, 4, 6);
    } catch (const std::exception& error) {
      ours = error.what();
    }
    beside.join();
    if (!ours.empty()) throw std::logic_error(ours);
    EXPECT(failure.empty());
  };
  by_engines({0, 0, 1, 1}, {}, work, with_slots);
}
CLAIM("an error reaches a rank that waits, and its memory is no longer used") {
  const auto work = [](Engine& engine, int rank) {
    std::mt19937_64 random(7);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return engine.fail("ends");
    }
    SlotTry one(engine, 2, random, true);
    EXPECT_THROWS(CommunicationFailure, one.dispatch(SlotPhase::kBoth));
  };
  for (const auto& domains : {std::vector{0, 0}, {0, 1}}) by_engines(domains, {}, work, with_slots);
}

int main(int argc, char** argv) { return claims::main(argc, argv); }
