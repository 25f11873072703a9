#include <algorithm>
#include <cstring>
#include <numeric>

#include "backend/host/numerics.h"
#include "backend/host/step.h"

namespace uccl_ep::host {
namespace {

// Pulls the rows that our experts want from staging (own domain) and landing (other domains) and writes each into the
// output.
class PlaceStep final : public HostStep {
 public:
  PlaceStep(HostContext& context, Op& op, const PlanStep& plan)
      : HostStep(context, op),
        plan_(plan),
        format_(stream_format(op)),
        shape_(op.wire_row()),
        next_row_(static_cast<size_t>(context.topo.num_ranks), 0),
        next_mine_(next_row_.size(), 0),
        open_(next_row_.size()) {
    std::iota(open_.begin(), open_.end(), 0);
  }

  // A chunk of each source that has one.
  bool advance() override {
    if (!started_ && !start()) return false;
    bool moved = false;
    std::erase_if(open_, [&](int source) {
      if (!plan_.stream_planned(source)) return false;
      const size_t src = static_cast<size_t>(source);
      InPort& port = context_.incoming[src].rows;
      const IncomingStream& stream = op_.plan->incoming[src];
      if (next_row_[src] < stream.num_rows() && port.ready()) {
        const Chunk chunk = cut_chunk(stream.row_pair_begin, next_row_[src], format_, port.ring().slot_bytes);
        place_chunk(stream, chunk, port.slot(), next_mine_[src]);
        port.release();  // also when nothing in it was ours: the producer waits for every reader
        next_row_[src] = chunk.end_row();
        moved = true;
      }
      return next_row_[src] == stream.num_rows();
    });
    return moved;
  }

  bool done() const override { return started_ && open_.empty(); }

  WaitingOn waiting_on() const override {
    if (!started_) return {Step::kPlace, context_.rank, -1, 1, 0, "for the caller's output memory"};
    if (open_.empty()) return {};
    const int src = open_.front();
    const InPort& port = context_.incoming[src].rows;
    return {Step::kPlace,      src,           static_cast<int64_t>(port.serial()), port.serial() + 1,
            port.seen_stamp(), "for its rows"};
  }

  Step step() const override { return Step::kPlace; }

 private:
  // The caller gives the output once it knows the counts. Padding is written first.
  bool start() {
    {
      std::lock_guard lock(op_.mutex);
      if (!op_.output_given) return false;
    }
    const Plan& plan = *op_.plan;
    if (plan.compact()) {
      if (op_.weights_out != nullptr) std::fill_n(op_.weights_out, plan.num_weights(), 0.0f);
      if (op_.experts_out != nullptr) std::fill_n(op_.experts_out, plan.num_weights(), int64_t{-1});
    } else {
      uint64_t row = 0;
      for (size_t e = 0; e < plan.tokens_per_expert.size(); ++e) {
        const uint64_t exact = plan.tokens_per_expert_exact[e];
        pad(row + exact, plan.tokens_per_expert[e] - exact);
        row += plan.tokens_per_expert[e];
      }
    }
    started_ = true;
    return true;
  }

  void pad(uint64_t first, uint64_t num_rows) const {
    if (num_rows == 0) return;
    const uint64_t scales = shape_.num_scales;
    std::memset(op_.rows_out + first * op_.out_row_bytes(), 0, num_rows * op_.out_row_bytes());
    if (op_.scales_out != nullptr) std::fill_n(op_.scales_out + first * scales, num_rows * scales, 1.0f);
    if (shape_.num_metadata > 0) std::memset(metadata_of(first), 0, num_rows * shape_.metadata_bytes());
    if (op_.weights_out != nullptr) std::fill_n(op_.weights_out + first, num_rows, 0.0f);
  }

  // One read, a write per row of the output; `mine` runs over the rows of the stream that are ours.
  void place_chunk(const IncomingStream& stream, const Chunk& chunk, const uint8_t* slot, uint32_t& mine) const {
    const Plan& plan = *op_.plan;
    for (; mine < stream.my_row.size() && stream.my_row[mine] < chunk.end_row(); ++mine) {
      const uint32_t begin = stream.my_out_begin[mine];
      const uint32_t end = stream.my_out_begin[mine + 1];
      const uint64_t first = plan.row_of(stream.my_out[begin]);
      write_row(slot + chunk.row_offset(stream.my_row[mine]), first);
      const uint32_t end_rows = plan.compact() ? begin + 1 : end;
      for (uint32_t s = begin + 1; s < end_rows; ++s) copy_row(first, stream.my_out[s]);
      context_.counters.rows_placed.add(end_rows - begin);
      if (op_.experts_out != nullptr)
        for (uint32_t s = begin; s < end; ++s) op_.experts_out[stream.my_out[s]] = stream.my_expert[s];
      if (!chunk.with_weights) continue;
      const float* weights = reinterpret_cast<const float*>(slot + chunk.weight_offset(stream.my_first_pair[mine]));
      for (uint32_t s = begin; s < end; ++s) op_.weights_out[stream.my_out[s]] = weights[s - begin];
    }
  }

  float* scales_of(uint64_t row) const { return op_.scales_out + row * shape_.num_scales; }

  uint32_t* metadata_of(uint64_t row) const { return op_.metadata_out + row * shape_.num_metadata; }

  void write_row(const uint8_t* in, uint64_t row) const {
    uint8_t* const out = op_.rows_out + row * op_.out_row_bytes();
    if (shape_.num_metadata > 0) std::memcpy(metadata_of(row), in + shape_.metadata_begin(), shape_.metadata_bytes());
    if (op_.scales_out != nullptr) {
      std::memcpy(out, in, shape_.code_bytes);
      std::memcpy(scales_of(row), in + shape_.code_bytes, shape_.scale_bytes());
    } else if (shape_.num_scales > 0) {
      fp8_dequantize_row(in, reinterpret_cast<const float*>(in + shape_.code_bytes), op_.signature.hidden,
                         reinterpret_cast<uint16_t*>(out));
    } else {
      std::memcpy(out, in, op_.row_bytes);
    }
  }

  void copy_row(uint64_t from, uint64_t to) const {
    const uint64_t num_bytes = op_.out_row_bytes();
    std::memcpy(op_.rows_out + to * num_bytes, op_.rows_out + from * num_bytes, num_bytes);
    if (op_.scales_out != nullptr) std::memcpy(scales_of(to), scales_of(from), shape_.scale_bytes());
    if (shape_.num_metadata > 0) std::memcpy(metadata_of(to), metadata_of(from), shape_.metadata_bytes());
  }

  const PlanStep& plan_;
  const StreamFormat format_;
  const RowShape shape_;
  std::vector<uint32_t> next_row_;   // [source rank]
  std::vector<uint32_t> next_mine_;  // [source rank]
  std::vector<int> open_;            // sources that have rows left or are not planned, ascending
  bool started_ = false;
};

}  // namespace

std::unique_ptr<HostStep> make_place(HostContext& context, Op& op, const PlanStep& plan) {
  return std::make_unique<PlaceStep>(context, op, plan);
}

}  // namespace uccl_ep::host
