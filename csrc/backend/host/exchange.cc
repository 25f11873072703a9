#include <cstring>

#include "backend/host/step.h"

namespace uccl_ep::host {

StreamFormat stream_format(const Op& op) { return {op.wire_row().bytes, op.signature.with_weights != 0}; }

namespace {

// Routing chunk: for each row one word with its number of pairs, then their experts; a zero word ends a chunk that is
// not full. A row never straddles two chunks.
class ExchangeStep final : public HostStep {
 public:
  ExchangeStep(HostContext& context, Op& op) : HostStep(context, op), next_row_(op.plan->source.size(), 0) {
    header_sent_.assign(op.plan->source.size(), false);
  }

  bool advance() override {
    bool moved = false;
    for (size_t d = 0; d < next_row_.size(); ++d) {
      OutgoingPorts& ports = context_.outgoing[d];
      if (!header_sent_[d] && ports.header.free()) {
        send_header(ports.header, op_.plan->source[d], static_cast<uint32_t>(context_.topo.members[d].size()));
        header_sent_[d] = moved = true;
      }
      if (op_.makes_plan() && next_row_[d] < op_.plan->source[d].num_rows() && ports.meta.free()) {
        send_routing(ports.meta, op_.plan->source[d], next_row_[d]);
        moved = true;
      }
    }
    return moved;
  }

  bool done() const override { return blocked_domain() < 0; }

  WaitingOn waiting_on() const override {
    const int d = blocked_domain();
    if (d < 0) return {};
    const OutPort& port = header_sent_[d] ? context_.outgoing[d].meta : context_.outgoing[d].header;
    const int peer =
        d == context_.domain ? context_.members()[port.slowest_reader()] : context_.topo.rail(context_.rank, d);
    return {Step::kExchange,
            peer,
            static_cast<int64_t>(port.serial()),
            port.serial() + 1 - port.ring().num_slots,
            0,
            "to have read an earlier routing chunk"};
  }

  Step step() const override { return Step::kExchange; }

 private:
  int blocked_domain() const {
    for (size_t d = 0; d < next_row_.size(); ++d)
      if (!header_sent_[d] || (op_.makes_plan() && next_row_[d] < op_.plan->source[d].num_rows()))
        return static_cast<int>(d);
    return -1;
  }

  void send_header(OutPort& port, const SourceStream& stream, uint32_t num_members) {
    OpHeader header{};
    header.epoch = op_.epoch;
    header.signature = op_.signature;
    header.num_tokens = op_.plan->num_tokens;
    header.num_refused = static_cast<uint32_t>(op_.num_refused);
    header.num_rows = stream.num_rows();
    header.num_pairs = stream.pair_expert.size();
    std::memcpy(port.slot(), &header, sizeof(header));
    uint64_t bytes = sizeof(header);
    if (op_.makes_plan()) {
      bytes = port.slot_bytes();
      std::memset(port.slot() + sizeof(header), 0, bytes - sizeof(header));
      count(stream, reinterpret_cast<uint32_t*>(port.slot() + sizeof(header)), num_members);
    }
    port.publish(bytes);
  }

  // Pairs by expert, rows by member; a row's pairs with one member are consecutive.
  void count(const SourceStream& stream, uint32_t* counts, uint32_t num_members) const {
    uint32_t* const rows = counts + num_members * context_.experts_per_rank;
    for (uint32_t row = 0; row < stream.num_rows(); ++row) {
      uint32_t last = num_members;
      for (uint32_t pair = stream.row_pair_begin[row]; pair < stream.row_pair_begin[row + 1]; ++pair) {
        const uint32_t expert = stream.pair_expert[pair];
        const uint32_t member = expert / context_.experts_per_rank;
        ++counts[expert];
        rows[member] += member != last;
        last = member;
      }
    }
  }

  void send_routing(OutPort& port, const SourceStream& stream, uint32_t& row) {
    uint32_t* word = reinterpret_cast<uint32_t*>(port.slot());
    const uint32_t* const begin = word;
    const uint64_t room = port.slot_bytes() / sizeof(uint32_t);
    for (; row < stream.num_rows(); ++row) {
      const uint32_t first = stream.row_pair_begin[row];
      const uint32_t pairs = stream.row_pair_begin[row + 1] - first;
      if (static_cast<uint64_t>(word - begin) + 1 + pairs > room) break;
      *word++ = pairs;
      std::memcpy(word, stream.pair_expert.data() + first, pairs * sizeof(uint32_t));
      word += pairs;
    }
    if (static_cast<uint64_t>(word - begin) < room)
      *word++ = 0;  // no row has no pairs: the end, whatever the slot held before
    port.publish(static_cast<uint64_t>(word - begin) * sizeof(uint32_t));
  }

  std::vector<bool> header_sent_;   // [domain]
  std::vector<uint32_t> next_row_;  // [domain]
};

}  // namespace

std::unique_ptr<HostStep> make_exchange(HostContext& context, Op& op) {
  return std::make_unique<ExchangeStep>(context, op);
}

}  // namespace uccl_ep::host
