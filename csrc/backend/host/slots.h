// Low latency on the host: a rank writes what a domain gets of an operation as one chunk, and no rank waits for a plan.
// The worker keeps several operations under way, and no function here waits. What a rank sends, and what others need of
// it, goes on before it receives; results are written when it receives. A call that only sends is copied when it is
// made, so that it waits for nobody.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/host/context.h"
#include "backend/low_latency.h"
#include "backend/op.h"

namespace uccl_ep::host {

constexpr uint32_t kUnrouted = 0xFFFFFFFF;

// Before what a chunk of rows or weights has: routing [T, K] int32, weights [T, K] fp32, rows, as the kind has them.
struct CallHeader {
  uint64_t number;
  OpSignature signature;
  uint32_t num_tokens;
  uint32_t num_refused;  // as in OpHeader
};
// Where they are.
struct SlotChunk {
  uint64_t routing = 0, weights = 0, rows = 0, end = 0;  // bytes from the beginning
  SlotChunk(uint64_t places, bool has_routing, bool has_weights, uint64_t row_bytes) {
    routing = round_up(sizeof(CallHeader), kLineBytes);
    weights = routing + (has_routing ? places * sizeof(uint32_t) : 0);
    rows = round_up(weights + (has_weights ? places * sizeof(float) : 0), kLineBytes);
    end = rows + row_bytes;
  }
};

// What is fixed when the call is queued. Operations of a kind have numbers from 1 on, the same on all ranks.
struct SlotCall {
  uint64_t number = 0;
  uint64_t num_refused = 0;  // calls that this rank refused before this one
  std::string refusal;  // why, the last of them
  OpSignature signature{};

  uint64_t call() const { return number + num_refused; }  // as users see it
};

class SlotWork {
 public:
  virtual ~SlotWork() = default;
  // Sends what depends on no other rank, when the operations of this kind before it have. True if anything moved.
  virtual bool stage() = 0;
  virtual bool staged() const = 0;
  // Sums for other ranks. True if anything moved.
  virtual bool serve() = 0;
  virtual bool served() const = 0;
  // What one of both waits for.
  virtual WaitingOn waiting_on() = 0;
  // What the result needs of ranks that are not `gone`, and has not come; first of ranks that have not entered. Throws
  // CommunicationFailure for a rank that has made another call.
  virtual std::vector<WaitingOn> missing(const std::vector<bool>& gone) = 0;
  // Nothing is missing of ranks that are not masked, and all is served: writes the result.
  virtual void finish() = 0;
  // The operation has failed: a caller that ignores the exception must not compute with parts of a result.
  virtual void spoil() const = 0;
};

std::unique_ptr<SlotWork> make_slot_dispatch(HostContext& context, const SlotCall& call,
                                             const LowLatencyDispatch& args);
std::unique_ptr<SlotWork> make_slot_combine(HostContext& context, const SlotCall& call, const LowLatencyCombine& args);

// Sizes of the rings. They hold two operations, and one more where ranks may be masked: engine/host/slots.h.
RingParams::Slots slot_rings(uint32_t max_tokens, uint32_t topk, uint32_t hidden, uint32_t sum_element_bytes,
                             bool masks);

// Throws UsageFailure(kRouting) for a [T, K] that names an expert twice for a token, or one that there is not.
void check_slot_routing(const int64_t* topk_idx, uint64_t num_tokens, uint32_t topk, uint32_t num_experts);

}  // namespace uccl_ep::host
