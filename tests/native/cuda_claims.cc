// What the CUDA backend works out on the host: where things lie, and how much memory a dispatch gets before its counts
// are known. Neither needs a GPU.
#include <utility>
#include <vector>

#include "backend/cuda/layout.h"
#include "claims.h"
#include "engine/cuda/guess.h"

using namespace uccl_ep;
using cuda::PlanSizes;

namespace {

PlanSizes needs(uint32_t rows) { return {rows, rows / 2, rows, rows + 1, 100, rows / 3}; }

CLAIM("nothing is guessed before something was seen, nor for no tokens") {
  Guess guess;
  PlanSizes sizes;
  EXPECT(!guess.make(100, sizes));
  guess.learn(100, needs(800));
  EXPECT(!guess.make(0, sizes));
  EXPECT(guess.make(100, sizes));
}

CLAIM("what comes again fits, and a sixteenth more of it") {
  Guess guess;
  PlanSizes sizes;
  for (uint32_t rows : {1u, 800u, 32768u}) {
    guess = {};
    guess.learn(100, needs(rows));
    EXPECT(guess.make(100, sizes));
    EXPECT(needs(rows).fits(sizes));
    EXPECT(needs(rows + rows / 16).fits(sizes));
    EXPECT(!needs(rows + rows / 4 + 128).fits(sizes));
  }
}

// The guess for `num_tokens` after dispatches of 100 tokens each that needed `rows`.
uint32_t guessed_rows(uint64_t num_tokens, const std::vector<uint32_t>& rows) {
  Guess guess;
  PlanSizes sizes;
  for (const uint32_t number : rows) guess.learn(100, needs(number));
  EXPECT(guess.make(num_tokens, sizes));
  return sizes.num_rows;
}

CLAIM("a guess is at most 5/4 of the least of the last four and 64") {
  EXPECT_EQ(guessed_rows(100, {1000, 9000}), 1250u + 64u);
  EXPECT_EQ(guessed_rows(100, {1000, 9000, 1200, 1100, 1200}), 1375u + 64u);  // of 1100; the 9000 is still known
  EXPECT_EQ(guessed_rows(100, {1000, 9000, 1200, 1100, 1200, 1200}), 1275u + 64u);  // a sixteenth more than 1200
}

CLAIM("guesses go with the number of tokens, and stop before they leave 32 bits") {
  EXPECT_EQ(guessed_rows(160, {1000}), 1700u + 64u);
  EXPECT_EQ(guessed_rows(199, {4000000000u}), 4000000064u);
}

CLAIM("staged rows begin at multiples of 128 bytes and fit the widest row") {
  for (uint64_t hidden = 128; hidden <= 16384; hidden += 128)
    for (Dtype wire : {Dtype::kBf16, Dtype::kFp8, Dtype::kFp32}) {
      const uint64_t bytes = cuda::staged_row_bytes(wire, hidden);
      EXPECT_EQ(bytes % 128, 0u);
      EXPECT(bytes >= wire_row_bytes(wire, hidden) && bytes < wire_row_bytes(wire, hidden) + 128);
      EXPECT(wire == Dtype::kFp32 || bytes <= hidden * 2);
    }
}

CLAIM("a region is within its budget, says what all of it is for, and holds a chunk of tokens") {
  for (uint32_t ranks : {1u, 2u, 4u, 8u, 64u})
    for (uint64_t row_bytes : {uint64_t{256}, uint64_t{14336}, uint64_t{32768}}) {
      const uint32_t experts = ranks * 32;
      const uint64_t least = cuda::least_budget_bytes(ranks, experts, row_bytes);
      for (uint64_t budget : {least, least + 12345, uint64_t{64} << 20, uint64_t{512} << 20}) {
        if (budget < least) continue;
        const cuda::RegionLayout layout = cuda::make_layout(ranks, experts, row_bytes, budget);
        EXPECT(layout.total_bytes <= cuda::kDevicePage * ((budget + cuda::kDevicePage - 1) / cuda::kDevicePage));
        uint64_t sum = 0;
        for (const auto& [name, bytes] : layout.entries) sum += bytes;
        EXPECT_EQ(sum, layout.total_bytes);
        EXPECT(cuda::window_tokens(layout, row_bytes) >= cuda::kChunkTokens);
        EXPECT(cuda::window_pieces(layout, row_bytes) >= cuda::kChunkTokens);
        EXPECT_EQ(layout.rows % 128, 0u);
      }
    }
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
