// What crosses between ranks: the 32-bit immediate, the header of an operation, the size of a row.
#pragma once

#include <bit>
#include <cstdint>

#include "common/error.h"
#include "common/units.h"

namespace uccl_ep {

// ---- immediate ------------------------------------------------------------------------------------------------------
// type 3 bits | channel 11 bits | serial 18 bits.
// data:    channel = the receiver's incoming channel, serial = number of the chunk on that channel since creation
// credit:  channel = the receiver's outgoing channel, serial = number of chunks that its reader has consumed
// heartbeat: channel = 1 if the sender's operation moved since its last heartbeat, else 0, and above that bit the lower
//   bits of the number of calls that it has refused; serial = sender's rank
// error, bye: channel = 0, serial = sender's rank
// A serial never restarts, so an immediate of an earlier epoch is an old serial. A ring has < 2^16 slots and a chunk
// is posted only when the one a ring before it was consumed, so two live serials of a channel differ by < 2^17 and
// 18 bits tell them apart: a wrapped serial cannot be mistaken. In full, for data (w: the slots of the ring, s: the
// serial of an immediate, e: the highest serial that arrived, + 1):
//   s arrives for the first time: what is w before s was consumed, so e > s - w. What is w before e - 1 was consumed as
//   well, and s was not, so s > e - 1 - w. Together |s - e| <= w < 2^16.
//   s is reported again: by the transport's contract before 2^17 serials have gone by, so e - s < 2^17.
// widen_serial() is exact for -2^17 <= s - e < 2^17 (a claim tries all of them), and a repeat finds its slot's stamp
// beyond s, whatever was put there since. Credits are counts of one channel that differ from the last known one by
// less: the lander holds a credit back while one of 2^16 before it is in flight.
enum class ImmType : uint32_t { kData = 1, kCredit = 2, kError = 3, kHeartbeat = 4, kBye = 5 };

constexpr uint32_t kImmSerialBits = 18;
constexpr uint32_t kImmChannelBits = 11;
constexpr uint32_t kMaxChannels = 1u << kImmChannelBits;
constexpr uint32_t kHeartbeatRefusals = kMaxChannels / 2;  // a heartbeat tells their number modulo this
constexpr uint32_t kMaxRingSlots = 1u << 16;
constexpr uint32_t kMaxRanks = 1u << kImmSerialBits;
constexpr uint32_t kImmTypeBits = 32 - kImmChannelBits - kImmSerialBits;
constexpr int64_t kImmSerialReach = int64_t{1} << (kImmSerialBits - 1);  // of widen_serial(), to either side
static_assert(static_cast<uint32_t>(ImmType::kBye) < 1u << kImmTypeBits);
static_assert(2 * int64_t{kMaxRingSlots} <= kImmSerialReach, "a wrapped serial could be mistaken");

struct Imm {
  ImmType type;
  uint32_t channel;
  uint32_t serial;  // low bits
};

constexpr uint32_t encode_imm(ImmType type, uint32_t channel, uint64_t serial) {
  return static_cast<uint32_t>(type) << (kImmChannelBits + kImmSerialBits) | channel << kImmSerialBits |
         static_cast<uint32_t>(serial & ((1u << kImmSerialBits) - 1));
}
constexpr Imm decode_imm(uint32_t imm) {
  return {static_cast<ImmType>(imm >> (kImmChannelBits + kImmSerialBits)), imm >> kImmSerialBits & (kMaxChannels - 1),
          imm & ((1u << kImmSerialBits) - 1)};
}
// The full serial nearest to `near` whose low bits are `low`.
constexpr uint64_t widen_serial(uint32_t low, uint64_t near) {
  constexpr int64_t span = int64_t{1} << kImmSerialBits;
  int64_t diff = (static_cast<int64_t>(low) - static_cast<int64_t>(near & (span - 1)) + span) % span;
  if (diff >= span / 2) diff -= span;
  if (diff < 0 && near < static_cast<uint64_t>(-diff)) diff += span;
  return near + static_cast<uint64_t>(diff);
}

// ---- operation header -----------------------------------------------------------------------------------------------
enum class OpKind : uint32_t { kDispatch = 1, kCombine = 2 };
enum class Dtype : uint32_t { kBf16 = 1, kFp32 = 2, kFp8 = 3 };
enum class PlanUse : uint32_t { kNew = 0, kCached = 1, kDiffers = 2 };

constexpr uint32_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : dtype == Dtype::kBf16 ? 2 : 1; }
inline const char* dtype_name(Dtype dtype) {
  return dtype == Dtype::kFp32 ? "fp32" : dtype == Dtype::kBf16 ? "bf16" : "fp8";
}

// What every rank must have called alike (contract 9). Compared field by field by every rank that reads it.
struct OpSignature {
  OpKind kind;
  Dtype dtype;  // of the tensors
  Dtype wire;  // of the rows between ranks
  PlanUse plan_use;
  uint32_t hidden;
  uint32_t with_weights;  // fp32 per pair: weights, of a combine their gradients
  uint32_t fp8_pow2;
  uint32_t expert_alignment;
  uint32_t compact_width;  // columns of a compact row's weights; 0: rows are expert-major
  uint32_t with_capacity;  // CUDA: the output has a size of its own, and the counts stay on the device
  uint64_t plan_id;  // epoch of the dispatch that made the plan; 0 for a new one

  bool operator==(const OpSignature&) const = default;
};

// Followed by counts, for a new plan: uint32_t pairs per expert of the destination domain (experts in order of member,
// then local index), then uint32_t rows per member of it.
// Writer: the source's worker (own domain) or the transport (other domains). Readers: all ranks of the destination
// domain.
struct OpHeader {
  uint64_t epoch;
  OpSignature signature;
  uint32_t num_tokens;  // of the source
  uint32_t num_refused;  // calls that the source refused before this one: compared as the signature is
  uint64_t num_rows;  // to the destination domain
  uint64_t num_pairs;  // to the destination domain
};
static_assert(sizeof(OpHeader) % 8 == 0);

// ---- command ring ---------------------------------------------------------------------------------------------------
constexpr uint64_t kCommandBytes = 16;  // after one line of bookkeeping; see queue/ring.h
// Commands that the consumer takes before it gives their slots back.
constexpr uint32_t command_batch(uint32_t capacity) { return capacity < 4 ? 1 : capacity / 4; }
// The least capacity that is never full to a producer with at most `most_pending` commands that have not been taken.
constexpr uint32_t command_capacity(uint32_t most_pending) {
  return std::bit_ceil(most_pending + most_pending / 3 + 1);
}

// ---- rows -----------------------------------------------------------------------------------------------------------
constexpr uint32_t kFp8Block = 128;

// One wire row. FP8: H codes, then the fp32 scales, padded to 16 bytes so that a row is one aligned bulk copy.
constexpr uint64_t wire_row_bytes(Dtype wire, uint64_t hidden) {
  if (wire == Dtype::kFp32) return hidden * 4;
  if (wire == Dtype::kBf16) return hidden * 2;
  return hidden + round_up(hidden / kFp8Block * 4, 16);
}

}  // namespace uccl_ep
