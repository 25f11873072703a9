// The receiving half of a proxy. It turns arrivals into stamps, which the domain polls (a GPU reads events instead),
// and consumed chunks into credits.
#pragma once

#include <cstdint>
#include <vector>

#include "proxy/board.h"
#include "proxy/post.h"
#include "proxy/proxy.h"

namespace uccl_ep {

class Lander {
 public:
  Lander(const ProxyContext& context, Board& board);

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
    // Every credit in flight names a larger count than this. A credit whose count exceeds this one by 2^15 is held
    // back. So an old credit is never mistaken for one of the next lap (layout/words.h).
    uint64_t credit_base = 0;
    uint32_t credits_in_flight = 0;
    uint32_t laggard = 0;  // the reader that was behind at the last look: while it still is, no other is asked
    bool open = false;  // listed in open_
    Refusal refusal;
  };

  // Chunks that all readers have consumed; any less than `wanted` if one has not consumed that many.
  uint64_t consumed(Channel& channel, uint64_t wanted) const;
  bool post_credit(uint32_t index, uint64_t num_consumed, uint64_t now_usec);
  void trace(TraceKind kind, uint32_t index, uint64_t serial, uint64_t num_bytes) const;
  [[noreturn]] void fail(int peer, const std::string& text) const;

  const ProxyContext& context_;
  std::vector<Channel> channels_;
  std::vector<uint32_t> open_;  // credited channels with chunks that were not returned yet
  bool ring_own_ = false;
  bool ring_domain_ = false;
  bool refused_ = false;
  // The last look found nothing to return, and the bell that readers ring had this ticket. A GPU does not ring.
  bool settled_ = false;
  uint32_t settled_ticket_ = 0;
  Counter arrivals_, arrived_bytes_, duplicates_, credits_, refused_posts_;
};

}  // namespace uccl_ep
