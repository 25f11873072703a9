// Packed words at the limits of their fields, and the signature of a call, field by field.
#include "backend/gpu/words.h"

#include <random>
#include <vector>

#include "backend/plan.h"
#include "block_rows.h"
#include "claims.h"
#include "proxy/post.h"
#include "queue/command.h"

using namespace uccl_ep;
using gpu::Addend;
using gpu::BlockRows;
using gpu::FoldTag;
using gpu::RelayTag;

namespace {

// Together they are the whole word, and no bit is of two.
template <typename... Fields>
constexpr bool fill_a_word() {
  using Word = std::common_type_t<typename Fields::Word...>;
  return (Fields::kMask ^ ...) == static_cast<Word>(~Word{0}) && (Fields::kMask | ...) == static_cast<Word>(~Word{0});
}
template <typename Field>
bool keeps_its_limits() {
  return Field::get(Field::put(Field::kMost)) == Field::kMost && Field::get(Field::put(1)) == 1 &&
         Field::put(Field::kMost) == Field::kMask && Field::fits(Field::kMost) &&
         !Field::fits(uint64_t{Field::kMost} + 1);
}

CLAIM("the fields of a word fill it, and each holds what it says") {
  static_assert(fill_a_word<ImmSerial, ImmChannel, ImmKind>());
  static_assert(fill_a_word<CookieSlot, CookieIndex, CookieKind>());
  static_assert(fill_a_word<Addend::Row, Addend::From, Addend::Returned>());
  static_assert(fill_a_word<FoldTag::Counter, FoldTag::Hurried, FoldTag::InRing, FoldTag::Part>());
  static_assert(fill_a_word<RelayTag::TokenBlock, RelayTag::Stream, RelayTag::Chunk>());
  // Negative control: a gap, and a bit of two.
  static_assert(!fill_a_word<RelayTag::TokenBlock, RelayTag::Chunk>());
  static_assert(!fill_a_word<RelayTag::TokenBlock, RelayTag::Stream, RelayTag::Chunk, BitField<uint32_t, 0, 1>>());
  EXPECT(keeps_its_limits<ImmSerial>() && keeps_its_limits<ImmChannel>() && keeps_its_limits<ImmKind>());
  EXPECT(keeps_its_limits<CommandBytes>() && keeps_its_limits<CommandChannel>() && keeps_its_limits<CommandSerial>() &&
         keeps_its_limits<CommandUnit>());
  EXPECT(keeps_its_limits<CookieSlot>() && keeps_its_limits<CookieIndex>() && keeps_its_limits<CookieKind>());
}

CLAIM("an addend survives at the limits of its fields, and a piece is never a returned sum") {
  for (uint32_t piece : {0u, 1u, gpu::kMaxTokens, gpu::kMaxTokens * gpu::kMaxMembers - 1}) {
    EXPECT(!Addend::of_piece(piece).is_returned());
    EXPECT_EQ(Addend::of_piece(piece).piece(), piece);
  }
  for (uint32_t domain : {0u, 1u, gpu::kMaxGpuRanks - 1, Addend::From::kMost})
    for (uint32_t row : {0u, 1u, gpu::kMaxTokens - 1}) {
      const Addend addend = Addend::of_domain(domain, row);
      EXPECT(addend.is_returned());
      EXPECT_EQ(addend.domain(), domain);
      EXPECT_EQ(addend.row(), row);
    }
  // Negative control: one row more would be of another domain.
  EXPECT_EQ(Addend::of_domain(2, gpu::kMaxTokens).row(), 0u);
}

// What an array says of token blocks with so many rows each: of all of them, whether every number is right.
bool says(const std::vector<uint32_t>& rows, uint32_t first) {
  const auto blocks = static_cast<uint32_t>(rows.size());
  std::vector<BlockRows> array(BlockRows::groups(blocks), BlockRows{0, {~0u, ~0u}});  // what nobody wrote is not read
  std::vector<uint32_t> before(1, first), owner;  // the token block of each row
  for (uint32_t block = 0; block < blocks; ++block) {
    before.push_back(before.back() + rows[block]);
    owner.insert(owner.end(), rows[block], block);
  }
  write_blocks(array.data(), blocks, [&](uint32_t block) { return before[block]; });
  bool good = true;
  for (uint32_t block = 0; block <= blocks; ++block)
    good &= BlockRows::rows_before(array.data(), block) == before[block];
  for (uint32_t block = 0; block < blocks; ++block) good &= BlockRows::rows(array.data(), block) == rows[block];
  for (uint32_t i = 0; i < owner.size(); ++i) {
    const uint32_t group = owner[i] / BlockRows::kBlocks;
    good &= group * BlockRows::kBlocks + array[group].block_of(first + i) == owner[i];
  }
  return good;
}

CLAIM("rows by token block are told as they were put, up to the most that a rank has") {
  std::mt19937 random(1);
  for (uint32_t blocks : {0u, 1u, 7u, 8u, 9u, 40u, gpu::kMaxTokens / gpu::kTokenBlock}) {
    std::vector<uint32_t> rows(blocks, gpu::kTokenBlock);
    EXPECT(says(rows, 0));
    for (uint32_t& number : rows) number = random() % 3 == 0 ? 0 : random() % (gpu::kTokenBlock + 1);
    EXPECT(says(rows, 0));
    EXPECT(says(rows, 1000));
  }
  // Negative control: more rows than a byte holds.
  EXPECT(!says({256, 1}, 0));
}

CLAIM("a fold's tag survives at the limits of its fields, and so does the box that it is put into") {
  for (uint32_t counter : {0u, 1u, FoldTag::Counter::kMost}) {
    for (bool hurried : {false, true})
      for (bool is_part : {false, true}) {
        const FoldTag tag = FoldTag::of_token_block(counter, hurried).as_part(is_part);
        EXPECT_EQ(tag.counter(), counter);
        EXPECT(tag.is_hurried() == hurried && tag.is_part() == is_part && !tag.is_in_ring());
        EXPECT(tag.word + 1 != 0);  // an empty box
        EXPECT_EQ(FoldTag{tag.word + 1 - 1}.word, tag.word);
      }
    const FoldTag tag = FoldTag::of_chunk(counter);
    EXPECT_EQ(tag.counter(), counter);
    EXPECT(tag.is_in_ring() && !tag.is_hurried() && !tag.is_part());
  }
  // Negative control: a counter beyond the limit says something else.
  EXPECT(FoldTag::of_token_block(FoldTag::Counter::kMost + 1, false).is_hurried());
}

CLAIM("a relay's tag survives at the limits of its fields, and none is a rehearsal's") {
  for (uint32_t chunk : {0u, 1u, gpu::kMaxRelayedChunks - 1})
    for (uint32_t stream : {1u, gpu::kMaxGpuRanks - 1})
      for (uint32_t token_block : {0u, 1u, gpu::kMaxTokens / gpu::kTokenBlock - 1}) {
        const RelayTag tag = RelayTag::of(chunk, stream, token_block);
        EXPECT_EQ(tag.chunk(), chunk);
        EXPECT_EQ(tag.stream(), stream);
        EXPECT_EQ(tag.token_block(), token_block);
        EXPECT_EQ(tag.awaited(), RelayTag::of(0, stream, token_block).word);
        EXPECT(tag.word != UINT32_MAX && tag.awaited() != UINT32_MAX);
      }
  // Negative control: one token block more would be of another stream.
  EXPECT_EQ(RelayTag::of(0, 2, RelayTag::TokenBlock::kMost + 1).stream(), 3u);
}

// Calls look(name, signature) with signatures that differ from `from` in the field of that name.
template <typename Look>
void for_each_field(const OpSignature& from, Look look) {
  std::apply(
      [&](const auto&... field) {
        const auto change = [&](const auto& one) {
          OpSignature changed = from;
          using Value = std::remove_reference_t<decltype(changed.*one.member)>;
          changed.*one.member = static_cast<Value>(static_cast<uint64_t>(from.*one.member) + 1);
          look(std::string(one.name), changed);
        };
        (change(field), ...);
      },
      kFields<OpSignature>);
}

CLAIM("signatures that differ in one field differ, and the error names that field and no other") {
  OpSignature usual{};
  usual.kind = OpKind::kDispatch;
  usual.dtype = usual.wire = Dtype::kBf16;
  usual.hidden = 128;
  size_t fields = 0;
  for_each_field(usual, [&](const std::string& name, const OpSignature& other) {
    EXPECT(other != usual && usual != other);
    EXPECT(differences(usual, other) == name);
    const std::string text = describe_mismatch(7, {0, usual, 0}, {1, other, 0}, "");
    EXPECT(text.find("(different: " + name + ")") != std::string::npos);
    ++fields;
  });
  EXPECT_EQ(fields, std::tuple_size_v<std::remove_cvref_t<decltype(kFields<OpSignature>)>>);
  // Negative control: equal ones differ in nothing.
  const OpSignature same = usual;
  EXPECT(same == usual && differences(usual, same).empty());
}

struct Forgetful {
  uint32_t listed, forgotten;
};

}  // namespace

template <>
inline constexpr auto uccl_ep::kFields<Forgetful> = std::make_tuple(UCCL_EP_FIELD(Forgetful, listed));
static_assert(!uccl_ep::all_listed<Forgetful>() && uccl_ep::num_members<Forgetful>() == 2);

int main(int argc, char** argv) { return claims::main(argc, argv); }
