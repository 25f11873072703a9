// What a proxy makes of immediates: of those that its peers send, and of those that nobody can have sent.
#include "lone_proxy.h"

namespace {

using namespace fuzz;

constexpr int kMostActs = 256;

// A number close to the one that comes next: most other ones are refused at once.
uint64_t near(uint64_t next, Bytes& input) { return next + static_cast<uint64_t>(int64_t{input.take<int8_t>()}); }

void arrive_data(LoneProxy& rank, Bytes& input) {
  const size_t channel = input.take<uint8_t>() % rank.at.channels.in.size();
  const uint32_t immediate =
      encode_imm(ImmType::kData, static_cast<uint32_t>(channel), near(rank.arrived(channel), input));
  rank.wire.arrive(rank.at.channels.in[channel].peer, immediate);
}

void arrive_credit(LoneProxy& rank, Bytes& input) {
  const size_t channel = input.take<uint8_t>() % rank.at.channels.out.size();
  const uint32_t immediate = encode_imm(ImmType::kCredit, static_cast<uint32_t>(channel), near(0, input));
  rank.wire.arrive(rank.at.channels.out[channel].peer, immediate);
}

void act(LoneProxy& rank, Bytes& input) {
  switch (input.take<uint8_t>() % 8) {
    case 0: {
      const int peer = static_cast<int>(input.take<uint8_t>() % 8) - 1;
      return rank.wire.arrive(peer, input.take<uint32_t>());
    }
    case 1:
      return arrive_data(rank, input);
    case 2:
      return arrive_credit(rank, input);
    case 3: {
      const uint32_t out = input.take<uint8_t>() % static_cast<uint32_t>(rank.at.channels.out.size());
      rank.send(out, input.take<uint16_t>());
      return;
    }
    case 4: {
      const size_t which = input.take<uint8_t>();
      return rank.wire.complete(which, input.take<uint8_t>() != 255);
    }
    case 5: {
      const size_t channel = input.take<uint8_t>() % rank.at.channels.in.size();
      return rank.read(channel, input.take<uint8_t>());
    }
    default:
      rank.wire.refuses = input.take<uint8_t>() % 2 != 0;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz_accepted = false;
  Bytes input(data, size);
  LoneProxy rank(input.take<uint8_t>() % 2 != 0);
  for (int i = 0; i < kMostActs && !input.empty(); ++i) {
    act(rank, input);
    if (!rank.step()) return 0;
  }
  fuzz_accepted = rank.num_stamps() != 0;
  return 0;
}
