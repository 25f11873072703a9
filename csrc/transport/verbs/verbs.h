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
  uint64_t idle_usec() const override;
  bool peer_alive(int peer) const override { return processes_[static_cast<size_t>(peer)].alive(); }
  std::string trouble() const override;

 private:
  // A NIC with its connections. Its members are destroyed from last to first, so that nobody writes to memory that is
  // gone.
  struct Rail {
    NicOptions options;  // with its family's defaults
    std::unique_ptr<Nic> nic;
    Owned<ibv_cq> completions;
    std::unique_ptr<QueuePairs> pairs;
    NicLoad load;
    std::vector<std::unique_ptr<Doorbell>> doorbells;
    std::vector<Link> links;  // by peer, as in setup_.peers
    std::vector<NicAddress> remotes;  // likewise
    std::vector<uint32_t> waiting;  // links with posts that were not handed over
    uint32_t in_flight = 0;  // writes
    uint32_t taken = 0;  // arrivals whose room was not given back
  };

  void open(const HostNic& chosen);
  QueueSizes sizes_for(const Nic& nic) const;
  void check(int peer, const Address& address) const;
  void make_links(Rail& rail, const std::vector<Address>& addresses);
  size_t peer_index(int peer) const;
  Rail* choose_rail(const WriteRequest& request, size_t peer_idx);
  Write write_of(const Rail& rail, size_t peer_idx, const WriteRequest& request) const;
  void read_events();
  void harvest(Rail& rail);
  void arrived(Rail& rail, const ibv_wc& completion);
  void completed(Rail& rail, const ibv_wc& completion);
  void break_off(Rail& rail, Link& link, const char* reason);
  void tell(Rail& rail, int peer, const Write& write, const char* reason);
  const char* reason_for(const Rail& rail, int peer, const ibv_wc& completion);

  const TransportSetup setup_;
  const NicOptions options_;
  bool has_device_ = false;
  DeviceRegions device_;
  std::vector<ProcessWatch> processes_;  // by rank
  std::vector<size_t> peer_idx_;  // by rank
  std::vector<std::unique_ptr<Rail>> rails_;
  size_t next_rail_ = 0;
  std::vector<Completion> ready_;  // from first_ready_ on: polled, and not reported yet
  size_t first_ready_ = 0;
  std::map<std::pair<int, std::string>, std::string> reasons_;  // texts that completions point to
  uint64_t last_event_usec_ = 0;
  uint64_t next_events_usec_ = 0;  // when the NICs' own events are read again
  uint64_t strangers_ = 0;
};

}  // namespace uccl_ep::verbs
