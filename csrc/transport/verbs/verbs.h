// The transport of RDMA NICs: a write with immediate per chunk. Everything that depends on the kind of NIC is in its
// queue pairs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/process.h"
#include "transport/nic_load.h"
#include "transport/nics.h"
#include "transport/transport.h"
#include "transport/verbs/datagrams.h"
#include "transport/verbs/link.h"
#include "transport/verbs/nic.h"
#include "transport/verbs/queue_pairs.h"

namespace uccl_ep::verbs {

class VerbsTransport final : public Transport {
 public:
  VerbsTransport(const TransportSetup& setup, const NicOptions& options);

  const char* name() const override { return "verbs"; }
  void register_device(const RegisteredRegion& region) override;
  std::string address() const override;
  void connect(const std::vector<std::string>& addresses) override;
  void attach_device(DeviceRegions device) override;
  void sealed() override {}
  bool has_room(uint64_t num_bytes) const override;
  PostResult post_write(const WriteRequest& request) override;
  void flush() override;
  size_t poll(std::span<Completion> out) override;
  PostResult send_datagram(int peer, std::span<const uint8_t> bytes) override;
  size_t receive_datagram(std::span<uint8_t> out) override;
  uint64_t idle_usec() const override;
  bool peer_alive(int peer) const override { return processes_[static_cast<size_t>(peer)].alive(); }
  std::string trouble() const override;

 private:
  // A NIC with its connections. Its members are destroyed from last to first, so that nobody writes to memory that is
  // gone.
  struct NicEnd {
    NicOptions options;  // with its family's defaults
    QueueSizes sizes;
    std::unique_ptr<Nic> nic;
    Owned<ibv_cq> completions;
    std::unique_ptr<QueuePairs> pairs;
    std::unique_ptr<Datagrams> datagrams;
    NicLoad load;
    std::vector<std::unique_ptr<Doorbell>> doorbells;
    std::vector<Link> links;  // as in setup_.rails
    std::vector<NicAddress> remotes;  // likewise
    std::vector<uint32_t> waiting;  // links with posts that were not handed over
    uint32_t in_flight = 0;  // writes
    uint32_t taken = 0;  // arrivals whose room was not given back
  };

  void open(const HostNic& chosen, size_t num_nics);
  void check(int peer, const Address& address) const;
  void make_links(NicEnd& end, const std::vector<Address>& rails);
  size_t rail_index(int peer) const;
  NicEnd* choose_end(const WriteRequest& request, size_t rail_idx);
  Write write_of(const NicEnd& end, size_t rail_idx, const WriteRequest& request) const;
  void read_events();
  void harvest(NicEnd& end);
  void arrived(NicEnd& end, const ibv_wc& completion);
  void completed(NicEnd& end, const ibv_wc& completion);
  void break_off(NicEnd& end, Link& link, const char* reason);
  void tell(NicEnd& end, int peer, const Write& write, const char* reason);
  const char* reason_for(const NicEnd& end, int peer, const ibv_wc& completion);

  const TransportSetup setup_;
  const NicOptions options_;
  bool has_device_ = false;
  DeviceRegions device_;
  std::vector<ProcessWatch> processes_;  // by rank
  std::vector<size_t> rail_idx_;  // by rank, in setup_.rails; SIZE_MAX: no rail
  std::vector<std::unique_ptr<NicEnd>> ends_;
  size_t next_end_ = 0;
  size_t next_sender_ = 0, next_receiver_ = 0;  // of datagrams, in ends_: rotate
  std::vector<Completion> ready_;  // from first_ready_ on: polled, and not reported yet
  size_t first_ready_ = 0;
  std::map<std::pair<int, std::string>, std::string> reasons_;  // texts that completions point to
  uint64_t last_event_usec_ = 0;
  uint64_t next_events_usec_ = 0;  // when the NICs' own events are read again
  uint64_t strangers_ = 0;
};

}  // namespace uccl_ep::verbs
