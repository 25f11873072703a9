#include <cstring>

#include "backend/host/numerics.h"
#include "backend/host/step.h"

namespace uccl_ep::host {
namespace {

// One pass over our rows per domain that gets them: quantised or copied into the send staging, in token order.
class StageStep final : public HostStep {
 public:
  StageStep(HostContext& context, Op& op)
      : HostStep(context, op), format_(stream_format(op)), next_row_(op.plan->source.size(), 0) {}

  bool advance() override {
    bool moved = false;
    for (size_t d = 0; d < next_row_.size(); ++d) {
      OutPort& port = context_.outgoing[d].rows;
      const SourceStream& stream = op_.plan->source[d];
      if (next_row_[d] == stream.num_rows() || !port.free()) continue;
      const Chunk chunk = cut_chunk(stream.row_pair_begin, next_row_[d], format_, port.slot_bytes());
      write_chunk(stream, chunk, port.slot());
      port.publish(chunk.num_bytes());
      count(static_cast<int>(d), chunk);
      next_row_[d] = chunk.end_row();
      moved = true;
    }
    return moved;
  }

  bool done() const override { return blocked_domain() < 0; }

  WaitingOn waiting_on() const override {
    const int d = blocked_domain();
    if (d < 0) return {};
    const OutPort& port = context_.outgoing[d].rows;
    const bool own = d == context_.domain;
    const int peer = own ? context_.members()[port.slowest_reader()] : context_.topo.rail(context_.rank, d);
    return {own ? Step::kStage : Step::kShip,
            peer,
            static_cast<int64_t>(port.serial()),
            port.serial() + 1 - port.ring().num_slots,
            0,
            own ? "to have read an earlier chunk" : "to take an earlier chunk"};
  }

  Step step() const override { return Step::kStage; }

 private:
  int blocked_domain() const {
    for (size_t d = 0; d < next_row_.size(); ++d)
      if (next_row_[d] < op_.plan->source[d].num_rows()) return static_cast<int>(d);
    return -1;
  }

  void write_chunk(const SourceStream& stream, const Chunk& chunk, uint8_t* slot) const {
    const OpSignature& s = op_.signature;
    const RowShape shape = op_.wire_row();
    for (uint32_t row = chunk.first_row; row < chunk.end_row(); ++row) {
      const uint64_t token = stream.row_token[row];
      const uint8_t* in = op_.rows_in + token * op_.row_bytes;
      uint8_t* out = slot + chunk.row_offset(row);
      if (op_.scales_in != nullptr)
        std::memcpy(out + shape.code_bytes, op_.scales_in + token * shape.num_scales, shape.scale_bytes());
      if (shape.num_metadata > 0)
        std::memcpy(out + shape.metadata_begin(), op_.metadata_in + token * shape.num_metadata, shape.metadata_bytes());
      if (shape.num_scales > 0 && op_.scales_in == nullptr)
        fp8_quantize_row(reinterpret_cast<const uint16_t*>(in), s.hidden, s.wire, out,
                         reinterpret_cast<float*>(out + shape.code_bytes));
      else
        std::memcpy(out, in, op_.row_bytes);
    }
    if (!chunk.with_weights) return;
    float* weights = reinterpret_cast<float*>(slot + chunk.weight_offset(chunk.first_pair));
    for (uint32_t i = 0; i < chunk.num_pairs; ++i)
      weights[i] = op_.weights_in[stream.pair_source[chunk.first_pair + i]];
  }

  void count(int d, const Chunk& chunk) const {
    context_.counters.rows_staged.add(chunk.num_rows);
    if (d == context_.domain) return;
    context_.counters.rows_shipped.add(chunk.num_rows);
    if (chunk.with_weights) context_.counters.pairs_shipped.add(chunk.num_pairs);
  }

  const StreamFormat format_;
  std::vector<uint32_t> next_row_;  // [domain]
};

}  // namespace

std::unique_ptr<HostStep> make_stage(HostContext& context, Op& op) { return std::make_unique<StageStep>(context, op); }

}  // namespace uccl_ep::host
