// How much memory a dispatch of the CUDA backend gets before its counts are known.
#include <vector>

#include "claims.h"
#include "engine/gpu/guess.h"

using namespace uccl_ep;
using gpu::PlanSizes;

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

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
