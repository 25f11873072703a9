// Low latency: every pair of token and expert has a slot in the expert's output, [experts of a rank][ranks *
// tokens][H], from the routing alone: no rank waits for a plan. A dispatch writes each row once into the memory of
// every rank of our domain that has an expert of its token, and that rank copies it into its slots. A combine writes
// every slot's row into the memory of its token's rank, which sums them; or it sums before it sends
// (low_latency_fold.cuh). Between domains: low_latency_net.cuh.
//
// Sending and receiving are two kernels, or one. Nothing that a kernel of its own waits for to send depends on an
// operation after the one before the last.
#pragma once

#include "backend/gpu/group.h"
#include "backend/gpu/steps.h"
#include "backend/low_latency.h"

namespace uccl_ep::gpu {

constexpr uint32_t kNoSlot = 0xFFFFFFFF;

struct SlotDispatchArgs {
  OpSignature signature{};
  SlotPhase phase = SlotPhase::kBoth;
  // To send.
  StageArgs stage;
  const int64_t* topk_idx = nullptr;  // [T, width], -1: none
  const float* weights = nullptr;  // [T, width], for the combine to know them; nullptr: it tells them
  uint32_t width = 0;
  // To receive. L: experts of a rank, S: slots of an expert, ranks * tokens.
  uint8_t* rows = nullptr;  // [L, S, H] BF16, or codes
  float* scales = nullptr;  // [L, ceil(H / 128), S], or with `ue8m0` [L, ceil(H / 512), S] words of four exponents
  bool ue8m0 = false;
  int32_t* counts = nullptr;  // [L]
  int64_t* ranges = nullptr;  // [L, ranks] first slot << 32 | slots
  int32_t* source_tokens = nullptr;  // [L, S]
  uint32_t* origins = nullptr;  // [L, S] SlotOrigin
  // [ranks, tokens, width] of all ranks' pairs the slot here, of all experts', or kNoSlot. Where there are several
  // domains: with weights, the number of the expert.
  uint32_t* pairs = nullptr;
  uint32_t* routed = nullptr;  // the same: the bits of their weights; nullptr: none come
  int32_t* total_counts = nullptr;  // [L], or nullptr: counts are added
  int64_t* waited_nsec = nullptr;  // [ranks], or nullptr: what block 0 waited for a rank's routing is added
};

struct SlotCombineArgs {
  OpSignature signature{};
  SlotPhase phase = SlotPhase::kBoth;
  uint32_t hidden = 0;
  bool folds = false;  // this launch sums before it sends, where it may: may_fold()
  // To send.
  const uint8_t* rows = nullptr;  // [L, S, H] BF16
  const int64_t* ranges = nullptr;  // of the dispatch, as origins and pairs
  const uint32_t* origins = nullptr;
  const uint32_t* pairs = nullptr;
  const uint32_t* routed = nullptr;  // nullptr: this combine tells its weights
  // To receive, and to sum for others. The wire of `signature` is that of their sums.
  const int64_t* topk_idx = nullptr;  // [T, width]
  const float* weights = nullptr;  // [T, width]
  uint32_t num_tokens = 0, width = 0;
  uint8_t* out = nullptr;  // [T, H] BF16
  int64_t* waited_nsec = nullptr;  // as in SlotDispatchArgs
};

// Whether launches of a combine may sum before they send (low_latency_fold.cuh). Not where ranks may be masked, for
// whose weights others would wait.
constexpr bool may_fold(const Group& group, const SlotCombineArgs& args) {
  return group.map.num_domains == 1 && group.mask_nsec == 0 && args.signature.wire == Dtype::kBf16;
}
// Whether this launch does. One that only sends waits for nobody, so it needs weights that are known.
constexpr bool folds(const Group& group, const SlotCombineArgs& args) {
  const bool sends = args.phase == SlotPhase::kBoth || (args.phase == SlotPhase::kSend && args.routed != nullptr);
  return sends && args.folds && may_fold(group, args);
}

Status load_low_latency_dispatch(uint32_t shared_bytes);
Status load_low_latency_combine(uint32_t shared_bytes);
// Says which ranks are masked, 1 or 0: out [ranks] int32.
Status launch_masks(const Group& group, int32_t* out, StreamHandle stream);
// Each is one kernel of `num_sms` blocks, at most kMaxSlotBlocks.
Status launch_low_latency(const Group& group, const SlotDispatchArgs& args, uint32_t num_sms, StreamHandle stream);
Status launch_low_latency(const Group& group, const SlotCombineArgs& args, uint32_t num_sms, StreamHandle stream);
// Shared memory that a block needs at most.
uint32_t slot_dispatch_bytes(const DeviceMap& map);
uint32_t slot_combine_bytes(const DeviceMap& map);

}  // namespace uccl_ep::gpu
