// A low-latency dispatch: a chunk for each domain has the routing of all our tokens, and the rows of those that have an
// expert there.
#include <cstring>
#include <numeric>

#include "backend/host/numerics.h"
#include "backend/host/slot_tokens.h"

namespace uccl_ep::host {
namespace {

std::vector<uint32_t> experts_of(const int64_t* topk_idx, uint64_t places) {
  std::vector<uint32_t> experts(places);
  for (uint64_t i = 0; i < places; ++i) experts[i] = topk_idx[i] < 0 ? kUnrouted : static_cast<uint32_t>(topk_idx[i]);
  return experts;
}

class SlotDispatch final : public SlotOperation {
 public:
  SlotDispatch(HostContext& context, const SlotCall& call, const LowLatencyDispatch& args)
      : SlotOperation(context, call),
        args_(args),
        experts_(experts_of(args.topk_idx, args.num_tokens * args.width)),
        shape_(row_shape(args.wire, args.hidden, 0)),
        num_slots_(context.incoming.size() * ports_.max_tokens) {
    if (args.phase == SlotPhase::kBoth) return;
    x_.assign(args.x, args.x + args.num_tokens * args.hidden * sizeof(uint16_t));
    args_.x = x_.data();
    if (args.weights == nullptr) return;
    weights_.assign(args.weights, args.weights + experts_.size());
    weights_.reserve(1);  // an address says that there are some
    args_.weights = weights_.data();
  }

  bool stage() override {
    if (staged_ || !all_free(ports_.rows)) return false;
    write_chunks();
    for (size_t d = 0; d < ports_.rows.size(); ++d)
      if (domain_lives(d)) ports_.rows[d].publish(ends_[d]);
    return staged_ = true;
  }
  bool staged() const override { return staged_; }
  bool serve() override { return false; }
  bool served() const override { return true; }
  WaitingOn waiting_on() override { return staged_ ? WaitingOn{} : waiting_for_slot(ports_.rows); }

  std::vector<WaitingOn> missing(const std::vector<bool>& gone) override {
    std::vector<WaitingOn> found;
    for (int src = 0; src < context_.topo.num_ranks; ++src)
      if (!gone[static_cast<size_t>(src)] && !enters(ports_.rows_of[static_cast<size_t>(src)], src))
        found.push_back(to_enter(src));
    return found;
  }

  void finish() override {
    std::vector<uint32_t> next(context_.experts_per_rank, 0);  // slot, by expert
    std::vector<uint32_t> begins;
    for (int src = 0; src < context_.topo.num_ranks; ++src) {
      begins = next;
      const uint64_t places = uint64_t{ports_.max_tokens} * args_.width, first = places * static_cast<uint64_t>(src);
      std::fill_n(args_.pairs + first, places, kUnrouted);
      if (lives(src)) place(src, next, first);
      for (size_t e = 0; e < next.size(); ++e)
        args_.ranges[e * context_.incoming.size() + static_cast<size_t>(src)] =
            static_cast<int64_t>(uint64_t{begins[e]} << 32 | (next[e] - begins[e]));
    }
    for (size_t e = 0; e < next.size(); ++e) {
      args_.counts[e] = static_cast<int32_t>(next[e]);
      if (args_.total_counts != nullptr) args_.total_counts[e] += args_.counts[e];
      context_.counters.rows_placed.add(next[e]);
    }
    for (int src = 0; src < context_.topo.num_ranks; ++src)
      if (lives(src)) ports_.rows_of[static_cast<size_t>(src)].release();
  }

  // No row is named.
  void spoil() const override {
    std::fill_n(args_.counts, context_.experts_per_rank, 0);
    std::fill_n(args_.ranges, context_.experts_per_rank * context_.incoming.size(), 0);
    std::fill_n(args_.pairs, uint64_t{ports_.max_tokens} * args_.width * context_.incoming.size(), kUnrouted);
  }

 private:
  void write_chunks() {
    const uint32_t num_tokens = static_cast<uint32_t>(args_.num_tokens);
    const SlotChunk chunk(experts_.size(), true, args_.weights != nullptr, 0);
    for (size_t d = 0; d < ports_.rows.size(); ++d)
      if (domain_lives(d)) write_call(ports_.rows[d].slot(), chunk, num_tokens, experts_.data(), args_.weights);
    ends_.assign(ports_.rows.size(), chunk.rows);
    SlotTokens tokens(context_, experts_.data(), args_.width);
    std::vector<uint8_t> row(shape_.bytes, 0);
    std::vector<uint32_t> last(ports_.rows.size(), UINT32_MAX);  // token that each domain has
    for (uint32_t token = 0; token < num_tokens; ++token) {
      bool written = false;
      for (const uint32_t expert : tokens.experts(token)) {
        if (!tokens.has(expert)) continue;
        const auto d = static_cast<size_t>(context_.topo.domain_of[static_cast<size_t>(tokens.owner(expert))]);
        if (std::exchange(last[d], token) == token || !domain_lives(d)) continue;
        if (!std::exchange(written, true)) write_row(token, row.data());
        std::memcpy(ports_.rows[d].slot() + ends_[d], row.data(), row.size());
        ends_[d] += row.size();
        context_.counters.rows_staged.add(1);
        if (static_cast<int>(d) != context_.domain) context_.counters.rows_shipped.add(1);
      }
    }
  }

  void write_row(uint32_t token, uint8_t* row) const {
    const auto* const in = reinterpret_cast<const uint16_t*>(args_.x) + uint64_t{token} * args_.hidden;
    if (shape_.num_scales > 0)
      fp8_quantize_row(in, args_.hidden, args_.wire, row, reinterpret_cast<float*>(row + shape_.code_bytes));
    else
      std::memcpy(row, in, shape_.code_bytes);
  }

  // The rows of one source, from the next slots of their experts on. `first`: of its places in the plan.
  void place(int src, std::vector<uint32_t>& next, uint64_t first) {
    const InPort& port = ports_.rows_of[static_cast<size_t>(src)];
    const CallHeader header = header_of(port);
    const uint64_t places = uint64_t{header.num_tokens} * args_.width;
    const SlotChunk chunk(places, true, args_.weights != nullptr, 0);
    std::memcpy(args_.pairs + first, slot_of(port) + chunk.routing, places * sizeof(uint32_t));
    if (args_.weights != nullptr)
      std::memcpy(args_.routed + first, slot_of(port) + chunk.weights, places * sizeof(float));
    SlotTokens tokens(context_, args_.pairs + first, args_.width);
    const uint8_t* row = slot_of(port) + chunk.rows;
    for (uint32_t token = 0; token < header.num_tokens; ++token) {
      if (tokens.owners(token, context_.domain).empty()) continue;
      for (const auto& [expert, pair] : tokens.experts_at(token, context_.rank)) {
        const uint64_t slot = next[expert]++;
        args_.source_tokens[expert * num_slots_ + slot] = static_cast<int32_t>(token);
        std::memcpy(args_.rows + (expert * num_slots_ + slot) * shape_.code_bytes, row, shape_.code_bytes);
        if (shape_.num_scales > 0) place_scales(reinterpret_cast<const float*>(row + shape_.code_bytes), expert, slot);
      }
      row += shape_.bytes;
    }
  }

  // Column-major: the scales of a block lie one behind the other.
  void place_scales(const float* scales, uint64_t expert, uint64_t slot) const {
    const uint32_t blocks = shape_.num_scales;
    if (!args_.ue8m0) {
      for (uint32_t b = 0; b < blocks; ++b) args_.scales[(expert * blocks + b) * num_slots_ + slot] = scales[b];
      return;
    }
    constexpr uint32_t kOfWord = 4, kExponent = 23;
    const uint32_t num_words = (blocks + kOfWord - 1) / kOfWord;
    auto* const words = reinterpret_cast<uint32_t*>(args_.scales);
    for (uint32_t w = 0; w < num_words; ++w) {
      uint32_t word = 0;
      for (uint32_t b = w * kOfWord; b < std::min(blocks, (w + 1) * kOfWord); ++b)
        word |= std::bit_cast<uint32_t>(scales[b]) >> kExponent << 8 * (b % kOfWord);
      words[(expert * num_words + w) * num_slots_ + slot] = word;
    }
  }

  LowLatencyDispatch args_;
  const std::vector<uint32_t> experts_;  // [T, width]
  std::vector<uint8_t> x_;
  std::vector<float> weights_;
  const RowShape shape_;
  const uint64_t num_slots_;  // of an expert
  std::vector<uint64_t> ends_;  // [domain] bytes of its chunk
  bool staged_ = false;
};

}  // namespace

std::unique_ptr<SlotWork> make_slot_dispatch(HostContext& context, const SlotCall& call,
                                             const LowLatencyDispatch& args) {
  return std::make_unique<SlotDispatch>(context, call, args);
}

RingParams::Slots slot_rings(uint32_t max_tokens, uint32_t topk, uint32_t hidden, uint32_t sum_element_bytes,
                             bool masks) {
  const uint64_t places = uint64_t{max_tokens} * topk;
  const SlotChunk rows(places, true, true, uint64_t{max_tokens} * wire_row_bytes(Dtype::kBf16, hidden));
  RingParams::Slots rings;
  rings.operations = masks ? 3 : 2;
  rings.dispatch_bytes = round_up(rows.end, kLineBytes);
  rings.weights_bytes = round_up(SlotChunk(places, true, true, 0).end, kLineBytes);
  rings.sums_bytes = round_up(uint64_t{max_tokens} * hidden * sum_element_bytes, kLineBytes);
  rings.max_tokens = max_tokens;
  rings.votes = masks;
  return rings;
}

void check_slot_routing(const int64_t* topk_idx, uint64_t num_tokens, uint32_t topk, uint32_t num_experts) {
  const Routing routing{RoutingKind::kTopk, topk_idx, topk};
  check_topk(routing, static_cast<uint32_t>(num_tokens), num_experts);
}

}  // namespace uccl_ep::host
