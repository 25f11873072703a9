// Creation, the queue, waiting and the end. The worker's passes: run.cc.
#include "engine/host/engine.h"

#include <chrono>
#include <numeric>

#include "common/thread.h"

namespace uccl_ep {
namespace {

std::vector<int> order_of(const EngineConfig& config) {
  std::vector<int> order = config.source_order;
  if (order.empty()) {
    order.resize(static_cast<size_t>(config.num_ranks));
    std::iota(order.begin(), order.end(), 0);
  }
  return order;
}

MemoryNeeds needs_of(const EngineConfig& config, const Topology& topo) {
  MemoryNeeds needs;
  needs.num_experts = config.num_experts;
  needs.least_row_bytes = config.widest_row_bytes();
  needs.budget_bytes = config.budget_bytes;
  needs.chunk_bytes = config.chunk_bytes;
  needs.window_chunks = config.window_chunks;
  needs.beside_bytes = transport_bytes(config, topo);
  if (config.low_latency_tokens > 0) {
    const bool masks = config.mask_timeout_s > 0;
    if (masks && static_cast<uint32_t>(config.num_ranks) > kMaxMaskedRanks)
      throw UsageFailure(UsageKind::kConfig, std::to_string(config.num_ranks) +
                                                 " ranks with mask_timeout_s: allowed are at most " +
                                                 std::to_string(kMaxMaskedRanks));
    needs.slots = host::slot_rings(config.low_latency_tokens, config.low_latency_topk, config.hidden,
                                   config.max_element_bytes, masks);
  }
  return needs;
}

RingParams rings_of(const EngineConfig& config) {
  const Topology topo = Topology::from_labels(checked(config).domain_of);
  return choose_rings(topo, needs_of(config, topo));
}

template <typename Condition>
bool wait_until(Op& op, uint64_t timeout_usec, Condition condition) {
  std::unique_lock lock(op.mutex);
  const bool holds =
      op.changed.wait_for(lock, std::chrono::microseconds(timeout_usec), [&] { return op.failed || condition(); });
  if (op.failed) throw CommunicationFailure(op.error);
  return holds;
}

}  // namespace

MemoryEntries host_memory_entries(const EngineConfig& config) { return memory_entries(config, rings_of(config)); }

uint64_t host_least_budget_bytes(const EngineConfig& config) {
  const Topology topo = Topology::from_labels(checked(config).domain_of);
  return least_budget_bytes(topo, needs_of(config, topo));
}

PlanFacts HostPlan::facts() const {
  PlanFacts facts;
  facts.plan_id = plan->plan_id;
  facts.engine_generation = plan->engine_generation;
  facts.routing_kind = plan->routing_kind;
  facts.routing_width = plan->routing_width;
  facts.num_tokens = plan->num_tokens;
  facts.expert_alignment = plan->expert_alignment;
  facts.compact_width = plan->compact_width;
  return facts;
}

HostOperation::HostOperation(HostEngine& engine, std::shared_ptr<HostPlan> plan)
    : engine_(engine), plan_(std::move(plan)) {
  op_.plan = plan_->plan;
}

bool HostOperation::wait_counts(uint64_t timeout_usec) {
  return wait_until(op_, timeout_usec, [&] { return op_.counts_known; });
}

bool HostOperation::wait(Stream, uint64_t timeout_usec) {
  return wait_until(op_, timeout_usec, [&] { return op_.done; });
}

bool HostOperation::counts_known() const {
  const std::lock_guard lock(op_.mutex);
  return op_.counts_known;
}

bool HostOperation::done() const {
  const std::lock_guard lock(op_.mutex);
  return op_.done;
}

void HostOperation::give_output(const DispatchOutput& output) {
  {
    const std::lock_guard lock(op_.mutex);
    if (op_.failed) throw CommunicationFailure(op_.error);
    op_.rows_out = output.rows;
    op_.scales_out = output.scales;
    op_.weights_out = output.weights;
    op_.experts_out = output.row_experts;
    op_.metadata_out = output.metadata;
    op_.output_given = true;
  }
  engine_.plane_.ring_worker();
}

HostEngine::HostEngine(const EngineConfig& config)
    : config_(checked(config)),
      rings_(rings_of(config)),
      plane_(config, rings_),
      topo_(plane_.topology()),
      closed_(plane_, config.num_ranks),
      waited_usec_(static_cast<size_t>(config.num_ranks)) {
  plane_.add_trace(worker_trace_);
}

HostEngine::~HostEngine() { close(true); }

void HostEngine::start(Drive drive) {
  std::vector<uint8_t*> bases;
  for (int rank = 0; rank < config_.num_ranks; ++rank) bases.push_back(plane_.region_base(rank));
  const host::Layout layout{topo_, rings_, plane_.layout(), plane_.channels()};
  context_ = host::make_context(layout, {config_.rank, order_of(config_)}, bases,
                                {&plane_.commands(), &plane_.control().proxy_bell, &worker_trace_});
  context_->patience_usec = why_usec(config_.progress_timeout_s);
  drive_ = drive;
  if (context_->slots != nullptr)
    slots_ = std::make_unique<SlotLanes>(config_, plane_, *context_, worker_trace_, [this] {
      {
        const std::lock_guard lock(mutex_);
        queue_changed_.notify_all();
      }
      plane_.ring_worker();
    });
  if (drive == Drive::kThreads) worker_ = start_thread("the worker", [this] { work(); });
  plane_.start(drive);
}

SlotLanes& HostEngine::slots() const {
  plane_.check_usable();
  if (slots_ != nullptr) return *slots_;
  throw UsageFailure(UsageKind::kConfig,
                     "this buffer has no memory for low latency: allowed is one made with low_latency_tokens");
}

CallLimits HostEngine::limits() const { return {config_.generation, config_.widest_row_bytes(), true}; }

std::shared_ptr<Operation> HostEngine::submit(std::shared_ptr<HostOperation> operation) {
  const std::lock_guard lock(mutex_);
  // First what may find no memory: a number that was given out and not used would be missed by the other ranks.
  queue_.push_back(operation);
  Op& op = operation->op_;
  try {
    ControlPlane::Number number = plane_.number_call();
    op.epoch = number.epoch;
    op.num_refused = number.num_refused;
    op.refusal = std::move(number.refusal);
  } catch (...) {
    queue_.pop_back();
    throw;
  }
  if (op.makes_plan()) op.plan->plan_id = op.epoch;
  queue_changed_.notify_all();
  return operation;
}

void HostEngine::close(bool abort) {
  plane_.close(abort, [this] {
    {
      // Operations that are under way end by themselves, or by the error, or by their deadline.
      std::unique_lock lock(mutex_);
      queue_changed_.wait(lock,
                          [&] { return drive_ == Drive::kSteps || (queue_.empty() && !busy_ && !wants_slots()); });
      if (slots_ != nullptr) slots_->drop_unwanted();
      stop_ = true;
      queue_changed_.notify_all();
    }
    if (drive_ == Drive::kSteps) end_unfinished();
    if (worker_.joinable()) worker_.join();
    running_.reset();
    plane_.leave();
    plane_.give_back();
  });
}

}  // namespace uccl_ep
