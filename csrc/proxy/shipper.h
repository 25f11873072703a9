// The sending half of a proxy. It passes finished chunks from the command ring to the transport, and flushed chunks
// back to their producer.
#pragma once

#include <cstdint>
#include <vector>

#include "proxy/board.h"
#include "proxy/latency.h"
#include "proxy/post.h"
#include "proxy/proxy.h"

namespace uccl_ep {

class Shipper {
 public:
  Shipper(const ProxyContext& context, Board& board);

  // Takes commands. Throws CommunicationFailure for an invalid one.
  bool drain();
  // Posts chunks as credits and the NIC allow, one per channel in turn.
  bool post(uint64_t now_usec);
  // Whether the last post() had refused posts; no bell announces when they would be accepted.
  bool refused() const { return refused_; }

  // A credit immediate arrived.
  void credit(uint32_t channel, uint32_t serial_low, int peer);
  // A data post is over. `delivered`: its bytes may be overwritten, and its producer is told.
  void flushed(const Cookie& cookie, bool delivered, uint64_t flushed_nsec);
  // Wakes the producer for everything flushed since the last call.
  void ring_producer();

  void add_stats(ProxyStats& stats) const;

 private:
  struct Slot {
    uint64_t serial = 0;
    uint64_t num_bytes = 0;
    uint64_t taken_nsec = 0;
    bool in_flight = false;
    uint64_t shared_offset = 0;  // in memory that the ring shares
  };
  // Chunks wait in the slots of their ring: serials [posted, queued).
  struct Channel {
    const OutChannel* out = nullptr;
    uint64_t queued = 0;
    uint64_t posted = 0;
    uint64_t credited = 0;    // chunks that the peer has consumed
    uint64_t wait_since_usec = 0;
    uint64_t refused_pass = 0;
    Refusal refusal;
    Prefix flushed;
    std::vector<Slot> slots;
    size_t stats = 0;
  };
  struct Totals {
    RingKind kind;
    int domain;
    Counter chunks, writes, bytes;
    Totals(RingKind k, int d) : kind(k), domain(d) {}
  };
  // Channels with waiting chunks, each once, in the order of their turn.
  class Turns {
   public:
    explicit Turns(size_t num_channels) : ring_(num_channels) {}
    size_t size() const { return size_; }
    uint32_t front() const { return ring_[head_]; }
    void pop() {
      head_ = (head_ + 1) % ring_.size();
      --size_;
    }
    void push(uint32_t channel) { ring_[(head_ + size_++) % ring_.size()] = channel; }

   private:
    std::vector<uint32_t> ring_;
    size_t head_ = 0;
    size_t size_ = 0;
  };

  void take(const Command& command, uint64_t taken_nsec);
  bool has_room(const Channel& channel) const;
  bool has_credit(Channel& channel, uint64_t now_usec);
  bool try_post(uint32_t index, uint64_t now_usec);
  void trace(TraceKind kind, const Channel& channel, const Slot& slot, uint64_t begin_nsec, uint64_t end_nsec) const;
  bool traces() const { return context_.trace != nullptr && context_.trace->on(); }
  [[noreturn]] void fail(int peer, const std::string& text) const;

  const ProxyContext& context_;
  const Memory memory_;  // of the chunks
  std::vector<Channel> channels_;
  std::vector<std::unique_ptr<Totals>> totals_;
  Turns turns_;
  uint64_t pass_ = 0;
  bool refused_ = false;
  bool ring_due_ = false;
  uint64_t in_flight_ops_ = 0;
  uint64_t in_flight_bytes_ = 0;
  Latencies latencies_;
  Counter commands_, credit_waits_, credit_wait_usec_, refused_posts_, peak_ops_, peak_bytes_;
};

}  // namespace uccl_ep
