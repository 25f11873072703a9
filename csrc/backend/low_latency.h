// The low-latency calls, for all backends: every pair of token and expert has a slot in the expert's output, from the
// routing alone.
#pragma once

#include <cstdint>

#include "layout/row_format.h"

namespace uccl_ep {

// A call sends and receives, or does one of both.
enum class SlotPhase : uint32_t { kBoth, kSend, kReceive };

// T tokens with `width` experts each; L experts of this rank; S = ranks * low_latency_tokens slots of an expert.
struct LowLatencyDispatch {
  SlotPhase phase = SlotPhase::kBoth;
  const uint8_t* x = nullptr;         // [T, H] BF16
  const int64_t* topk_idx = nullptr;  // [T, width], -1: none
  const float* weights = nullptr;     // [T, width], so that the combine knows them; or nullptr
  uint64_t num_tokens = 0;
  uint32_t width = 0, hidden = 0;
  Dtype wire = Dtype::kBf16;
  // Of the results; a call that only sends has none.
  uint8_t* rows = nullptr;           // [L, S, H]
  float* scales = nullptr;  // [L, ceil(H / 128), S], or with `ue8m0` [L, ceil(H / 512), S] words of four exponents
  bool ue8m0 = false;
  int32_t* counts = nullptr;  // [L]
  int64_t* ranges = nullptr;  // [L, ranks]
  int32_t* source_tokens = nullptr;  // [L, S]
  uint32_t* origins = nullptr;  // [L, S], for the combine, as pairs [ranks, low_latency_tokens, width]
  uint32_t* pairs = nullptr;
  uint32_t* routed = nullptr;  // with weights, as pairs
  int32_t* total_counts = nullptr;  // [L] or nullptr
  int64_t* waited_nsec = nullptr;  // [ranks] or nullptr
  void* stream = nullptr;  // a GPU's
};

struct LowLatencyCombine {
  SlotPhase phase = SlotPhase::kBoth;
  const uint8_t* rows = nullptr;  // [L, S, H] BF16
  const int64_t* ranges = nullptr;  // of the dispatch, as origins and pairs
  const uint32_t* origins = nullptr;
  const uint32_t* pairs = nullptr;
  const uint32_t* routed = nullptr;  // of a dispatch that had these weights; nullptr: the combine tells them
  const int64_t* topk_idx = nullptr;  // [T, width]
  const float* weights = nullptr;  // [T, width]
  uint64_t num_tokens = 0;
  uint32_t width = 0, hidden = 0;
  Dtype wire = Dtype::kBf16;  // what a rank's and a domain's sums are rounded to: kBf16 or kFp32
  uint8_t* out = nullptr;  // [T, H] BF16
  int64_t* waited_nsec = nullptr;  // [ranks] or nullptr
  void* stream = nullptr;  // a GPU's
};

}  // namespace uccl_ep
