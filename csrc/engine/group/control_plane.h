// One rank's place in its group: its region and its peers', the proxy, the numbers of calls, heartbeats, errors, the
// end. Every engine has one; it moves no rows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/error.h"
#include "common/mapping.h"
#include "engine/config.h"
#include "engine/stats.h"
#include "layout/region.h"
#include "proxy/proxy.h"
#include "queue/ring.h"
#include "sync/control.h"
#include "sync/trace.h"
#include "transport/transport.h"

namespace uccl_ep {

// Who makes an engine's passes: threads of its own, or the program. A program that steps all ranks of a group decides
// their order, and may do so in simulated time: common/clock.h.
enum class Drive { kThreads, kSteps };

// The rings of a buffer: the host backend's, or those of a GPU buffer that a transport carries.
using Rings = std::variant<RingParams, DeviceRings>;
// What the transport allocates on a rank; and on the one that has the most rails, so that all choose the same rings.
uint64_t transport_bytes(const EngineConfig& config, const Topology& topo, int rank);
uint64_t transport_bytes(const EngineConfig& config, const Topology& topo);
// What a rank's control plane allocates, its rings in host memory included.
MemoryEntries memory_entries(const EngineConfig& config, const Rings& rings);

class ControlPlane {
 public:
  // Allocates the region. `near_pci`: the GPU that its NICs should be near to; empty: our CPU. Throws UsageFailure for
  // a configuration that cannot work.
  ControlPlane(const EngineConfig& config, const Rings& rings, const std::string& near_pci = "");
  ~ControlPlane();
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  // ---- creation, in this order
  // Device memory of ours that a NIC is to read and write.
  void register_device(const RegisteredRegion& region);
  std::string export_handle() const;
  // Maps the domain peers and connects the transport; `handles` by rank.
  void connect(const std::vector<std::string>& handles);
  // Device regions for the transport.
  void attach_device(DeviceRegions device);
  // What another thread of this rank records belongs to its trace. Outlives this.
  void add_trace(TraceBuffer& of) { traces_.push_back(&of); }
  // Every rank has connected: calls are taken from now on.
  void start(Drive drive = Drive::kThreads);
  // With Drive::kSteps: a pass of the proxy.
  Pass step() { return proxy_->make_pass(); }

  // ---- the sequence of calls
  struct Number {
    uint64_t epoch = 0;
    uint64_t num_refused = 0;  // calls that this rank refused before
    std::string refusal;       // why, the last of them
  };
  // Throws where no call can be queued: UsageFailure(kClosed), and the error that reached this rank.
  void check_usable() const;
  // Of the operation that is queued now. Throws UsageFailure(kClosed).
  Number number_call();
  // Of a low-latency operation on the host, which is none of that sequence: `epoch` is 0. Throws UsageFailure(kClosed).
  Number note_low_latency();
  uint64_t num_queued() const;
  // A call of this rank was refused before it was queued, `why`. It takes a number, so that what the rank calls next is
  // no match for what the others call now. Nothing on a buffer that is closed or broken.
  void refused(const std::string& why);
  // Operations that were queued and calls that were refused. Who sees it unchanged has done neither.
  uint64_t num_calls() const;
  // Why this rank refused the `nth` call that it did, where that is known; else "".
  std::string refusal(uint64_t nth) const;
  // "; rank 1 refused call 7: why", where `rank` is not in our call 7 and has refused more calls than our
  // `num_refused`.
  std::string refused_since(int rank, uint64_t call, uint64_t num_refused) const;

  // ---- errors
  // This rank cannot go on: every rank raises.
  void fail(const std::string& text);
  // To every rank directly, unless it has an earlier error.
  void spread(const ErrorRecord& record) const;
  // To this rank alone: the others go on without it.
  void keep(const ErrorRecord& record) const;
  // A rank that dies, or leaves alone, is no error.
  bool outlives_ranks() const;
  // For a deadline: the rank whose heart stopped, if one did, is the cause, not whom we happen to wait for. The message
  // is `text`, that, and what is wrong with our NICs.
  void blame(ErrorRecord& record, std::string text) const;
  bool failed() const;
  // Throws the error that reached this rank, if any.
  void check() const;
  // Returns when an error reaches this rank, or after `timeout_usec`.
  void wait_for_error(uint64_t timeout_usec) const;
  // The rank has said that it closes, or its process is gone.
  bool peer_closed(int rank) const;
  // Grows when an operation of any rank moves, or bytes of chunks, as far as this rank knows.
  uint64_t moves() const;

  // ---- the end, by any thread, whatever others do here
  // No call takes a number any more. With `abort` tells the others, which ends what this rank waits for. Then calls
  // `end`, which has to leave() and give_back(), unless another thread has, and returns when that is through.
  void close(bool abort, const std::function<void()>& end);
  // With no more than that.
  void close(bool abort);
  // Every rank learns that this one closes.
  void announce_close() { proxy_->announce_close(); }
  // Every rank closes; or there is an error, and all have been told.
  bool may_leave() const;
  // No operation is under way. Announces the close and waits until it may leave: for a deadline, with Drive::kSteps not
  // at all. Stops the proxy.
  void leave();
  // Statistics and the error stay those of the end.
  // Its pages: of our region and of those of our domain's other ranks.
  std::vector<Mapping> give_back();

  // ---- trace.cc. Records what happens from now on: of each thread at least `max_events`, for which memory is taken
  // when more are wanted than before. Throws UsageFailure.
  void start_trace(uint64_t max_events);
  // What was recorded, when chunks in flight are flushed or after a second.
  Trace stop_trace();

  // Of the proxy, and the memory of all this. Names: docs of Buffer.stats(). Empty before start().
  Stats stats() const;

  // ---- for the data path
  const Topology& topology() const { return topo_; }
  const RegionLayout& layout() const { return layout_; }
  const Channels& channels() const { return channels_; }
  // Null, 0 outside our domain, and of a peer before connect().
  uint8_t* region_base(int rank) const { return regions_[static_cast<size_t>(rank)].base(); }
  uint64_t region_bytes(int rank) const { return regions_[static_cast<size_t>(rank)].num_bytes(); }
  // Of a thread that ends before give_back().
  ControlBlock& control() const { return *controls_[static_cast<size_t>(config_.rank)]; }
  CommandRing& commands() const { return *commands_; }
  // By any thread, at any time: wakes the worker.
  void ring_worker() const;

  // ---- for what runs on a GPU
  // An operation has been queued.
  void note_queued();
  // One more kernel has been queued: the proxy stays awake until it has ended.
  void note_launched(uint64_t operations = 1, bool by_replay = false);
  // A replay is to come: the proxy is awake for it.
  void wake();

 private:
  ErrorRecord own_failure(std::string_view text);
  int stale_rank() const;
  void settle() const;
  void forget_traces();

  const EngineConfig config_;
  const Topology topo_;
  const Rings rings_;
  const RegionLayout layout_;
  const Channels channels_;
  std::vector<Mapping> regions_;  // [rank], unmapped outside our domain; all of them by give_back()
  std::vector<ControlBlock*> controls_;  // [rank], null outside our domain
  TraceBuffer proxy_trace_;
  std::vector<TraceBuffer*> traces_{&proxy_trace_};
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<CommandRing> commands_;
  std::unique_ptr<Proxy> proxy_;
  // Operations of a GPU engine that were queued; replays, and what said that one is to come. Writers: note_launched(),
  // wake(); reader: the proxy; never reset.
  Flag launched_, awaited_;
  std::mutex launch_mutex_;

  mutable std::mutex mutex_;  // guards what follows
  bool started_ = false;
  Drive drive_ = Drive::kThreads;
  bool closed_ = false;
  bool traced_ = false;
  uint64_t num_queued_ = 0, num_refused_ = 0, num_low_latency_ = 0;
  bool refused_last_ = false;

  std::mutex closing_;  // held by the thread that ends all this; before `mutex_`
  bool ended_ = false;

  // Held shared by threads that are not ours while they look at the memory, the transport or the proxy; give_back()
  // takes it alone. After `mutex_`, never before.
  mutable std::shared_mutex memory_mutex_;
  bool given_back_ = false;
  std::optional<ErrorRecord> last_error_;  // of the end
  Stats last_stats_;
};

}  // namespace uccl_ep
