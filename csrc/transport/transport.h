// The contract between a proxy and a network: writes to rails, and datagrams to all ranks of other domains.
//
// Writes are reliable, unordered and counted.
// * post_write() writes bytes of our registered region into the peer's region and raises an immediate there. An arrival
//   is reported at the peer only when all its bytes are visible to the peer's host threads.
// * Nothing is ordered: neither two writes to one peer, nor their arrivals, nor their completions.
// * A posted write ends exactly once: as kWriteDone (flushed: it will never touch the peer's memory again) or as
//   kFailure. The caller keeps the write's bytes unchanged until then.
// * An arrival may be reported more than once. The payload is not written again after kWriteDone. The last report is
//   polled before half of the channel's serial numbers (kImmSerialBits) have passed, because only serials tell
//   immediates apart.
// * The same holds for writes between device memories. Their arrival says that the bytes are visible to every GPU of
//   the peer's domain.
// A datagram is what a network of any kind can carry: it may be lost, come twice, late, or before an earlier one, and
// anybody may have sent it. The proxy knows who did, and repeats what is not acknowledged (proxy/messages.h).
// One thread uses a transport: the proxy. register_device(), address(), connect() and attach_device() are called
// before that thread starts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/fields.h"
#include "sync/flag.h"

namespace uccl_ep {

// Our region, as the domain memory allocated it. `name` lets a same-host transport map it in another process.
struct RegisteredRegion {
  void* base = nullptr;
  uint64_t bytes = 0;
  std::string name;
  int dmabuf_fd = -1;  // of device memory, if the driver gives one; the caller owns it
};

// The parameters of a transport.
struct TransportSetup {
  int rank = 0;
  int num_ranks = 1;
  std::vector<int> rails;  // ranks that we write to, and that write to us
  std::vector<int> all;  // ranks that datagrams go to and come from; the rails are among them
  RegisteredRegion region;
  uint64_t generation = 0;  // of the engine: equal on all its ranks, and different for every other engine
  uint64_t largest_write_bytes = 0;  // no write is larger
  uint64_t progress_timeout_usec = 20'000'000;  // how long a link may be down
  uint32_t local_idx = 0, local_size = 1;  // among the ranks that share the host's NICs
  std::string near_pci;  // "0000:1b:00.0", the GPU that the NICs should be near to; empty: our CPU
};

// The memory that a write's offsets refer to: regions or device regions.
enum class Memory : uint32_t { kHost, kDevice };

struct WriteRequest {
  int peer;
  uint64_t local_offset;  // in our region
  uint64_t remote_offset;  // in the peer's region
  uint64_t num_bytes;  // 0: only the immediate
  uint32_t immediate;
  uint64_t cookie;  // comes back with kWriteDone
  Memory memory = Memory::kHost;
  bool limited = false;  // counts towards its NIC's limit: see has_room()
};

struct Completion {
  enum class Kind : uint32_t { kWriteDone, kArrival, kFailure };
  Kind kind;
  int peer;
  uint32_t immediate;  // kArrival
  uint64_t num_bytes;  // kArrival, kWriteDone
  uint64_t cookie;  // kWriteDone, kFailure
  const char* reason;  // kFailure: text that lives as long as the transport
};

// How a transport within one host moves device memory: with copy engines. Only the proxy's thread uses them.
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;
  // Starts a copy; copies may complete in any order. Returns a ticket. Throws CommunicationFailure(kTransport).
  virtual uint64_t start(void* to, const void* from, uint64_t num_bytes) = 0;
  // The caller repeats it while copies are in progress. Started copies may be submitted in groups.
  virtual void flush() = 0;
  // True: all bytes of the copy are visible to every GPU of the receiving domain and to the host. The caller asks until
  // it gets true, and not again. Throws as start().
  virtual bool done(uint64_t ticket) = 0;
};

// Makes writes of NICs into local device memory visible to every GPU of the domain. Only the proxy's thread uses it.
class DeviceFlush {
 public:
  virtual ~DeviceFlush() = default;
  // Throws CommunicationFailure(kTransport).
  virtual void flush() = 0;
};

// Device regions as this process has mapped them, by rank. {nullptr, 0}: none.
struct DeviceRegions {
  std::vector<RegisteredRegion> regions;
  // Both live as long as the transport uses them.
  DeviceCopies* copies = nullptr;
  DeviceFlush* nic_writes = nullptr;  // nullptr: all GPUs see the NICs' writes without a flush
};

// No datagram is longer.
constexpr size_t kMaxDatagramBytes = 576;

enum class PostResult : uint32_t { kPosted, kAgain };  // kAgain: the queue is full now, poll and try again

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;
  // Registers our device memory, so that a NIC can read and write it. Called before address(). Throws
  // CommunicationFailure(kTransport).
  virtual void register_device(const RegisteredRegion& region) = 0;
  // Opaque bytes for the peers; the bootstrap gathers them.
  virtual std::string address() const = 0;
  // Connects to the setup's ranks, but does not wait for them. `addresses` is by rank. Throws
  // CommunicationFailure(kTransport), also for an address of another rank, generation or transport.
  virtual void connect(const std::vector<std::string>& addresses) = 0;
  // Called after connect() and before the proxy starts. Without it no write may name device memory.
  virtual void attach_device(DeviceRegions device) = 0;
  // Called after every rank has connected. Removes names that were needed only to connect.
  virtual void sealed() = 0;
  // Whether the limit of a NIC has room for one more write of `num_bytes`. Only limited writes count: before other
  // writes a caller need not ask. One limited write may always be in flight.
  virtual bool has_room(uint64_t num_bytes) const = 0;
  // Throws CommunicationFailure(kTransport) for a write that leaves a region, or to a rank that is no rail; then
  // nothing was posted.
  virtual PostResult post_write(const WriteRequest& request) = 0;
  // Rings one doorbell for the writes posted since the last flush.
  virtual void flush() = 0;
  // Fills `out` and returns the number of completions. Never blocks.
  virtual size_t poll(std::span<Completion> out) = 0;
  // Sends a copy of `bytes`, at most kMaxDatagramBytes. kPosted says nothing of its arrival. Never blocks. Throws
  // CommunicationFailure(kTransport) for a rank that is not among the setup's, and if no NIC can send any more.
  virtual PostResult send_datagram(int peer, std::span<const uint8_t> bytes) = 0;
  // The peer's proxy is to look at once for what it was sent. Where nobody can tell it, it polls often enough.
  virtual void wake(int /*peer*/) {}
  // Copies the next datagram that has arrived to `out`, which has room for kMaxDatagramBytes, and returns its length.
  // 0: none has. Never blocks.
  virtual size_t receive_datagram(std::span<uint8_t> out) = 0;
  // Bytes that had left at the last poll(), including those of writes in flight. While the number grows, a link is slow
  // but not dead. 0: the transport knows only whole writes.
  virtual uint64_t moved_bytes() const { return 0; }
  // How long the proxy may sleep before poll() has work, if nobody rings its bell. UINT64_MAX: until the bell rings.
  virtual uint64_t idle_usec() const = 0;
  // False once the peer's process is known to be gone (a transport that cannot know says true).
  virtual bool peer_alive(int peer) const = 0;
  // The current fault of local NICs, for the text of an error: "port 1 of NIC mlx5_0 went down 3.2 s ago". Empty: no
  // known fault. Any thread may call it.
  virtual std::string trouble() const { return {}; }
};

struct LoopOptions {
  double gbytes_per_s = 0;  // per rank and direction out; 0: unlimited. The limiter allows no burst over one chunk.
  double latency_usec = 0;
  uint64_t seed =
      0;  // 0: in order. Else arrivals and completions are delivered in a seeded random order and with random delays
  double refuse_rate = 0;  // share of post_write calls answered kAgain
  double duplicate_rate = 0;  // share of writes whose payload and immediate are delivered twice (before kWriteDone),
                              // and of datagrams that come twice
  double loss_rate = 0;  // share of datagrams that are lost
  int drop_peer = -1;  // nothing is delivered to or from this rank
  uint32_t queue_depth = 1024;  // per peer
  // For tests; both outlive the transport. While `cut` is odd, nothing leaves and nothing is acknowledged. A write that
  // waits for longer than the progress deadline fails. The transport reads `clock_nsec` instead of the host's clock, so
  // that delays take no time and are equal in every run.
  const Flag* cut = nullptr;
  const Flag* clock_nsec = nullptr;
};

// Choice and settings of a rank's NICs.
struct NicOptions {
  std::vector<std::string> devices;  // by name; empty: the nearest
  std::string provider;  // of ofi; empty: the first suitable one
  std::string interface;  // of ofi's tcp: the network interface; empty: chosen
  int gid_index = -1;  // of verbs; -1: chosen
  int service_level = -1;  // of verbs; -1: the NIC family's
  int traffic_class = -1;  // of verbs; -1: the NIC family's
  // Limits of data in flight per NIC. 0: verbs takes the NIC family's default; ofi and loop have no limit.
  uint64_t window_bytes = 0;
  uint32_t window_ops = 0;
};

template <>
inline constexpr auto kFields<LoopOptions> =
    std::tuple{UCCL_EP_FIELD(LoopOptions, gbytes_per_s),   UCCL_EP_FIELD(LoopOptions, latency_usec),
               UCCL_EP_FIELD(LoopOptions, seed),           UCCL_EP_FIELD(LoopOptions, refuse_rate),
               UCCL_EP_FIELD(LoopOptions, duplicate_rate), UCCL_EP_FIELD(LoopOptions, loss_rate),
               UCCL_EP_FIELD(LoopOptions, drop_peer)};

template <>
inline constexpr auto kFields<NicOptions> =
    std::tuple{UCCL_EP_FIELD(NicOptions, devices),       UCCL_EP_FIELD(NicOptions, provider),
               UCCL_EP_FIELD(NicOptions, interface),     UCCL_EP_FIELD(NicOptions, gid_index),
               UCCL_EP_FIELD(NicOptions, service_level), UCCL_EP_FIELD(NicOptions, traffic_class),
               UCCL_EP_FIELD(NicOptions, window_bytes),  UCCL_EP_FIELD(NicOptions, window_ops)};

struct TransportOptions {
  LoopOptions loop;
  NicOptions nic;
};

}  // namespace uccl_ep
