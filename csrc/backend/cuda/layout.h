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
constexpr uint32_t kTokensPerBlock = 64;   // tokens that one block routes: a bit each of a 64-bit mask
constexpr uint32_t kRowsPerChunk = 32;     // staged rows that one flag publishes
constexpr uint32_t kPairsPerToken = 32;    // of the capacity; an operation may distribute them otherwise
constexpr uint32_t kHalves = 2;

// Flags, all uint64 epochs that only grow. In the region of the rank that reads them; written by peers over NVLink.
//   header_full[s]  writer: rank s. Its header (and routing, of a new plan) of that epoch is in s's region.
//   rows_full[s][c] writer: rank s. Chunk c of its staged rows of that epoch is in s's region.
//   values_full[s]  writer: rank s. Its fp32 values of that epoch are in s's region.
//   read[d]         writer: rank d. It has read what it wanted of our header, routing, rows and values of that epoch.
//   folded[d][c]    writer: rank d. Chunk c of its pieces of that epoch is in our region.
//   folded_all[d]   writer: rank d. All its pieces and fp32 values of that epoch are in our region.
//   merged[s]       writer: rank s. It has read all pieces in its region up to that epoch: they may be overwritten.
struct Offsets {
  uint64_t header_full = 0, values_full = 0, read = 0, folded_all = 0, merged = 0;  // [ranks]
  uint64_t rows_full = 0, folded = 0;  // [ranks][chunks]
  uint64_t headers = 0;  // [halves] DeviceHeader, then uint32 counts [experts]
  uint64_t header_bytes = 0;
  // What a half holds of a dispatch.
  uint64_t lists = 0;    // [halves][ranks][tokens] ListEntry
  uint64_t pairs = 0;    // [halves][pairs] PairEntry
  uint64_t values = 0;   // [halves][pairs] float
  uint64_t rows = 0;     // [halves] tokens * row_bytes
  // Combine.
  uint64_t pieces = 0;   // piece rows
  uint64_t piece_values = 0;  // [pairs] float
  // Read and written by this rank only.
  uint64_t local = 0;        // Local
  uint64_t chunk_counts = 0;  // [ranks][chunks] uint32: pieces of a chunk that are done; the last resets it
  uint64_t block_counts = 0; // [blocks] uint32[experts + 2 * ranks + 2]: see exchange.cu
  uint64_t plan_scratch = 0; // PlanScratch
  uint64_t token_begin = 0;  // [2][tokens + 1] uint32: pairs, then rows, of earlier tokens
  uint64_t total_bytes = 0;

  uint32_t num_ranks = 0;
  uint32_t num_experts = 0;
  uint32_t max_tokens = 0;   // a multiple of kTokensPerBlock
  uint32_t max_pairs = 0;
  uint64_t row_bytes = 0;    // widest wire row
};
struct RegionLayout : Offsets {
  std::vector<std::pair<std::string, uint64_t>> entries;  // by purpose; their sum is total_bytes
};

// The largest layout within `budget_bytes`. Throws UsageFailure(kBudget) naming the least budget.
RegionLayout make_layout(uint32_t num_ranks, uint32_t num_experts, uint64_t row_bytes, uint64_t budget_bytes);
uint64_t least_budget_bytes(uint32_t num_ranks, uint32_t num_experts, uint64_t row_bytes);

// A row for one destination rank.
struct ListEntry {
  uint32_t token;
  uint32_t first_pair;   // number of its first pair for the destination among the source's pairs
  uint32_t first_slot;   // pairs of earlier rows for the destination
  uint16_t num_pairs;
  uint16_t order;        // how many lower ranks get the token, too
};
struct PairEntry {
  uint16_t expert;       // of the group
  uint16_t column;       // of the caller's routing
  uint32_t position;     // earlier pairs of this source with the expert
};

// Written by the kernel that enters an operation; compared by every peer.
struct DeviceHeader {
  uint64_t epoch;
  OpSignature signature;
  uint32_t num_tokens;
  uint32_t num_pairs;
  uint32_t row_begin[kMaxDomainRanks + 1];   // rows for lower ranks: where a destination's pieces begin
  uint32_t pair_count[kMaxDomainRanks];      // pairs for each rank
};

// The operation in progress; kept in device memory so that a captured graph advances it, too.
struct OpState {
  uint64_t epoch = 0;          // of this operation
  uint64_t free_after = 0;     // epoch whose "read" (dispatch) or "merged" (combine) this one waits for
  uint64_t num_dispatches = 0;
  uint64_t half_epoch[kHalves] = {};  // last dispatch that used the half
  uint64_t last_combine = 0;
  uint32_t half = 0;
};

struct Local {
  OpState op;
  uint64_t stop = 0;  // 1: an error is known, kernels return. Writers: kernels of this rank, its host
  uint32_t arrived[8] = {};  // blocks of a kernel that are through, by Kernel; the last resets it
};

// What a new plan is made of, between the kernels that make it.
struct PlanScratch {
  uint32_t row_begin[kMaxDomainRanks + 1];   // received rows of lower sources
  uint32_t slot_begin[kMaxDomainRanks + 1];  // received pairs of lower sources
  uint32_t piece_base[kMaxDomainRanks];      // where our pieces begin at each source
  // Followed by uint32 slot_base[ranks][experts of a rank], padding_begin[experts of a rank], ..._end.
};

// Pinned host memory. Writer: a kernel; reader: the host.
struct HostCounts {
  uint64_t epoch;  // published last
  uint32_t num_rows, received_rows, received_pairs, sent_rows, sent_pairs;
  uint32_t reserved;
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
  // Of this rank as destination.
  uint32_t* row_begin = nullptr;    // [ranks + 1]
  uint32_t* piece_base = nullptr;   // [ranks]
  uint32_t* sent_begin = nullptr;   // [ranks + 1] rows that we sent to lower ranks
  uint32_t* padding = nullptr;      // [experts of a rank][2]: slots that are padding
  uint32_t* row_token = nullptr;    // [received rows]
  uint32_t* row_pair = nullptr;     // [received rows] the source's number of the row's first pair
  uint32_t* row_slot = nullptr;     // [received rows + 1] into slots
  uint32_t* slots = nullptr;        // [received pairs]
  // Of this rank as source.
  uint32_t* piece_begin = nullptr;  // [tokens + 1] into piece_rows
  uint32_t* piece_rows = nullptr;   // [sent rows] rows of our piece memory, ranks ascending
  uint32_t* pair_place = nullptr;   // [sent pairs] index in the caller's [T, width] values
  uint32_t num_tokens = 0, received_rows = 0, received_pairs = 0, sent_rows = 0, sent_pairs = 0, num_rows = 0;
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
