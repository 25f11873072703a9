// A dispatch's plan, which a combine or a cached dispatch re-uses. Immutable once it is
// complete. Memory: <= 16 bytes per sent pair and per received pair, plus 4 bytes per row of the domain.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/error.h"
#include "layout/topology.h"
#include "layout/wire.h"

namespace uccl_ep {

enum class RoutingKind : uint32_t { kTopk, kMap };

// The router's output as the caller gave it. Topk: int64 [T, width = K], -1 = dropped. Map: bool [T, width = E].
struct Routing {
  RoutingKind kind = RoutingKind::kTopk;
  const void* data = nullptr;
  uint32_t width = 0;
};

// Our rows for one domain, in token order; a row is there once, however many of the domain's ranks want it.
struct SourceStream {
  std::vector<uint32_t> row_token;       // [rows]
  std::vector<uint32_t> row_pair_begin;  // [rows + 1]
  std::vector<uint32_t>
      pair_expert;     // [pairs] ascending in a row; index among the domain's experts (member * E_local + l)
  std::vector<uint32_t> pair_source;     // [pairs] place in the caller's [T, width] weights

  uint32_t num_rows() const { return static_cast<uint32_t>(row_token.size()); }
  bool operator==(const SourceStream&) const = default;
};

// Rows of one source for our domain, from its routing.
struct IncomingStream {
  std::vector<uint32_t> row_pair_begin;  // [rows + 1], all rows of the stream
  // Rows that have pairs with our experts, ascending.
  std::vector<uint32_t> my_row;         // [m]
  std::vector<uint32_t>
      my_first_pair;  // [m] number of our first pair in the stream; a row's pairs with us are consecutive
  std::vector<uint32_t> my_out_begin;  // [m + 1] into my_out
  std::vector<uint32_t> my_out;  // [my pairs] where the pair's weight goes: see Plan::row_of
  std::vector<uint32_t> my_expert;  // [my pairs] local index; compact rows only
  // Only where we merge the stream (our own rows, rows that we relay): the member of our domain that has the pair.
  std::vector<uint16_t> pair_member;    // [pairs]

  uint32_t num_rows() const { return static_cast<uint32_t>(row_pair_begin.size()) - 1; }
};

struct Plan {
  uint64_t plan_id = 0;  // epoch of the dispatch that made it: the same on all ranks
  uint64_t engine_generation = 0;  // a plan works on the buffer that made it only
  RoutingKind routing_kind = RoutingKind::kTopk;
  uint32_t routing_width = 0;
  uint32_t num_tokens = 0;
  uint32_t num_experts = 0;
  uint32_t expert_alignment = 1;
  // W, columns of a compact row's weights. 0: rows are expert-major, one per pair.
  uint32_t compact_width = 0;
  std::vector<SourceStream> source;      // [domain]
  std::vector<IncomingStream> incoming;  // [source rank]
  std::vector<uint64_t> tokens_per_expert;        // [E_local] padded to expert_alignment
  std::vector<uint64_t> tokens_per_expert_exact;  // [E_local]
  uint64_t num_rows = 0;                 // padded total; compact: one per received row

  bool compact() const { return compact_width != 0; }
  // The row of a pair's place in the output. Expert-major: row and weight of a pair have the same index. Compact: the
  // pairs of a row are row * W + 0, 1, ...
  uint64_t row_of(uint32_t out) const { return compact() ? out / compact_width : out; }
  // Weights beside the rows, unused columns of compact rows included.
  uint64_t num_weights() const { return compact() ? num_rows * compact_width : num_rows; }
  uint64_t num_bytes() const;
};

// Names of the fields that differ, "hidden, weights".
std::string differences(const OpSignature& one, const OpSignature& other);
// A call as an error names it.
std::string describe(const OpSignature& signature);
// "rank 1 refused call 7: why", or several calls from `first` on; without `why` where it is not known.
std::string describe_refusals(int rank, uint64_t first, uint64_t count, const std::string& why);

// Why others go on without `rank`: `peer` of its domain is missing, or `rank` itself is.
std::string describe_masked(int rank, int peer);

// A rank's call for operation `epoch`, and the number of calls that it refused before.
struct Called {
  int rank = -1;
  OpSignature signature{};
  uint64_t num_refused = 0;
};
// The error of two ranks that called differently. `why` the rank that has refused more calls did so last, if known.
std::string describe_mismatch(uint64_t epoch, const Called& one, const Called& other, const std::string& why);
// How long a rank waits for the one that refused a call to say why. That takes milliseconds, but seconds where many
// threads share a core.
constexpr uint64_t why_usec(double progress_timeout_s) {
  return static_cast<uint64_t>(1e6 * std::clamp(progress_timeout_s / 4, 1.0, 5.0));
}

// Throws UsageFailure (kRouting) for a routing by top-k as plan_source() does.
void check_topk(const Routing& routing, uint32_t num_tokens, uint32_t num_experts);
// Builds the source streams of a plan. Throws UsageFailure (kRouting) naming token, expert and what is allowed.
void plan_source(const Topology& topo, uint32_t num_experts, uint32_t num_tokens, const Routing& routing, Plan& plan);

}  // namespace uccl_ep
