// What ranks dispatch and combine, drawn from a seed; the same for either backend.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/units.h"
#include "engine/call.h"
#include "engine/config.h"

namespace uccl_ep {

constexpr Dtype kBf16 = Dtype::kBf16, kFp32 = Dtype::kFp32, kFp8 = Dtype::kFp8;

// What the ranks of a group do.
struct CudaRun {
  std::vector<int> domain_of = {0, 0};
  std::vector<int> host_of;  // empty: one host
  int mirrored = 0;  // not 0: only so many ranks run, the first domain; other domains are its mirror images: mirror.h
  std::vector<uint64_t> num_tokens = {40, 27};  // by rank; again from the first when there are more ranks
  uint32_t experts_per_rank = 4, hidden = 256, topk = 3;
  Dtype dtype = Dtype::kBf16, wire = Dtype::kBf16;  // of the rows of a dispatch
  bool compact = false, with_weights = true;
  bool fp8_codes = false;  // FP8 rows come out as codes and scales
  bool given_codes = false;  // and are given so
  uint32_t num_metadata = 0;
  bool is_map = false;
  uint32_t map_one_in = 3;  // of a map's entries are routed
  int idle_rank = -1;  // gets no rows, and its dispatches get no address for their weights
  uint32_t alignment = 1;
  int64_t spare_bytes = 8 << 20;  // of the budget, beyond the least
  uint32_t window_tokens = 0;
  uint32_t num_sms = 2, stage_sms = 0;
  bool bulk_copies = true;
  int rounds = 2;
  bool combines_in_a_row = false;  // of a round: after its dispatches
  uint64_t seed = 1;
  double arrival_timeout_s = 60, progress_timeout_s = 40;
  uint32_t late_usec = 0;  // the last rank's, before every call
  LoopOptions loop;
  int64_t capacity = -1;  // rows of a GPU engine's output, of which every rank gets more; its counts stay on the GPU
  bool is_spacious = false;  // the capacity: every rank gets fewer
  bool pad_to_capacity = false;
  uint64_t max_tokens = 0;  // said with the capacity
  PacketRoom packets;
  uint64_t least_tails = 0;  // chunks of packets' tails that all ranks have to ship
  uint64_t least_windows = 0, most_windows = UINT64_MAX;  // that a rank's operations have to take, and may

  int num_ranks() const { return static_cast<int>(domain_of.size()); }
  int num_running() const { return mirrored != 0 ? mirrored : num_ranks(); }
  // A running rank: it, or the one of which it is an image.
  int origin_of(int rank) const { return rank % num_running(); }
  uint64_t tokens_of(int rank) const { return num_tokens[static_cast<size_t>(origin_of(rank)) % num_tokens.size()]; }
  // An expert of this rank's routing, if its origin's has `expert` there: the two domains are exchanged.
  int64_t image_of(int64_t expert, int rank) const {
    const int64_t of_domain = int64_t{num_running()} * experts_per_rank, domain = rank / num_running();
    const int64_t from = expert / of_domain, to = from == domain ? 0 : from == 0 ? domain : from;
    return expert + (to - from) * of_domain;
  }
  uint32_t num_experts() const { return experts_per_rank * static_cast<uint32_t>(num_ranks()); }
  uint32_t width() const { return is_map ? num_experts() : topk; }
  Dtype dispatch_dtype() const { return given_codes ? wire : dtype; }
  uint64_t num_scales() const { return row_format(kFp8).num_scales(hidden); }
  Dtype combine_wire() const { return dtype; }
};

inline CudaRun run_of(const std::vector<int>& domain_of, Dtype dtype = kBf16, Dtype wire = kBf16) {
  CudaRun run;
  run.domain_of = domain_of;
  run.dtype = dtype;
  run.wire = wire;
  return run;
}
// More tokens than the buffer takes at once: three windows a dispatch.
inline CudaRun windows_of(const std::vector<int>& domain_of, Dtype dtype, Dtype wire) {
  CudaRun run = run_of(domain_of, dtype, wire);
  run.hidden = 1024;
  run.spare_bytes = 1 << 20;
  run.num_tokens = {170, 150, 0, 60};
  run.rounds = 1;
  run.least_windows = 4 * 2 + 1;
  return run;
}
// What the network may do.
inline LoopOptions everything() {
  LoopOptions loop;
  loop.seed = 7;
  loop.duplicate_rate = 0.5;
  loop.refuse_rate = 0.5;
  loop.latency_usec = 100;
  return loop;
}

inline EngineConfig config_of(const CudaRun& run, int rank) {
  EngineConfig config;
  config.rank = rank;
  config.num_ranks = run.num_ranks();
  config.domain_of = run.domain_of;
  config.host_of = run.host_of;
  config.num_experts = run.num_experts();
  config.hidden = run.hidden + static_cast<uint32_t>(round_up(kMetadataBytes * run.num_metadata, kFp8Block));
  config.max_element_bytes = dtype_bytes(run.dtype);
  config.generation = 42;
  config.arrival_timeout_s = run.arrival_timeout_s;
  config.progress_timeout_s = run.progress_timeout_s;
  config.window_tokens = run.window_tokens;
  config.bulk_copies = run.bulk_copies;
  config.packets = run.packets;
  if (run.mirrored != 0) config.transport = "mirror";
  config.loop = run.loop;
  return config;
}

// A rank's tensors of one round.
struct RankInput {
  uint64_t num_tokens = 0;
  uint32_t width = 0;  // of the routing
  std::vector<uint8_t> x, routing;
  std::vector<float> weights, scales;
  std::vector<uint32_t> metadata;

  RankInput(const CudaRun& run, int rank, int round) : num_tokens(run.tokens_of(rank)), width(run.width()) {
    std::mt19937_64 random(run.seed * 1000 + static_cast<uint64_t>(run.origin_of(rank) * 100 + round));
    std::normal_distribution<float> normal;
    const auto chance = [&](uint64_t n) { return random() % n == 0; };
    for (uint64_t i = 0; i < num_tokens * run.hidden; ++i) {
      const float value = chance(50) ? 0.0f : normal(random) * (chance(40) ? 1e3f : 1.0f);
      const auto* const bytes = reinterpret_cast<const uint8_t*>(&value);
      x.insert(x.end(), bytes + 4 - dtype_bytes(run.dtype), bytes + 4);  // the upper half of it is a BF16
    }
    const uint32_t experts = run.num_experts();
    for (uint64_t t = 0; t < num_tokens; ++t) {
      const uint64_t first = random() % experts, step = 1 + random() % (experts / run.width());
      for (uint32_t k = 0; k < run.width(); ++k) {
        if (run.is_map) {
          routing.push_back(chance(run.map_one_in));
        } else {
          const auto chosen = static_cast<int64_t>((first + k * step) % experts);
          const bool is_none = chance(8) || chosen / run.experts_per_rank == run.idle_rank;
          const int64_t expert = is_none ? -1 : run.image_of(chosen, rank);
          const auto* const bytes = reinterpret_cast<const uint8_t*>(&expert);
          routing.insert(routing.end(), bytes, bytes + sizeof(expert));
        }
        weights.push_back(normal(random));
      }
    }
    if (run.given_codes) {
      x.resize(num_tokens * run.hidden);  // any bytes are codes
      for (uint64_t i = 0; i < num_tokens * run.num_scales(); ++i) scales.push_back(normal(random));
    }
    for (uint64_t i = 0; i < num_tokens * run.num_metadata; ++i) metadata.push_back(static_cast<uint32_t>(random()));
    scales.reserve(1);
    metadata.reserve(1);
    x.reserve(1);  // a rank without tokens has addresses, too
    routing.reserve(1);
    weights.reserve(1);
  }
};

struct Dispatched {
  std::vector<uint64_t> counts;
  std::vector<uint8_t> rows;
  std::vector<float> scales, weights;
  std::vector<int64_t> experts;
  std::vector<uint32_t> metadata;

  static constexpr uint8_t kGarbage = 0xEE;
  // Nothing of what is there is right by chance.
  void make_room(const CudaRun& run, uint64_t num_rows) {
    const uint64_t width = run.compact ? std::min(run.width(), run.experts_per_rank) : 1;
    rows.assign(num_rows * run.hidden * (run.fp8_codes ? 1 : dtype_bytes(run.dtype)), kGarbage);
    scales.assign(run.fp8_codes ? num_rows * run.num_scales() : 0, -7.0f);
    weights.assign(run.with_weights ? num_rows * width : 0, -7.0f);
    experts.assign(run.compact ? num_rows * width : 0, -7);
    metadata.assign(num_rows * run.num_metadata, 0xEEEEEEEE);
  }
  // What is left of it, or what is missing as zeros.
  void resize(const CudaRun& run, uint64_t num_rows) {
    Dispatched exact;
    exact.make_room(run, num_rows);
    rows.resize(exact.rows.size());
    scales.resize(exact.scales.size());
    weights.resize(exact.weights.size());
    experts.resize(exact.experts.size());
    metadata.resize(exact.metadata.size());
  }
  // As many rows as the capacity has: the first, or more, which are padding or have not been written to.
  void fit_capacity(const CudaRun& run) {
    const bool pads = run.pad_to_capacity;
    Dispatched exact;
    exact.make_room(run, static_cast<uint64_t>(run.capacity));
    if ((exact.rows.size() > rows.size()) != run.is_spacious) throw std::logic_error("another number of rows came");
    rows.resize(exact.rows.size(), pads ? 0 : kGarbage);
    scales.resize(exact.scales.size(), pads ? 1.0f : -7.0f);
    weights.resize(exact.weights.size(), pads ? 0.0f : -7.0f);
    experts.resize(exact.experts.size(), pads ? -1 : -7);
    metadata.resize(exact.metadata.size(), pads ? 0 : 0xEEEEEEEE);
  }
};
struct Combined {
  std::vector<uint8_t> out;
  std::vector<float> weights;
};

// An address, also of nothing.
template <typename T>
T* address_if(bool wanted, std::vector<T>& v) {
  v.reserve(1);
  return wanted ? v.data() : nullptr;
}

// Where a dispatch's results go.
inline DispatchOutput output_of(const CudaRun& run, Dispatched& got) {
  DispatchOutput output;
  output.rows = address_if(true, got.rows);
  output.scales = address_if(run.fp8_codes, got.scales);
  output.weights = address_if(run.with_weights && (run.idle_rank < 0 || !got.weights.empty()), got.weights);
  output.row_experts = address_if(run.compact, got.experts);
  output.metadata = address_if(run.num_metadata > 0, got.metadata);
  return output;
}

inline DispatchArgs dispatch_args(const CudaRun& run, const RankInput& in, bool has_routing) {
  DispatchArgs args;
  args.x = in.x.data();
  args.num_tokens = in.num_tokens;
  args.hidden = run.hidden;
  args.dtype = run.dispatch_dtype();
  args.wire = run.wire;
  args.scales = run.given_codes ? in.scales.data() : nullptr;
  args.metadata = run.num_metadata > 0 ? in.metadata.data() : nullptr;
  args.num_metadata = run.num_metadata;
  args.has_routing = has_routing;
  args.routing = {run.is_map ? RoutingKind::kMap : RoutingKind::kTopk, in.routing.data(), in.width};
  args.weights = run.with_weights ? in.weights.data() : nullptr;
  args.expert_alignment = run.alignment;
  args.compact = run.compact;
  return args;
}
inline CombineArgs combine_args(const CudaRun& run, const RankInput& in, Dispatched& from, Combined& to) {
  to.out.assign(in.num_tokens * run.hidden * dtype_bytes(run.dtype), 0xEE);
  to.weights.assign(run.with_weights ? in.weights.size() : 0, 0.0f);
  CombineArgs args;
  args.rows = address_if(true, from.rows);
  args.hidden = run.hidden;
  args.dtype = run.dtype;
  args.wire = run.combine_wire();
  args.weights = address_if(run.with_weights, from.weights);
  for (uint64_t i = 0; i < in.num_tokens % 3 && !run.given_codes; ++i) args.bias[i] = in.x.data();
  args.out = address_if(true, to.out);
  args.weights_out = address_if(run.with_weights, to.weights);
  return args;
}

}  // namespace uccl_ep
