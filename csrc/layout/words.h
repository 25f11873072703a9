// Packed words: fields of bits, each above the one before, so that none overlap. Every word has an encoder and a
// decoder, and its fields say what they hold at most; tests/native/words_claims.cc tries their limits.
// Here: the immediate. Others: queue/command.h, proxy/post.h, backend/gpu/words.h.
#pragma once

#include <cstdint>

namespace uccl_ep {

// Bits kFirst to kFirst + kBits - 1 of a word.
template <typename Unsigned, uint32_t kFirst, uint32_t kBits>
struct BitField {
  using Word = Unsigned;
  static constexpr uint32_t kEnd = kFirst + kBits;
  static_assert(kBits > 0 && kEnd <= 8 * sizeof(Word), "the field leaves its word");
  static constexpr Word kMost = static_cast<Word>(~Word{0}) >> (8 * sizeof(Word) - kBits);
  static constexpr Word kMask = kMost << kFirst;

  // Larger values would overwrite the next field: see fits().
  static constexpr Word put(Word value) { return value << kFirst; }
  static constexpr Word get(Word word) { return word >> kFirst & kMost; }
  static constexpr bool fits(uint64_t value) { return value <= kMost; }
};
template <typename Below, uint32_t kBits>
using BitsAbove = BitField<typename Below::Word, Below::kEnd, kBits>;

// ---- immediate ------------------------------------------------------------------------------------------------------
// type 2 bits | channel 13 bits | serial 17 bits.
// data:    channel = the receiver's incoming channel, serial = number of the chunk on that channel since creation
// credit:  channel = the receiver's outgoing channel, serial = number of chunks that its reader has consumed
// probe: channel = 0, serial = sender's rank; it only shows that the connection works
// A serial never restarts, so an immediate of an earlier epoch is an old serial. A ring has < 2^15 slots. A
// chunk is posted only when the one a ring before it was consumed. So two live serials of a channel differ by < 2^16.
// 17 bits tell them apart: a wrapped serial cannot be mistaken. In full, for data (w: the slots of the ring, s: the
// serial of an immediate, e: the highest serial that arrived, + 1):
//   s arrives for the first time: what is w before s was consumed, so e > s - w. What is w before e - 1 was consumed as
//   well, and s was not, so s > e - 1 - w. Together |s - e| <= w < 2^15.
//   s is reported again: by the transport's contract before 2^16 serials have gone by, so e - s < 2^16.
// widen_serial() is exact for -2^16 <= s - e < 2^16 (a claim tries all of them). A repeat finds its slot's stamp beyond
// s, whatever was put there since. Credits are counts of one channel that differ from the last known one by
// less: the lander holds a credit back while one of 2^15 before it is in flight.
enum class ImmType : uint32_t { kData = 1, kCredit = 2, kProbe = 3 };

constexpr uint32_t kImmSerialBits = 17;
using ImmSerial = BitField<uint32_t, 0, kImmSerialBits>;
using ImmChannel = BitsAbove<ImmSerial, 13>;
using ImmKind = BitsAbove<ImmChannel, 2>;
static_assert(ImmKind::kEnd == 32);
constexpr uint32_t kMaxChannels = ImmChannel::kMost + 1;
constexpr uint32_t kMaxRingSlots = 1u << 15;
constexpr uint32_t kMaxRanks = ImmSerial::kMost + 1;
constexpr int64_t kImmSerialReach = int64_t{1} << (kImmSerialBits - 1);  // of widen_serial(), to either side
static_assert(ImmKind::fits(static_cast<uint32_t>(ImmType::kProbe)));
static_assert(2 * int64_t{kMaxRingSlots} <= kImmSerialReach, "a wrapped serial could be mistaken");

struct Imm {
  ImmType type;
  uint32_t channel;
  uint32_t serial;  // low bits
};

constexpr uint32_t encode_imm(ImmType type, uint32_t channel, uint64_t serial) {
  return ImmKind::put(static_cast<uint32_t>(type)) | ImmChannel::put(channel) |
         ImmSerial::put(static_cast<uint32_t>(serial & ImmSerial::kMost));
}
constexpr Imm decode_imm(uint32_t imm) {
  return {static_cast<ImmType>(ImmKind::get(imm)), ImmChannel::get(imm), ImmSerial::get(imm)};
}
// The full serial nearest to `near` whose low bits are `low`.
constexpr uint64_t widen_serial(uint32_t low, uint64_t near) {
  constexpr int64_t span = int64_t{1} << kImmSerialBits;
  int64_t diff = (static_cast<int64_t>(low) - static_cast<int64_t>(near & (span - 1)) + span) % span;
  if (diff >= span / 2) diff -= span;
  if (diff < 0 && near < static_cast<uint64_t>(-diff)) diff += span;
  return near + static_cast<uint64_t>(diff);
}

}  // namespace uccl_ep
