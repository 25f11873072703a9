// The thread that drives a rank's network: it ships finished chunks, publishes arrivals, returns credits and monitors
// the other ranks. step() is the protocol; shipper.h, lander.h and health.h are its parts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "layout/region.h"
#include "layout/topology.h"
#include "proxy/messages.h"
#include "queue/ring.h"
#include "sync/control.h"
#include "sync/trace.h"
#include "sync/word.h"
#include "transport/transport.h"

namespace uccl_ep {

class Board;
class Shipper;
class Lander;
class Health;

// The objects that a proxy uses. All outlive the proxy.
struct ProxyContext {
  int rank = -1;
  const Topology* topo = nullptr;
  const Channels* channels = nullptr;    // of `rank`
  const RegionLayout* layout = nullptr;  // of `rank`
  uint8_t* region = nullptr;             // ours; starts with `control`
  ControlBlock* control = nullptr;       // ours
  std::vector<ControlBlock*> domain_controls;  // [rank], ours included; nullptr: the rank is in another domain
  CommandRing* commands = nullptr;
  Transport* transport = nullptr;        // to the ranks of other domains
  // Numbers of the operations that were launched on a GPU, and that have ended there. While one is under way, its
  // kernels push commands and consume chunks without ringing. Null on the host, where everybody rings.
  const Flag* launched = nullptr;
  const Flag* ended = nullptr;
  // Number of graph replays, including announced ones. Set together with `launched`.
  const Flag* awaited = nullptr;
  TraceBuffer* trace = nullptr;  // written by the proxy's thread; nullptr: no trace
  // The death of a rank, or of the connection to it, is no error: others do without it.
  bool outlives_ranks = false;
  // A post that is refused for longer is an error.
  uint64_t progress_timeout_usec = 20'000'000;
};

// Chunks of one kind to one domain.
struct ShipStats {
  RingKind kind;
  int domain;
  uint64_t chunks;  // flushed
  uint64_t writes;  // posted
  uint64_t bytes;  // posted
};

struct ProxyStats {
  std::vector<ShipStats> ships;  // by kind, then domain; only those that have a channel
  uint64_t commands = 0;  // taken from the queue
  uint64_t command_nsec_p50 = 0, command_nsec_p99 = 0;  // from taken until flushed, of the last Latencies::kKept chunks
  uint64_t credit_waits = 0;  // chunks that were ready before their credit
  uint64_t credit_wait_usec = 0;
  uint64_t refused_posts = 0;
  uint64_t peak_in_flight_ops = 0;  // data
  uint64_t peak_in_flight_bytes = 0;  // data
  uint64_t arrivals = 0;  // chunks that landed
  uint64_t arrived_bytes = 0;
  uint64_t duplicates_dropped = 0;
  uint64_t credits_sent = 0;  // immediates; each may return credit for several chunks
  MessageStats messages;
  uint64_t wakeups = 0;  // times the thread returned from sleeping
  uint64_t passes = 0;
  uint64_t busy_usec = 0;  // not asleep
};

enum class Pass { kIdle, kMoved, kFailed };

class Proxy {
 public:
  // Checks the field limits. Throws UsageFailure(kConfig).
  explicit Proxy(ProxyContext context);
  ~Proxy();  // stops
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  void start();
  // Joins the thread even if work is pending. Afterwards this proxy no longer uses the transport. Idempotent.
  void stop();

  // Instead of start(): one pass, as the thread makes it. What step() throws becomes an error of all ranks.
  Pass make_pass();
  // One pass; true if anything moved. Throws what the transport throws, and CommunicationFailure for whatever breaks
  // the protocol.
  bool step();

  // ---- any thread
  ProxyStats stats() const;
  // now_usec() of the last sign of life: the heartbeat of a domain peer, or any message of another rank. Never older
  // than this proxy.
  uint64_t last_heard_usec(int rank) const;
  // How long there has been no sign of life, by the clock of deadlines (common/patience.h). Never longer than this
  // proxy has existed.
  uint64_t silent_usec(int rank) const;
  // now_usec() of the last movement of the rank's operation or of its bytes, as far as known. A rank of another domain
  // reports it by heartbeats.
  uint64_t last_moved_usec(int rank) const;
  // Calls that the rank has refused, as far as known. A rank of another domain reports it by heartbeats.
  uint64_t num_refused(int rank) const;
  // As Transport::trouble().
  std::string trouble() const { return context_.transport->trouble(); }
  // The rank entered close() (domain peer: its flag; other domain: its bye arrived in ours) or its process is gone.
  bool remote_closed(int rank) const;

  // Tells all ranks that this one may disappear: sets our `closing` flag and sends a bye to each rail, which tells its
  // domain. Idempotent.
  void announce_close();
  // After announce_close(): every rank has closed or died, and has acknowledged our messages (byes, our error). If the
  // transport is destroyed earlier, a peer may wait in vain; after a deadline it may be destroyed anyway.
  bool all_closed() const;
  // The error that this rank found has reached every rank that can be reached, or there is none.
  bool error_delivered() const;

 private:
  void run();
  void rest(bool moved, uint32_t ticket);  // after a pass
  bool is_to_look_again();
  bool stays_awake();
  void sleep(uint32_t ticket);
  uint64_t sleep_usec() const;
  void account();
  bool poll_transport();
  void take(const Completion& completion, uint64_t polled_nsec);
  void fail(const ErrorRecord& record);

  ProxyContext context_;
  std::unique_ptr<Board> board_;
  std::unique_ptr<Shipper> shipper_;
  std::unique_ptr<Lander> lander_;
  std::unique_ptr<Health> health_;
  std::vector<Completion> completions_;
  bool failed_ = false;  // an exception came out of a pass: from now on only errors, byes and heartbeats are sent
  bool chunks_moved_ = false;  // or credits, in the last pass
  uint32_t empty_passes_ = 0;
  uint64_t empty_since_nsec_ = 0;
  uint64_t awake_since_usec_ = 0;
  uint64_t last_chunk_usec_ = 0;  // when a chunk or a credit last moved, or a graph replay was announced
  uint64_t awaited_ = 0;
  uint64_t settled_bytes_ = 0;  // of chunks that have arrived or were flushed
  Counter wakeups_, passes_, busy_usec_;
  Flag stopping_;
  std::thread thread_;
};

}  // namespace uccl_ep
