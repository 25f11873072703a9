// The receiving half of a proxy. It turns arrivals into stamps, which the domain polls (a GPU polls the board instead),
// and consumed chunks into credits.
#pragma once

#include <cstdint>
#include <vector>

#include "proxy/post.h"
#include "proxy/prefix.h"
#include "proxy/proxy.h"

namespace uccl_ep {

class Lander {
 public:
  explicit Lander(const ProxyContext& context);

  // A data immediate arrived. Throws CommunicationFailure if no peer can have sent it.
  void arrive(const Completion& completion);
  // Wakes the readers of everything that arrived since the last call.
  void ring_readers();

  // Sends credits for consumed chunks: half a ring at a time, or all if `now_all`.
  bool return_credits(bool now_all, uint64_t now_usec);
  void credit_flushed(uint32_t channel);
  bool refused() const { return refused_; }

  void add_stats(ProxyStats& stats) const;

 private:
  struct Channel {
    const InChannel* in = nullptr;
    uint64_t end = 0;  // highest serial that arrived, + 1
    Prefix arrived;
    uint64_t returned = 0;  // chunks whose credit was posted
    // Every credit in flight names a larger count than this. A credit whose count exceeds this one by 2^16 is held
    // back. So an old credit is never mistaken for one of the next lap (layout/words.h).
    uint64_t credit_base = 0;
    uint32_t credits_in_flight = 0;
    bool open = false;  // listed in open_
    Refusal refusal;
  };

  uint64_t consumed(const InChannel& in) const;
  bool post_credit(uint32_t index, uint64_t num_consumed, uint64_t now_usec);
  void trace(TraceKind kind, uint32_t index, uint64_t serial, uint64_t num_bytes) const;
  [[noreturn]] void fail(int peer, const std::string& text) const;

  const ProxyContext& context_;
  std::vector<Channel> channels_;
  std::vector<uint32_t> open_;  // credited channels with chunks that were not returned yet
  bool ring_own_ = false;
  bool ring_domain_ = false;
  bool refused_ = false;
  Counter arrivals_, arrived_bytes_, duplicates_, credits_, refused_posts_;
};

}  // namespace uccl_ep
