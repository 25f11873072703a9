// What a top-k routing says of ranks and experts, and routing that travels beside rows as metadata: one launch each,
// because each launch of a caller's costs it more time than the kernel takes.
#pragma once

#include <cstdint>

#include "device/runtime.h"

namespace uccl_ep::gpu {

// Counts tokens by rank, node and expert, and says which ranks each goes to. A token that names an expert twice counts
// once. What names no expert does not count; a dispatch refuses it.
struct TopkLayout {
  const int64_t* topk_idx = nullptr;  // [tokens][width], -1: none
  uint32_t num_tokens = 0, width = 0;
  uint32_t num_experts = 0;    // a multiple of num_ranks
  uint32_t num_ranks = 0;
  uint32_t ranks_of_node = 0;  // of which num_ranks is a multiple; 0: nodes are not counted
  uint32_t* counts = nullptr;  // [ranks, then nodes, then experts], zeros before
  bool* in_rank = nullptr;     // [tokens][ranks]
};

// A row's metadata, in words: rank + 1, token, width experts + 1 of two words each (0: none), width weights or none.
// Of all rows a multiple of two words, so that an expert is one aligned number.
constexpr uint32_t topk_words(uint32_t width, bool has_weights) {
  return 2 + 2 * width + (has_weights ? (width + 1) / 2 * 2 : 0);
}

struct TopkPack {
  const int64_t* topk_idx = nullptr;  // [rows][width]
  const uint32_t* weights = nullptr;  // [rows][width], the bits; or null
  uint32_t rank = 0, num_rows = 0, width = 0;
  uint32_t* words = nullptr;  // [rows][topk_words]
};
// Experts first_expert to first_expert + num_experts are numbered from 0; others become -1, and their weights 0.
struct TopkUnpack {
  const uint32_t* words = nullptr;  // [rows][row_words]
  uint32_t num_rows = 0, width = 0, first_expert = 0, num_experts = 0;
  uint32_t row_words = 0;  // as they travelled: with weights or without, whoever wants these
  int64_t* experts = nullptr;   // [rows][width]
  uint32_t* weights = nullptr;  // [rows][width]; null: not wanted
};

// Asynchronous, on the current device. Without rows nothing is launched.
Status launch_topk(const TopkLayout& args, StreamHandle stream);
Status launch_topk(const TopkPack& args, StreamHandle stream);
Status launch_topk(const TopkUnpack& args, StreamHandle stream);
Status load_topk(uint32_t shared_bytes);

}  // namespace uccl_ep::gpu
