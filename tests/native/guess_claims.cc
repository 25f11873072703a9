// How much memory plans of the CUDA backend take, and how much a dispatch gets before its counts are known.
#include <iterator>
#include <numeric>
#include <random>
#include <set>
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

// Of rank 0 of a group in domains of 8, with uniform routing: bytes of a saved plan for each sent and received pair.
double plan_bytes_of_pair(uint32_t ranks, uint32_t num_experts) {
  constexpr uint32_t kTokens = 4096, kTopk = 8;
  const uint32_t per_rank = num_experts / ranks, per_domain = 8 * per_rank;
  std::vector<int> labels;
  for (uint32_t rank = 0; rank < ranks; ++rank) labels.push_back(static_cast<int>(rank / 8));
  const gpu::DeviceRegionLayout layout =
      gpu::make_layout(Topology::from_labels(labels), 0, {num_experts, 14336}, uint64_t{1} << 30);
  std::mt19937 random(1);
  std::vector<uint32_t> experts(num_experts);
  std::iota(experts.begin(), experts.end(), 0);
  gpu::PlanSizes sizes;
  for (uint32_t source = 0; source < ranks; ++source) {
    for (uint32_t token = 0; token < kTokens; ++token) {
      std::set<uint32_t> reached, domains;
      for (uint32_t k = 0; k < kTopk; ++k) {
        std::swap(experts[k], experts[k + random() % (num_experts - k)]);
        reached.insert(experts[k] / per_rank);
        domains.insert(experts[k] / per_domain);
        sizes.received_pairs += experts[k] < per_rank ? 1 : 0;
      }
      sizes.received_rows += static_cast<uint32_t>(reached.count(0));
      if (source == 0) {
        sizes.sent_pairs += kTopk;
        const auto pieces = std::distance(reached.begin(), reached.lower_bound(8));
        sizes.sent_addends += static_cast<uint32_t>(pieces + static_cast<int64_t>(domains.size() - domains.count(0)));
      } else if (source % 8 == 0) {
        sizes.relayed_rows += static_cast<uint32_t>(domains.count(0));
      }
    }
  }
  EXPECT(sizes.received_rows > 28000 && sizes.relayed_rows > 15000 && sizes.sent_addends > 20000);
  gpu::PlanView view;
  view.num_tokens = kTokens;
  view.num_token_blocks = kTokens / gpu::kTokenBlock;
  return static_cast<double>(gpu::lay_out_plan(view, sizes, nullptr, layout)) /
         static_cast<double>(sizes.sent_pairs + sizes.received_pairs);
}

CLAIM("a saved plan of 64, 128 or 256 ranks takes at most 16 bytes for each sent and each received pair") {
  for (uint32_t ranks : {64u, 128u, 256u}) EXPECT(plan_bytes_of_pair(ranks, 256) <= 16);
}

}  // namespace

int main(int argc, char** argv) { return claims::main(argc, argv); }
