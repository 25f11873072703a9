// Command words: torn ones are never taken, and random ones lead to no write that a producer cannot have meant.
#include "lone_proxy.h"

namespace {

using namespace fuzz;

constexpr int kMostActs = 256;

// A producer whose words become visible in any order.
class Torn {
 public:
  explicit Torn(uint32_t capacity) : ring_(memory_, capacity) {}

  void start(Bytes& input) {
    const uint64_t taken = shared().taken.flag.read();
    if (pushed_.size() - taken == ring_.capacity()) return;
    Command command{input.take<uint8_t>(), input.take<uint16_t>(), input.take<uint32_t>()};
    command.unit = static_cast<uint32_t>(command.serial >> 8);
    const uint64_t index = pushed_.size();
    pushed_.push_back({command, 0});
    hidden_.push_back({index, 0});
    hidden_.push_back({index, 1});
  }
  void show(size_t which) {
    if (hidden_.empty()) return;
    const auto its = hidden_.begin() + static_cast<ptrdiff_t>(which % hidden_.size());
    Pushed& pushed = pushed_[its->index];
    const CommandWords words = encode_command(pushed.command, (its->index & ring_.capacity()) == 0);
    shared().slots()[its->index % ring_.capacity()].word[its->half].store(words.word[its->half]);
    ++pushed.num_visible;
    hidden_.erase(its);
  }
  void pop() {
    Command seen;
    if (!ring_.pop(seen)) return;
    must(num_taken_ < pushed_.size(), "nothing is taken that was not pushed");
    const Pushed& pushed = pushed_[num_taken_++];
    must(pushed.num_visible == 2, "a torn command is not taken");
    must(seen.channel == pushed.command.channel && seen.num_bytes == pushed.command.num_bytes &&
             seen.serial == pushed.command.serial && seen.unit == pushed.command.unit,
         "a command comes as it was pushed");
  }
  uint64_t num_taken() const { return num_taken_; }

 private:
  struct Pushed {
    Command command;
    int num_visible;  // words
  };
  struct Hidden {
    uint64_t index;
    int half;
  };
  CommandRingMemory& shared() { return *reinterpret_cast<CommandRingMemory*>(memory_); }

  static constexpr uint32_t kMostCommands = 8;
  alignas(kLineBytes) uint8_t memory_[kLineBytes + kMostCommands * kCommandBytes] = {};
  CommandRing ring_;
  std::vector<Pushed> pushed_;
  std::vector<Hidden> hidden_;
  uint64_t num_taken_ = 0;
};

void feed_torn(Bytes& input) {
  Torn torn(1u << input.take<uint8_t>() % 4);
  for (int i = 0; i < kMostActs && !input.empty(); ++i) {
    const uint8_t act = input.take<uint8_t>();
    if (act % 4 == 0)
      torn.start(input);
    else if (act % 4 == 1)
      torn.pop();
    else
      torn.show(act / 4);
  }
  fuzz_accepted = torn.num_taken() != 0;
}

// A word of a command as a producer would write it, and as it would not.
void scribble(LoneProxy& rank, Bytes& input) {
  auto& ring = *reinterpret_cast<CommandRingMemory*>(rank.region() + rank.layout.commands_offset);
  const uint32_t slot = input.take<uint8_t>() % rank.layout.num_commands;
  ring.slots()[slot].word[input.take<uint8_t>() % 2].store(input.take<uint64_t>());
}

void feed_words(Bytes& input) {
  LoneProxy rank(input.take<uint8_t>() % 2 != 0);
  for (int i = 0; i < kMostActs && !input.empty(); ++i) {
    const uint8_t act = input.take<uint8_t>();
    if (act % 4 == 0)
      rank.send(act / 4 % static_cast<uint32_t>(rank.at.channels.out.size()), input.take<uint16_t>());
    else if (act % 4 == 1)
      rank.wire.complete(act / 4, true);
    else
      scribble(rank, input);
    if (act >= 128 && !rank.step()) return;
  }
  fuzz_accepted = rank.step() && !rank.wire.in_flight.empty();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz_accepted = false;
  Bytes input(data, size);
  input.take<uint8_t>() % 2 != 0 ? feed_torn(input) : feed_words(input);
  return 0;
}
