// The transport of one host: the sender's proxy copies into the receiver's mapped region when a NIC would have
// delivered, then puts the immediate into the receiver's inbox and rings its proxy. Device memory is copied by whoever
// was attached, from the post on; the immediate follows when a NIC would have delivered and the copy is over. A
// datagram is put into the receiver's inbox, too, if there is room. It stands in for a NIC, its faults included.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "common/mapping.h"
#include "common/patience.h"
#include "common/process.h"
#include "sync/control.h"
#include "transport/loop/address.h"
#include "transport/loop/inbox.h"
#include "transport/loop/link.h"
#include "transport/nic_load.h"
#include "transport/transport.h"

namespace uccl_ep::loop {

class LoopTransport final : public Transport {
 public:
  LoopTransport(const TransportSetup& setup, const TransportOptions& options);

  const char* name() const override { return "loop"; }
  // The peers are on this host: attach_device() brings their memory, too.
  void register_device(const RegisteredRegion&) override {}
  std::string address() const override { return encode_address(own_); }
  void connect(const std::vector<std::string>& addresses) override;
  void attach_device(DeviceRegions device) override;
  void sealed() override { inbox_.unlink(); }
  bool has_room(uint64_t num_bytes) const override { return load_.has_room(num_bytes); }
  PostResult post_write(const WriteRequest& request) override;
  // A write is on its way as soon as it is posted.
  void flush() override {
    if (device_.copies != nullptr) device_.copies->flush();
  }
  size_t poll(std::span<Completion> out) override;
  PostResult send_datagram(int peer, std::span<const uint8_t> bytes) override;
  void wake(int peer) override { peers_[static_cast<size_t>(peer)].control->proxy_bell.ring(); }
  size_t receive_datagram(std::span<uint8_t> out) override;
  uint64_t moved_bytes() const override { return moved_bytes_; }
  uint64_t idle_usec() const override;
  bool peer_alive(int peer) const override;

 private:
  struct Peer {
    bool is_rail = false;  // writes go to it and come from it
    bool lost = false;  // writes and datagrams to and from it are dropped
    Mapping region;
    Mapping inbox;
    ControlBlock* control = nullptr;
    InboxMarks* marks = nullptr;  // of its inbox
    ArrivalWriter writer;  // into its inbox
    ArrivalReader reader;  // of our inbox
    MailWriter mail_writer;
    MailReader mail_reader;
    uint32_t outstanding = 0;
    bool ring_due = false;  // listed in ring_due_
    bool has_arrivals = false, has_mail = false;  // listed in arrived_, in mail_
    std::vector<uint32_t> stalled;  // deliveries that found its inbox full, in order
    ProcessWatch process;
  };

  struct LateMail {
    uint64_t when_nsec;
    int peer;
    uint32_t num_bytes;
    std::array<uint8_t, kMaxDatagramBytes> bytes;
  };

  // The next event of a write, and its time.
  enum class Act : uint32_t { kDeliver, kDeliverAgain, kReport, kReportFailure };
  struct Due {
    uint64_t when_nsec;
    uint64_t order;  // in order of posting among equals
    uint32_t write;  // index in writes_
    Act act;
  };
  struct Later {
    bool operator()(const Due& a, const Due& b) const {
      return a.when_nsec != b.when_nsec ? a.when_nsec > b.when_nsec : a.order > b.order;
    }
  };
  struct Write {
    WriteRequest request;
    bool again = false;  // to be delivered once more before it is reported
    uint64_t copy = 0;  // ticket of its copy, if has_copy()
    bool has_copy() const { return request.memory == Memory::kDevice && request.num_bytes != 0; }
  };

  void reserve_mail(size_t num_ranks);
  void connect_peer(int rank, const std::string& text, size_t num_ranks);
  Peer& checked_peer(const WriteRequest& request);
  uint64_t start_copy(const WriteRequest& request);
  bool copy_failed(uint32_t write, const CommunicationFailure& failure, uint64_t now_nsec);
  bool link_holds(uint64_t now_nsec);
  void fail_pending(uint64_t now_nsec);
  bool settle_copy(uint32_t write, uint64_t now_nsec);
  void schedule(uint64_t when_nsec, uint32_t write, Act act);
  uint32_t take_write_slot();
  void perform_due(uint64_t now_nsec, std::span<Completion> out, size_t& count);
  void deliver_or_stall(uint32_t write, uint64_t now_nsec);
  void retry_stalled(uint64_t now_nsec);
  void look_at_copies(uint64_t now_nsec);
  void ring_receivers();
  void deliver(uint32_t write, uint64_t now_nsec);
  Completion report(uint32_t write, Completion::Kind kind);
  void harvest(std::span<Completion> out, size_t& count);
  bool harvest_of(int rank, std::span<Completion> out, size_t& count);
  // Lists the senders that marks stand for and that `has` does not list yet.
  void take_marks(MarkLine& marks, bool Peer::* has, std::vector<int>& list);
  uint64_t disorder_nsec(uint64_t num_bytes);
  // datagrams.cc
  bool deliver_mail(int peer, std::span<const uint8_t> datagram);
  void deliver_late_mail(uint64_t now_nsec);
  uint64_t clock() const { return options_.clock_nsec != nullptr ? options_.clock_nsec->read() : now_nsec(); }
  bool chance(double rate) { return rate > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < rate; }

  RegisteredRegion region_;
  DeviceRegions device_;  // no regions before attach_device()
  LoopOptions options_;
  Address own_;
  Mapping inbox_;
  NicLoad load_;
  std::vector<Peer> peers_;  // by rank
  const std::vector<int> rails_, all_;  // ranks, as in TransportSetup
  EgressLink link_;
  std::mt19937_64 random_;
  std::vector<Write> writes_;
  std::vector<uint32_t> free_writes_;
  std::vector<Due> due_;  // heap, earliest first
  std::vector<uint32_t> copying_;  // due, but their copy is not over yet
  std::vector<LateMail> late_mail_;  // under way, in no order
  std::string failure_;  // what failed first
  const uint64_t progress_timeout_usec_;
  PatienceClock patience_;
  bool is_cut_ = false;
  uint64_t cut_since_usec_ = 0;  // of patience_
  uint64_t moved_bytes_ = 0;
  uint64_t num_scheduled_ = 0;
  uint64_t num_stalled_ = 0;
  uint64_t copied_bytes_ = 0;  // in this poll
  // Ranks. Who still has something after its turn goes behind the others, so that no sender starves another.
  std::vector<int> ring_due_;  // have an arrival that they were not told of
  std::vector<int> arrived_, mail_;  // may have sent arrivals, datagrams
  InboxMarks* marks_ = nullptr;  // of our inbox
  bool more_now_ = false;  // the last poll stopped early
};

}  // namespace uccl_ep::loop
