// The contract between a proxy and a network. Reliable, unordered, counted.
//
// * post_write() writes bytes of our registered region into the peer's region and raises an immediate there. An arrival
//   is reported at the peer only when all its bytes are visible to the peer's host threads.
// * Nothing is ordered: neither two writes to one peer, nor their arrivals, nor their completions.
// * A write that was posted is reported exactly once as kWriteDone (flushed: it will never touch the peer's memory
//   again) or ends in kFailure. The caller keeps its bytes unchanged until then.
// * An arrival may be reported more than once. The payload is not written again after kWriteDone, and the last report
//   is polled before half the serial numbers of its channel (kImmSerialBits) have gone by: immediates are told apart by
//   them.
// * A write between device memories is a write like any other: its arrival says that its bytes are visible to every GPU
//   of the peer's domain.
// * One thread uses a transport: the proxy. register_device(), address(), connect() and attach_device() are called
//   before that thread starts.
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
  int dmabuf_fd = -1;  // of device memory, where the driver gives one; the caller keeps it
};

// The parameters of a transport.
struct TransportSetup {
  int rank = 0;
  int num_ranks = 1;
  std::vector<int> peers;  // ranks to connect to
  RegisteredRegion region;
  uint64_t generation = 0;  // of the engine: the same on all its ranks, and of no other engine
  uint64_t largest_write_bytes = 0;  // no write has more
  uint64_t progress_timeout_usec = 20'000'000;  // how long a link may be gone
  uint32_t local_idx = 0, local_size = 1;  // of the ranks that share the host's NICs
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

// How a transport of one host moves device memory: copy engines. Used by the proxy's thread only.
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;
  // Starts a copy; copies may complete in any order. Returns a ticket. Throws CommunicationFailure(kTransport).
  virtual uint64_t start(void* to, const void* from, uint64_t num_bytes) = 0;
  // Called repeatedly while copies are in progress; started copies may be submitted in groups.
  virtual void flush() = 0;
  // All its bytes are visible to every GPU of the receiving domain and to the host. Asked until it says so, once;
  // throws as start().
  virtual bool done(uint64_t ticket) = 0;
};

// Makes writes of NICs into local device memory visible to every GPU of the domain. Used by the proxy's thread only.
class DeviceFlush {
 public:
  virtual ~DeviceFlush() = default;
  // Throws CommunicationFailure(kTransport).
  virtual void flush() = 0;
};

// Device regions as this process has them mapped; by rank, {nullptr, 0} where there is none.
struct DeviceRegions {
  std::vector<RegisteredRegion> regions;
  // Both outlive the transport's use.
  DeviceCopies* copies = nullptr;
  DeviceFlush* nic_writes = nullptr;  // nullptr: all GPUs see them without a flush
};

enum class PostResult : uint32_t { kPosted, kAgain };  // kAgain: the queue to this peer is full now, poll and try again

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;
  // Our device memory, for a NIC to read and write; before address(). Throws CommunicationFailure(kTransport).
  virtual void register_device(const RegisteredRegion& region) = 0;
  // Opaque bytes for the peers, gathered by the bootstrap.
  virtual std::string address() const = 0;
  // `addresses`: by rank; those of the setup's peers are connected. Waits for none of them. Throws
  // CommunicationFailure(kTransport), also for an address of another rank, generation or transport.
  virtual void connect(const std::vector<std::string>& addresses) = 0;
  // After connect(), before the proxy starts; without it no write may name device memory.
  virtual void attach_device(DeviceRegions device) = 0;
  // After every rank has connected: names that were only needed for that are removed.
  virtual void sealed() = 0;
  // A NIC's limit has room for one more write of so many bytes. It closes for limited writes only: whoever posts
  // others need not ask. One write may always be in flight.
  virtual bool has_room(uint64_t num_bytes) const = 0;
  // Throws CommunicationFailure(kTransport) for a write that leaves a region, or to a rank that is not connected; then
  // nothing was posted.
  virtual PostResult post_write(const WriteRequest& request) = 0;
  // One doorbell for the writes posted since the last flush.
  virtual void flush() = 0;
  // Fills `out`, returns how many. Never blocks.
  virtual size_t poll(std::span<Completion> out) = 0;
  // Bytes of writes that have left, also of those that are under way, at the last poll(): while they grow a slow link
  // is not a dead one. 0 where only whole writes are known.
  virtual uint64_t moved_bytes() const { return 0; }
  // How long the proxy may sleep, if nobody rings its bell, before poll() has something to do. UINT64_MAX: until rung.
  virtual uint64_t idle_usec() const = 0;
  // False once the peer's process is known to be gone (a transport that cannot know says true).
  virtual bool peer_alive(int peer) const = 0;
  // The present fault of local NICs, for the text of an error: "port 1 of NIC mlx5_0 went down 3.2 s ago". Empty:
  // nothing that is known. Any thread.
  virtual std::string trouble() const { return {}; }
};

struct LoopOptions {
  double gbytes_per_s = 0;  // per rank and direction out; 0: unlimited. The limiter allows no burst over one chunk.
  double latency_usec = 0;
  uint64_t seed =
      0;  // 0: in order. Else arrivals and completions are delivered in a seeded random order and with random delays
  double refuse_rate = 0;  // share of post_write calls answered kAgain
  double duplicate_rate = 0;  // share of writes whose payload and immediate are delivered twice (before kWriteDone)
  int drop_peer = -1;  // rank to and from which nothing is delivered any more
  uint32_t queue_depth = 1024;  // per peer
  // For tests; both outlive the transport. While `cut` is odd nothing leaves or is acknowledged, and what waits for
  // longer than the progress deadline fails. `clock_nsec` is read instead of the host's clock, so that delays take no
  // time and are the same in every run.
  const Flag* cut = nullptr;
  const Flag* clock_nsec = nullptr;
};

// Choice and settings of a rank's NICs.
struct NicOptions {
  std::vector<std::string> devices;  // by name; empty: the nearest
  std::string provider;  // of ofi; empty: the first that can do it
  std::string interface;  // of ofi's tcp: the network interface; empty: chosen
  int gid_index = -1;  // of verbs; -1: chosen
  int service_level = -1;  // of verbs; -1: the NIC family's
  int traffic_class = -1;  // of verbs; -1: the NIC family's
  // In flight per NIC; 0: the NIC family's default. loop takes it as a NIC would; 0: no limit there.
  uint64_t window_bytes = 0;
  uint32_t window_ops = 0;
};

template <>
inline constexpr auto kFields<LoopOptions> =
    std::tuple{UCCL_EP_FIELD(LoopOptions, gbytes_per_s),   UCCL_EP_FIELD(LoopOptions, latency_usec),
               UCCL_EP_FIELD(LoopOptions, seed),           UCCL_EP_FIELD(LoopOptions, refuse_rate),
               UCCL_EP_FIELD(LoopOptions, duplicate_rate), UCCL_EP_FIELD(LoopOptions, drop_peer)};

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
