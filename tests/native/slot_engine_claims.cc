// Low latency on the host, ranks as threads of one process, under sanitizers: two operations of a kind under way, every
// fault of the loop transport, a thread that leaves, other calls beside it.
#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "claims.h"
#include "slot_try.h"

using namespace uccl_ep;

namespace {

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
