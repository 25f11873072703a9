// Makes the engine of a rank in a program without Python. The ranks meet over nothing but an all-gather of bytes.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/config.h"
#include "engine/engine.h"
#include "engine/group/choice.h"

namespace uccl_ep {

// The bytes of every rank, by rank; collective. `step` is the same on all ranks and names the step in errors. It bounds
// its waits: what it throws ends the creation.
using AllGather = std::function<std::vector<std::string>(const std::string& mine, const std::string& step)>;

// A step of a creation: every rank produces something, and gets what all have produced. If one fails, all throw: it
// what it failed with, the others CommunicationFailure(kPeerFailed), which names it and its error.
std::vector<std::string> exchange(int rank, const AllGather& all_gather, const std::string& step,
                                  const std::function<std::string()>& produce);

// This rank cannot take part in a creation, for the reason that it throws. The others learn of it in their first step.
[[noreturn]] void refuse_creation(int rank, const AllGather& all_gather, const std::exception_ptr& why);

struct SetUp {
  std::unique_ptr<Engine> engine;  // started
  EngineConfig config;             // with what was found and chosen
  TransportChoice transport;
};

// Collective. `wanted` says rank, num_ranks and the settings; an empty `domain_of` is found, a `transport` of "auto"
// chosen, the generation is new. make: the engine of a configuration. All ranks come to the same or throw:
// UsageFailure, CommunicationFailure(kRankMismatch) for a setting that differs, naming two ranks and their values, and
// what `exchange` throws. Nothing is left behind.
SetUp set_up(const EngineConfig& wanted, bool on_gpu, const AllGather& all_gather,
             const std::function<std::unique_ptr<Engine>(const EngineConfig&)>& make);

}  // namespace uccl_ep
