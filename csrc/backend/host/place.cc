#include <cstring>

#include "backend/host/numerics.h"
#include "backend/host/step.h"

namespace uccl_ep::host {
namespace {

// Pulls the rows that our experts want from staging (own domain) and landing (other domains) and writes each into its
// slots.
class PlaceStep final : public HostStep {
 public:
  PlaceStep(HostContext& context, Op& op, const PlanStep& plan)
      : HostStep(context, op),
        plan_(plan),
        format_(row_format(op)),
        next_row_(static_cast<size_t>(context.topo.num_ranks), 0),
        next_mine_(next_row_.size(), 0) {}

  bool advance() override {
    if (!started_ && !start()) return false;
    bool moved = false;
    for (size_t src = 0; src < next_row_.size(); ++src) {
      if (!plan_.stream_planned(static_cast<int>(src))) continue;
      InPort& port = context_.incoming[src].rows;
      const IncomingStream& stream = op_.plan->incoming[src];
      if (next_row_[src] == stream.num_rows() || !port.ready()) continue;
      const Chunk chunk = cut_chunk(stream.row_pair_begin, next_row_[src], format_, port.ring().slot_bytes);
      place_chunk(stream, chunk, port.slot(), next_mine_[src]);
      port.release();  // also when nothing in it was ours: the producer waits for every reader
      next_row_[src] = chunk.end_row();
      moved = true;
    }
    return moved;
  }

  bool done() const override { return started_ && blocked_source() < 0; }

  WaitingOn waiting_on() const override {
    if (!started_) return {Step::kPlace, context_.rank, -1, 1, 0, "for the caller's output memory"};
    const int src = blocked_source();
    if (src < 0) return {};
    const InPort& port = context_.incoming[src].rows;
    return {Step::kPlace,      src,           static_cast<int64_t>(port.serial()), port.serial() + 1,
            port.seen_stamp(), "for its rows"};
  }

  Step step() const override { return Step::kPlace; }

 private:
  // The caller gives the output once it knows the counts; padding rows are zeroed first.
  bool start() {
    {
      std::lock_guard lock(op_.mutex);
      if (!op_.output_given) return false;
    }
    const Plan& plan = *op_.plan;
    uint64_t slot = 0;
    for (size_t e = 0; e < plan.tokens_per_expert.size(); ++e) {
      const uint64_t padding = plan.tokens_per_expert[e] - plan.tokens_per_expert_exact[e];
      const uint64_t first = slot + plan.tokens_per_expert_exact[e];
      if (padding != 0) std::memset(op_.rows_out + first * op_.row_bytes, 0, padding * op_.row_bytes);
      if (padding != 0 && op_.values_out != nullptr) std::memset(op_.values_out + first, 0, padding * sizeof(float));
      slot += plan.tokens_per_expert[e];
    }
    started_ = true;
    return true;
  }

  int blocked_source() const {
    for (size_t src = 0; src < next_row_.size(); ++src)
      if (!plan_.stream_planned(static_cast<int>(src)) || next_row_[src] < op_.plan->incoming[src].num_rows())
        return static_cast<int>(src);
    return -1;
  }

  // One read, a write per slot; `mine` runs over the rows of the stream that are ours.
  void place_chunk(const IncomingStream& stream, const Chunk& chunk, const uint8_t* slot, uint32_t& mine) const {
    for (; mine < stream.my_row.size() && stream.my_row[mine] < chunk.end_row(); ++mine) {
      const uint8_t* in = slot + chunk.row_offset(stream.my_row[mine]);
      const uint32_t begin = stream.my_slot_begin[mine];
      const uint32_t end = stream.my_slot_begin[mine + 1];
      uint8_t* first = op_.rows_out + stream.my_slot[begin] * op_.row_bytes;
      write_row(in, first);
      for (uint32_t s = begin + 1; s < end; ++s)
        std::memcpy(op_.rows_out + stream.my_slot[s] * op_.row_bytes, first, op_.row_bytes);
      context_.counters.rows_placed.add(end - begin);
      if (!chunk.with_values) continue;
      const float* values = reinterpret_cast<const float*>(slot + chunk.value_offset(stream.my_first_pair[mine]));
      for (uint32_t s = begin; s < end; ++s) op_.values_out[stream.my_slot[s]] = values[s - begin];
    }
  }

  void write_row(const uint8_t* in, uint8_t* out) const {
    const uint32_t hidden = op_.signature.hidden;
    if (op_.signature.wire == Dtype::kFp8)
      fp8_dequantize_row(in, reinterpret_cast<const float*>(in + hidden), hidden, reinterpret_cast<uint16_t*>(out));
    else
      std::memcpy(out, in, op_.row_bytes);
  }

  const PlanStep& plan_;
  const RowFormat format_;
  std::vector<uint32_t> next_row_;   // [source rank]
  std::vector<uint32_t> next_mine_;  // [source rank]
  bool started_ = false;
};

}  // namespace

std::unique_ptr<HostStep> make_place(HostContext& context, Op& op, const PlanStep& plan) {
  return std::make_unique<PlaceStep>(context, op, plan);
}

}  // namespace uccl_ep::host
