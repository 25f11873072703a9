// The transport over libfabric. A write carries its immediate as the receiver's completion data; if a provider cannot
// do that, a message follows the write. A write is done when libfabric says that it was delivered.
//
// A write is held back until the next write or flush(): only then is it known whether it needs FI_MORE. A write that
// the provider refuses (unfinished connection, full queue) is parked per peer, and poll() retries it. Meanwhile that
// peer gets no further writes; other peers do not wait. A datagram is a message; one that the provider refuses is lost.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/patience.h"
#include "common/process.h"
#include "transport/nic_load.h"
#include "transport/ofi/address.h"
#include "transport/ofi/endpoint.h"
#include "transport/ofi/naming.h"
#include "transport/transport.h"

namespace uccl_ep::ofi {

// The most writes of a rank that are posted and not reported, over all its NICs.
constexpr uint32_t kNumOps = 4096;
// Messages that may arrive between two polls: datagrams, and notices of Naming::kMessage.
constexpr uint32_t kNumReceives = 1024;
// Datagrams that are posted and not over. A peer that takes none holds no more than its share.
constexpr uint32_t kNumSends = 256, kMostSendsToPeer = 4;

// A write, until it is reported.
struct Post {
  fi_context2 context;  // libfabric's; a completion names the write by its address
  WriteRequest request;
  Notice notice;
  uint64_t refused_since_usec;  // by the clock of patience_
  uint32_t nic;
  uint32_t next;  // in the list of free, parked or failed writes
  bool written;  // of Naming::kMessage: its bytes are flushed
  const char* reason;  // why it failed; null: it did not
};

struct Receive {
  fi_context2 context;
  uint8_t bytes[kMaxDatagramBytes];
  uint32_t num_bytes;  // of a datagram that has come
  uint32_t nic;
};
static_assert(sizeof(Notice) <= kMaxDatagramBytes);

struct Send {
  fi_context2 context;
  uint8_t bytes[kMaxDatagramBytes];
  int peer;
};

// The index of `context` in the array; `count`: it is not there.
template <typename T>
uint32_t index_in(const T* array, uint32_t count, const void* context) {
  const std::less<const void*> before;
  if (before(context, array) || !before(context, array + count)) return count;
  return static_cast<uint32_t>(static_cast<const T*>(context) - array);
}

// Indices of ops, in order, linked by Post::next.
struct OpList {
  uint32_t first = kNumOps, last = kNumOps;
  bool empty() const { return first == kNumOps; }
};

class OfiTransport final : public Transport {
 public:
  // `naming` replaces the provider's, for tests.
  OfiTransport(const TransportSetup& setup, const NicOptions& options, const Naming* naming = nullptr);
  ~OfiTransport() override;

  const char* name() const override { return "ofi"; }
  void register_device(const RegisteredRegion& region) override;
  std::string address() const override { return encode_address(own_); }
  void connect(const std::vector<std::string>& addresses) override;
  // The NIC reads and writes what register_device() gave it.
  void attach_device(DeviceRegions device) override { nic_writes_ = device.nic_writes; }
  void sealed() override {}
  bool has_room(uint64_t num_bytes) const override;
  PostResult post_write(const WriteRequest& request) override;
  void flush() override;
  size_t poll(std::span<Completion> out) override;
  PostResult send_datagram(int peer, std::span<const uint8_t> bytes) override;
  size_t receive_datagram(std::span<uint8_t> out) override;
  uint64_t idle_usec() const override;
  bool peer_alive(int peer) const override;

  static uint64_t memory_bytes(size_t num_all);
  // Arrivals that named no rail.
  uint64_t num_strangers() const { return num_strangers_; }

 private:
  struct Nic {
    std::unique_ptr<Endpoint> endpoint;
    RegisteredMemory* region = nullptr;
    RegisteredMemory* device = nullptr;
    void* op_desc = nullptr;  // descriptors of the memory of ops_, receives_ and sends_
    void* receive_desc = nullptr;
    void* send_desc = nullptr;
    NicLoad load;
    uint32_t held = kNumOps;
    std::vector<int> rank_of;  // by its fi_addr_t; -1: no rail
  };
  struct Peer {
    bool connected = false, is_rail = false;
    uint32_t num_sends = 0;  // datagrams that are posted and not over
    Address address;
    Tags tags;  // of its own
    std::vector<fi_addr_t> endpoints;  // by our NIC: the endpoint that it writes and sends to
    OpList parked;
    ProcessWatch process;
    std::string reason;  // the first failure
  };

  void open(std::vector<Offer> offers);
  void connect_peer(int rank, const std::string& text);
  void connect_nics(int rank, const Address& address);
  Peer& checked_peer(const WriteRequest& request);
  const RemoteMemory& remote_of(const Peer& peer, uint32_t nic, Memory memory) const;
  uint32_t choose_nic(const WriteRequest& request);

  // submit.cc
  void push(OpList& list, uint32_t idx);
  uint32_t pop(OpList& list);
  void submit_held(Nic& nic, uint64_t flags);
  void submit_or_park(uint32_t idx, uint64_t flags);
  ssize_t submit(Post& op, uint64_t flags);
  ssize_t write(Post& op, const Peer& peer, uint64_t flags) const;
  ssize_t send_notice(Post& op, const Peer& peer, uint64_t flags) const;
  void retry_parked(uint64_t now_usec);
  void retry_parked_of(Peer& peer, uint64_t now_usec);
  void set_failed(uint32_t idx, const std::string& text);

  // completions.cc
  void read(uint32_t nic, std::span<Completion> out, size_t& count);
  void read_error(uint32_t nic);
  void take(uint32_t nic, const fi_cq_data_entry& entry, fi_addr_t source, std::span<Completion> out, size_t& count);
  bool take_arrival(uint32_t nic, const fi_cq_data_entry& entry, fi_addr_t source, Arrival& arrival);
  bool take_notice(uint32_t receive, size_t num_bytes, Arrival& arrival);
  void report_failed(std::span<Completion> out, size_t& count);
  Completion report(uint32_t idx, Completion::Kind kind);

  // datagrams.cc
  void open_datagrams();
  void post_receive(uint32_t idx);
  void retry_receives();
  bool take_send(const void* context);

  const TransportSetup setup_;
  const NicOptions options_;
  Address own_;
  Tags tags_;  // ours
  DeviceFlush* nic_writes_ = nullptr;
  PatienceClock patience_;
  uint64_t latest_usec_ = 0;  // when something last moved
  uint64_t num_strangers_ = 0;
  uint32_t num_in_flight_ = 0;  // ops that are not free
  uint32_t num_parked_ = 0;
  uint32_t next_nic_ = 0, next_read_ = 0, next_sender_ = 0;  // rotate
  OpList free_, failed_;
  std::vector<Peer> peers_;  // by rank
  std::unique_ptr<Post[]> ops_;  // before the endpoints, which use them until they are closed
  std::unique_ptr<Receive[]> receives_;
  std::unique_ptr<Send[]> sends_;
  std::vector<uint32_t> unposted_;  // receives that the provider refused
  std::vector<uint32_t> free_sends_;
  std::deque<uint32_t> datagrams_;  // receives that nobody has taken
  std::vector<Nic> nics_;
};

}  // namespace uccl_ep::ofi
