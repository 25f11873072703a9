// Low-latency calls of the host engine, as callers see them. The worker: slot_worker.cc.
#include "engine/host/slots.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace uccl_ep {
namespace {

void require(bool good, UsageKind kind, const std::string& text) {
  if (!good) throw UsageFailure(kind, text);
}

}  // namespace

SlotLanes::SlotLanes(const EngineConfig& config, ControlPlane& plane, host::HostContext& context,
                     TraceBuffer& worker_trace, std::function<void()> wake)
    : config_(config),
      plane_(plane),
      context_(context),
      trace_(worker_trace),
      wake_(std::move(wake)),
      masked_(static_cast<size_t>(config.num_ranks), 0),
      closed_(plane, config.num_ranks) {}

SlotLanes::~SlotLanes() = default;

void SlotLanes::check(uint64_t num_tokens, uint32_t width, uint32_t hidden, const int64_t* topk_idx) const {
  plane_.check_usable();
  const auto at_most = [](uint64_t value, uint64_t most, const std::string& what) {
    require(value <= most, UsageKind::kShape, std::to_string(value) + what + "; allowed are " + std::to_string(most));
  };
  at_most(num_tokens, config_.low_latency_tokens, " tokens");
  at_most(width, config_.low_latency_topk, " columns of topk_idx");
  at_most(hidden, config_.hidden, " columns of a row");
  require(hidden % kHiddenUnit == 0, UsageKind::kShape,
          "hidden = " + std::to_string(hidden) + "; allowed are multiples of " + std::to_string(kHiddenUnit));
  host::check_slot_routing(topk_idx, num_tokens, width, config_.num_experts);
}

void SlotLanes::call(const LowLatencyDispatch& args) {
  if (args.phase == SlotPhase::kReceive) return want(dispatches_, args.counts);
  check(args.num_tokens, args.width, args.hidden, args.topk_idx);
  queue(args, slot_signature(OpKind::kLowLatencyDispatch, args.wire, args.hidden, args.width, args.weights != nullptr),
        args.counts);
}

void SlotLanes::call(const LowLatencyCombine& args) {
  if (args.phase == SlotPhase::kReceive) return want(combines_, args.out);
  check(args.num_tokens, args.width, args.hidden, args.topk_idx);
  require(args.wire == Dtype::kBf16 || (args.wire == Dtype::kFp32 && config_.max_element_bytes >= sizeof(float)),
          UsageKind::kDtype,
          std::string("sums between ranks as ") + dtype_name(args.wire) +
              "; allowed are bf16, and fp32 where the buffer takes fp32");
  queue(args, slot_signature(OpKind::kLowLatencyCombine, args.wire, args.hidden, args.width, args.routed != nullptr),
        args.out);
}

namespace {

std::unique_ptr<host::SlotWork> work_of(host::HostContext& context, const host::SlotCall& call,
                                        const LowLatencyDispatch& args) {
  return host::make_slot_dispatch(context, call, args);
}
std::unique_ptr<host::SlotWork> work_of(host::HostContext& context, const host::SlotCall& call,
                                        const LowLatencyCombine& args) {
  return host::make_slot_combine(context, call, args);
}

}  // namespace

template <typename Args>
void SlotLanes::queue(const Args& args, const OpSignature& signature, const void* result) {
  auto operation = std::make_shared<Operation>();
  operation->came.assign(masked_.size(), false);
  operation->result = result;
  operation->waited_nsec = args.waited_nsec;
  const ControlPlane::Number number = plane_.note_low_latency();
  try {
    Sequence& its = sequence(signature.kind);
    its.num_queued.add(1);
    operation->call = {its.num_queued.value(), number.num_refused, number.refusal, signature};
    operation->work = work_of(context_, operation->call, args);
    const std::lock_guard lock(mutex_);
    its.unwanted.push_back(operation);
    its.open.push_back(operation);
  } catch (const std::exception& failure) {  // out of memory, and the number is given out: the others wait for it
    plane_.spread(failure_of(config_.rank, failure.what()));
    throw;
  }
  if (args.phase == SlotPhase::kBoth)
    want(sequence(signature.kind), result);
  else
    wake_();
}

void SlotLanes::want(Sequence& its, const void* result) {
  plane_.check_usable();
  {
    const std::lock_guard lock(mutex_);
    require(!its.unwanted.empty() && its.unwanted.front()->result == result, UsageKind::kInput,
            "a result is received in another order than it was sent; allowed is that order, each once");
    its.wanted = its.unwanted.front();
    its.unwanted.pop_front();
    its.wanted->wanted = true;
    wanted_.push_back(its.wanted);
  }
  wake_();
}

bool SlotLanes::wait(OpKind kind, uint64_t timeout_usec) {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Operation> operation = sequence(kind).wanted;
  const auto over = [&] { return error_ || operation->done; };
  const bool holds = changed_.wait_for(lock, std::chrono::microseconds(timeout_usec), over);
  if (error_ && !operation->done) throw CommunicationFailure(*error_);
  return holds;
}

void SlotLanes::masks(int32_t* out) const {
  plane_.check_usable();
  const std::lock_guard lock(mutex_);
  std::copy(masked_.begin(), masked_.end(), out);
}

void SlotLanes::add_stats(Stats& out) const {
  const std::lock_guard lock(mutex_);
  put(out, "low_latency.dispatches", dispatches_.num_queued.value());
  put(out, "low_latency.masked_ranks", static_cast<uint64_t>(std::count(masked_.begin(), masked_.end(), 1)));
  put(out, "low_latency.dropped_pairs", context_.slots->dropped_pairs.value());
}

bool SlotLanes::wants() const {
  const std::lock_guard lock(mutex_);
  return !wanted_.empty();
}

void SlotLanes::drop_unwanted() {
  const std::lock_guard lock(mutex_);
  for (Sequence* of : {&dispatches_, &combines_}) {
    std::erase_if(of->open, [](const auto& operation) { return !operation->wanted; });
    of->unwanted.clear();
  }
}

bool SlotLanes::has_work() const {
  const std::lock_guard lock(mutex_);
  const auto works = [](const std::shared_ptr<Operation>& operation) { return operation->wanted || !operation->sent; };
  return std::any_of(dispatches_.open.begin(), dispatches_.open.end(), works) ||
         std::any_of(combines_.open.begin(), combines_.open.end(), works);
}

}  // namespace uccl_ep
