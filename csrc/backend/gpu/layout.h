// What a rank's device region holds and where, and what the kernels of one operation get as arguments.
// Every rank of the domain computes the same layout, so no offset travels.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "backend/gpu/signals.h"
#include "common/error.h"
#include "layout/region.h"
#include "layout/topology.h"
#include "layout/votes.h"
#include "layout/wire.h"

namespace uccl_ep::gpu {

constexpr uint32_t kMaxGpuRanks = 2048;  // of the group
constexpr uint32_t kMaxMembers = 128;    // of a domain: kernel arguments hold a pointer per member
constexpr uint32_t kMaxBlocks = 1024;    // of a kernel
constexpr uint32_t kTileTokens = 64;     // routed together: a bit each of a 64-bit mask
constexpr uint32_t kRowGroup = 8;        // staged rows that one flag publishes
constexpr uint32_t kTokenBlock = 32;  // half a tile: tokens whose pieces one flag publishes. Windows have whole ones
constexpr uint32_t kPairsPerToken = 32;  // of the capacity for usual tokens; an operation may distribute them otherwise
constexpr uint32_t kMaxTokens = 1u << 16;
constexpr uint32_t kMaxRelayedChunks = 1000;  // of rows, in a ring between domains
constexpr uint32_t kHalves = 2;
constexpr uint32_t kNumPhases = 18;  // Phase, in device.cuh
constexpr uint32_t kMaxSlotBlocks = 256;  // of a low-latency kernel
constexpr uint32_t kMaxSlotTokens = 4096;

// In kernels ranks are numbered by domain, then by member, and experts by the number of their rank: a domain's are
// neighbours. A rank's *stream* to a domain is its tokens that have experts there, in their order; to its own domain,
// all tokens. The *holder* of a rank's rows for our domain is the rank itself or, of another domain, its rail in ours.

struct Addend;  // words.h
struct BlockRows;  // words.h
struct Local;
struct PlanScratch;
struct SourcePlan;

// Where elements of type T begin in a rank's region, in bytes.
template <typename T>
struct Part {
  uint64_t offset = 0;
  // In a region that is mapped at `base`.
  constexpr T* in(uint8_t* base) const { return reinterpret_cast<T*>(base + offset); }
};

// What a rank tells each member of a low-latency operation.
struct SlotHeader {
  uint64_t number;
  OpSignature signature;
  uint32_t num_tokens;
  uint32_t num_blocks;  // of its kernel
  uint32_t num_refused;  // as in OpHeader
  uint32_t folds;  // 1: of a combine, rows are sums of its sender
};
constexpr uint32_t kRankWords = kMaxMaskedRanks / 32;
// Ranks, a bit each: masks.cuh.
struct SlotVote {
  uint32_t ranks[kRankWords];
  DeviceFlag<VoteCast> cast;
};
struct alignas(kLineBytes) SlotVotes {
  SlotVote votes[kVotesOfRank];
};
static_assert(sizeof(SlotVote) == sizeof(VoteWords) && sizeof(SlotVotes) == sizeof(RankVotes));
// Low latency: what every rank of the domain may write here without asking. Dispatches and combines have numbers, each
// from 1 on; number n uses half n mod 2, when the reader of number n - 2 has published that it is through. A *place* is
// a pair's index in its source's [T, K]. Of a rank of another domain, this rank writes its header and routing itself.
struct LowLatencyMap {
  Part<DeviceFlag<SlotRoutingFull>> routing_full;  // [ranks]
  Part<DeviceFlag<SlotRowsFull>> rows_full;  // [members][kMaxSlotBlocks]
  Part<DeviceFlag<SlotRowsRead>> rows_read;  // [members]
  Part<DeviceFlag<PairsEntered>> pairs_entered;  // [ranks]
  Part<DeviceFlag<SlotPairsFull>> pairs_full;  // [members][kMaxSlotBlocks]
  Part<DeviceFlag<PairsRead>> pairs_read;  // [members]
  Part<SlotHeader> headers;  // [dispatch, combine][halves][ranks]
  Part<SlotVote> votes;  // [members][2][2]: masks.cuh. Those of other domains: SlotNet
  Part<SlotVote> decisions;  // [members][3]: of two settlements, and the last one that the member waits in
  Part<int32_t> routing;  // [halves][ranks][places] numbers of experts, -1: none
  Part<uint32_t> routed;  // the same: weights, if they came with the routing
  Part<uint8_t> rows;  // [halves][members][tokens][row_bytes]
  // [halves][streams][places][pair_bytes]. A sum of several pairs is at the place of the one with the lowest expert.
  Part<uint8_t> pairs;
  Part<uint32_t> weights;  // [halves][ranks][places], where there is one domain: low_latency_fold.cuh
  // Where there are several domains.
  Part<uint8_t> net;  // SlotNet, SlotNetState
  Part<DeviceCounter<SlotPartsDone>> sent_counts;  // [domains][chunks]
  Part<DeviceCounter<SlotPartsDone>> relayed_counts;  // [streams][chunks]
  uint32_t rows_of_chunk = 0, chunks = 0;  // rows of a chunk; chunks of an operation at most
  uint64_t row_chunk_bytes = 0, sum_chunk_bytes = 0, routing_bytes = 0, weights_bytes = 0;  // of slots of the rings
  uint64_t row_bytes = 0, pair_bytes = 0;
  uint32_t tokens = 0;  // of a rank, at most; 0: there is no memory for it
  uint32_t topk = 0;  // experts of a token, at most

  // Sources' routing lies at multiples of 16 bytes.
  constexpr uint32_t places() const { return (tokens * topk + 3) / 4 * 4; }
};

struct DeviceMap {
  Part<DeviceFlag<HeaderFull>> header_full;  // [ranks]
  Part<DeviceFlag<WeightsFull>> weights_full;  // [ranks]
  Part<DeviceFlag<ListsFull>> lists_full;  // [members]
  Part<DeviceFlag<Read>> read;  // [members]
  Part<DeviceFlag<FoldedAll>> folded_all;  // [members]
  Part<DeviceFlag<Merged>> merged;  // [members]
  Part<DeviceFlag<RowsFull>> rows_full;  // [members][row groups]
  Part<DeviceFlag<Folded>> folded;  // [streams][members][token blocks]
  Part<uint8_t> packets;  // [halves][packet_bytes] for our own domain: packet.h
  uint64_t packet_bytes = 0;
  uint64_t head_bytes = 0;  // of another domain's packet: what lands in its slot
  uint64_t tail_bytes = 0;  // of a chunk of its tail
  uint32_t tail_slots = 0;  // where those land; 0: no packet has a tail
  Part<uint8_t> rows;  // [halves][half_bytes] for our own domain, at the place of their token
  // Combine.
  // [1 + batch_streams][piece_bytes], or of our own only: of our tokens, then of a batch of streams. A row's lie side
  // by side, ranks ascending.
  Part<uint8_t> pieces;
  Part<float> piece_weights;  // [streams][weight_halves][stream_weights]
  // Read and written by this rank only.
  Part<Local> local;
  Part<uint64_t> waited_nsec;  // [ranks] since creation: how long we were there before it entered
  Part<uint16_t> tables;  // RankTables
  Part<uint8_t> net;  // where there are several domains: Net, NetState
  Part<DeviceCounter<SentRows>> sent_counts;  // [domains][slots]
  Part<DeviceCounter<RelayedRows>> relayed_counts;  // [streams][slots]
  Part<DeviceCounter<FoldedRows>> token_block_counts;  // [ranks][token blocks] its pieces that are done
  Part<uint32_t> tile_counts;  // [tiles][tile_words]: see tile.cuh
  Part<PlanScratch> plan_scratch;
  Part<SourcePlan> source_plans;  // [ranks]
  Part<uint32_t> token_addends;  // [tokens + 1] addends of earlier tokens
  Part<Addend> addends;  // [pairs]: see PlanView
  Part<BlockRows> sent_token_blocks;  // [domains][groups of token blocks] of our streams
  Part<uint32_t> pair_origin;  // [pairs] place in the caller's [T, width]
  LowLatencyMap low_latency;
  uint64_t total_bytes = 0;

  uint32_t num_ranks = 0;
  uint32_t num_members = 0;  // of this rank's domain
  uint32_t num_streams = 0;  // that a rank of it merges, at most
  // A window of a combine merges a batch of the streams that we relay; that of the last batch also merges our tokens.
  uint32_t batch_streams = 0;
  uint32_t stream_batches = 1;  // of the rank of several members that relays most
  // Weights' gradients go behind all rows, in windows of their own. Otherwise they go with those of the last window.
  bool weights_apart = false;
  uint32_t weight_pairs = 0;  // whose weights such a window has of a stream, on all ranks; or all
  uint32_t weight_halves = 1;  // of the memory for them: windows use them in turn
  uint32_t stream_weights = 0;  // of a stream in a half
  uint32_t num_domains = 0;
  uint32_t num_experts = 0;
  uint32_t max_tokens = 0;  // a multiple of kTileTokens
  uint32_t max_pairs = 0;
  uint32_t stream_pairs = 0;  // of them in our domain, at most
  uint32_t most_stream_pairs = 0;  // in any domain
  uint64_t half_bytes = 0;  // staged rows
  uint64_t piece_bytes = 0;
  uint64_t row_bytes = 0;  // widest wire row
  // Rings between domains, at the beginning of the region.
  uint32_t row_slots = 0;
  uint32_t return_slots = 0;  // of a stream that we merge
  uint32_t sum_slots = 0;  // of them for sums: on all ranks equally many
  uint64_t slot_bytes = 0;
  uint32_t slot_weights = 1;  // that a slot holds
};
struct DeviceRegionLayout : DeviceMap {
  DeviceRings rings;
  std::vector<std::pair<std::string, uint64_t>> entries;  // by purpose; their sum is total_bytes
  uint64_t group_hash = 0;  // of the layouts of all domains: ranks whose hashes differ do not fit together
};

// What is counted of a tile: tokens by expert, rank and domain, a byte each; and all of it.
constexpr uint32_t tile_token_words(const DeviceMap& map) {
  return (map.num_experts + map.num_ranks + map.num_domains + 3) / 4;
}
constexpr uint32_t tile_words(const DeviceMap& map) { return tile_token_words(map) + map.num_ranks + 1; }

constexpr uint64_t kDevicePage = 2u << 20;  // memory of a GPU comes in whole ones
// Kernels keep places in 32 bits, in units of 16 bytes: in a region, and among the rows that a combine sums.
constexpr uint64_t kMostRegionBytes = uint64_t{1} << 36, kMostRowsBytes = uint64_t{1} << 36;

// Memory for low latency, for so many tokens of a rank with so many experts each; 0: none.
struct LowLatencyRoom {
  uint32_t tokens = 0, topk = 0;
  uint64_t row_bytes = 0;  // of the widest row
  uint64_t sum_bytes = 0;  // of the widest sum between domains
  bool masks = false;  // ranks may be masked
};
// What a region has to hold.
struct RegionNeeds {
  uint32_t num_experts = 0;  // of the group
  uint64_t row_bytes = 0;  // of the widest row
  uint32_t window_tokens = 0;  // 0: what the budget allows
  LowLatencyRoom beside = {};
  PacketRoom packets = {};
};
// The layout of the ranks of a domain, with the longest windows for which no rank needs more than `budget_bytes`, which
// is at least the least; beyond kMostRegionBytes it is not used. Streams go in batches only if the memory is too small
// for all. With `window_tokens` at most one for windows of so many tokens, of widest rows. Windows may be a quarter
// shorter, so that an operation of any number of tokens has room; with `window_tokens` only where that costs no time.
DeviceRegionLayout make_layout(const Topology& topo, int domain, const RegionNeeds& needs, uint64_t budget_bytes);
// Of the rank that needs most. With `window_tokens`: what operations of so many tokens need, though rows go in the
// least windows.
uint64_t least_budget_bytes(const Topology& topo, const RegionNeeds& needs);

// How far this rank is; kept in device memory so that a captured graph advances it, too.
struct Progress {
  uint64_t epoch = 0;  // of the last operation
  uint64_t dispatch_windows = 0, combine_windows = 0;  // of all operations
  uint64_t num_refused = 0;  // calls of this rank, so far. Writer: refuse.cu, in the order of the operations
};

// In an epoch: it is the number of a low-latency operation.
constexpr uint64_t kLowLatencyEpoch = uint64_t{1} << 63;
// Numbers of the last low-latency dispatch (0) and combine (1) whose rows this rank has sent, or received. In device
// memory, so that a captured graph advances them, too.
struct LowLatencyState {
  uint64_t sent[2] = {}, received[2] = {};
  // Where ranks may be masked, a bit each: those that are, those that decisions name (masks.cuh), and those that this
  // rank misses and has not voted on yet.
  uint32_t masked[kRankWords] = {}, named[kRankWords] = {}, suspected[kRankWords] = {};
  uint64_t num_settled = 0;
  uint64_t dropped_pairs = 0;  // of combines: their experts' ranks are masked
  DeviceFlag<SlotsSettled> settled[2];
  DeviceFlag<SlotsThrough> through[2][2];  // by kind: sending, receiving
};

// The most rows that neighbouring token blocks have of a stream to another domain, in spans of several lengths. Each
// span begins at a multiple of its length.
struct SpanRows {
  static constexpr uint32_t kLengths = 4;
  static constexpr uint32_t blocks(uint32_t length) { return 4u << length; }
  uint16_t most[kLengths] = {};

  // Of tokens that may all go to one domain.
  static constexpr SpanRows all() {
    SpanRows all;
    for (uint32_t i = 0; i < kLengths; ++i) all.most[i] = static_cast<uint16_t>(blocks(i) * kTokenBlock);
    return all;
  }
  constexpr SpanRows with(const SpanRows& other) const {
    SpanRows all = *this;
    for (uint32_t i = 0; i < kLengths; ++i)
      if (all.most[i] < other.most[i]) all.most[i] = other.most[i];
    return all;
  }
};
static_assert(SpanRows::blocks(SpanRows::kLengths - 1) * kTokenBlock <= UINT16_MAX);

// What a plan takes memory for.
struct PlanSizes {
  uint32_t num_rows = 0;  // of the output
  uint32_t received_rows = 0, received_pairs = 0, sent_pairs = 0;
  uint32_t most_tokens = 0;  // of any rank
  uint32_t most_pieces = 0;  // that any token block of any rank has in any domain
  // Where there are several domains.
  uint32_t most_rows = 0;  // that any token block of any rank has of a stream to another domain
  SpanRows span_rows = {};  // of any rank that has more tokens than a window holds of the widest rows
  uint32_t most_pairs = 0;  // of any rank, or a few more
  uint32_t shipped_rows = 0;  // of our streams to others; they take no memory
  uint32_t relayed_rows = 0;  // of the streams that we merge for others
  uint32_t sent_addends = 0;  // pieces of our tokens in our domain, and sums from others

  // With memory for `most`.
  constexpr bool fits(const PlanSizes& most) const {
    return num_rows <= most.num_rows && received_rows <= most.received_rows && received_pairs <= most.received_pairs &&
           sent_pairs <= most.sent_pairs && most_tokens <= most.most_tokens && relayed_rows <= most.relayed_rows &&
           sent_addends <= most.sent_addends;
  }
};

struct Local {
  Progress progress;
  uint64_t entered = 0;  // epoch of the operation whose kernels run, or kLowLatencyEpoch with its number
  DeviceFlag<Stop> stop;
  DeviceFlag<Counted> counted;
  DeviceFlag<Packed> packed;
  DeviceFlag<WeightsRelayed> weights_relayed;
  DeviceFlag<Planned> planned;
  DeviceFlag<RowsPlanned> rows_planned;
  DeviceFlag<Hashed> hashed;
  uint64_t routing_hash = 0;  // of a routing that is compared with a plan's; the last to add resets it
  DeviceCounter<Arrived> arrived[kNumPhases] = {};  // blocks
  LowLatencyState low_latency;
  // Progress, arrival, masks: the time, in ticks of patience.cuh, before which no wait's deadline begins. Writers and
  // readers: threads whose deadline is over; any of their values will do; never reset.
  uint32_t patient_since[3] = {};
  DeviceCounter<SharesTaken> next_share[kHalves][4] = {};  // by a window's number mod 2, and SharedWork
  uint64_t block_hash[kMaxBlocks] = {};
  uint64_t step_nsec[kNumSteps] = {};  // since creation: what block 0 has spent in a step
};

struct ListEntry;
struct PairEntry;
// What a new plan is made of, between the kernels that make it: of each source, and of all.
struct SourcePlan {
  // Its received rows and pairs, which are numbered in the given order of sources.
  uint32_t row_begin, row_end, pair_begin, pair_end;
  uint32_t weight_begin;  // as in PlanView
  uint32_t num_tokens, stream_rows, num_pairs;
  uint32_t tail_chunks;  // of its packet
  // Of its packet: its rows for us; all its pairs, and their weights; rows by token block.
  const ListEntry* lists;
  const PairEntry* all_pairs;
  const float* weights;
  const BlockRows *token_block_rows, *token_block_streams;
  const uint32_t* stream_pieces;
};
struct PlanScratch {
  PlanSizes sizes;
  uint32_t most_tail = 0;  // chunks of the longest tail of any packet
  uint32_t window_tokens = 0;  // of windows but the first
  // Followed by uint32 out_row_base[ranks][experts of a rank], padding[experts of a rank][2], size[experts of a rank].
};

// Pinned host memory. Writer: a kernel; reader: the host.
struct HostCounts {
  DeviceFlag<CountsCome> call;  // published last
  PlanSizes sizes;
  // Followed by uint32 exact[experts of a rank], padded[experts of a rank].
};
struct HostError {
  uint64_t claim;
  DeviceFlag<FaultTold> published;
  uint32_t kind;  // ErrorKind
  uint32_t step;  // Step
  int32_t peer;
  int32_t chunk;
  uint64_t epoch, num_refused, expected, seen;
  uint32_t code;  // DeviceFault
};
// Pinned host memory. Writer: a thread of the host; reader: kernels, now and then while their deadlines are over.
// Times are at most kMostLivedNsec, and deadlines half of that: kernels keep both in 32 bits.
constexpr uint64_t kMostLivedNsec = uint64_t{1} << 50;
struct HostPulse {
  uint64_t beats;  // only grows while the host runs; from 1 on; published after the others
  uint64_t alive_nsec;  // since the host last stood still
  uint64_t still_nsec;  // since then, or since bytes last moved between domains: the shorter of the two
};
enum class DeviceFault : uint32_t {
  kNone,
  kTimeout,
  kMismatch,
  kPlanDiffers,
  kExpertRange,
  kExpertTwice,
  kTooManyPairs,
  kTooManyTokens,
  kMasked
};

// A plan in device memory; arrays lie in one allocation that the caller owns.
struct PlanView {
  uint64_t* routing_hash = nullptr;  // [1]
  int64_t* tokens_per_expert = nullptr;  // [experts of a rank] pairs, padding included
  uint64_t* overflow = nullptr;  // [1] 1: more rows came than the caller has room for
  uint64_t* most_tokens = nullptr;  // [1] of any rank
  // Of this rank as destination.
  uint32_t* row_begin = nullptr;  // [ranks] a source's rows, numbered in the given order of sources
  uint32_t* row_end = nullptr;  // [ranks]
  uint32_t* weight_begin = nullptr;  // [ranks] number of a pair in its source's packet = ours + weight_begin (mod 2^32)
  BlockRows* token_block_rows = nullptr;  // [ranks][groups of token blocks] the source's rows for us
  uint32_t* token_blocks = nullptr;  // [ranks] token blocks of a source's tokens
  uint32_t* padding = nullptr;  // [experts of a rank][2]: rows of the output that are padding
  uint32_t* row_piece = nullptr;  // [received rows] number among the source's pieces in our domain
  uint32_t* row_pair_begin = nullptr;  // [received rows + 1] into out_rows
  uint32_t* out_rows = nullptr;  // [received pairs] a row of the output; of compact rows the local expert
  // Of this rank as source.
  uint32_t* addend_begin = nullptr;  // [tokens + 1] addends of earlier tokens: pieces, and sums from other domains
  uint32_t* pair_begin = nullptr;  // [ranks + 1] pairs for lower ranks
  uint32_t* pair_place = nullptr;  // [sent pairs] index in the caller's [T, width] weights
  // Where there are several domains; else nullptr.
  BlockRows* token_block_streams = nullptr;  // [ranks][groups of token blocks] of a stream to our domain
  BlockRows* sent_token_blocks = nullptr;  // [domains][groups of token blocks] of our streams
  Addend* addends = nullptr;  // [addends]
  uint32_t* relayed_begin = nullptr;  // [streams] into relayed_piece; the first is nothing
  uint32_t* relayed_pairs = nullptr;  // [streams] pairs of a stream
  uint32_t* relayed_piece = nullptr;  // [relayed rows, one more for each stream] pieces of earlier rows
  // Of 16 bits, and so behind all others, which stay aligned.
  static_assert(kMaxTokens - 1 <= UINT16_MAX);
  uint16_t* row_token = nullptr;  // [received rows]
  uint16_t* row_position = nullptr;  // [received rows] in the stream, where there are several domains
  uint32_t num_tokens = 0;
  uint32_t num_token_blocks = 0;  // of the rank with the most tokens
  uint32_t num_out_rows = 0;  // that the caller has: higher ones are dropped
  // 0: a received row is written once per pair, with the pair's weight beside it. Else rows are compact: received row i
  // is row i of the output, its weights are row i of [rows, compact_width], and `out_rows` holds the experts instead.
  uint32_t compact_width = 0;
};
// Points a plan's arrays into `memory`, in the order above; their bytes. Null: only those.
uint64_t lay_out_plan(PlanView& view, const PlanSizes& sizes, uint8_t* memory, const DeviceMap& of);

}  // namespace uccl_ep::gpu
