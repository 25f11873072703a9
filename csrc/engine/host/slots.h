// The low-latency operations of a host engine. Dispatches and combines are two sequences beside the engine's other one,
// and of each several are under way: the worker sends each when it can, and receives when the caller wants the result.
//
// A caller that sends waits for nobody: its chunk waits in the worker until all have received the operation that it
// overwrites, two before. Where ranks may be masked a ring has three slots, and no chunk waits for a rank. Who has
// agreed on the masks of operation n - 2 knows that all that are not masked have received operation n - 3.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/host/agreement.h"
#include "backend/host/slots.h"
#include "common/patience.h"
#include "engine/call.h"
#include "engine/config.h"
#include "engine/group/control_plane.h"
#include "engine/host/closed_ranks.h"
#include "engine/stats.h"

namespace uccl_ep {

// What a pass of the worker has found.
enum class Look { kNothing, kWaits, kMoved };

class SlotLanes {
 public:
  // `wake`: called when there is something to do for the worker.
  SlotLanes(const EngineConfig& config, ControlPlane& plane, host::HostContext& context, TraceBuffer& worker_trace,
            std::function<void()> wake);
  ~SlotLanes();

  // ---- any thread. Queue an operation, or, with SlotPhase::kReceive, want the result of the first that is not wanted.
  // Throw UsageFailure before anything is queued.
  void call(const LowLatencyDispatch& args);
  void call(const LowLatencyCombine& args);
  // Until the result of the latest call of a kind that wants one is there. False after `timeout_usec`. Throws the
  // error, when nothing of that call is in use any more.
  bool wait(OpKind kind, uint64_t timeout_usec);
  // Who is masked, by results up to now: [ranks] 1 or 0.
  void masks(int32_t* out) const;
  void add_stats(Stats& out) const;

  // Whether somebody waits. Results that nobody has wanted by the end are forgotten.
  bool wants() const;
  void drop_unwanted();

  // ---- the worker
  bool has_work() const;
  // A pass. Errors end operations.
  Look look();
  // Whom it waits for, or -1.
  int waiting_for() const { return waiting_for_; }

 private:
  struct Operation;
  struct Sequence {
    Counter num_queued;  // writer: who calls
    std::deque<std::shared_ptr<Operation>> open;  // sent or to be sent; the worker's part of the first is not over
    std::deque<std::shared_ptr<Operation>> unwanted;  // nobody wants their results yet
    std::shared_ptr<Operation> wanted;  // the latest
  };
  Sequence& sequence(OpKind kind) { return kind == OpKind::kLowLatencyDispatch ? dispatches_ : combines_; }

  // slots.cc
  void check(uint64_t num_tokens, uint32_t width, uint32_t hidden, const int64_t* topk_idx) const;
  template <typename Args>
  void queue(const Args& args, const OpSignature& signature, const void* result);
  void want(Sequence& its, const void* result);
  // slot_worker.cc
  std::vector<std::shared_ptr<Operation>> open_of(const Sequence& its) const;
  bool pass();
  bool advance(Operation& operation, bool may_stage);
  bool receive(Operation& operation);
  bool settle(Operation& operation, const std::vector<WaitingOn>& missing);
  void mask(const host::RankBits& ranks);
  void note_waits(Operation& operation, const std::vector<WaitingOn>& missing);
  void check_arrival(const Operation& operation, const std::vector<WaitingOn>& missing, uint64_t since_usec);
  void check_progress(Operation& operation, const WaitingOn& waiting);
  ErrorRecord record_of(const Operation& operation, ErrorKind kind, const WaitingOn& waiting) const;
  static std::string name_of(const Operation& operation);
  [[noreturn]] void fail_closed(const Operation& operation, const WaitingOn& waiting) const;
  [[noreturn]] void fail_late(const Operation& operation, const WaitingOn& waiting, bool arrival,
                              uint64_t waited_usec) const;
  [[noreturn]] void fail_masked(const Operation& operation, int peer) const;
  void finish(const std::shared_ptr<Operation>& operation);
  void fail_all();

  const EngineConfig& config_;
  ControlPlane& plane_;
  host::HostContext& context_;
  TraceBuffer& trace_;  // the worker's
  const std::function<void()> wake_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Sequence dispatches_, combines_;
  std::deque<std::shared_ptr<Operation>> wanted_;  // in this order they are settled, and received
  std::optional<ErrorRecord> error_;
  std::vector<int32_t> masked_;  // [rank]

  // The worker's.
  PatienceClock patience_;
  ClosedRanks closed_;
  uint64_t num_settled_ = 0;
  host::RankBits named_;  // by decisions: they are masked, between domains with their domains
  int waiting_for_ = -1;
};

struct SlotLanes::Operation {
  host::SlotCall call;
  std::unique_ptr<host::SlotWork> work;
  const void* result = nullptr;  // where it goes
  int64_t* waited_nsec = nullptr;
  // Guarded by the lanes' mutex.
  bool sent = false, wanted = false, done = false;  // sent: others have all that they need of it
  // The worker's. Times are by its patience; 0: not yet.
  uint64_t began_usec = 0, wanted_usec = 0, moved_usec = 0;
  uint64_t wanted_nsec = 0, moves = 0;
  std::vector<bool> came;  // [rank]
  std::optional<host::Agreement> agreement;
  bool votes = false, settled = false;
};

}  // namespace uccl_ep
