// Signals: the flags and counters by which kernels tell each other what is there. Each is a type that says all there is
// to know of it; signals.cuh publishes and reads them by that. The table of docs/memory_model.md is made of these
// declarations (python -m tests.signals --write).
//
// A flag is a 64-bit number that only grows and is never reset: an epoch, the number of a window, or chunks since
// creation. It lies in the region of the rank that reads it. A counter goes back to 0 by whoever its declaration names.
#pragma once

#include <tuple>

#include "backend/gpu/low_latency_signals.h"
#include "backend/gpu/signal.h"

namespace uccl_ep::gpu {

// ---- between the ranks of a domain ----------------------------------------------------------------------------------
struct HeaderFull {
  static constexpr Signal kIs{
      .name = "header_full[s]",
      .writer =
          "s: block 0 of the operation's first kernel, of a combine with several domains the block that sees to "
          "the network; of a new plan when it has the sums of all tiles. Of another domain: the poller",
      .readers = "all ranks",
      .publishes = "the header of s's packet (`packet.h`), and of a new plan its counts; of another domain the packet",
      .waits = "block 0 of every rank, and whoever finds a flag of s missing",
      .deadline = Deadline::kArrival,
      .step = Step::kExchange};
};
struct ListsFull {
  static constexpr Signal kIs{
      .name = "lists_full[m]",
      .writer = "m: of a new plan the last block that has routed",
      .readers = "members of the domain",
      .publishes =
          "what else is in the packet of m for its own domain, but for weights: lists, pairs, token block "
          "tables; and what m alone reads of its routing",
      .waits = "the blocks that place, beside `planned`",
      .step = Step::kExchange};
};
struct RowsFull {
  static constexpr Signal kIs{.name = "rows_full[s][c]",
                              .writer = "s: the telling warp of the block that staged row group c",
                              .readers = "ranks with rows of s",
                              .publishes = "its rows",
                              .waits = "`place`, row by row",
                              .step = Step::kPlace};
};
struct WeightsFull {
  static constexpr Signal kIs{
      .name = "weights_full[s]",
      .writer = "s: last block that has routed, or last block to stage weights. Of another domain: the poller",
      .readers = "ranks with rows of s",
      .publishes = "weights, in the packet",
      .waits = "`place`, after its rows",
      .step = Step::kPlace};
};
struct Read {
  static constexpr Signal kIs{
      .name = "read[d]",
      .writer = "d: last block of `place`, when all its loads are complete",
      .readers = "the ranks whose memory it read",
      .publishes = "nothing; the half may be overwritten",
      .waits = "routing, `stage` and `place` of the window that uses the half again (two later)",
      .step = Step::kStage};
};
struct Folded {
  static constexpr Signal kIs{
      .name = "folded[k][d][c]",
      .writer =
          "d: the telling warp that counts the last of its pieces of the source's token block c; one for those "
          "without any",
      .readers = "who merges the stream: the source (k = 0) or its rail",
      .publishes = "its pieces",
      .waits = "`merge`, token block by token block",
      .step = Step::kMerge};
};
struct FoldedAll {
  static constexpr Signal kIs{.name = "folded_all[d]",
                              .writer = "d: last block of `fold`",
                              .readers = "all members of the domain",
                              .publishes = "a window's weights of d; with the last, all its pieces",
                              .waits = "`merge`, before weights and at its end",
                              .step = Step::kMerge};
};
struct Merged {
  static constexpr Signal kIs{
      .name = "merged[s]",
      .writer = "s: last block of `merge`",
      .readers = "the ranks that put pieces there",
      .publishes = "nothing; piece memory may be overwritten",
      .waits = "`fold` of the window that uses the half again (two later), or of the next combine's first window",
      .step = Step::kFold};
};

// ---- from the poller, in chunks since creation ----------------------------------------------------------------------
struct RowsThere {
  static constexpr Signal kIs{.name = "NetState::rows_there[s]",
                              .writer = "the poller",
                              .readers = "`place`",
                              .publishes = "chunks of s's rows that have arrived, all up to a number",
                              .waits = "`place`, row by row",
                              .scope = Scope::kGpu,
                              .step = Step::kPlace};
};
struct ReturnsThere {
  static constexpr Signal kIs{.name = "NetState::returns_there[D]",
                              .writer = "the poller",
                              .readers = "`merge`",
                              .publishes = "chunks of sums from domain D that have arrived, all up to a number",
                              .waits = "`merge`, token block by token block",
                              .scope = Scope::kGpu,
                              .step = Step::kMerge};
};
struct PacketsGone {
  static constexpr Signal kIs{.name = "NetState::packets_gone[D]",
                              .writer = "the poller",
                              .readers = "who writes packets",
                              .publishes = "nothing; the transport has let go of the packets up to a number",
                              .waits = "who writes packets, before a slot is written again",
                              .scope = Scope::kGpu,
                              .step = Step::kShip};
};
struct TailsThere {
  static constexpr Signal kIs{.name = "NetState::tails_there[s]",
                              .writer = "the poller",
                              .readers = "who unpacks s's packet",
                              .publishes = "chunks of s's tails, all up to a number",
                              .waits = "who unpacks, chunk by chunk",
                              .scope = Scope::kGpu,
                              .step = Step::kPlan};
};
struct TailsGone {
  static constexpr Signal kIs{.name = "NetState::tails_gone[D]",
                              .writer = "the poller",
                              .readers = "who writes packets",
                              .publishes = "nothing; as above, of tails",
                              .waits = "those",
                              .scope = Scope::kGpu,
                              .step = Step::kShip};
};
struct RowsGone {
  static constexpr Signal kIs{.name = "NetState::rows_gone[D]",
                              .writer = "the poller",
                              .readers = "`stage`",
                              .publishes = "nothing; as above, of rows",
                              .waits = "`stage`",
                              .scope = Scope::kGpu,
                              .step = Step::kShip};
};
struct ReturnsGone {
  static constexpr Signal kIs{.name = "NetState::returns_gone[k]",
                              .writer = "the poller",
                              .readers = "`merge`, and `fold` where it writes into rings",
                              .publishes = "nothing; as above, of sums",
                              .waits = "those",
                              .scope = Scope::kGpu,
                              .step = Step::kShip};
};

// ---- between the blocks of a GPU ------------------------------------------------------------------------------------
struct Counted {
  static constexpr Signal kIs{.name = "Local::counted",
                              .writer = "the last block to count its tiles",
                              .readers = "the blocks that route",
                              .publishes = "counts of all tiles",
                              .waits = "routing, before positions are known",
                              .scope = Scope::kGpu,
                              .step = Step::kExchange};
};
struct Packed {
  static constexpr Signal kIs{
      .name = "Local::packed",
      .writer = "the last block to route, or to stage weights, or block 0 of a dispatch",
      .readers =
          "the warp that hands packets to the proxy, and those that stage; in a combine that warp has written "
          "them itself",
      .publishes = "the packets for other domains, and of a new plan where its tokens are in our streams",
      .waits = "that warp, `stage` of a new plan",
      .scope = Scope::kGpu,
      .deadline = Deadline::kBlocks};
};
struct WeightsRelayed {
  static constexpr Signal kIs{.name = "Local::weights_relayed",
                              .writer = "the last block to copy weights into the rings",
                              .readers = "the warp that hands chunks to the proxy",
                              .publishes = "a window's weights of the streams that we relay",
                              .waits = "that warp",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kBlocks};
};
struct Planned {
  static constexpr Signal kIs{
      .name = "Local::planned",
      .writer = "block 0, with the headers and counts of all ranks, while tiles are still being written",
      .readers = "the blocks that place",
      .publishes = "`PlanScratch`: where each source and expert begins, the counts",
      .waits = "placing and the plan's heads of a new plan",
      .scope = Scope::kGpu,
      .deadline = Deadline::kBlocks};
};
struct RowsPlanned {
  static constexpr Signal kIs{
      .name = "Local::rows_planned",
      .writer = "the last block that has planned its share of the rows",
      .readers = "the blocks that place, from each warp's second batch of rows on",
      .publishes =
          "what is known of all rows of a new plan but for the first, one a lane (fewer where fewer are dealt out), of "
          "each warp that places; if a packet has a tail, of all rows",
      .waits = "placing, if a packet has a tail; else nobody: who misses it plans rows himself",
      .scope = Scope::kGpu,
      .deadline = Deadline::kBlocks};
};
struct Hashed {
  static constexpr Signal kIs{.name = "Local::hashed",
                              .writer = "the last block to route",
                              .readers = "the block that writes the plan's hash",
                              .publishes = "the hash in our own header",
                              .waits = "that block",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kBlocks};
};
struct Stop {
  static constexpr Signal kIs{.name = "Local::stop",
                              .writer = "kernels of this rank, and its host by a copy engine",
                              .readers = "its kernels",
                              .publishes = "1: an error is known, kernels return",
                              .waits = "nobody: every wait looks at it",
                              .deadline = Deadline::kNobody};
};

// ---- to the host, in pinned memory ----------------------------------------------------------------------------------
struct CountsCome {
  static constexpr Signal kIs{.name = "HostCounts::call",
                              .writer = "block 0 of a new plan, when the lists of all ranks are there, too",
                              .readers = "the host",
                              .publishes = "the counts of the call",
                              .waits = "the caller, with the operation's deadlines",
                              .deadline = Deadline::kBlocks};
};
struct FaultTold {
  static constexpr Signal kIs{.name = "HostError::published",
                              .writer = "the thread that won `claim`",
                              .readers = "the host",
                              .publishes = "the first fault of this rank",
                              .waits = "nobody: a thread of the host looks",
                              .deadline = Deadline::kNobody};
};

// ---- counters of one GPU --------------------------------------------------------------------------------------------
struct Arrived {
  static constexpr Signal kIs{.name = "Local::arrived[Phase]",
                              .writer = "a thread of each block that is through with something",
                              .readers = "the last of them",
                              .publishes = "what all blocks wrote before",
                              .waits = "nobody; at the end of a kernel between domains the block that ends it",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kBlocks,
                              .reset = "the last to arrive"};
};
struct SentRows {
  static constexpr Signal kIs{.name = "sent_counts[D][slot]",
                              .writer = "who stages a row",
                              .readers = "the warp that hands chunks to the proxy",
                              .publishes = "rows of a chunk",
                              .waits = "that warp",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kBlocks,
                              .reset = "that warp"};
};
struct RelayedRows {
  static constexpr Signal kIs{.name = "relayed_counts[k][slot]",
                              .writer = "who relays a row",
                              .readers = "the warp that hands chunks to the proxy",
                              .publishes = "rows of a chunk, or parts of them",
                              .waits = "that warp",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kBlocks,
                              .reset = "that warp"};
};
struct FoldedRows {
  static constexpr Signal kIs{.name = "token_block_counts[s][c]",
                              .writer = "who tells of a folded row, after a fence",
                              .readers = "the one that adds the last",
                              .publishes = "nothing by itself",
                              .waits = "nobody",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kNobody,
                              .reset = "the one that adds the last"};
};
struct SharesTaken {
  static constexpr Signal kIs{.name = "Local::next_share",
                              .writer = "who takes a share of the work that is not dealt out",
                              .readers = "the same",
                              .publishes = "nothing",
                              .waits = "nobody",
                              .scope = Scope::kGpu,
                              .deadline = Deadline::kNobody,
                              .reset = "the last block of a window"};
};

// In the order of the table.
using AllSignals =
    std::tuple<HeaderFull, ListsFull, RowsFull, WeightsFull, Read, Folded, FoldedAll, Merged, SlotRoutingFull,
               SlotRowsFull, SlotRowsRead, PairsEntered, SlotPairsFull, PairsRead, VoteCast, RowsThere, ReturnsThere,
               PacketsGone, TailsThere, TailsGone, RowsGone, ReturnsGone, SlotPacketThere, SlotRowsThere, SlotSumsThere,
               SlotChunksGone, Counted, Packed, WeightsRelayed, Planned, RowsPlanned, Hashed, SlotsSettled,
               SlotsThrough, Stop, CountsCome, FaultTold, Arrived, SentRows, RelayedRows, SlotPartsDone, FoldedRows,
               SharesTaken>;

}  // namespace uccl_ep::gpu
