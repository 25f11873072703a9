// How writes reach peers over one NIC. The two policies differ in their queue pairs and in what a completion says. Both
// post writes in the same way (link.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/verbs/nic.h"
#include "transport/verbs/sizes.h"

namespace uccl_ep::verbs {

// Where a link's writes are posted.
struct Outlet {
  ibv_qp_ex* qp = nullptr;
  ibv_ah* ah = nullptr;  // srd
  uint32_t remote_qp = 0;  // srd
};

constexpr uint64_t kReceive = UINT64_MAX;  // wr_id of receives; Link makes those of writes
constexpr uint32_t kQueueKey = 0x75636c65;  // of srd and datagrams: both ends name it

class QueuePairs {
 public:
  virtual ~QueuePairs() = default;
  // Whether a write is over as soon as a later one to the same peer is.
  virtual bool completes_in_order() const = 0;
  // Writes that may be in flight to all peers together.
  virtual uint32_t most_writes() const = 0;
  // Fills in, by rail, the number of our queue pair for it, and the number of the first packet that this queue pair
  // sends.
  virtual void describe(NicAddress& address) const = 0;
  virtual Outlet connect(int rail, const NicAddress& remote) = 0;
  // The rank whose write arrived; -1: no peer's.
  virtual int sender_of(const ibv_wc& arrival) const = 0;
  // Makes room for `count` more arrivals: so many were taken out of the completion queue.
  virtual void give_back(uint32_t count) = 0;
  // Nothing that was posted to the peer touches its memory from now on. srd cannot take posts back, and does nothing.
  virtual void cut(int peer) = 0;
};

struct QueuePairOptions {
  const NicOptions* nic = nullptr;
  const TransportSetup* setup = nullptr;
  QueueSizes sizes;
  ibv_cq* completions = nullptr;
};

// The way to a peer's port.
ibv_ah_attr route_to(const Port& port, const NicAddress& remote, const NicOptions& options);

// rc.cc: InfiniBand and RoCE. A reliable connection per rail, one shared receive queue.
std::unique_ptr<QueuePairs> make_rc(Nic& nic, const QueuePairOptions& options);
// srd.cc: EFA. One queue pair for all rails, which keeps no order and may need no receives.
std::unique_ptr<QueuePairs> make_srd(Nic& nic, const QueuePairOptions& options);

}  // namespace uccl_ep::verbs
