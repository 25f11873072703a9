// The low-latency calls of a GPU engine: checks and launches.
#include "backend/gpu/low_latency.h"

#include "engine/gpu/engine.h"

namespace uccl_ep {
namespace {

using gpu::must;

void require(bool good, UsageKind kind, const std::string& text) {
  if (!good) throw UsageFailure(kind, text);
}

}  // namespace

void GpuEngine::check_low_latency(uint64_t num_tokens, uint32_t width, uint32_t hidden) const {
  check_usable();
  const gpu::LowLatencyMap& map = layout_.low_latency;
  require(map.tokens > 0, UsageKind::kConfig,
          "this buffer has no memory for low latency: allowed is one made with low_latency_tokens");
  const auto at_most = [](uint64_t value, uint64_t most, const std::string& what) {
    require(value <= most, UsageKind::kShape, std::to_string(value) + what + "; allowed are " + std::to_string(most));
  };
  at_most(num_tokens, map.tokens, " tokens");
  at_most(width, map.topk, " columns of topk_idx");
  at_most(uint64_t{hidden} * 2, map.row_bytes, " bytes of a row");
  require(hidden % kHiddenUnit == 0, UsageKind::kShape,
          "hidden = " + std::to_string(hidden) + "; allowed are multiples of " + std::to_string(kHiddenUnit));
}

void GpuEngine::low_latency(const LowLatencyDispatch& args) {
  const std::lock_guard lock(mutex_);
  const gpu::OnDevice guard(device_);
  check_low_latency(args.num_tokens, args.width, args.hidden);
  gpu::SlotDispatchArgs slots;
  slots.signature =
      slot_signature(OpKind::kLowLatencyDispatch, args.wire, args.hidden, args.width, args.weights != nullptr);
  slots.phase = args.phase;
  slots.stage.x = args.x;
  slots.stage.num_tokens = static_cast<uint32_t>(args.num_tokens);
  slots.stage.hidden = args.hidden;
  slots.stage.wire = args.wire;
  slots.stage.row = row_shape(args.wire, args.hidden);
  slots.topk_idx = args.topk_idx;
  slots.weights = args.weights;
  slots.width = args.width;
  slots.rows = args.rows;
  slots.scales = args.scales;
  slots.ue8m0 = args.ue8m0;
  slots.counts = args.counts;
  slots.ranges = args.ranges;
  slots.source_tokens = args.source_tokens;
  slots.origins = args.origins;
  slots.pairs = args.pairs;
  slots.routed = args.routed;
  slots.total_counts = args.total_counts;
  slots.waited_nsec = args.waited_nsec;
  launch_slots(slots, stream_of(args.stream));
  num_low_latency_ += args.phase != SlotPhase::kReceive;
}

void GpuEngine::low_latency(const LowLatencyCombine& args) {
  const std::lock_guard lock(mutex_);
  const gpu::OnDevice guard(device_);
  check_low_latency(args.num_tokens, args.width, args.hidden);
  gpu::SlotCombineArgs slots;
  require(args.wire == Dtype::kBf16 || (args.wire == Dtype::kFp32 && config_.max_element_bytes >= sizeof(float)),
          UsageKind::kDtype,
          std::string("sums between domains as ") + dtype_name(args.wire) +
              "; allowed are bf16, and fp32 where the buffer takes fp32");
  slots.signature =
      slot_signature(OpKind::kLowLatencyCombine, args.wire, args.hidden, args.width, args.routed != nullptr);
  slots.phase = args.phase;
  slots.hidden = args.hidden;
  slots.folds = args.num_tokens * args.width >= config_.low_latency_fold_pairs;
  slots.rows = args.rows;
  slots.ranges = args.ranges;
  slots.origins = args.origins;
  slots.pairs = args.pairs;
  slots.routed = args.routed;
  slots.topk_idx = args.topk_idx;
  slots.weights = args.weights;
  slots.num_tokens = static_cast<uint32_t>(args.num_tokens);
  slots.width = args.width;
  slots.out = args.out;
  slots.waited_nsec = args.waited_nsec;
  launch_slots(slots, stream_of(args.stream));
}

void GpuEngine::low_latency_masks(int32_t* out, Stream stream) {
  const std::lock_guard lock(mutex_);
  const gpu::OnDevice guard(device_);
  check_usable();
  const auto op = begin(nullptr, stream_of(stream), false);
  must(gpu::launch_masks(group_, out, stream_of(stream)), "masks");
  finish(*op);
}

template <typename Args>
void GpuEngine::launch_slots(const Args& args, gpu::StreamHandle stream) {
  require(!given_back_, UsageKind::kClosed, "the buffer was closed in the middle of an operation");
  const auto op = begin(nullptr, stream, false);
  note_launch(*op);
  must(gpu::launch_low_latency(group_, args, low_latency_sms_, stream), "low latency");
  if (args.phase != SlotPhase::kReceive) note_queued(*op);
  finish(*op);
}

}  // namespace uccl_ep
