// Data that ranks exchange: the header of an operation with its signature. Immediates: layout/words.h.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "common/error.h"
#include "common/fields.h"
#include "layout/row_format.h"

namespace uccl_ep {

// ---- operation header -----------------------------------------------------------------------------------------------
enum class OpKind : uint32_t { kDispatch = 1, kCombine = 2, kLowLatencyDispatch = 3, kLowLatencyCombine = 4 };
enum class PlanUse : uint32_t { kNew = 0, kCached = 1, kDiffers = 2 };

constexpr uint32_t kMostBiases = 2;  // of a combine: rows that a rank adds to its own sums

// The part of a call that must be equal on all ranks (contract 9). Host and kernels compare it by the list below, which
// also gives errors the names of fields. A new field is a line here and one there: what is not listed does not compile.
struct OpSignature {
  OpKind kind;
  Dtype dtype;  // of the tensors
  Dtype wire;  // of the rows between ranks: a row format
  PlanUse plan_use;
  uint32_t hidden;
  uint32_t with_weights;  // fp32 per pair: weights, of a combine their gradients
  uint32_t expert_alignment;
  uint32_t compact_width;  // columns of a compact row's weights; 0: rows are expert-major
  uint32_t num_metadata;  // words that travel with each row
  uint32_t with_capacity;  // CUDA: the output has a size of its own, and the counts stay on the device
  uint32_t topk;  // columns of the routing: of low latency; CUDA: of a new plan with a capacity; 0: not said, or a map
  uint32_t rounds_sums;  // of a combine: what a domain returns to another is rounded to BF16
  uint64_t max_tokens;  // of any rank, with a capacity of a new plan; 0: not said
  uint64_t plan_id;  // epoch of the dispatch that made the plan; 0 for a new one

  constexpr bool operator==(const OpSignature& other) const;
};
template <>
inline constexpr auto kFields<OpSignature> = std::tuple{field("kind", &OpSignature::kind),
                                                        field("dtype", &OpSignature::dtype),
                                                        field("wire format", &OpSignature::wire),
                                                        field("use of a plan", &OpSignature::plan_use),
                                                        field("hidden", &OpSignature::hidden),
                                                        field("weights", &OpSignature::with_weights),
                                                        field("expert_alignment", &OpSignature::expert_alignment),
                                                        field("row layout", &OpSignature::compact_width),
                                                        field("metadata", &OpSignature::num_metadata),
                                                        field("capacity", &OpSignature::with_capacity),
                                                        field("max_tokens", &OpSignature::max_tokens),
                                                        field("top-k", &OpSignature::topk),
                                                        field("rounded sums", &OpSignature::rounds_sums),
                                                        field("plan", &OpSignature::plan_id)};
static_assert(all_listed<OpSignature>(), "a field is missing in the list");
static_assert(std::has_unique_object_representations_v<OpSignature>,
              "bytes between fields travel, and may be anything");
constexpr bool OpSignature::operator==(const OpSignature& other) const { return all_equal(*this, other); }

// Followed by counts, for a new plan: uint32_t pairs per expert of the destination domain (experts in order of member,
// then local index), then uint32_t rows per member of it.
// Writer: the source's worker (own domain) or the transport (other domains). Readers: all ranks of the destination
// domain.
struct OpHeader {
  uint64_t epoch;
  OpSignature signature;
  uint32_t num_tokens;  // of the source
  uint32_t num_refused;  // calls that the source refused before this one: compared as the signature is
  uint64_t num_rows;  // to the destination domain
  uint64_t num_pairs;  // to the destination domain
};
static_assert(sizeof(OpHeader) % 8 == 0);

// ---- command ring ---------------------------------------------------------------------------------------------------
constexpr uint64_t kCommandBytes = 16;  // after one line of bookkeeping; see queue/ring.h
// Commands that the consumer takes before it returns their slots.
constexpr uint32_t command_batch(uint32_t capacity) { return capacity < 4 ? 1 : capacity / 4; }
// The least capacity that is never full to a producer with at most `most_pending` commands that have not been taken.
constexpr uint32_t command_capacity(uint32_t most_pending) {
  return std::bit_ceil(most_pending + most_pending / 3 + 1);
}

}  // namespace uccl_ep
