// What a rank's device region holds and where, and what the kernels of one operation get as arguments.
// Every rank of the domain computes the same layout, so no offset travels.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "layout/wire.h"

namespace uccl_ep::cuda {

constexpr uint32_t kMaxDomainRanks = 64;   // kernel arguments hold a pointer per rank
constexpr uint32_t kMaxBlocks = 1024;      // of a kernel
constexpr uint32_t kTileTokens = 64;       // routed together: a bit each of a 64-bit mask
constexpr uint32_t kStageRows = 8;         // staged rows that one flag publishes
constexpr uint32_t kChunkTokens = 32;      // tokens whose pieces one flag publishes; windows consist of whole ones
constexpr uint32_t kPairsPerToken = 32;    // of the capacity; an operation may distribute them otherwise
constexpr uint32_t kMaxTokens = 1u << 16;
constexpr uint32_t kHalves = 2;

// Flags, all uint64 epochs that only grow. In the region of the rank that reads them; written by peers over NVLink.
//   header_full[s]  writer: rank s. Its header (and routing, of a new plan) of that epoch is in s's region.
//   rows_full[s][c] writer: rank s. Chunk c (kStageRows) of its staged rows of that epoch is in s's region.
//   values_full[s]  writer: rank s. Its fp32 values of that epoch are in s's region.
//   read[d]         writer: rank d. It has read what it wanted of our header, routing, rows and values of that epoch.
//   folded[d][c]    writer: rank d. Its pieces of chunk c (kChunkTokens of our tokens) of that epoch are in our region.
//   folded_all[d]   writer: rank d. All its pieces and fp32 values of that epoch are in our region.
//   merged[s]       writer: rank s. It has read all pieces in its region up to that epoch: they may be overwritten.
struct Offsets {
  uint64_t header_full = 0, values_full = 0, read = 0, folded_all = 0, merged = 0;  // [ranks]
  uint64_t rows_full = 0, folded = 0;  // [ranks][chunks]
  uint64_t headers = 0;  // [halves] DeviceHeader, then uint32 counts [experts]
  uint64_t header_bytes = 0;
  // What a half holds of a dispatch. Pairs and values are numbered by destination, then token, then expert.
  uint64_t lists = 0;         // [halves][ranks][tokens] ListEntry
  uint64_t pairs = 0;         // [halves][pairs] PairEntry
  uint64_t values = 0;        // [halves][pairs] float
  uint64_t chunk_rows = 0;    // [halves][ranks][chunks + 1] uint32: rows for the rank of earlier chunks of tokens
  uint64_t chunk_pieces = 0;  // [halves][chunks + 1] uint32: pieces of earlier chunks of tokens
  uint64_t rows = 0;          // [halves] half_bytes
  // Combine.
  uint64_t pieces = 0;        // piece_bytes; a token's pieces lie side by side, ranks ascending
  uint64_t piece_values = 0;  // [pairs] float
  // Read and written by this rank only.
  uint64_t local = 0;         // Local
  uint64_t chunk_counts = 0;  // [ranks][chunks] uint32: pieces of a chunk that are done; the last resets it
  uint64_t tile_counts = 0;   // [tiles] uint32[experts + 2 * ranks + 2]: see exchange.cuh
  uint64_t plan_scratch = 0;  // PlanScratch
  uint64_t token_pieces = 0;  // [tokens + 1] uint32: pieces of earlier tokens
  uint64_t pair_origin = 0;   // [pairs] uint32: place in the caller's [T, width]
  uint64_t total_bytes = 0;

  uint32_t num_ranks = 0;
  uint32_t num_experts = 0;
  uint32_t max_tokens = 0;   // a multiple of kTileTokens
  uint32_t max_pairs = 0;
  uint64_t half_bytes = 0;   // staged rows
  uint64_t piece_bytes = 0;
  uint64_t row_bytes = 0;    // widest wire row
};
struct RegionLayout : Offsets {
  std::vector<std::pair<std::string, uint64_t>> entries;  // by purpose; their sum is total_bytes
};

constexpr uint64_t kDevicePage = 2u << 20;  // memory of a GPU comes in whole ones

// The largest layout within `budget_bytes`, which is at least the least.
RegionLayout make_layout(uint32_t num_ranks, uint32_t num_experts, uint64_t row_bytes, uint64_t budget_bytes);
uint64_t least_budget_bytes(uint32_t num_ranks, uint32_t num_experts, uint64_t row_bytes);

// From one staged row to the next. Bulk copies are slow where source and destination lie differently in 128 bytes.
constexpr uint64_t staged_row_bytes(Dtype wire, uint64_t hidden) { return round_up(wire_row_bytes(wire, hidden), 128); }

// Tokens whose staged rows fit a half: a longer dispatch goes in windows of so many.
inline uint32_t window_tokens(const Offsets& at, uint64_t row_bytes) {
  const uint64_t rows = at.half_bytes / row_bytes / kChunkTokens * kChunkTokens;
  return rows < at.max_tokens ? static_cast<uint32_t>(rows) : at.max_tokens;
}
// A chunk of tokens belongs to the window (pieces before it) / window_pieces of a combine. What the last chunk of a
// window has beyond it still fits the memory.
inline uint32_t window_pieces(const Offsets& at, uint64_t wire_row_bytes) {
  return static_cast<uint32_t>(at.piece_bytes / wire_row_bytes) - kChunkTokens * at.num_ranks;
}

// A row for one destination rank.
struct ListEntry {
  uint32_t token;
  uint32_t first_slot;   // pairs of earlier rows for the destination
  uint32_t piece;        // number of its piece among the source's
  uint32_t num_pairs;
};
struct PairEntry {
  uint32_t expert;       // of the destination
  uint32_t position;     // earlier pairs of this source with the expert
};

// Written by the kernel that begins an operation; compared by every peer.
struct DeviceHeader {
  uint64_t epoch;
  OpSignature signature;
  uint64_t routing_hash;
  uint32_t num_tokens;
  uint32_t row_begin[kMaxDomainRanks + 1];   // rows for lower ranks
  uint32_t pair_begin[kMaxDomainRanks + 1];  // pairs for lower ranks
};

// How far this rank is; kept in device memory so that a captured graph advances it, too.
struct Progress {
  uint64_t epoch = 0;  // of the last operation
  uint64_t num_dispatches = 0;
  uint64_t half_epoch[kHalves] = {};  // last dispatch that used the half
  uint64_t last_combine = 0;
};

// What a plan takes memory for.
struct PlanSizes {
  uint32_t num_rows = 0;  // of the output
  uint32_t received_rows = 0, received_pairs = 0, sent_pairs = 0;
  uint32_t most_tokens = 0, most_sent_rows = 0;  // of any rank

  // With memory for `most`.
  constexpr bool fits(const PlanSizes& most) const {
    return num_rows <= most.num_rows && received_rows <= most.received_rows && received_pairs <= most.received_pairs &&
           sent_pairs <= most.sent_pairs && most_tokens <= most.most_tokens;
  }
};

struct Local {
  Progress progress;
  uint64_t entered = 0;  // epoch of the operation whose kernels run
  uint64_t stop = 0;  // 1: an error is known, kernels return. Writers: kernels of this rank, its host
  uint64_t counted = 0;  // epoch whose tiles have all been counted
  uint64_t planned = 0;  // epoch whose PlanScratch is complete
  uint64_t routing_hash = 0;  // of a routing that is compared with a plan's; the last to add resets it
  uint32_t arrived[8] = {};  // blocks that are through with something, by Arrival; the last resets it
  uint32_t taken[3] = {};    // shares of work that have been taken, by Taken; reset when all are through
  uint64_t block_hash[kMaxBlocks] = {};
  uint64_t step_nsec[kNumSteps] = {};  // what block 0 has spent in a step, since creation
};

// What a new plan is made of, between the kernels that make it.
struct PlanScratch {
  // By source: its received rows and pairs, which are numbered in the given order of sources.
  uint32_t row_begin[kMaxDomainRanks], row_end[kMaxDomainRanks];
  uint32_t slot_begin[kMaxDomainRanks], slot_end[kMaxDomainRanks];
  uint32_t value_begin[kMaxDomainRanks];  // as in PlanView
  PlanSizes sizes;
  // Followed by uint32 slot_base[ranks][experts of a rank], padding[experts of a rank][2], size[experts of a rank].
};

// Pinned host memory. Writer: a kernel; reader: the host.
struct HostCounts {
  uint64_t call;  // published last
  PlanSizes sizes;
  // Followed by uint32 exact[experts of a rank], padded[experts of a rank].
};
struct HostError {
  uint64_t claim;
  uint64_t published;
  uint32_t kind;  // ErrorKind
  uint32_t step;  // Step
  int32_t peer;
  int32_t chunk;
  uint64_t epoch, expected, seen;
  uint32_t code;  // DeviceFault
};
enum class DeviceFault : uint32_t {
  kNone,
  kTimeout,
  kMismatch,
  kPlanDiffers,
  kExpertRange,
  kExpertTwice,
  kTooManyPairs
};

// A plan in device memory; arrays lie in one allocation that the caller owns.
struct PlanView {
  uint64_t* routing_hash = nullptr;      // [1]
  int64_t* tokens_per_expert = nullptr;  // [experts of a rank] pairs, padding included
  uint64_t* overflow = nullptr;          // [1] 1: more slots were needed than the caller has
  // Of this rank as destination.
  uint32_t* row_begin = nullptr;    // [ranks] a source's rows, numbered in the given order of sources
  uint32_t* row_end = nullptr;      // [ranks]
  uint32_t* value_begin = nullptr;  // [ranks] a source's number of the pair = our number + value_begin (mod 2^32)
  uint32_t* chunk_rows = nullptr;   // [ranks][chunks + 1] the source's rows of earlier chunks of its tokens
  uint32_t* chunk_pieces = nullptr; // [ranks][chunks + 1] the source's pieces of earlier chunks of its tokens
  uint32_t* chunks = nullptr;       // [ranks] chunks of a source's tokens
  uint32_t* padding = nullptr;      // [experts of a rank][2]: slots that are padding
  uint32_t* row_token = nullptr;    // [received rows]
  uint32_t* row_piece = nullptr;    // [received rows] number among the source's pieces
  uint32_t* row_slot = nullptr;     // [received rows + 1] into slots
  uint32_t* slots = nullptr;        // [received pairs] of expert-major rows; of compact ones the local expert
  // Of this rank as source.
  uint32_t* piece_begin = nullptr;  // [tokens + 1] pieces of earlier tokens
  uint32_t* pair_begin = nullptr;   // [ranks + 1] pairs for lower ranks
  uint32_t* pair_place = nullptr;   // [sent pairs] index in the caller's [T, width] values
  uint32_t num_tokens = 0;
  uint32_t num_chunks = 0;          // of the rank with the most tokens
  uint32_t num_slots = 0;           // of the caller's rows: higher slots are dropped
  // 0: a row goes to each of its slots, and a value too. Else rows are compact: row i goes to slot i, its values to
  // [i, compact_width], and `slots` holds the experts instead.
  uint32_t compact_width = 0;
};

// What every kernel knows of the domain.
struct Domain {
  Offsets at;
  uint8_t* base[kMaxDomainRanks];  // regions, mapped here
  uint32_t rank;                   // index in the domain
  uint32_t experts_per_rank;
  uint32_t source_order[kMaxDomainRanks];
  uint64_t arrival_nsec, progress_nsec;  // deadlines
  uint32_t shared_bytes;  // a block may have
  bool bulk_copies;       // this GPU has them
  HostError* error;
  HostCounts* counts;
};

}  // namespace uccl_ep::cuda
