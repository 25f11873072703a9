// Where the tokens of one rank go, from its routing [T, K]: sender and receivers count in the same order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "backend/host/meeting.h"
#include "backend/host/slots.h"

namespace uccl_ep::host {

class SlotTokens {
 public:
  // `experts`: [T, topk], kUnrouted: none.
  SlotTokens(const HostContext& context, const uint32_t* experts, uint32_t topk)
      : context_(context), experts_(experts), topk_(topk) {}

  std::span<const uint32_t> experts(uint32_t token) const { return {experts_ + uint64_t{token} * topk_, topk_}; }
  bool has(uint32_t expert) const { return expert < context_.num_experts; }
  int owner(uint32_t expert) const { return static_cast<int>(expert / context_.experts_per_rank); }
  // The ranks of a domain with experts of a token, ascending.
  const std::vector<int>& owners(uint32_t token, int domain) {
    found_.clear();
    for (const uint32_t expert : experts(token))
      if (has(expert) && context_.topo.domain_of[static_cast<size_t>(owner(expert))] == domain)
        found_.push_back(owner(expert));
    std::sort(found_.begin(), found_.end());
    found_.erase(std::unique(found_.begin(), found_.end()), found_.end());
    return found_;
  }
  // A rank's experts of a token, by their index there, ascending; each with its place in [T, K].
  const std::vector<std::pair<uint32_t, uint64_t>>& experts_at(uint32_t token, int rank) {
    local_.clear();
    for (uint32_t k = 0; k < topk_; ++k)
      if (const uint32_t expert = experts(token)[k]; has(expert) && owner(expert) == rank)
        local_.emplace_back(expert % context_.experts_per_rank, uint64_t{token} * topk_ + k);
    std::sort(local_.begin(), local_.end());
    return local_;
  }

 private:
  const HostContext& context_;
  const uint32_t* const experts_;
  const uint32_t topk_;
  std::vector<int> found_;
  std::vector<std::pair<uint32_t, uint64_t>> local_;
};

// What both kinds of operations do with headers and ports.
class SlotOperation : public SlotWork {
 public:
  SlotOperation(HostContext& context, const SlotCall& call)
      : context_(context),
        ports_(*context.slots),
        call_(call),
        meeting_(call.number, {context.rank, call.signature, call.num_refused}, call.refusal, context.patience_usec),
        entered_(context.incoming.size(), false) {}

 protected:
  bool lives(int rank) const { return !ports_.masked[static_cast<size_t>(rank)]; }
  // A domain is masked as a whole, but where there is one.
  bool domain_lives(size_t d) const {
    return static_cast<int>(d) == context_.domain || lives(context_.topo.members[d][0]);
  }
  // The chunk of this operation: others may come before it.
  bool is_ready(const InPort& port) const { return port.ready(call_.number - 1); }
  const uint8_t* slot_of(const InPort& port) const { return port.slot(call_.number - 1); }
  bool is_next(const OutPort& port) const { return port.serial() == call_.number - 1; }
  // Whether the slots of all live domains may be written.
  template <typename Ports>
  bool all_free(Ports& ports) {
    for (size_t d = 0; d < ports.size(); ++d)
      if (domain_lives(d) && !ports[d].free()) return false;
    return true;
  }
  // A rank whose worker or proxy keeps a slot from being written.
  template <typename Ports>
  WaitingOn waiting_for_slot(Ports& ports) {
    for (size_t d = 0; d < ports.size(); ++d) {
      OutPort& port = ports[d];
      if (!domain_lives(d) || port.free()) continue;
      const bool own = static_cast<int>(d) == context_.domain;
      const int peer =
          own ? context_.members()[port.slowest_reader()] : context_.topo.rail(context_.rank, static_cast<int>(d));
      return {Step::kStage, peer, static_cast<int64_t>(port.serial()), call_.number, 0, "to take an earlier operation"};
    }
    return {};
  }

  // Writes header, routing and weights, as far as they travel.
  void write_call(uint8_t* to, const SlotChunk& chunk, uint32_t num_tokens, const uint32_t* routing,
                  const float* weights) const {
    const CallHeader header{call_.number, call_.signature, num_tokens, static_cast<uint32_t>(call_.num_refused)};
    const uint64_t places = uint64_t{num_tokens} * call_.signature.topk;
    std::memcpy(to, &header, sizeof(header));
    if (routing != nullptr) std::memcpy(to + chunk.routing, routing, places * sizeof(uint32_t));
    if (weights != nullptr) std::memcpy(to + chunk.weights, weights, places * sizeof(float));
  }
  // Whether the chunk of `src` is there. Throws CommunicationFailure where it is of another call.
  bool enters(const InPort& port, int src) {
    const auto s = static_cast<size_t>(src);
    if (entered_[s] || !is_ready(port)) return entered_[s];
    const CallHeader header = header_of(port);
    if (header.num_refused == call_.num_refused && header.signature == call_.signature)
      entered_[s] = true;
    else
      meeting_.meet_other_call({src, header.signature, header.num_refused});
    return entered_[s];
  }
  CallHeader header_of(const InPort& port) const {
    CallHeader header;
    std::memcpy(&header, slot_of(port), sizeof(header));
    header.num_tokens = std::min(header.num_tokens, ports_.max_tokens);
    return header;
  }
  WaitingOn to_enter(int src) const {
    return {Step::kExchange, src, -1, call_.number, call_.number - 1, "to enter the operation"};
  }

  HostContext& context_;
  SlotPorts& ports_;
  const SlotCall call_;

 private:
  Meeting meeting_;
  std::vector<bool> entered_;  // [rank]
};

}  // namespace uccl_ep::host
