// Ranks that dispatch and combine with low latency, on the stand-in for CUDA, and what plain loops over all ranks'
// inputs give.
#pragma once

#include <bit>
#include <bitset>
#include <cstring>

#include "backend/host/numerics.h"
#include "gpu_runs.h"
#include "layout/votes.h"

namespace uccl_ep {

struct SlotRun : CudaRun {
  uint32_t max_tokens = 48;
  bool ue8m0 = false;
  double mask_timeout_s = 0;
  Dtype sum_wire = kBf16;  // what sums are rounded to
  uint32_t fold_pairs = 0;
  bool mixes = false;  // every second rank does not fold, or sends and receives by calls of their own
  bool knows = false;  // weights come with the routing
  bool splits = false;  // sending and receiving are calls of their own; then dispatches come in twos before combines
  int num_rounds = 3;

  uint32_t slots() const { return static_cast<uint32_t>(num_ranks()) * max_tokens; }
  uint64_t row_bytes() const { return uint64_t{hidden} * (is_quantised(wire) ? 1 : 2); }
  uint64_t scale_words() const { return !is_quantised(wire) ? 0 : ue8m0 ? (num_scales() + 3) / 4 : num_scales(); }
};
inline SlotRun slots_of(const std::vector<int>& domain_of, Dtype wire = kBf16) {
  SlotRun run;
  run.domain_of = domain_of;
  run.wire = wire;
  run.num_tokens = {40, 27, 0, 48};
  return run;
}
inline SlotRun slots_of(int num_ranks, Dtype wire = kBf16) {
  return slots_of(std::vector<int>(static_cast<size_t>(num_ranks), 0), wire);
}

// What a rank receives. What no pair has is never compared.
struct Slots {
  std::vector<uint8_t> rows;
  std::vector<uint32_t> scales, origins, pairs, routed;  // routed: empty where no weights come
  std::vector<int32_t> counts, source_tokens, total_counts;
  std::vector<int64_t> ranges, waited_nsec;

  explicit Slots(const SlotRun& run)
      : rows(run.experts_per_rank * run.slots() * run.row_bytes(), 0xEE),
        scales(run.experts_per_rank * run.slots() * run.scale_words() + 1, 0xEEEEEEEE),
        origins(run.experts_per_rank * run.slots(), 0xEEEEEEEE),
        pairs(run.slots() * uint64_t{run.topk}, 0xEEEEEEEE),
        routed(run.knows ? run.slots() * uint64_t{run.topk} : 0, 0xEEEEEEEE),
        counts(run.experts_per_rank, -7),
        source_tokens(run.experts_per_rank * run.slots(), -7),
        total_counts(run.experts_per_rank, 1000),
        ranges(run.experts_per_rank * static_cast<uint32_t>(run.num_ranks()), -7),
        waited_nsec(static_cast<size_t>(run.num_ranks()), 5) {}
};

inline int64_t expert_at(const RankInput& in, uint64_t place) {
  int64_t expert = 0;
  std::memcpy(&expert, in.routing.data() + place * sizeof(expert), sizeof(expert));
  return expert;
}
// What an expert does to its row, so that every expert's rows differ.
inline uint16_t computed(uint16_t value, int64_t expert) { return static_cast<uint16_t>(value ^ (expert & 3) << 7); }

inline float value_of(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline uint16_t rounded(float value) {  // to nearest even; it is finite
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

using Ranks = std::bitset<kMaxMaskedRanks>;
// A rank's inputs of all ranks, by which results are known.
struct World {
  const SlotRun& run;
  std::vector<RankInput> inputs;
  Ranks gone;
  bool is_gone(uint64_t rank) const { return rank < gone.size() && gone.test(rank); }
  World(const SlotRun& of, int round) : run(of) {
    for (int rank = 0; rank < run.num_ranks(); ++rank) inputs.emplace_back(run, rank, round);
  }

  template <typename Visit>  // visit(source, token, place), in the order of an expert's slots
  void each_row_of(int64_t expert, Visit visit) const {
    for (uint32_t s = 0; s < inputs.size(); ++s)
      for (uint64_t place = 0; !is_gone(s) && place < inputs[s].num_tokens * run.topk; ++place)
        if (expert_at(inputs[s], place) == expert) visit(s, static_cast<uint32_t>(place / run.topk), place);
  }
  const uint16_t* row(uint32_t source, uint64_t token) const {
    return reinterpret_cast<const uint16_t*>(inputs[source].x.data()) + token * run.hidden;
  }

  void check(int rank, const Slots& got) const {
    const uint32_t slots = run.slots(), ranks = static_cast<uint32_t>(run.num_ranks());
    for (uint32_t l = 0; l < run.experts_per_rank; ++l) {
      uint32_t count = 0;
      std::vector<uint32_t> of_source(ranks, 0);
      each_row_of(rank * static_cast<int64_t>(run.experts_per_rank) + l, [&](uint32_t s, uint32_t token, uint64_t) {
        const uint64_t slot = uint64_t{l} * slots + count;
        EXPECT(got.source_tokens[slot] == static_cast<int32_t>(token));
        check_row(row(s, token), got, l, count);
        ++count;
        ++of_source[s];
      });
      EXPECT(got.counts[l] == static_cast<int32_t>(count));
      EXPECT(got.total_counts[l] == 1000 + static_cast<int32_t>(count));
      uint32_t begin = 0;
      for (uint32_t s = 0; s < ranks; ++s) {
        EXPECT(got.ranges[l * ranks + s] == static_cast<int64_t>(uint64_t{begin} << 32 | of_source[s]));
        begin += of_source[s];
      }
    }
  }
  void check_row(const uint16_t* row, const Slots& got, uint32_t expert, uint32_t slot) const {
    const uint64_t index = uint64_t{expert} * run.slots() + slot;
    const uint8_t* const there = got.rows.data() + index * run.row_bytes();
    if (!is_quantised(run.wire)) {
      EXPECT(std::memcmp(there, row, run.row_bytes()) == 0);
      return;
    }
    std::vector<uint8_t> codes(run.hidden);
    std::vector<float> scales(run.num_scales());
    host::fp8_quantize_row(row, run.hidden, run.wire, codes.data(), scales.data());
    EXPECT(std::memcmp(there, codes.data(), run.hidden) == 0);
    for (uint64_t w = 0; w < run.scale_words(); ++w) {
      uint32_t word = std::bit_cast<uint32_t>(scales[run.ue8m0 ? 0 : w]);
      if (run.ue8m0) {
        word = 0;
        for (uint64_t i = 0; i < 4 && 4 * w + i < scales.size(); ++i)
          word |= (std::bit_cast<uint32_t>(scales[4 * w + i]) >> 23) << 8 * i;
      }
      EXPECT(got.scales[(expert * run.scale_words() + w) * run.slots() + slot] == word);
    }
  }
  // The sum of a rank's tokens, in fp32: experts of a rank ascending, rounded to the wire; then domains, of which our
  // own counts rank by rank, and others as one number.
  void check_sums(int rank, const std::vector<uint16_t>& out) const {
    const RankInput& in = inputs[static_cast<size_t>(rank)];
    const Topology topo = Topology::from_labels(run.domain_of);
    for (uint64_t t = 0; t < in.num_tokens; ++t)
      for (uint32_t h = 0; h < run.hidden; ++h) {
        float total = 0;
        for (int d = 0; d < topo.num_domains(); ++d) {
          float of_domain = 0;
          float& sum = d == topo.domain_of[rank] ? total : of_domain;
          for (const int r : topo.members[d])
            sum += on_wire(sum_of_rank(in, t, r, row(static_cast<uint32_t>(rank), t)[h]));
          if (d != topo.domain_of[rank]) total += on_wire(of_domain);
        }
        if (out[t * run.hidden + h] != rounded(total))
          throw std::logic_error("token " + std::to_string(t) + ", element " + std::to_string(h));
      }
  }
  float on_wire(float sum) const { return run.sum_wire == kBf16 ? value_of(rounded(sum)) : sum; }
  float sum_of_rank(const RankInput& in, uint64_t t, int rank, uint16_t value) const {
    float sum = 0;
    if (is_gone(static_cast<uint64_t>(rank))) return sum;
    for (uint32_t l = 0; l < run.experts_per_rank; ++l) {
      const int64_t expert = rank * static_cast<int64_t>(run.experts_per_rank) + l;
      for (uint64_t k = 0; k < run.topk; ++k)
        if (expert_at(in, t * run.topk + k) == expert)
          sum += in.weights[t * run.topk + k] * value_of(computed(value, expert));
    }
    return sum;
  }
};

class SlotRank {
 public:
  static EngineConfig config_of(const SlotRun& run, int rank) {
    EngineConfig config = uccl_ep::config_of(run, rank);
    config.max_element_bytes = dtype_bytes(run.sum_wire);
    config.low_latency_tokens = run.max_tokens;
    config.low_latency_topk = run.topk;
    config.low_latency_sms = run.num_sms;
    config.low_latency_fold_pairs = rank % 2 != 0 && run.mixes ? uint32_t{1} << 20 : run.fold_pairs;
    config.bulk_copies = run.bulk_copies;
    config.mask_timeout_s = run.mask_timeout_s;
    config.budget_bytes = gpu_least_budget_bytes(config);
    return config;
  }
  SlotRank(const SlotRun& run, int rank) : run_(run), rank_(rank), engine_(config_of(run, rank), rank, run.num_sms, 0) {
    EXPECT(cudaSetDevice(rank) == cudaSuccess);
    EXPECT(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
  }
  ~SlotRank() {
    engine_.close(true);
    cudaStreamDestroy(stream_);
  }
  GpuEngine& engine() { return engine_; }
  cudaStream_t stream() const { return stream_; }

  void dispatch(const RankInput& in, Slots& got, SlotPhase phase) { dispatch(in, got, phase, run_.wire); }
  void dispatch(const RankInput& in, Slots& got, SlotPhase phase, Dtype wire) {
    LowLatencyDispatch args;
    args.phase = phase;
    args.x = in.x.data();
    args.topk_idx = reinterpret_cast<const int64_t*>(in.routing.data());
    if (!got.routed.empty()) args.weights = in.weights.data();
    args.num_tokens = in.num_tokens;
    args.width = run_.topk;
    args.hidden = run_.hidden;
    args.wire = wire;
    args.rows = got.rows.data();
    args.scales = is_quantised(run_.wire) ? reinterpret_cast<float*>(got.scales.data()) : nullptr;
    args.ue8m0 = run_.ue8m0;
    args.counts = got.counts.data();
    args.ranges = got.ranges.data();
    args.source_tokens = got.source_tokens.data();
    args.origins = got.origins.data();
    args.pairs = got.pairs.data();
    if (!got.routed.empty()) args.routed = got.routed.data();
    args.total_counts = got.total_counts.data();
    args.waited_nsec = got.waited_nsec.data();
    args.stream = stream_;
    engine_.low_latency(args);
  }
  void combine(const RankInput& in, const std::vector<uint16_t>& rows, const Slots& of, std::vector<uint16_t>& out,
               SlotPhase phase) {
    LowLatencyCombine args;
    args.phase = phase;
    args.rows = reinterpret_cast<const uint8_t*>(rows.data());
    args.ranges = of.ranges.data();
    args.origins = of.origins.data();
    args.pairs = of.pairs.data();
    if (!of.routed.empty()) args.routed = of.routed.data();
    args.topk_idx = reinterpret_cast<const int64_t*>(in.routing.data());
    args.weights = in.weights.data();
    args.num_tokens = in.num_tokens;
    args.width = run_.topk;
    args.hidden = run_.hidden;
    args.wire = run_.sum_wire;
    args.out = reinterpret_cast<uint8_t*>(out.data());
    args.stream = stream_;
    engine_.low_latency(args);
  }
  void finish() {
    cudaStreamSynchronize(stream_);
    engine_.check();
  }
  std::vector<int32_t> masks() {
    std::vector<int32_t> masked(static_cast<size_t>(run_.num_ranks()), -7);
    engine_.low_latency_masks(masked.data(), stream_);
    finish();
    return masked;
  }
  double stat(const std::string& name) const {
    for (const auto& [its, value] : engine_.stats())
      if (its == name) return value;
    throw std::logic_error("no stat " + name);
  }
  // What the experts compute from BF16 rows; the rest of the memory is NaN.
  std::vector<uint16_t> experts(const World& world, const Slots& got) const {
    std::vector<uint16_t> rows(run_.experts_per_rank * run_.slots() * uint64_t{run_.hidden}, 0x7FC1);
    for (uint32_t l = 0; l < run_.experts_per_rank; ++l) {
      const int64_t expert = rank_ * static_cast<int64_t>(run_.experts_per_rank) + l;
      uint64_t slot = uint64_t{l} * run_.slots();
      world.each_row_of(expert, [&](uint32_t s, uint32_t token, uint64_t) {
        for (uint32_t h = 0; h < run_.hidden; ++h)
          rows[slot * run_.hidden + h] = computed(world.row(s, token)[h], expert);
        ++slot;
      });
      EXPECT(slot == uint64_t{l} * run_.slots() + static_cast<uint64_t>(got.counts[l]));
    }
    return rows;
  }

 private:
  const SlotRun run_;
  const int rank_;
  GpuEngine engine_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace uccl_ep
