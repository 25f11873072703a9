// A low-latency combine: each rank sums its experts' rows for a token of another rank, times their weights. The sums of
// a domain meet at the token's rank, or at the rail that ships what they add up to.
#include <cstring>

#include "backend/host/numerics.h"
#include "backend/host/slot_tokens.h"

namespace uccl_ep::host {
namespace {

class SlotCombine final : public SlotOperation {
 public:
  SlotCombine(HostContext& context, const SlotCall& call, const LowLatencyCombine& args)
      : SlotOperation(context, call),
        args_(args),
        row_bytes_(wire_row_bytes(args.wire, args.hidden)),
        folded_(context.incoming.size(), false),
        relayed_(ports_.merged.size(), false),
        sums_(args.hidden) {
    keep();
  }

  // With weights that the dispatch brought, all that others need of us.
  bool stage() override {
    bool moved = false;
    if (!told_ && all_free(ports_.weights)) {
      tell();
      moved = told_ = true;
    }
    return told_ && knows() ? fold_all() || moved : moved;
  }
  bool staged() const override { return told_ && (!knows() || all_folded()); }

  bool serve() override {
    bool moved = fold_all();
    for (size_t stream = 1; stream < relayed_.size(); ++stream) moved |= !relayed(stream) && relay(stream);
    return moved;
  }
  bool served() const override {
    for (size_t stream = 1; stream < relayed_.size(); ++stream)
      if (!relayed(stream)) return false;
    return all_folded();
  }

  WaitingOn waiting_on() override {
    if (!told_) return waiting_for_slot(ports_.weights);
    for (int src = 0; src < context_.topo.num_ranks; ++src) {
      OutPort& port = ports_.pieces[static_cast<size_t>(src)];
      if (folded(src)) continue;
      if (!knows() && !is_ready(weights_of(src))) return to_enter(src);
      if (!port.free())
        return {Step::kFold, context_.holder(src),         static_cast<int64_t>(port.serial()), call_.number,
                0,           "to have merged earlier sums"};
    }
    for (size_t stream = 1; stream < relayed_.size(); ++stream) {
      if (relayed(stream)) continue;
      MergedPorts& merged = ports_.merged[stream];
      if (const WaitingOn piece = waiting_for_piece(merged, ports_.masked); piece.peer >= 0) return piece;
      if (!is_ready(weights_of(merged.src))) return to_enter(merged.src);
      return {Step::kShip,  merged.src, static_cast<int64_t>(merged.returned.serial()),
              call_.number, 0,          "to take an earlier operation"};
    }
    return {};
  }

  std::vector<WaitingOn> missing(const std::vector<bool>& gone) override {
    std::vector<WaitingOn> found;
    for (int src = 0; src < context_.topo.num_ranks; ++src)
      if (!gone[static_cast<size_t>(src)] && !enters(weights_of(src), src)) found.push_back(to_enter(src));
    const MergedPorts& own = ports_.merged[0];
    for (size_t q = 0; q < own.pieces.size(); ++q)
      if (!gone[static_cast<size_t>(context_.members()[q])] && !is_ready(own.pieces[q]))
        found.push_back(without(own.pieces[q], context_.members()[q], "for its partial sums"));
    for (size_t d = 0; d < ports_.returned.size(); ++d) {
      const int rail = context_.topo.rail(context_.rank, static_cast<int>(d));
      if (static_cast<int>(d) != context_.domain && !gone[static_cast<size_t>(rail)] && !is_ready(ports_.returned[d]))
        found.push_back(without(ports_.returned[d], rail, "for its relayed sums"));
    }
    return found;
  }

  void finish() override {
    merge();
    for (int src = 0; src < context_.topo.num_ranks; ++src)
      if (lives(src)) weights_of(src).release();
    for (size_t q = 0; q < ports_.merged[0].pieces.size(); ++q)
      if (lives(context_.members()[q])) ports_.merged[0].pieces[q].release();
    for (size_t d = 0; d < ports_.returned.size(); ++d)
      if (static_cast<int>(d) != context_.domain && domain_lives(d)) ports_.returned[d].release();
  }

  void spoil() const override {
    if (args_.out != nullptr) std::memset(args_.out, 0xFF, args_.num_tokens * args_.hidden * sizeof(uint16_t));
  }

 private:
  bool knows() const { return args_.routed != nullptr; }
  // Copies what is read after the call has returned.
  void keep() {
    const uint64_t ranks = context_.incoming.size(), num_slots = ranks * ports_.max_tokens;
    pairs_.assign(args_.pairs, args_.pairs + num_slots * args_.width);
    ranges_.assign(args_.ranges, args_.ranges + context_.experts_per_rank * ranks);
    for (uint64_t i = 0; i < args_.num_tokens * args_.width; ++i) there_.push_back(args_.topk_idx[i] >= 0);
    const auto* const rows = reinterpret_cast<const uint16_t*>(args_.rows);
    for (uint64_t e = 0; e < context_.experts_per_rank; ++e) rows_of_.push_back(rows + e * num_slots * args_.hidden);
    if (args_.phase == SlotPhase::kBoth) return;
    if (knows()) {
      routed_.assign(args_.routed, args_.routed + pairs_.size());
      args_.routed = routed_.data();
    }
    weights_.assign(args_.weights, args_.weights + there_.size());
    args_.weights = weights_.data();
    kept_rows_.resize(context_.experts_per_rank);
    for (uint64_t e = 0; e < context_.experts_per_rank; ++e) {
      uint64_t end = 0;
      for (uint64_t src = 0; src < ranks; ++src) {
        const auto range = static_cast<uint64_t>(ranges_[e * ranks + src]);
        end = std::max(end, (range >> 32) + (range & UINT32_MAX));
      }
      kept_rows_[e].assign(rows_of_[e], rows_of_[e] + end * args_.hidden);
      rows_of_[e] = kept_rows_[e].data();
    }
  }
  InPort& weights_of(int src) { return ports_.weights_of[static_cast<size_t>(src)]; }
  bool folded(int src) const { return folded_[static_cast<size_t>(src)] || !lives(src); }
  bool all_folded() const {
    for (int src = 0; src < context_.topo.num_ranks; ++src)
      if (!folded(src)) return false;
    return true;
  }
  bool relayed(size_t stream) const { return relayed_[stream] || !lives(ports_.merged[stream].src); }
  // The routing that a rank's dispatch had.
  SlotTokens tokens_of(int src) const { return SlotTokens(context_, pairs_.data() + first_place(src), args_.width); }
  uint64_t first_place(int src) const { return static_cast<uint64_t>(src) * ports_.max_tokens * args_.width; }

  void tell() {
    const auto num_tokens = static_cast<uint32_t>(args_.num_tokens);
    const SlotChunk chunk(knows() ? 0 : there_.size(), true, true, 0);
    for (size_t d = 0; d < ports_.weights.size(); ++d) {
      if (!domain_lives(d)) continue;
      write_call(ports_.weights[d].slot(), chunk, num_tokens, knows() ? nullptr : there_.data(),
                 knows() ? nullptr : args_.weights);
      ports_.weights[d].publish(chunk.end);
    }
  }

  bool fold_all() {
    bool moved = false;
    for (int src = 0; src < context_.topo.num_ranks; ++src) {
      OutPort& port = ports_.pieces[static_cast<size_t>(src)];
      if (folded(src) || (!knows() && !enters(weights_of(src), src)) || !is_next(port) || !port.free()) continue;
      fold(src, port.slot());
      port.publish(kLineBytes);  // in our domain a size means nothing
      moved = folded_[static_cast<size_t>(src)] = true;
    }
    return moved;
  }

  // Our sums for a stream lie by token, where no other member writes: one that is masked may still do so.
  void fold(int src, uint8_t* slots) {
    SlotTokens tokens = tokens_of(src);
    const CallHeader header = knows() ? CallHeader{} : header_of(weights_of(src));
    const SlotChunk chunk(uint64_t{header.num_tokens} * args_.width, true, true, 0);
    const uint8_t* const told = slot_of(weights_of(src));
    const auto* const there = reinterpret_cast<const uint32_t*>(told + chunk.routing);
    const auto* const weights = knows() ? reinterpret_cast<const float*>(args_.routed + first_place(src))
                                        : reinterpret_cast<const float*>(told + chunk.weights);
    const uint32_t num_tokens = knows() ? ports_.max_tokens : header.num_tokens;
    std::vector<uint64_t> next = first_slots(src);
    for (uint32_t token = 0; token < num_tokens; ++token) {
      const auto& experts = tokens.experts_at(token, context_.rank);
      if (experts.empty()) continue;
      std::fill(sums_.begin(), sums_.end(), 0.0f);
      for (const auto& [expert, place] : experts) {
        const uint16_t* const in = rows_of_[expert] + next[expert]++ * args_.hidden;
        if (knows() || there[place] != 0) add_weighted(in, weights[place], args_.hidden, sums_.data());
      }
      const void* const sum = sums_.data();
      sum_rows(&sum, 1, Dtype::kFp32, args_.hidden, args_.wire, slots);
      slots += row_bytes_;
      context_.counters.rows_folded.add(1);
    }
  }
  // Of a source, by our expert.
  std::vector<uint64_t> first_slots(int src) const {
    const uint64_t ranks = context_.incoming.size();
    std::vector<uint64_t> first(context_.experts_per_rank);
    for (uint64_t e = 0; e < first.size(); ++e)
      first[e] = static_cast<uint64_t>(ranges_[e * ranks + static_cast<uint64_t>(src)]) >> 32;
    return first;
  }

  // Adds up what our domain has for a token of another domain.
  bool relay(size_t stream) {
    MergedPorts& ports = ports_.merged[stream];
    if (!enters(weights_of(ports.src), ports.src) || waiting_for_piece(ports, ports_.masked).peer >= 0) return false;
    if (!is_next(ports.returned) || !ports.returned.free()) return false;
    SlotTokens tokens = tokens_of(ports.src);
    const uint32_t num_tokens = header_of(weights_of(ports.src)).num_tokens;
    uint8_t* out = ports.returned.slot();
    find_pieces(ports);
    for (uint32_t token = 0; token < num_tokens; ++token) {
      rows_.clear();
      for (const int owner : tokens.owners(token, context_.domain)) rows_.push_back(next_piece(owner));
      if (rows_.empty()) continue;
      sum_rows(rows_.data(), static_cast<uint32_t>(rows_.size()), args_.wire, args_.hidden, args_.wire, out);
      out += row_bytes_;
      context_.counters.rows_relayed.add(1);
    }
    for (InPort& port : ports.pieces) port.release();
    ports.returned.publish(std::max<uint64_t>(static_cast<uint64_t>(out - ports.returned.slot()), kLineBytes));
    return relayed_[stream] = true;
  }
  // The pieces of a stream, by member, and then the next one of an owner.
  void find_pieces(const MergedPorts& ports) {
    pieces_.clear();
    for (const InPort& port : ports.pieces) pieces_.push_back(slot_of(port));
  }
  const uint8_t* next_piece(int owner) {
    const uint8_t*& next = pieces_[static_cast<size_t>(context_.topo.local_of[static_cast<size_t>(owner)])];
    return std::exchange(next, next + row_bytes_);
  }
  WaitingOn waiting_for_piece(const MergedPorts& ports, const std::vector<bool>& gone) const {
    for (size_t q = 0; q < ports.pieces.size(); ++q)
      if (!gone[static_cast<size_t>(context_.members()[q])] && !is_ready(ports.pieces[q]))
        return without(ports.pieces[q], context_.members()[q], "for its partial sums");
    return {};
  }
  WaitingOn without(const InPort& port, int peer, const char* what) const {
    return {Step::kMerge, peer, static_cast<int64_t>(call_.number - 1), call_.number, port.serial(), what};
  }

  // The sums of our own tokens, domains ascending, and in our domain ranks ascending.
  void merge() {
    SlotTokens tokens = tokens_of(context_.rank);
    find_pieces(ports_.merged[0]);
    std::vector<uint64_t> next(ports_.returned.size(), 0);  // row, by domain
    for (uint32_t token = 0; token < args_.num_tokens; ++token) {
      rows_.clear();
      for (size_t d = 0; d < next.size(); ++d) {
        const std::vector<int>& owners = tokens.owners(token, static_cast<int>(d));
        if (static_cast<int>(d) != context_.domain) {
          if (!owners.empty() && domain_lives(d)) rows_.push_back(slot_of(ports_.returned[d]) + next[d]++ * row_bytes_);
          continue;
        }
        for (const int owner : owners)
          if (lives(owner)) rows_.push_back(next_piece(owner));
      }
      sum_rows(rows_.data(), static_cast<uint32_t>(rows_.size()), args_.wire, args_.hidden, Dtype::kBf16,
               args_.out + uint64_t{token} * args_.hidden * sizeof(uint16_t));
      context_.counters.rows_merged.add(1);
      count_dropped(tokens, token);
    }
  }
  void count_dropped(const SlotTokens& tokens, uint32_t token) {
    for (uint32_t k = 0; k < args_.width; ++k)
      if (const uint32_t expert = tokens.experts(token)[k]; tokens.has(expert) && there_[token * args_.width + k] != 0)
        if (!lives(tokens.owner(expert))) ports_.dropped_pairs.add(1);
  }

  LowLatencyCombine args_;
  const uint64_t row_bytes_;  // of a sum
  std::vector<uint32_t> pairs_, routed_;  // as in the arguments, and what follows
  std::vector<float> weights_;
  std::vector<int64_t> ranges_;
  std::vector<uint32_t> there_;  // [T, width] whether a place still has an expert
  std::vector<const uint16_t*> rows_of_;  // by our expert
  std::vector<std::vector<uint16_t>> kept_rows_;
  bool told_ = false;
  std::vector<bool> folded_;  // [source rank]
  std::vector<bool> relayed_;  // by merged stream; the first is our own
  std::vector<float> sums_;
  std::vector<const void*> rows_;
  std::vector<const uint8_t*> pieces_;
};

}  // namespace

std::unique_ptr<SlotWork> make_slot_combine(HostContext& context, const SlotCall& call, const LowLatencyCombine& args) {
  return std::make_unique<SlotCombine>(context, call, args);
}

}  // namespace uccl_ep::host
