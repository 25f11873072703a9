// The layout of a rank's region. Declared once: the owner, its domain peers and remote senders all compute
// the same layout from the same inputs, so ranks never exchange offsets.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "layout/events.h"
#include "layout/topology.h"
#include "layout/wire.h"

namespace uccl_ep {

// kTail: of a packet, what its header slot does not hold. kSlot…: of low latency. A dispatch has its routing and rows;
// a combine its weights, and the sums that come back.
enum class RingKind : uint32_t {
  kHeader,
  kMeta,
  kRows,
  kPieces,
  kReturn,
  kTail,
  kSlotRouting,
  kSlotRows,
  kSlotWeights,
  kSlotSums
};
constexpr uint32_t kNumRingKinds = 10;
inline const char* ring_name(RingKind kind) {
  static const char* const names[] = {"header", "meta",         "rows",      "pieces",       "return",
                                      "tail",   "slot_routing", "slot_rows", "slot_weights", "slot_sums"};
  return names[static_cast<uint32_t>(kind)];
}

// `num_slots` chunk slots. Chunk number `serial` (counted since creation, never restarting) uses slot
// serial % num_slots. Flags are in the region; so are slots, but those of a device layout are in the device region.
//   stamps: Flag per slot, = serial + 1.
//     domain ring or landing ring: "the chunk is there". Writer: the producer (landing: the rail's proxy). Readers: all
//     readers. send ring: "the transport has flushed the chunk". Writer: the proxy. Reader: the producer.
//   consumed: FlagLine per reader, = number of chunks that it has consumed. Writer: that reader. Reader: the producer
//     (landing: the rail's proxy, which turns it into credits). Send rings have none.
struct RingLayout {
  RingKind kind = RingKind::kRows;
  uint64_t slots_offset = 0;
  uint64_t slot_bytes = 0;
  uint64_t stamps_offset = 0;
  uint64_t consumed_offset = 0;
  uint32_t num_slots = 0;
  uint32_t num_readers = 0;
  // Not 0: the bytes at `slots_offset` that this send ring shares with others. A command says where its chunk begins.
  uint64_t shared_bytes = 0;

  uint64_t slot_offset(uint64_t serial) const { return slots_offset + serial % num_slots * slot_bytes; }
};

struct RingParams {
  uint64_t slot_bytes = 0;       // of row, piece and return chunks
  uint64_t meta_slot_bytes = 0;  // of routing chunks
  uint32_t num_slots = 0;        // of every ring but the header rings
  uint32_t num_experts = 0;      // of the whole group
  // Of low latency: every chunk is a whole operation. 0: there is none.
  struct Slots {
    uint32_t operations = 0;  // that a ring holds
    uint64_t dispatch_bytes = 0, weights_bytes = 0, sums_bytes = 0;
    uint32_t max_tokens = 0;  // of an operation
    bool votes = false;  // about masked ranks
  } slots = {};
};
constexpr uint64_t kRemoteSignsBytes = 32;  // what is known of a rank whose rows land: sync/control.h
constexpr uint32_t kHeaderSlots = 2;  // see Exchange: a header of epoch n-2 has been read by all when epoch n starts

// Of a packet between domains: how much lands in its slot, and the chunks of what it has beyond.
struct PacketRoom {
  uint32_t head_tokens = 4096;  // whose routing lands at once, if it is not very uneven
  uint32_t tail_bytes = 64 << 10, tail_slots = 4;
};

// Rings of a GPU buffer that a transport carries: their slots lie in device memory, from offset 0 of a rank's device
// region on. Slots follow each other at `slot_bytes`, so a multiple of 256 keeps every slot aligned.
struct DeviceRings {
  // A slot of the header rings to domains of a size: header, routing and weights of an operation in one chunk.
  std::map<int, uint64_t> packet_bytes;
  uint64_t rows_slot_bytes = 0;
  uint32_t rows_slots = 0;
  uint64_t return_slot_bytes = 0;
  uint32_t return_slots = 0;  // of sums; a ring back from a domain has slots for weights, too, by the domain's size
  // Of low latency; 0: none. A ring holds two operations, so it may be one chunk of each, or several.
  struct Slots {
    // Of an operation: one chunk, a multiple of kSharedUnitBytes. All other domains get the same.
    uint64_t routing_bytes = 0, weights_bytes = 0;
    uint64_t row_slot_bytes = 0, sum_slot_bytes = 0;
    uint32_t chunks = 0;  // of rows, or sums, of an operation at most
    bool votes = false;  // about masked ranks
  } slots = {};
  std::map<int, uint32_t> weight_slots = {};  // none: 0
  // All packets that a rank of a domain of a size sends for an operation; none: the largest to each domain.
  std::map<int, uint64_t> sent_packet_bytes = {};
  // What a packet has beyond its slot goes in chunks of its own, by domains' size at most so many of an operation.
  std::map<int, uint32_t> tail_chunks = {};  // none: there are no rings for it
  uint64_t tail_slot_bytes = 0;
  uint32_t tail_slots = 0;  // where they land

  uint32_t slots_back_from(int size) const {
    const auto weights = weight_slots.find(size);
    return return_slots + (weights == weight_slots.end() ? 0 : weights->second);
  }
};
constexpr uint64_t kDeviceRingAlignBytes = 256;

struct RegionLayout {
  int rank = 0;
  // The command ring: never full, however many of the send rings' slots are under way.
  uint64_t commands_offset = 0;
  uint32_t num_commands = 0;  // a power of two
  // Our rows for our own domain.
  RingLayout own_header, own_meta, own_rows;
  // Our rows for another domain, by domain (own domain: unused).
  std::vector<RingLayout> header_send, meta_send, rows_send, tail_send;
  // Other ranks' rows for our domain, where we are the rail. In order of `incoming`.
  std::vector<int> incoming;  // source ranks, in turn from the one after us, so that rails serve different ones first
  std::vector<RingLayout> header_landing, meta_landing, rows_landing, tail_landing;
  // Partial sums. pieces[0]: of our own rows; pieces[1 + i]: of the rows of incoming[i]. Inner index: the member that
  // writes.
  std::vector<std::vector<RingLayout>> pieces;
  // Sums that we relay to incoming[i], and sums that the other domains return to us.
  std::vector<RingLayout> return_send;  // by incoming
  std::vector<RingLayout> return_landing;  // by domain (own domain: unused)
  // Of low latency, as above: to each domain, and of incoming[i]. On the host routing travels with the rows.
  struct Slots {
    std::vector<RingLayout> routing_send, rows_send, weights_send, sums_landing;
    std::vector<RingLayout> routing_landing, rows_landing, weights_landing, sums_send;
    RingLayout own_rows, own_weights;
    std::vector<std::vector<RingLayout>> pieces;
  } slots;
  // Of a device layout, 0 on the host. The board: what a GPU reads instead of the stamps of many slots. Flag per
  // channel in the order of Channels.in, then Channels.out; an incoming one says how many chunks have arrived such that
  // none before them is missing, an outgoing one likewise how many are flushed. Writer: the rank's proxy, after the
  // stamps; readers: GPUs of the domain; scope: system; never reset.
  uint64_t board_offset = 0;
  // Flag per slot of a ring, by EventRing: events.h. Writer: the rank's proxy, after the board; readers and scope as
  // above; a slot is written once a lap.
  struct Events {
    uint64_t offset = 0;
    uint32_t capacity = 0;  // a power of two; 0: of no channel
  };
  std::array<Events, kNumEventRings> events;
  // Flag: number of operations that have ended. Writer: the rank's kernels; reader: its proxy, which stays awake while
  // more were launched.
  uint64_t ended_offset = 0;
  // RankVotes of this rank, then of every rank; 0: there are none. Writer: the rank's kernels or worker, then its
  // proxy; readers: the proxy, then those, and on the host the domain; scope: system; flags are never reset.
  uint64_t votes_offset = 0;
  uint64_t device_bytes = 0;  // of the rings' slots in the device region
  uint64_t total_bytes = 0;  // of the region, in host memory
  // The same bytes by purpose, for memory_plan(); their sum is total_bytes.
  std::vector<std::pair<std::string, uint64_t>> entries;
};

RegionLayout make_region_layout(const Topology& topo, const RingParams& rings, int rank);
// Of another rank of the domain of `own`'s rank.
RegionLayout make_member_layout(const Topology& topo, const RingParams& rings, const RegionLayout& own, int member);
// Control page, board, events and command ring in the region, and only the rings that a transport carries. No meta
// rings: the packet in a header ring has it all, chunk epoch - 1 of it for each operation.
RegionLayout make_device_layout(const Topology& topo, const DeviceRings& rings, int rank);
// The most of any rank of domains of a size. Every rank there reserves as much, so later parts have equal offsets.
uint64_t device_ring_bytes(const Topology& topo, const DeviceRings& rings, int size);

// Chooses slot sizes and the number of slots so that the largest region of any rank, and what is allocated beside
// it, fit `budget_bytes`.
struct MemoryNeeds {
  uint32_t num_experts = 0;
  uint64_t least_row_bytes = 0;  // the widest wire row of this buffer
  uint64_t budget_bytes = 0;
  uint64_t chunk_bytes = 0;  // 0: chosen
  uint32_t window_chunks = 0;  // 0: chosen
  uint64_t beside_bytes = 0;  // allocated outside the region, by the transport
  RingParams::Slots slots = {};
};
RingParams choose_rings(const Topology& topo, const MemoryNeeds& needs);
// The least budget that choose_rings accepts: on every ring of the busiest rank as many slots of as many bytes as needs
// say, else two slots of one row with all its pairs.
uint64_t least_budget_bytes(const Topology& topo, const MemoryNeeds& needs);

// ---- channels: rings that a transport carries -----------------------------------------------------------------------
struct OutChannel {
  RingLayout send;  // in our region
  int peer = -1;
  uint32_t peer_channel = 0;  // index of the peer's InChannel
  uint64_t remote_slots_offset = 0;  // in the peer's region
  // Slots there. A ring of tails has more here: a kernel hands over whole packets, and waits for nobody who reads.
  uint32_t remote_slots = 0;
  bool credited = true;  // headers need none: see kHeaderSlots
};
struct InChannel {
  RingLayout landing;  // in our region
  int peer = -1;
  uint32_t peer_channel = 0;  // index of the peer's OutChannel, named by our credits
  bool credited = true;
};
struct Channels {
  // A device layout has no meta channels.
  // By other domain: header, meta, rows, tail, slots; then by incoming: return, slot sums.
  std::vector<OutChannel> out;
  // By incoming: header, meta, rows, tail, slots; then by other domain: return, slot sums.
  std::vector<InChannel> in;
  // Index of the channel that starts in `ring`; UINT32_MAX when the ring is no send ring.
  uint32_t out_of(const RingLayout& ring) const;
  // The most that send rings share.
  uint64_t shared_bytes() const;
  // Of the channels of a ring, in order of their numbers there: where their words are on the board.
  std::vector<uint32_t> board_of(EventRing ring) const;
};
// Of a rank; without the peers' numbers and offsets. The second throws as those below.
Channels list_channels(const Topology& topo, const RegionLayout& layout);
Channels checked_channels(const Topology& topo, const RegionLayout& layout);
// Both throw UsageFailure(kConfig) for more channels than an immediate can name; choose_rings() does, too.
Channels make_channels(const Topology& topo, const RingParams& rings, int rank);
Channels make_device_channels(const Topology& topo, const DeviceRings& rings, int rank);
// Throws if that throws for any rank.
void check_channels(const Topology& topo, const DeviceRings& rings);

}  // namespace uccl_ep
