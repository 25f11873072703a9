#include <array>
#include <cstring>
#include <numeric>
#include <span>

#include "backend/host/numerics.h"
#include "backend/host/step.h"

namespace uccl_ep::host {
namespace {

// The pieces of one chunk of a merged stream: every member publishes one, also a member without rows in it.
bool all_ready(const std::vector<InPort>& pieces) {
  for (const InPort& port : pieces)
    if (!port.ready()) return false;
  return true;
}

WaitingOn waiting_for_piece(const HostContext& context, const std::vector<InPort>& pieces) {
  for (size_t q = 0; q < pieces.size(); ++q)
    if (!pieces[q].ready())
      return {Step::kMerge,           context.members()[q],   static_cast<int64_t>(pieces[q].serial()),
              pieces[q].serial() + 1, pieces[q].seen_stamp(), "for its partial sums"};
  return {};
}

// Appends the piece of each member that has pairs of `row`, ranks ascending, and copies the weights of its pairs.
// Pairs of a row are in the order of experts, so those of one member are consecutive.
class RowPieces {
 public:
  RowPieces(const IncomingStream& stream, const Chunk& chunk, const std::vector<InPort>& pieces)
      : stream_(stream), chunk_(chunk), pieces_(pieces) {}

  void append(uint32_t row, std::vector<const void*>& rows) const {
    int last = -1;
    for (uint32_t pair = stream_.row_pair_begin[row]; pair < stream_.row_pair_begin[row + 1]; ++pair) {
      const int member = stream_.pair_member[pair];
      if (member != last) rows.push_back(pieces_[member].slot() + chunk_.row_offset(row));
      last = member;
    }
  }
  float weight(uint32_t pair) const {
    float weight;
    std::memcpy(&weight, pieces_[stream_.pair_member[pair]].slot() + chunk_.weight_offset(pair), sizeof(weight));
    return weight;
  }

 private:
  const IncomingStream& stream_;
  const Chunk& chunk_;
  const std::vector<InPort>& pieces_;
};

class MergeRelayed final : public HostStep {
 public:
  MergeRelayed(HostContext& context, Op& op, size_t merged_idx)
      : HostStep(context, op),
        ports_(context.merged[merged_idx]),
        stream_(op.plan->incoming[ports_.src]),
        format_(stream_format(op)) {}

  bool advance() override {
    if (done() || !all_ready(ports_.pieces) || !ports_.returned.free()) return false;
    const Chunk chunk = cut_chunk(stream_.row_pair_begin, next_row_, format_, ports_.returned.slot_bytes());
    merge_chunk(chunk, ports_.returned.slot());
    for (InPort& port : ports_.pieces) port.release();
    ports_.returned.publish(chunk.num_bytes());
    context_.counters.rows_relayed.add(chunk.num_rows);
    if (chunk.with_weights) context_.counters.pairs_relayed.add(chunk.num_pairs);
    next_row_ = chunk.end_row();
    return true;
  }

  bool done() const override { return next_row_ == stream_.num_rows(); }

  WaitingOn waiting_on() const override {
    if (done()) return {};
    if (!all_ready(ports_.pieces)) return waiting_for_piece(context_, ports_.pieces);
    const uint64_t serial = ports_.returned.serial();
    return {Step::kShip,
            ports_.src,
            static_cast<int64_t>(serial),
            serial + 1 - ports_.returned.ring().num_slots,
            0,
            "to take an earlier chunk"};
  }

  Step step() const override { return Step::kMerge; }

 private:
  void merge_chunk(const Chunk& chunk, uint8_t* slot) {
    const RowPieces pieces(stream_, chunk, ports_.pieces);
    const OpSignature& s = op_.signature;
    for (uint32_t row = chunk.first_row; row < chunk.end_row(); ++row) {
      rows_.clear();
      pieces.append(row, rows_);
      uint8_t* const out = slot + chunk.row_offset(row);
      sum_rows(rows_.data(), static_cast<uint32_t>(rows_.size()), s.wire, s.hidden, s.wire, out);
      if (s.rounds_sums != 0) round_to_bf16(out, s.hidden);
    }
    if (!chunk.with_weights) return;
    float* weights = reinterpret_cast<float*>(slot + chunk.weight_offset(chunk.first_pair));
    for (uint32_t i = 0; i < chunk.num_pairs; ++i) weights[i] = pieces.weight(chunk.first_pair + i);
  }

  // Of a row in fp32.
  void round_to_bf16(void* row, uint32_t hidden) {
    rounded_.resize(hidden);
    const void* const one[] = {row};
    sum_rows(one, 1, Dtype::kFp32, hidden, Dtype::kBf16, rounded_.data());
    const void* const rounded[] = {rounded_.data()};
    sum_rows(rounded, 1, Dtype::kBf16, hidden, Dtype::kFp32, row);
  }

  MergedPorts& ports_;
  const IncomingStream& stream_;
  const StreamFormat format_;
  uint32_t next_row_ = 0;
  std::vector<const void*> rows_;
  std::vector<uint16_t> rounded_;
};

// One row of the output after the other, in token order: pieces of our own domain, one relayed row of each other
// domain.
class MergeOutput final : public HostStep {
 public:
  MergeOutput(HostContext& context, Op& op)
      : HostStep(context, op), own_(context.merged[0]), streams_(op.plan->source.size()) {
    list_domains();
    for (size_t d = 0; d < streams_.size(); ++d) cut(d);
  }

  bool advance() override {
    bool moved = false;
    while (next_token_ < op_.plan->num_tokens && merge_token(next_token_)) {
      ++next_token_;
      moved = true;
    }
    return moved;
  }

  bool done() const override { return next_token_ == op_.plan->num_tokens; }

  WaitingOn waiting_on() const override {
    if (done()) return {};
    for (const uint32_t d : domains_of(next_token_)) {
      if (chunk_ready(d)) continue;
      if (static_cast<int>(d) == context_.domain) return waiting_for_piece(context_, own_.pieces);
      const InPort& port = context_.outgoing[d].returned;
      return {Step::kMerge,
              context_.topo.rail(context_.rank, static_cast<int>(d)),
              static_cast<int64_t>(port.serial()),
              port.serial() + 1,
              port.seen_stamp(),
              "for its relayed sums"};
    }
    return {};
  }

  Step step() const override { return Step::kMerge; }

 private:
  struct Stream {
    uint32_t row = 0;  // next row of our stream to the domain
    Chunk chunk;       // that holds it
  };

  const std::vector<uint32_t>& pair_begin(size_t d) const { return op_.plan->source[d].row_pair_begin; }

  void cut(size_t d) {
    const uint64_t slot_bytes = context_.outgoing[d].rows.slot_bytes();  // all row rings have the same
    streams_[d].chunk = cut_chunk(pair_begin(d), streams_[d].row, stream_format(op_), slot_bytes);
  }

  // The domains in which each token has a row. Most tokens have rows in a few of many.
  void list_domains() {
    first_domain_.assign(op_.plan->num_tokens + 1, 0);
    for (const SourceStream& source : op_.plan->source)
      for (uint32_t token : source.row_token) ++first_domain_[token + 1];
    std::partial_sum(first_domain_.begin(), first_domain_.end(), first_domain_.begin());
    domains_.resize(first_domain_.back());
    std::vector<uint32_t> next(first_domain_.begin(), first_domain_.end() - 1);
    for (uint32_t d = 0; d < streams_.size(); ++d)
      for (uint32_t token : op_.plan->source[d].row_token) domains_[next[token]++] = d;
  }

  std::span<const uint32_t> domains_of(uint32_t token) const {
    return {domains_.data() + first_domain_[token], first_domain_[token + 1] - first_domain_[token]};
  }

  bool chunk_ready(size_t d) const {
    return static_cast<int>(d) == context_.domain ? all_ready(own_.pieces) : context_.outgoing[d].returned.ready();
  }

  bool merge_token(uint32_t token) {
    for (const uint32_t d : domains_of(token))
      if (!chunk_ready(d)) return false;
    const OpSignature& s = op_.signature;
    rows_.clear();
    append_bias(token);
    for (const uint32_t d : domains_of(token)) append(d);
    sum_rows(rows_.data(), static_cast<uint32_t>(rows_.size()), s.wire, s.hidden, s.dtype,
             op_.rows_out + token * op_.row_bytes);
    for (const uint32_t d : domains_of(token)) step_over(d);
    context_.counters.rows_merged.add(1);
    return true;
  }

  // As rows of the wire's dtype.
  void append_bias(uint32_t token) {
    const OpSignature& s = op_.signature;
    for (size_t i = 0; i < op_.bias.size(); ++i) {
      if (op_.bias[i] == nullptr) continue;
      const void* row = op_.bias[i] + token * op_.row_bytes;
      if (s.dtype != s.wire) {
        converted_[i].resize(s.hidden);
        sum_rows(&row, 1, s.dtype, s.hidden, s.wire, converted_[i].data());
        row = converted_[i].data();
      }
      rows_.push_back(row);
    }
  }

  // Adds the row's addends in order, and puts the weights of its pairs back to where the weights came from.
  void append(size_t d) {
    const Stream& stream = streams_[d];
    const SourceStream& source = op_.plan->source[d];
    const uint32_t first = source.row_pair_begin[stream.row];
    const uint32_t end = source.row_pair_begin[stream.row + 1];
    if (static_cast<int>(d) == context_.domain) {
      const RowPieces pieces(op_.plan->incoming[context_.rank], stream.chunk, own_.pieces);
      pieces.append(stream.row, rows_);
      for (uint32_t pair = first; stream.chunk.with_weights && pair < end; ++pair)
        op_.weights_out[source.pair_source[pair]] = pieces.weight(pair);
      return;
    }
    const uint8_t* slot = context_.outgoing[d].returned.slot();
    rows_.push_back(slot + stream.chunk.row_offset(stream.row));
    const float* weights = reinterpret_cast<const float*>(slot + stream.chunk.weight_offset(first));
    for (uint32_t pair = first; stream.chunk.with_weights && pair < end; ++pair)
      op_.weights_out[source.pair_source[pair]] = weights[pair - first];
  }

  void step_over(size_t d) {
    if (++streams_[d].row < streams_[d].chunk.end_row()) return;
    if (static_cast<int>(d) == context_.domain)
      for (InPort& port : own_.pieces) port.release();
    else
      context_.outgoing[d].returned.release();
    cut(d);
  }

  MergedPorts& own_;
  std::vector<Stream> streams_;  // [domain]
  std::vector<uint32_t> first_domain_;  // [token] in domains_; behind the last its size
  std::vector<uint32_t> domains_;       // ascending for each token
  uint32_t next_token_ = 0;
  std::vector<const void*> rows_;
  std::array<std::vector<float>, kMostBiases> converted_;  // of a token, where BF16 sums travel in fp32
};

}  // namespace

std::unique_ptr<HostStep> make_merge_relayed(HostContext& context, Op& op, size_t merged_idx) {
  return std::make_unique<MergeRelayed>(context, op, merged_idx);
}
std::unique_ptr<HostStep> make_merge_output(HostContext& context, Op& op) {
  return std::make_unique<MergeOutput>(context, op);
}

}  // namespace uccl_ep::host
