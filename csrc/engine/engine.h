// One rank's end of a buffer: owns the region, the proxy and the worker thread that runs the operations in their order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/host/context.h"
#include "backend/host/step.h"
#include "backend/op.h"
#include "common/fields.h"
#include "common/mapping.h"
#include "layout/region.h"
#include "proxy/proxy.h"
#include "queue/ring.h"
#include "transport/transport.h"

namespace uccl_ep {

struct EngineConfig {
  int rank = 0;
  int num_ranks = 1;
  std::vector<int> domain_of;
  uint32_t num_experts = 0;
  uint32_t hidden = 0;  // largest row
  uint32_t max_element_bytes = 4;  // of a tensor on this buffer: 2 or 4
  uint64_t budget_bytes = 0;
  uint32_t window_tokens = 0;  // of a CUDA engine: no more of the budget is taken than they need; 0: all of it
  uint64_t chunk_bytes = 0;  // 0: chosen from the budget
  uint32_t window_chunks = 0;  // 0: chosen
  double arrival_timeout_s = 300;
  double progress_timeout_s = 20;
  uint32_t num_proxies = 1;
  bool bulk_copies = true;  // of a CUDA engine: where the GPU has them
  std::vector<int> source_order;  // empty: ascending
  uint64_t generation = 0;  // the same on all ranks, fresh per engine
  std::string transport = "loop";
  LoopOptions loop;
  NicOptions nic;
  std::string near_pci;  // the GPU that its NICs should be near to; empty: our CPU
  // The host side of a CUDA buffer with several domains: kernels make and take the chunks, the proxy ships them. Needs
  // no budget and runs no operation.
  std::optional<DeviceRings> device_rings;
};

// What Python fills in, by these names: uccl_ep_train/config_sections.py says from what.
template <>
inline constexpr auto kFields<EngineConfig> = std::tuple{UCCL_EP_FIELD(EngineConfig, rank),
                                                         UCCL_EP_FIELD(EngineConfig, num_ranks),
                                                         UCCL_EP_FIELD(EngineConfig, domain_of),
                                                         UCCL_EP_FIELD(EngineConfig, num_experts),
                                                         UCCL_EP_FIELD(EngineConfig, hidden),
                                                         UCCL_EP_FIELD(EngineConfig, max_element_bytes),
                                                         UCCL_EP_FIELD(EngineConfig, budget_bytes),
                                                         UCCL_EP_FIELD(EngineConfig, window_tokens),
                                                         UCCL_EP_FIELD(EngineConfig, chunk_bytes),
                                                         UCCL_EP_FIELD(EngineConfig, window_chunks),
                                                         UCCL_EP_FIELD(EngineConfig, arrival_timeout_s),
                                                         UCCL_EP_FIELD(EngineConfig, progress_timeout_s),
                                                         UCCL_EP_FIELD(EngineConfig, num_proxies),
                                                         UCCL_EP_FIELD(EngineConfig, bulk_copies),
                                                         UCCL_EP_FIELD(EngineConfig, source_order),
                                                         UCCL_EP_FIELD(EngineConfig, generation),
                                                         UCCL_EP_FIELD(EngineConfig, transport),
                                                         UCCL_EP_FIELD(EngineConfig, loop),
                                                         UCCL_EP_FIELD(EngineConfig, nic)};

struct DispatchArgs {
  const uint8_t* x = nullptr;  // [T, H]
  uint64_t num_tokens = 0;
  uint32_t hidden = 0;
  Dtype dtype = Dtype::kBf16;
  Dtype wire = Dtype::kBf16;
  bool fp8_pow2 = true;
  bool has_routing = false;  // false: `plan` is used as it is
  Routing routing;
  const float* weights = nullptr;  // [T, width]
  std::shared_ptr<Plan> plan;  // with routing: checked against it
  uint32_t expert_alignment = 1;
  bool compact = false;  // a row per received token instead of one per pair
  // Of a CUDA engine only.
  int64_t capacity = -1;  // rows of the output; -1: exactly those that arrive
  bool pad_to_capacity = false;  // rows of the capacity that nothing arrives for become padding
  bool aside = false;  // on a stream of the engine, else on the caller's
};

// Memory of a dispatch's results; the fields of Op that end in _out.
struct DispatchOutput {
  uint8_t* rows = nullptr;
  float* scales = nullptr;
  float* weights = nullptr;
};

struct CombineArgs {
  const uint8_t* rows = nullptr;  // [num_rows, H]
  uint32_t hidden = 0;
  Dtype dtype = Dtype::kBf16;
  Dtype wire = Dtype::kBf16;
  std::shared_ptr<Plan> plan;
  const float* weights = nullptr;  // [num_weights]
  uint8_t* out = nullptr;  // [T, H]
  float* weights_out = nullptr;  // [T, width], zeroed
  bool aside = false;  // as in DispatchArgs
};

RingParams ring_params_of(const EngineConfig& config);
// Everything that an engine allocates, by purpose; and the least budget that would do.
std::vector<std::pair<std::string, uint64_t>> memory_entries(const EngineConfig& config);
uint64_t least_budget_bytes(const EngineConfig& config);

// Numbers by the names that Buffer.stats() documents.
using Stats = std::vector<std::pair<std::string, double>>;
// Whom a rank has waited for longest, by what it has waited for each; -1: for nobody.
void put_straggler(Stats& out, const std::vector<uint64_t>& waited_usec, int own_rank);

class Engine {
 public:
  // Allocates the region. Throws UsageFailure for a configuration that cannot work.
  explicit Engine(const EngineConfig& config);
  ~Engine();

  // Device memory of ours that a NIC is to read and write; before export_handle(). Of a device engine only.
  void register_device(const RegisteredRegion& region);
  std::string export_handle() const;
  // Maps the domain peers and connects the transport; `handles` by rank.
  void connect(const std::vector<std::string>& handles);
  // Device regions for the transport; between connect() and start(). Of a device engine only.
  void attach_device(DeviceRegions device);
  // Every rank has connected.
  void start();

  // Validate (UsageFailure, nothing was queued), then queue. The memory behind the pointers is used until wait() is
  // over.
  std::shared_ptr<Op> dispatch(const DispatchArgs& args);
  std::shared_ptr<Op> combine(const CombineArgs& args);
  // True when the counts are known / the operation is over; false after `timeout_usec`. Throw what the operation failed
  // with.
  bool wait_counts(Op& op, uint64_t timeout_usec) const;
  bool wait(Op& op, uint64_t timeout_usec) const;
  void give_output(Op& op, const DispatchOutput& output);
  // Compact rows, before give_output: where their experts go.
  void give_row_experts(Op& op, int64_t* experts);

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
  // This rank cannot go on: every rank raises.
  void fail(const std::string& text);
  // To every rank directly, unless it has an earlier error.
  void spread(const ErrorRecord& record) const;
  // For a deadline: the rank whose heart stopped, if one did, is the cause, not whom we happen to wait for. The message
  // is `text`, that, and what is wrong with our NICs.
  void blame(ErrorRecord& record, std::string text) const;
  // Throws the error that reached this rank, if any.
  void check() const;
  // Waits, bounded by the progress deadline, until every rank closes; then gives everything back. With `abort` tells
  // the others and does not wait. By any thread, whatever others do here; operations under way end first. Afterwards
  // all may be called: operations are refused, statistics and the error are those of the end.
  void close(bool abort);
  // Its two parts, for who has registered our memory elsewhere. leave() is false if somebody has left before.
  bool leave(bool abort);
  void give_back();

  // trace.cc. Records what happens from now on: of each thread at least `max_events`, for which memory is taken when
  // more are wanted than before. Throws UsageFailure.
  void start_trace(uint64_t max_events);
  // What was recorded, when chunks in flight are flushed or after a second.
  Trace stop_trace();

  // Name and value, dotted names (docs of Buffer.stats()). Of a device engine only what its proxy counts, and its
  // memory.
  Stats stats() const;
  const Topology& topology() const { return topo_; }
  bool failed() const;
  // Grows when an operation of any rank moves, or bytes of chunks, as far as this rank knows.
  uint64_t moves() const;
  // Returns when an error reaches this rank, or after `timeout_usec`.
  void wait_for_error(uint64_t timeout_usec) const;
  uint32_t num_experts() const { return config_.num_experts; }

  // ---- for the kernels' side of a device engine
  const RegionLayout& layout() const { return layout_; }
  const Channels& channels() const { return channels_; }
  // Null, 0 outside our domain, and of a peer before connect().
  uint8_t* region_base(int rank) const { return regions_[static_cast<size_t>(rank)].base(); }
  uint64_t region_bytes(int rank) const { return regions_[static_cast<size_t>(rank)].num_bytes(); }
  // One more kernel has been queued: the proxy stays awake until it has ended.
  void note_launched(bool by_replay = false);
  // An operation has been queued.
  void note_queued();
  uint64_t num_queued() const;
  // A replay is to come: the proxy is awake for it.
  void wake();

 private:
  using Steps = std::vector<std::unique_ptr<host::HostStep>>;

  // dispatch.cc, combine.cc
  Steps dispatch_steps(Op& op, host::PlanStep*& plan);
  Steps combine_steps(Op& op, host::PlanStep*& plan);
  std::shared_ptr<Op> submit(std::shared_ptr<Op> op);
  void check_usable() const;
  void check_row(uint32_t hidden, Dtype dtype) const;
  void check_plan(const std::shared_ptr<Plan>& plan) const;

  // run.cc
  void work();
  void run(Op& op);
  void count(const Op& op, uint64_t started_nsec);
  void run_steps(Op& op, Steps& steps, const host::PlanStep& plan);
  WaitingOn waiting_for(const Steps& steps, const host::PlanStep& plan) const;
  void sleep(uint32_t ticket, const Op& op, const Steps& steps, const WaitingOn& waiting);
  // By the worker's patience.
  struct Waiting {
    uint64_t started_usec = 0;
    uint64_t moved_usec = 0;  // when moves() was last seen to grow
    uint64_t moves = 0;
  };
  void check_deadlines(const Op& op, const Steps& steps, const host::PlanStep& plan, Waiting& waiting);
  bool long_closed(int rank, uint64_t patient_usec);
  int stale_rank() const;
  ErrorRecord timeout_record(const Op& op, const WaitingOn& waiting, bool arrival, uint64_t waited_usec) const;
  void locate(const Op& op, const Steps& steps, ErrorRecord& record) const;
  bool peer_closed(int rank) const;
  void trace(TraceKind kind, const Op& op, const WaitingOn& of, uint64_t began_nsec);
  void settle() const;
  void forget_traces();
  void finish(Op& op, const ErrorRecord* error);

  ControlBlock& control() const { return *controls_[config_.rank]; }

  const EngineConfig config_;
  const Topology topo_;
  const RingParams ring_params_;
  const RegionLayout layout_;
  const Channels channels_;
  std::vector<Mapping> regions_;  // [rank], unmapped outside our domain; all of them by give_back()
  std::vector<ControlBlock*> controls_;  // [rank], null outside our domain
  TraceBuffer proxy_trace_, worker_trace_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<CommandRing> commands_;
  std::unique_ptr<host::HostContext> context_;
  std::unique_ptr<Proxy> proxy_;
  // Operations of a device engine that were queued; replays, and what said that one is to come. Writers:
  // note_launched(), wake(); reader: the proxy; never reset.
  Flag launched_, awaited_;
  std::mutex launch_mutex_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable queue_changed_;
  std::deque<std::shared_ptr<Op>> queue_;
  bool busy_ = false;
  bool stop_ = false;
  bool started_ = false;
  bool closed_ = false;
  bool traced_ = false;
  uint64_t num_queued_ = 0, num_refused_ = 0;
  bool refused_last_ = false;
  struct OpCounters {
    uint64_t dispatches = 0, combines = 0, dispatch_usec = 0, combine_usec = 0;
  } counters_;
  // By step. Writer: the worker.
  PatienceClock patience_;
  std::vector<uint64_t>
      closed_seen_usec_;  // [rank] patience_ when the worker first saw that it has closed; 0: it has not
  Counter busy_nsec_[kNumSteps];  // in advance() that moved something
  Counter blocked_usec_[kNumSteps];  // asleep while the step was not done
  std::vector<Counter> waited_usec_;  // [rank] asleep and waiting_for() it
  std::thread worker_;

  // Held shared by threads that are not ours while they look at the memory, the transport or the proxy; give_back()
  // takes it alone. After `mutex_`, never before.
  mutable std::shared_mutex memory_mutex_;
  bool given_back_ = false;
  std::optional<ErrorRecord> last_error_;  // of the end
  Stats last_stats_;
};

}  // namespace uccl_ep
