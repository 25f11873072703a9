#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "backend/host/meeting.h"
#include "backend/host/step.h"

namespace uccl_ep::host {
namespace {

class HostPlan final : public PlanStep {
 public:
  HostPlan(HostContext& context, Op& op)
      : PlanStep(context, op),
        rows_(static_cast<size_t>(context.topo.num_ranks), 0),
        pairs_(rows_.size(), 0),
        my_pairs_(rows_.size(), 0),
        my_rows_(rows_.size(), 0),
        not_entered_(rows_.size()),
        planned_(rows_.size(), false),
        meeting_(op.epoch, {context.rank, op.signature, op.num_refused}, op.refusal, context.patience_usec) {
    std::iota(not_entered_.begin(), not_entered_.end(), 0);
    if (!op.makes_plan()) return;
    not_planned_ = not_entered_;
    next_out_.assign(rows_.size() * context.experts_per_rank, 0);
    op.plan->incoming.assign(rows_.size(), {});
  }

  const std::vector<int>& not_entered() const override { return not_entered_; }
  bool stream_planned(int src) const override { return planned_[static_cast<size_t>(src)]; }
  bool done() const override { return not_entered_.empty() && not_planned_.empty(); }
  Step step() const override { return not_entered_.empty() ? Step::kPlan : Step::kExchange; }

  bool advance() override {
    bool moved = !not_entered_.empty() && read_headers();
    if (!not_entered_.empty()) return moved;
    if (!counts_known_) {
      if (op_.makes_plan()) assign_slots();
      announce_counts();
      moved = true;
    }
    std::erase_if(not_planned_, [&](int src) {
      IncomingPorts& ports = context_.incoming[static_cast<size_t>(src)];
      while (!is_complete(src) && ports.meta.ready()) {
        read_routing(src, ports.meta.slot());
        ports.meta.release();
        moved = true;
      }
      return planned_[static_cast<size_t>(src)] = is_complete(src);
    });
    return moved;
  }

  WaitingOn waiting_on() const override {
    if (done()) return {};
    const bool enters = !not_entered_.empty();
    const int src = enters ? not_entered_.front() : not_planned_.front();
    if (enters) return {Step::kExchange, src, -1, op_.epoch, op_.epoch - 1, "to enter the operation"};
    const InPort& port = context_.incoming[src].meta;
    return {Step::kPlan,      src, static_cast<int64_t>(port.serial()), port.serial() + 1, port.seen_stamp(),
            "for its routing"};
  }

 private:
  // It is called often, and there are as many sources as ranks. So it takes those that are in turn, and looks at all
  // now and then, because a call that does not match must not wait for a rank that does not come.
  bool read_headers() {
    constexpr uint64_t kLookUsec = 200;
    const auto enters = [this](int src) {
      return context_.incoming[static_cast<size_t>(src)].header.ready() && read_header(src);
    };
    const size_t before = not_entered_.size();
    if (const uint64_t now = now_usec(); now >= next_look_usec_) {
      next_look_usec_ = now + kLookUsec;
      std::erase_if(not_entered_, enters);
    } else {
      not_entered_.erase(not_entered_.begin(), std::find_if_not(not_entered_.begin(), not_entered_.end(), enters));
    }
    return not_entered_.size() != before;
  }

  bool is_complete(int src) const {
    return op_.plan->incoming[static_cast<size_t>(src)].num_rows() == rows_[static_cast<size_t>(src)];
  }

  // False: there is nothing to go on with.
  bool read_header(int src) {
    InPort& port = context_.incoming[src].header;
    OpHeader header;
    std::memcpy(&header, port.slot(), sizeof(header));
    const Called other{src, header.signature, header.num_refused};
    if (header.num_refused != op_.num_refused) return meeting_.meet_other_call(other), false;
    if (header.signature.plan_use == PlanUse::kDiffers)
      meeting_.refuse(ErrorKind::kPlanMismatch, src,
                      "call " + std::to_string(op_.call()) + " on the buffer: rank " + std::to_string(src) +
                          " used plan " + std::to_string(header.signature.plan_id) +
                          " with another routing than it was made for");
    if (header.epoch != op_.epoch || (header.signature != op_.signature && op_.signature.plan_use != PlanUse::kDiffers))
      return meeting_.meet_other_call(other), false;
    rows_[src] = header.num_rows;
    pairs_[src] = header.num_pairs;
    if (op_.makes_plan()) {
      const uint32_t* counts = reinterpret_cast<const uint32_t*>(port.slot() + sizeof(header));
      const uint32_t* mine = counts + context_.member * context_.experts_per_rank;
      for (uint32_t e = 0; e < context_.experts_per_rank; ++e) out_count(e, src) = mine[e];
      my_rows_[src] = counts[context_.members().size() * context_.experts_per_rank + context_.member];
    }
    port.release();
    if (!op_.makes_plan()) planned_[static_cast<size_t>(src)] = true;
    return true;
  }

  uint64_t& out_count(uint32_t expert, int src) { return next_out_[expert * rows_.size() + static_cast<size_t>(src)]; }

  // Turns counts into the first slot of each (expert, source): expert-major, sources in stock order, segments padded.
  void assign_slots() {
    Plan& plan = *op_.plan;
    uint64_t slot = 0;
    for (uint32_t e = 0; e < context_.experts_per_rank; ++e) {
      const uint64_t begin = slot;
      for (int src : context_.source_order) {
        const uint64_t count = out_count(e, src);
        out_count(e, src) = slot;
        slot += count;
        my_pairs_[src] += count;
      }
      plan.tokens_per_expert_exact.push_back(slot - begin);
      slot = begin + round_up(slot - begin, plan.expert_alignment);
      plan.tokens_per_expert.push_back(slot - begin);
    }
    for (size_t src = 0; src < rows_.size(); ++src) reserve(plan.incoming[src], src);
    plan.num_rows = plan.compact() ? assign_rows() : slot;
    if (plan.num_weights() >= UINT32_MAX)
      meeting_.refuse(ErrorKind::kTransport, context_.rank,
                      std::to_string(plan.num_weights()) + " received pairs: a plan numbers fewer than 2^32");
  }

  // Compact rows: turns the rows of each source into its first row. Returns the number of all.
  uint64_t assign_rows() {
    uint64_t row = 0;
    for (int src : context_.source_order) row += std::exchange(my_rows_[src], row);
    return row;
  }

  // A saved plan holds no spare memory.
  void reserve(IncomingStream& stream, size_t src) const {
    stream.row_pair_begin.reserve(rows_[src] + 1);
    stream.row_pair_begin.push_back(0);
    stream.my_row.reserve(my_rows_[src]);
    stream.my_first_pair.reserve(my_rows_[src]);
    stream.my_out_begin.reserve(my_rows_[src] + 1);
    stream.my_out_begin.push_back(0);
    stream.my_out.reserve(my_pairs_[src]);
    if (op_.plan->compact()) stream.my_expert.reserve(my_pairs_[src]);
    if (context_.holder(static_cast<int>(src)) == context_.rank) stream.pair_member.reserve(pairs_[src]);
  }

  void announce_counts() {
    counts_known_ = true;
    std::lock_guard lock(op_.mutex);
    op_.counts_known = true;
    op_.changed.notify_all();
  }

  void read_routing(int src, const uint8_t* slot) {
    IncomingStream& stream = op_.plan->incoming[src];
    const bool merges = context_.holder(src) == context_.rank;
    const uint32_t first_mine = context_.member * context_.experts_per_rank;
    const uint32_t* word = reinterpret_cast<const uint32_t*>(slot);
    const uint32_t* const end = word + context_.incoming[src].meta.ring().slot_bytes / sizeof(uint32_t);
    while (stream.num_rows() < rows_[src] && word < end) {
      const uint32_t pairs = *word;
      if (pairs == 0) break;
      if (pairs > static_cast<uint64_t>(end - word) - 1) corrupt(src);
      ++word;
      uint32_t mine = 0;
      for (uint32_t p = 0; p < pairs; ++p) {
        const uint32_t expert = word[p];
        if (merges) stream.pair_member.push_back(static_cast<uint16_t>(expert / context_.experts_per_rank));
        const uint32_t local = expert - first_mine;  // wraps for experts before ours
        if (local >= context_.experts_per_rank) continue;
        if (mine == 0) {
          stream.my_row.push_back(stream.num_rows());
          stream.my_first_pair.push_back(stream.row_pair_begin.back() + p);
        }
        push_out(stream, src, local, mine++);
      }
      if (mine != 0) stream.my_out_begin.push_back(static_cast<uint32_t>(stream.my_out.size()));
      stream.row_pair_begin.push_back(stream.row_pair_begin.back() + pairs);
      word += pairs;
    }
    if (stream.num_rows() == rows_[src] && stream.row_pair_begin.back() != pairs_[src]) corrupt(src);
  }

  // `nth`: how many of our experts the row had before `local`.
  void push_out(IncomingStream& stream, int src, uint32_t local, uint32_t nth) {
    const uint32_t width = op_.plan->compact_width;
    if (width == 0) {
      stream.my_out.push_back(static_cast<uint32_t>(out_count(local, src)++));
      return;
    }
    if (nth == 0) ++my_rows_[src];
    if (nth == width) corrupt(src);
    stream.my_out.push_back(static_cast<uint32_t>((my_rows_[src] - 1) * width + nth));
    stream.my_expert.push_back(local);
  }

  [[noreturn]] void corrupt(int src) const {
    meeting_.refuse(ErrorKind::kTransport, src,
                    "the routing that arrived from rank " + std::to_string(src) + " is not what its header announced");
  }

  std::vector<uint64_t> rows_;      // [source rank]
  std::vector<uint64_t> pairs_;     // [source rank]
  std::vector<uint64_t> next_out_;  // [expert][source rank]: counts, then the next slot
  std::vector<uint64_t> my_pairs_;  // [source rank] pairs of its rows with our experts
  std::vector<uint64_t> my_rows_;   // [source rank] its rows with our experts; compact: then the next row
  std::vector<int> not_entered_;    // source ranks, ascending
  std::vector<int> not_planned_;    // likewise; of a new plan
  std::vector<bool> planned_;       // [source rank]
  uint64_t next_look_usec_ = 0;  // at all sources
  Meeting meeting_;
  bool counts_known_ = false;
};

}  // namespace

std::unique_ptr<PlanStep> make_plan(HostContext& context, Op& op) { return std::make_unique<HostPlan>(context, op); }

}  // namespace uccl_ep::host
