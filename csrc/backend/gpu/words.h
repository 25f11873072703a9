// Packed words of the kernels (see layout/words.h), and why no field of theirs overflows.
#pragma once

#include "backend/gpu/layout.h"
#include "layout/words.h"

namespace uccl_ep::gpu {

// An addend of a token's sum: a piece of our domain, by its number, or a sum that another domain returns.
struct Addend {
  using Row = BitField<uint32_t, 0, 16>;  // of our stream to the domain
  using From = BitsAbove<Row, 15>;        // the domain
  using Returned = BitsAbove<From, 1>;
  static_assert(Row::fits(kMaxTokens - 1) && From::fits(kMaxGpuRanks - 1));
  static_assert(uint64_t{kMaxTokens} * kMaxMembers <= Returned::kMask, "a piece could be taken for a returned sum");

  uint32_t word;

  static constexpr Addend of_piece(uint32_t number) { return {number}; }
  static constexpr Addend of_domain(uint32_t domain, uint32_t row) {
    return {Returned::kMask | From::put(domain) | Row::put(row)};
  }
  constexpr bool is_returned() const { return (word & Returned::kMask) != 0; }
  constexpr uint32_t piece() const { return word; }
  constexpr uint32_t domain() const { return From::get(word); }
  constexpr uint32_t row() const { return Row::get(word); }
};
static_assert(sizeof(Addend) == sizeof(uint32_t));

// The most that a token block of a rank has: pieces in any domain, and rows of a stream to another domain. And the
// pairs of a rank, in units.
struct BlockMost {
  using Pieces = BitField<uint32_t, 0, 13>;
  using Rows = BitsAbove<Pieces, 6>;
  using Pairs = BitsAbove<Rows, 13>;
  static constexpr uint32_t kPairUnit = 1024;
  static_assert(Pieces::fits(uint64_t{kTokenBlock} * kMaxMembers) && Rows::fits(kTokenBlock));
  static_assert(Pairs::fits(uint64_t{kMaxTokens} * kPairsPerToken / kPairUnit));

  uint32_t word = 0;

  static constexpr BlockMost of(uint32_t pieces, uint32_t rows) { return {Pieces::put(pieces) | Rows::put(rows)}; }
  static constexpr BlockMost of_pairs(uint32_t pairs) { return {Pairs::put((pairs + kPairUnit - 1) / kPairUnit)}; }
  constexpr uint32_t pieces() const { return Pieces::get(word); }
  constexpr uint32_t rows() const { return Rows::get(word); }
  constexpr uint32_t pairs() const { return Pairs::get(word) * kPairUnit; }  // at least so many: whole units
  constexpr BlockMost with(BlockMost other) const {
    const uint32_t units = Pairs::get(word), its_units = Pairs::get(other.word);
    const uint32_t most_pieces = pieces() < other.pieces() ? other.pieces() : pieces();
    const uint32_t most_rows = rows() < other.rows() ? other.rows() : rows();
    return {of(most_pieces, most_rows).word | Pairs::put(units < its_units ? its_units : units)};
  }
};

// Rows of a source, or of a stream, in kBlocks neighbouring token blocks, so that an array of these says how many rows
// come before a token block.
struct BlockRows {
  static constexpr uint32_t kBlocks = 8;
  static_assert((kBlocks - 1) * kTokenBlock < 256, "a sum of bytes does not fit a byte");

  uint32_t before = 0;       // rows of all earlier token blocks
  uint32_t counts[2] = {};   // of each, a byte

  // Elements of an array for so many token blocks. The last one also tells the total.
  static constexpr uint32_t groups(uint32_t token_blocks) { return token_blocks / kBlocks + 1; }
  // Of an array: the rows of a token block.
  static constexpr uint32_t rows(const BlockRows* array, uint32_t block) {
    return array[block / kBlocks].counts[block / 4 % 2] >> 8 * (block % 4) & 0xFF;
  }
  // Of an array: the rows of all token blocks before `block`.
  static constexpr uint32_t rows_before(const BlockRows* array, uint32_t block) {
    const BlockRows its = array[block / kBlocks];
    return its.before_number(block % kBlocks);
  }
  // The rows before the group's token block number `n`.
  constexpr uint32_t before_number(uint32_t n) const {
    const uint32_t lower = n < 4 ? counts[0] & ~(~0u << 8 * n) : counts[0];
    const uint32_t higher = n <= 4 ? 0 : counts[1] & ~(~0u << 8 * (n - 4));
    return before + sum_of_bytes(lower) + sum_of_bytes(higher);
  }

  // The number of the token block that has a row of the group.
  constexpr uint32_t block_of(uint32_t row) const {
    uint32_t n = 0, rest = row - before;
    for (uint32_t word : counts)
      for (uint32_t i = 0; i < 4; ++i, word >>= 8) {
        const uint32_t rows = word & 0xFF;
        if (rest < rows) return n;
        rest -= rows;
        ++n;
      }
    return n;
  }

 private:
  static constexpr uint32_t sum_of_bytes(uint32_t word) { return word * 0x01010101u >> 24; }
};
static_assert(sizeof(BlockRows) == 12 && alignof(BlockRows) == 4);

// Where a folded row is counted: for its token block at its source, or for its chunk of a ring.
struct FoldTag {
  using Counter = BitField<uint32_t, 0, 29>;
  using Hurried = BitsAbove<Counter, 1>;  // another domain waits for it: the warp that folds it tells, which is sooner
  using InRing = BitsAbove<Hurried, 1>;  // the counter is that of a chunk
  using Part = BitsAbove<InRing, 1>;  // of a part of the row
  static_assert(Counter::fits(uint64_t{kMaxGpuRanks} * (kMaxTokens / kTokenBlock)));
  static_assert(Counter::fits(uint64_t{kMaxGpuRanks + 1} * kMaxRingSlots));

  uint32_t word;

  static constexpr FoldTag of_token_block(uint32_t counter, bool hurried) {
    return {Counter::put(counter) | (hurried ? Hurried::kMask : 0)};
  }
  static constexpr FoldTag of_chunk(uint32_t counter) { return {InRing::kMask | Counter::put(counter)}; }
  constexpr FoldTag as_part(bool is_part) const { return {word | (is_part ? Part::kMask : 0)}; }
  constexpr uint32_t counter() const { return Counter::get(word); }
  constexpr bool is_hurried() const { return (word & Hurried::kMask) != 0; }
  constexpr bool is_in_ring() const { return (word & InRing::kMask) != 0; }
  constexpr bool is_part() const { return (word & Part::kMask) != 0; }
};

// The tag of a row that we relay: what its sum waits for, and the chunk that it goes into.
struct RelayTag {
  using TokenBlock = BitField<uint32_t, 0, 11>;
  using Stream = BitsAbove<TokenBlock, 11>;
  using Chunk = BitsAbove<Stream, 10>;  // of a window; make_layout() makes chunks large enough
  static_assert(TokenBlock::fits(kMaxTokens / kTokenBlock - 1) && Chunk::fits(kMaxRelayedChunks - 1));
  static_assert(kMaxGpuRanks - 1 <= Stream::kMost && kMaxRelayedChunks <= Chunk::kMost,
                "no tag is all ones, which is a rehearsal's");

  uint32_t word;

  static constexpr RelayTag of(uint32_t chunk, uint32_t stream, uint32_t token_block) {
    return {Chunk::put(chunk) | Stream::put(stream) | TokenBlock::put(token_block)};
  }
  // Stream and token block: what has to be there.
  constexpr uint32_t awaited() const { return word & (Stream::kMask | TokenBlock::kMask); }
  constexpr uint32_t token_block() const { return TokenBlock::get(word); }
  constexpr uint32_t stream() const { return Stream::get(word); }
  constexpr uint32_t chunk() const { return Chunk::get(word); }
};

// Where the row of a slot came from: a rank, and the place of the pair there.
struct SlotOrigin {
  using Place = BitField<uint32_t, 0, 20>;
  using Rank = BitsAbove<Place, 12>;
  static_assert(Rank::fits(kMaxGpuRanks - 1) && Place::fits(uint64_t{kMaxSlotTokens} * kPairsPerToken - 1));

  uint32_t word;

  static constexpr SlotOrigin of(uint32_t rank, uint32_t place) { return {Rank::put(rank) | Place::put(place)}; }
  constexpr uint32_t place() const { return Place::get(word); }
  constexpr uint32_t rank() const { return Rank::get(word); }
};

}  // namespace uccl_ep::gpu
