// What a proxy makes of datagrams: of those of its peers, of those that have come before, and of those that nobody in
// its group can have sent.
#include "lone_proxy.h"

namespace {

using namespace fuzz;

constexpr int kMostActs = 64;

// What the proxy has to know.
struct Known {
  uint64_t newest[5][kNumMessageKinds] = {};  // serials of messages that it has taken
  uint64_t num_taken = 0;
  bool error = false;  // the first is its own, or a peer's
  bool owed[5] = {};  // its own error, to that rank

  void take(const DatagramHeader& header) {
    if (header.nonce != Wire::kNonce || header.receiver != 0 || header.sender < 2 || header.sender >= 5 ||
        header.kind >= kNumMessageKinds || header.acknowledges > 1 || header.serial == 0)
      return;
    const MessageKind kind = static_cast<MessageKind>(header.kind);
    if (header.acknowledges != 0) {
      if (kind == MessageKind::kError && header.serial == 1) owed[header.sender] = false;
    } else if (header.serial > newest[header.sender][header.kind]) {
      newest[header.sender][header.kind] = header.serial;
      ++num_taken;
      error |= kind == MessageKind::kError;
    }
  }
  void find_error() {  // who said bye still waits for this rank
    for (int rank = 2; rank < 5 && !error; ++rank) owed[rank] = true;
    error = true;
  }
  bool owes() const { return owed[2] || owed[3] || owed[4]; }
};

void arrive_raw(LoneProxy& rank, Bytes& input) {
  std::vector<uint8_t> bytes(1 + input.take<uint16_t>() % kMaxDatagramBytes);
  input.copy(bytes.data(), bytes.size());
  rank.wire.mail.push_back(bytes);
}

// One that has its form, but for what the input changes.
void arrive(LoneProxy& rank, Known& known, Bytes& input) {
  const uint8_t wrong = input.take<uint8_t>();
  DatagramHeader header;
  header.nonce = wrong == 1 ? input.take<uint64_t>() : Wire::kNonce;
  header.receiver = wrong == 2 ? input.take<uint32_t>() : 0;
  header.sender = wrong == 3 ? input.take<uint32_t>() : 2 + input.take<uint8_t>() % 3;
  header.kind = wrong == 4 ? input.take<uint32_t>() : input.take<uint8_t>() % kNumMessageKinds;
  header.acknowledges = wrong == 5 ? input.take<uint32_t>() : input.take<uint8_t>() % 2;
  header.serial = input.take<uint8_t>() % 4;
  uint8_t payload[sizeof(ErrorRecord)] = {};
  const bool has_payload = header.kind < kNumMessageKinds && header.acknowledges == 0;
  const uint32_t num_bytes = has_payload ? payload_bytes(static_cast<MessageKind>(header.kind)) : 0;
  input.copy(payload, num_bytes);
  const Datagram datagram = encode_datagram(header, std::span(payload).first(num_bytes));
  rank.wire.mail.emplace_back(datagram.bytes().begin(), datagram.bytes().end());
  known.take(header);
}

void act(LoneProxy& rank, Known& known, Bytes& input) {
  switch (input.take<uint8_t>() % 8) {
    case 0:
      return arrive_raw(rank, input);
    case 1:
      return rank.leave();
    case 2:
      known.find_error();
      return rank.find_error();
    case 3:
      rank.wire.refuses = input.take<uint8_t>() % 2 != 0;
      return;
    default:
      return arrive(rank, known, input);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz_accepted = false;
  Known known;
  Bytes input(data, size);
  LoneProxy rank(input.take<uint8_t>() % 2 != 0);
  uint64_t num_arrived = 0;
  for (int i = 0; i < kMostActs && !input.empty(); ++i) {
    const size_t before = rank.wire.mail.size();
    act(rank, known, input);
    num_arrived += rank.wire.mail.size() - before;
    if (!rank.step()) return 0;
    must(rank.wire.mail.empty(), "a datagram is taken in the pass that finds it");
    const MessageStats stats = rank.messages();
    must(stats.strangers + stats.duplicates + stats.acknowledged + stats.taken == num_arrived,
         "a datagram is counted once");
    must(stats.taken == known.num_taken, "a message is taken once");
    must(rank.error_delivered() == !known.owes(), "an error is delivered when all have acknowledged it");
  }
  fuzz_accepted = known.num_taken != 0 && rank.wire.num_acknowledged != 0;
  return 0;
}
