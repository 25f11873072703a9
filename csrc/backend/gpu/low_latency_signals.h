// Signals of low latency: signals.h.
#pragma once

#include "backend/gpu/signal.h"

namespace uccl_ep::gpu {

// ---- low latency, between the ranks of a domain: numbers of dispatches, or of combines ------------------------------
struct SlotRoutingFull {
  static constexpr Signal kIs{.name = "LowLatencyMap::routing_full[s]",
                              .writer = "s: the block that sends its routing to this rank",
                              .readers = "who receives",
                              .publishes = "routing and header of s's dispatch",
                              .waits = "who receives, before it knows any slot",
                              .deadline = Deadline::kArrival,
                              .step = Step::kExchange};
};
struct SlotRowsFull {
  static constexpr Signal kIs{.name = "LowLatencyMap::rows_full[s][b]",
                              .writer = "s: block b of its kernel, when it has sent its rows",
                              .readers = "who receives",
                              .publishes = "the rows that the block sent here",
                              .waits = "who receives, row by row",
                              .step = Step::kPlace};
};
struct SlotRowsRead {
  static constexpr Signal kIs{.name = "LowLatencyMap::rows_read[d]",
                              .writer = "d: last block that has received",
                              .readers = "who sends",
                              .publishes = "nothing; d's memory for our rows may be overwritten",
                              .waits = "who sends, two dispatches later",
                              .deadline = Deadline::kArrival,
                              .step = Step::kStage};
};
struct PairsEntered {
  static constexpr Signal kIs{.name = "LowLatencyMap::pairs_entered[d]",
                              .writer = "d: the block that sends its header to this rank",
                              .readers = "who receives, who folds",
                              .publishes = "header and, in one domain, weights of d's combine that are not known",
                              .waits = "who receives; who folds, before it sums for d with such weights",
                              .deadline = Deadline::kArrival,
                              .step = Step::kExchange};
};
struct SlotPairsFull {
  static constexpr Signal kIs{.name = "LowLatencyMap::pairs_full[d][b]",
                              .writer = "d: block b of its kernel, when it has sent its rows",
                              .readers = "who receives",
                              .publishes = "the rows that the block sent here; of our own, where those are that stay",
                              .waits = "who receives, before it sums",
                              .step = Step::kMerge};
};
struct PairsRead {
  static constexpr Signal kIs{.name = "LowLatencyMap::pairs_read[s]",
                              .writer = "s: last block that has merged",
                              .readers = "who sends",
                              .publishes = "nothing; s's memory for our pairs may be overwritten",
                              .waits = "who sends, two combines later",
                              .deadline = Deadline::kArrival,
                              .step = Step::kFold};
};
struct VoteCast {
  static constexpr Signal kIs{.name = "SlotVote::cast",
                              .writer =
                                  "the rank whose vote or decision it is: block 0 of its receiving kernel; of "
                                  "another domain's rank our proxy, `SlotNet::far_votes`",
                              .readers = "all others; of `SlotNet::own_votes` our proxy",
                              .publishes = "the ranks beside it: masks.cuh",
                              .waits = "block 0 of a receiving kernel, at most mask_timeout_s",
                              .deadline = Deadline::kNobody,
                              .step = Step::kExchange};
};

// ---- between domains, in chunks since creation ---------------------------------------------------------------------
struct SlotPacketThere {
  static constexpr Signal kIs{.name = "SlotNetState::routing_there[s], weights_there[s]",
                              .writer = "the poller",
                              .readers = "who copies it here, who sums for s",
                              .publishes = "routing, or weights, at s's rail",
                              .waits = "those",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kArrival,
                              .step = Step::kExchange};
};
struct SlotRowsThere {
  static constexpr Signal kIs{.name = "SlotNetState::rows_there[s]",
                              .writer = "the poller",
                              .readers = "who receives",
                              .publishes = "s's rows up to a chunk",
                              .waits = "who receives, row by row",
                              .scope = Scope::kGpu,
                              .step = Step::kPlace};
};
struct SlotSumsThere {
  static constexpr Signal kIs{.name = "SlotNetState::sums_there[D]",
                              .writer = "the poller",
                              .readers = "who receives",
                              .publishes = "D's sums up to a chunk",
                              .waits = "`merge`, token by token",
                              .scope = Scope::kGpu,
                              .step = Step::kMerge};
};
struct SlotChunksGone {
  static constexpr Signal kIs{.name = "SlotNetState::routing_gone[D], rows_gone[D], weights_gone[D], sums_gone[k]",
                              .writer = "the poller",
                              .readers = "who writes there",
                              .publishes = "nothing; chunks up to a number have left",
                              .waits = "who writes there, two operations later",
                              .scope = Scope::kGpu,
                              .step = Step::kShip};
};

// ---- between the blocks of a GPU ------------------------------------------------------------------------------------
struct SlotsSettled {
  static constexpr Signal kIs{.name = "LowLatencyState::settled[kind]",
                              .writer = "block 0 of a receiving kernel that may mask ranks",
                              .readers = "its other blocks",
                              .publishes = "what all other ranks have sent, and who is masked",
                              .waits = "those blocks",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kBlocks};
};
struct SlotsThrough {
  static constexpr Signal kIs{.name = "LowLatencyState::through[kind][phase]",
                              .writer = "the last block that has sent, or received",
                              .readers = "the block that sees to the network",
                              .publishes = "nothing; no block waits any more",
                              .waits = "that block",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kBlocks};
};
struct SlotPartsDone {
  static constexpr Signal kIs{.name = "LowLatencyMap::sent_counts[D][chunk], relayed_counts[k][chunk]",
                              .writer = "who sends a part of a row, or sums it",
                              .readers = "the warp that hands chunks to the proxy",
                              .publishes = "parts of the rows of a chunk",
                              .waits = "that warp",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kBlocks,
                              .reset = "that warp"};
};

}  // namespace uccl_ep::gpu
