#include "backend/host/numerics.h"
#include "backend/host/step.h"

namespace uccl_ep::host {
namespace {

// Sums the rows of our experts that belong to one token, and puts the sum where the token's stream is merged: at its
// source (own domain) or at the rail rank. A piece chunk is addressed like the stream's chunk; only our rows of it are
// written.
class FoldStep final : public HostStep {
 public:
  FoldStep(HostContext& context, Op& op)
      : HostStep(context, op),
        format_(stream_format(op)),
        next_row_(static_cast<size_t>(context.topo.num_ranks), 0),
        next_mine_(next_row_.size(), 0) {
    for (int src = 0; src < context.topo.num_ranks; ++src)
      if (op.plan->incoming[static_cast<size_t>(src)].num_rows() > 0) open_.push_back(src);
  }

  // A chunk of each source that has one.
  bool advance() override {
    bool moved = false;
    std::erase_if(open_, [&](int source) {
      const size_t src = static_cast<size_t>(source);
      OutPort& port = context_.incoming[src].pieces;
      const IncomingStream& stream = op_.plan->incoming[src];
      if (!port.free()) return false;
      const Chunk chunk = cut_chunk(stream.row_pair_begin, next_row_[src], format_, port.slot_bytes());
      fold_chunk(stream, chunk, port.slot(), next_mine_[src]);
      port.publish(chunk.num_bytes());
      next_row_[src] = chunk.end_row();
      moved = true;
      return next_row_[src] == stream.num_rows();
    });
    return moved;
  }

  bool done() const override { return open_.empty(); }

  WaitingOn waiting_on() const override {
    if (open_.empty()) return {};
    const int src = open_.front();
    const OutPort& port = context_.incoming[src].pieces;
    return {Step::kFold,
            context_.holder(src),
            static_cast<int64_t>(port.serial()),
            port.serial() + 1 - port.ring().num_slots,
            0,
            "to have merged an earlier chunk"};
  }

  Step step() const override { return Step::kFold; }

 private:
  void fold_chunk(const IncomingStream& stream, const Chunk& chunk, uint8_t* slot, uint32_t& mine) {
    const OpSignature& s = op_.signature;
    const Plan& plan = *op_.plan;
    for (; mine < stream.my_row.size() && stream.my_row[mine] < chunk.end_row(); ++mine) {
      const uint32_t begin = stream.my_out_begin[mine];
      const uint32_t end = stream.my_out_begin[mine + 1];
      rows_.clear();  // pairs of a row are in the order of its experts; a compact row is their sum already
      const uint32_t end_rows = plan.compact() ? begin + 1 : end;
      for (uint32_t i = begin; i < end_rows; ++i)
        rows_.push_back(op_.rows_in + plan.row_of(stream.my_out[i]) * op_.row_bytes);
      sum_rows(rows_.data(), end_rows - begin, s.dtype, s.hidden, s.wire, slot + chunk.row_offset(stream.my_row[mine]));
      context_.counters.rows_folded.add(1);
      if (!chunk.with_weights) continue;
      float* weights = reinterpret_cast<float*>(slot + chunk.weight_offset(stream.my_first_pair[mine]));
      for (uint32_t i = begin; i < end; ++i) weights[i - begin] = op_.weights_in[stream.my_out[i]];
    }
  }

  const StreamFormat format_;
  std::vector<uint32_t> next_row_;   // [source rank]
  std::vector<uint32_t> next_mine_;  // [source rank]
  std::vector<int> open_;            // sources that have rows left, ascending
  std::vector<const void*> rows_;
};

}  // namespace

std::unique_ptr<HostStep> make_fold(HostContext& context, Op& op) { return std::make_unique<FoldStep>(context, op); }

}  // namespace uccl_ep::host
