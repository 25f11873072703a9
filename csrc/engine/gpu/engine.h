// The engine of tensors on a GPU: operations are launched by the caller's thread, on its stream or on one of the
// engine's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/gpu/packet.h"
#include "backend/gpu/steps.h"
#include "backend/gpu/trace.h"
#include "backend/low_latency.h"
#include "device/memory.h"
#include "engine/engine.h"
#include "engine/gpu/descriptors.h"
#include "engine/gpu/guess.h"
#include "engine/gpu/network.h"
#include "engine/gpu/pulse.h"
#include "engine/gpu/sizes.h"
#include "engine/group/control_plane.h"
#include "sync/flag.h"

namespace uccl_ep {

class GpuEngine;

// A plan in device memory that the caller allocates: `storage_bytes`, which is known when the sizes are.
struct GpuPlan final : SavedPlan {
  using Sizes = gpu::PlanSizes;  // counts, a guess of them, or with a capacity the most that there can be
  PlanFacts facts() const override;
  uint64_t num_rows() const override { return sizes.num_rows; }
  uint64_t num_bytes() const override { return storage_bytes; }
  const std::vector<uint64_t>& tokens_per_expert() const override { return padded_counts; }
  const std::vector<uint64_t>& tokens_per_expert_exact() const override { return exact_counts; }

  uint64_t plan_id = 0;
  uint64_t engine_generation = 0;
  RoutingKind routing_kind = RoutingKind::kTopk;
  uint32_t routing_width = 0;
  uint32_t expert_alignment = 1;
  bool has_capacity = false;
  uint64_t storage_bytes = 0;
  std::vector<uint64_t> padded_counts, exact_counts;  // empty with a capacity
  uint64_t counts_begin = 0, counts_end = 0;  // bytes of the storage: PlanView's tokens_per_expert; overflow follows
  Sizes sizes;
  gpu::PlanView view;
};

class GpuOp final : public Operation {
 public:
  explicit GpuOp(GpuEngine& engine) : engine_(engine) {}
  GpuOp(const GpuOp&) = delete;
  GpuOp& operator=(const GpuOp&) = delete;

  std::shared_ptr<SavedPlan> plan() const override { return plan_; }
  bool wait_counts(uint64_t timeout_usec) override;
  bool counts_known() const override { return counts_known_; }
  bool is_guessed() const override { return place_.fit == gpu::Fit::kIfLargeEnough; }
  void give_up_guess() override;
  bool placed() const override { return placed_; }
  void give_output(const DispatchOutput& output) override;
  bool wait(Stream stream, uint64_t timeout_usec) override;
  bool done() const override;

 private:
  friend class GpuEngine;
  GpuEngine& engine_;
  uint64_t call_ = 0;
  gpu::PlaceArgs place_;  // of a dispatch
  std::shared_ptr<GpuPlan> plan_;
  bool counts_known_ = false;
  uint64_t waited_since_usec_ = 0;  // start of the wait for the counts; 0: no wait
  bool placed_ = false;             // or kernels that are launched will place the rows
  bool pads_ = false;              // whether unused rows of the output become padding
  gpu::StreamHandle stream_ = nullptr;  // that it runs on
  gpu::GraphHandle captured_by_ = nullptr;  // while it is launched
  uint64_t capture_ = 0;
  gpu::Event done_;  // set if `stream_` is not the caller's
  bool queued_ = false;  // part of it is launched, so peers rely on the rest
  bool launched_ = false;
};

inline gpu::StreamHandle stream_of(Stream stream) { return static_cast<gpu::StreamHandle>(stream); }

// SMs of a GPU that the kernels of a buffer may take while they wait. Kernels of several buffers may wait at the same
// time, so each buffer needs SMs of its own (contract 12). NCCL needs some, too. Throws UsageFailure if there are not
// enough.
class SmShare {
 public:
  SmShare(int device, uint32_t sms);
  ~SmShare() { give_back(); }
  SmShare(const SmShare&) = delete;
  SmShare& operator=(const SmShare&) = delete;
  void give_back();

 private:
  const int device_;
  uint32_t sms_;
};

// What an engine's destructor still needs when its other members are gone.
struct GpuHandles {
  gpu::Stream stream_, control_stream_;
  gpu::Stream refusal_stream_;  // no graph is ever captured from it
  gpu::Event inputs_ready_;
  gpu::Event last_done_;  // see last_stream_
  gpu::PinnedMemory pinned_;  // HostError, HostCounts, and the word that stops kernels
};

class GpuEngine final : public Engine, private GpuHandles {
 public:
  // Allocates the region on `device`. Throws UsageFailure for a configuration that cannot work.
  GpuEngine(const EngineConfig& config, int device, uint32_t num_sms, uint32_t stage_sms);
  ~GpuEngine() override;

  std::string export_handle() const override;
  void connect(const std::vector<std::string>& handles) override;
  void share_memory(const std::function<void()>& look) override;
  void start() override;

  std::shared_ptr<Operation> dispatch(const DispatchArgs& args) override;
  std::shared_ptr<Operation> combine(const CombineArgs& args) override;
  // Low latency: see LowLatency in Python. A call may only send, or only receive what an earlier one has sent.
  void low_latency(const LowLatencyDispatch& args) override;
  void low_latency(const LowLatencyCombine& args) override;
  // Which ranks are masked then: out [ranks], 1 or 0.
  void low_latency_masks(int32_t* out, Stream stream) override;
  void refused(const std::string& why, Stream stream) override;
  uint64_t num_calls() const override { return plane_.num_calls(); }

  void fail(const std::string& text) override { plane_.fail(text); }
  // Also throws if its kernels found an error that has not been reported.
  void check() const override;
  void wake() override;
  // Also waits for kernels that are launched meanwhile.
  void start_trace(uint64_t max_events) override;
  Trace stop_trace() override;
  void close(bool abort) override;
  Stats stats() const override;

 private:
  friend class GpuOp;
  // Kernels of an engine in a graph. It lasts as long as the process, because a graph may be replayed at any time.
  struct CapturedLaunches {
    explicit CapturedLaunches(GpuEngine& of) : engine(&of) {}
    std::mutex mutex;
    GpuEngine* engine;  // null: it has given its memory back
    Flag count;         // writer: who captures; reader: a thread of the GPU's runtime
  };
  // True when the counts of a new plan have arrived, or are not waited for.
  bool poll_counts(GpuOp& op);
  void give_up_guess(GpuOp& op);
  void give_output(GpuOp& op, const DispatchOutput& output);

  // Starts an operation on the caller's stream or, `aside`, on ours; in both cases after what is queued on the
  // caller's.
  std::shared_ptr<GpuOp> begin(std::shared_ptr<GpuPlan> plan, gpu::StreamHandle stream, bool aside);
  std::shared_ptr<GpuPlan> new_plan(const DispatchArgs& args) const;
  void check_dispatch(const DispatchArgs& args) const;
  void check_combine(const CombineArgs& args) const;
  void check_room(const DispatchArgs& args) const;
  uint32_t most_pieces(uint32_t width) const;
  uint32_t tokens_of_capacity(const DispatchArgs& args) const;
  void check_low_latency(uint64_t num_tokens, uint32_t width, uint32_t hidden) const;
  template <typename Args>
  void launch_slots(const Args& args, gpu::StreamHandle stream);
  void check_form(const DispatchArgs& args, const GpuPlan& plan);
  void exchange(GpuOp& op);
  void launch(GpuOp& op);
  void note_queued(GpuOp& op);
  void note_launch(const GpuOp& op);
  void note_replay(uint64_t operations);
  CapturedLaunches* new_captured_launches();
  void end_dispatch(GpuOp& op);
  void size_plan(GpuPlan& plan, const GpuPlan::Sizes& sizes) const;
  void check_usable() const;
  CallLimits limits() const { return {config_.generation, config_.widest_row_bytes(), false}; }
  void follow(gpu::StreamHandle stream, gpu::StreamHandle other);  // `stream` waits for what is queued on `other`
  void finish(GpuOp& op);
  void note_last(const GpuOp& op);
  void note_last(gpu::StreamHandle stream);
  bool tell_fault() const;
  void watch();
  void tell_kernels_to_stop();
  void wait_for_kernels();
  void give_back();
  void fill_tables();
  ErrorRecord record_of(const gpu::HostError& error) const;
  std::string text_of(const gpu::HostError& error) const;
  void tell_mismatch(const gpu::HostError& error, ErrorRecord& record) const;
  gpu::DeviceHeader header_of(int number, uint64_t epoch) const;
  gpu::SlotHeader slot_header_of(int number, const gpu::HostError& error) const;
  int rank_of(int number) const;
  TraceEvent event_of(const gpu::TraceRecord& record) const;
  // Whether NICs carry what goes between domains; if not, all ranks are on this host.
  bool has_nics() const { return topo_.num_domains() > 1 && config_.transport != "loop"; }

  const EngineConfig config_;
  const Topology topo_;
  const RankNumbers numbers_;
  const int device_;
  const uint32_t num_sms_, stage_sms_, low_latency_sms_;
  SmShare share_;
  gpu::DeviceRegionLayout layout_;
  ControlPlane plane_;
  std::unique_ptr<Network> network_;  // where there are several domains
  gpu::Group group_{};
  gpu::DescriptorSocket socket_;
  std::vector<gpu::DeviceMapping> regions_;
  std::vector<uint64_t> region_bytes_;
  // Of ranks whose regions we map, by rank: of their sockets, on our host; fabric handles, of other hosts.
  std::vector<std::string> addresses_, fabric_handles_;
  gpu::StreamHandle last_stream_ = nullptr;  // of the last launch outside a graph, which ends with last_done_
  uint64_t* stop_word_ = nullptr;
  mutable std::mutex mutex_;   // one launch at a time
  uint64_t num_begun_ = 0, num_dispatches_ = 0, num_combines_ = 0, num_windows_ = 0;
  uint64_t num_low_latency_ = 0;
  std::map<uint64_t, CapturedLaunches*> captured_launches_;  // by capture
  bool has_captured_ = false;
  uint64_t rows_shipped_ = 0, rows_placed_ = 0, rows_folded_ = 0, rows_relayed_ = 0;  // of plans without a capacity
  uint64_t num_guesses_ = 0, num_misses_ = 0;
  using Form = std::tuple<RoutingKind, uint32_t, uint32_t, uint32_t, int>;  // see form_of()
  std::map<Form, Guess> guesses_;
  bool started_ = false, closed_ = false;
  // Held shared by readers of regions or the network that do not hold `mutex_`. close() holds both to give these back.
  mutable std::shared_mutex memory_mutex_;
  bool given_back_ = false;
  bool is_idle_ = true;  // when it closes: no kernel of a graph may still use its memory
  std::vector<gpu::DeviceMapping> trace_memory_;  // the last is in use; kernels or graphs may still refer to the others
  std::vector<Network::Seen> seen_;  // by a word's number in a trace
  gpu::ClockSample trace_began_;
  Flag leaving_;
  std::thread watcher_;
  std::unique_ptr<Pulse> pulse_;  // while kernels may wait
};

}  // namespace uccl_ep
