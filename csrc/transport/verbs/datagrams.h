// Datagrams over one NIC: one unreliable queue pair for all ranks, with a completion queue and buffers of its own. EFA
// has such queue pairs, too.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/verbs/nic.h"
#include "transport/verbs/sizes.h"

namespace uccl_ep::verbs {

// Of the buffers for so many.
uint64_t datagram_buffer_bytes(const DatagramSizes& sizes);

class Datagrams {
 public:
  // Before what it receives, a NIC writes where that came from, or leaves the place alone.
  static constexpr uint32_t kRouteBytes = 40;
  static constexpr uint32_t kSlotBytes = 640;  // whole lines
  static_assert(kRouteBytes + kMaxDatagramBytes <= kSlotBytes);

  // Throws CommunicationFailure(kTransport), UsageFailure(kConfig).
  // num_nics: of the rank.
  Datagrams(Nic& nic, const NicOptions& options, const TransportSetup& setup, size_t num_nics);

  // Of the queue pair, for the address.
  uint32_t number() const { return qp_->qp_num; }
  void connect(int peer, const NicAddress& remote);
  // False: all buffers are under way, or it has failed. Throws CommunicationFailure(kTransport) for a rank that is not
  // connected.
  bool send(int peer, std::span<const uint8_t> bytes);
  // Why it sends nothing any more; empty: it works.
  const std::string& failure() const { return failure_; }
  // As Transport::receive_datagram().
  size_t receive(std::span<uint8_t> out);

 private:
  struct Free {
    void operator()(uint8_t* memory) const;
  };
  struct Way {
    Owned<ibv_ah> ah;
    uint32_t remote_qp = 0;
  };
  struct Received {
    uint32_t slot;
    uint32_t num_bytes;
  };

  void create();
  void modify(ibv_qp_state state, int mask);
  void post_receive(uint32_t slot);
  void poll();
  uint8_t* slot_at(uint32_t slot) const { return buffers_.get() + size_t{slot} * kSlotBytes; }
  [[noreturn]] void refuse(int peer, const std::string& text) const;

  Nic& nic_;
  const NicOptions& options_;
  DatagramSizes sizes_;
  std::unique_ptr<uint8_t, Free> buffers_;  // slots of receives, then slots of sends
  Owned<ibv_mr> memory_;
  Owned<ibv_cq> completions_;
  std::vector<Way> ways_;  // by rank
  Owned<ibv_qp> qp_;
  std::vector<uint32_t> free_;  // slots of sends
  std::vector<Received> received_;  // from first_received_ on: nobody has taken them
  size_t first_received_ = 0;
  std::string failure_;
};

}  // namespace uccl_ep::verbs
