// The C interface: conversions, and errors as numbers. Nothing is thrown across it.
#include "c_api/uccl_ep.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "c_api/make.h"
#include "engine/group/setup.h"

struct uccl_ep_group {
  std::unique_ptr<uccl_ep::Engine> engine;
  bool on_gpu = false;
  uint32_t num_local_experts = 0;
};
struct uccl_ep_plan {
  uccl_ep_group* group = nullptr;
  uccl_ep_routing routing{};
  std::shared_ptr<uccl_ep::SavedPlan> saved;  // of its first dispatch
};
struct uccl_ep_op {
  uccl_ep_group* group = nullptr;
  std::shared_ptr<uccl_ep::Operation> operation;
};

namespace uccl_ep {
namespace {

thread_local std::string error_text;

uccl_ep_status status_of(ErrorKind kind) { return static_cast<uccl_ep_status>(32 + static_cast<int>(kind)); }
uccl_ep_status status_of(UsageKind kind) { return static_cast<uccl_ep_status>(16 + static_cast<int>(kind)); }
static_assert(UCCL_EP_PEER_FAILED == 32 + static_cast<int>(ErrorKind::kPeerFailed) &&
              UCCL_EP_ARRIVAL_TIMEOUT == 32 + static_cast<int>(ErrorKind::kArrivalTimeout) &&
              UCCL_EP_TOPOLOGY_ERROR == 16 + static_cast<int>(UsageKind::kTopology) &&
              UCCL_EP_CONFIG_ERROR == 16 + static_cast<int>(UsageKind::kConfig));
static_assert(UCCL_EP_FP8_FP32 == static_cast<int>(Dtype::kFp8Fp32) && UCCL_EP_BF16 == static_cast<int>(Dtype::kBf16));

// Its status; what it throws becomes one.
template <typename Do>
uccl_ep_status guarded(const Do& what) {
  const auto failed = [](uccl_ep_status status, const char* text) {
    try {
      error_text = text;
    } catch (const std::bad_alloc&) {
      error_text.clear();
    }
    return status;
  };
  try {
    return what();
  } catch (const CommunicationFailure& failure) {
    return failed(status_of(failure.record().kind), failure.what());
  } catch (const UsageFailure& failure) {
    return failed(status_of(failure.kind()), failure.what());
  } catch (const std::exception& failure) {
    return failed(UCCL_EP_INTERNAL_ERROR, failure.what());
  } catch (...) {
    return failed(UCCL_EP_INTERNAL_ERROR, "an exception that is not of the standard library");
  }
}

[[noreturn]] void refuse(const std::string& text) { throw UsageFailure(UsageKind::kInput, text); }

template <typename T>
T& there(T* object, const char* name) {
  if (object == nullptr) refuse(std::string(name) + " is NULL");
  return *object;
}

// A struct of a program of this version, or of another: fields that it lacks are 0, and fields that we lack must be.
template <typename T>
T taken(const T* given, const char* name) {
  constexpr size_t kLeast = offsetof(T, magic) + sizeof(uint32_t);
  const T& head = there(given, name);
  if (head.magic != UCCL_EP_MAGIC || head.size < kLeast)
    refuse(std::string(name) + " was not set to UCCL_EP_INIT: its size is " + std::to_string(head.size));
  const auto* const bytes = reinterpret_cast<const uint8_t*>(given);
  if (head.size > sizeof(T) && std::any_of(bytes + sizeof(T), bytes + head.size, [](uint8_t byte) { return byte; }))
    refuse(std::string(name) + " has fields of a later version than " + std::to_string(UCCL_EP_VERSION));
  T copy{};
  std::memcpy(static_cast<void*>(&copy), given, std::min(head.size, sizeof(T)));
  return copy;
}

Dtype dtype_of(uccl_ep_dtype given, bool may_be_quantised, const char* name) {
  const auto dtype = static_cast<Dtype>(given);
  const int most = may_be_quantised ? UCCL_EP_FP8_FP32 : UCCL_EP_FP32;
  if (static_cast<int>(given) < UCCL_EP_BF16 || static_cast<int>(given) > most)
    throw UsageFailure(UsageKind::kDtype, std::string(name) + " = " + std::to_string(static_cast<int>(given)) +
                                              ": allowed is 1 to " + std::to_string(most));
  return dtype;
}

// The program's, which gathers the same number of bytes of each rank: the sizes first.
AllGather all_gather_of(const uccl_ep_group_config& config) {
  if (config.all_gather == nullptr) refuse("all_gather is NULL");
  return [config](const std::string& mine, const std::string& step) {
    const size_t ranks = config.num_ranks;
    const auto gather = [&](const void* own, size_t num_bytes, void* all) {
      if (const int code = config.all_gather(config.all_gather_context, own, num_bytes, all, step.c_str()); code != 0)
        throw std::runtime_error(step + ": the program's all-gather returned " + std::to_string(code));
    };
    const uint64_t own_size = mine.size();
    std::vector<uint64_t> sizes(ranks);
    gather(&own_size, sizeof(own_size), sizes.data());
    const uint64_t most = *std::max_element(sizes.begin(), sizes.end());
    if (most > kMostGatheredBytes) throw std::runtime_error(step + ": a rank says " + std::to_string(most) + " bytes");
    std::string padded = mine, all(ranks * most, '\0');
    padded.resize(most);
    gather(padded.data(), most, all.data());
    std::vector<std::string> gathered;
    for (size_t r = 0; r < ranks; ++r) gathered.push_back(all.substr(r * most, sizes[r]));
    return gathered;
  };
}

EngineConfig config_of(const uccl_ep_group_config& given) {
  EngineConfig config;
  const auto number = [](uint32_t value, const char* name) {
    if (value > kMostRanks)
      throw UsageFailure(UsageKind::kConfig, std::string(name) + " = " + std::to_string(value) +
                                                 ": allowed are up to " + std::to_string(kMostRanks));
    return static_cast<int>(value);
  };
  config.rank = number(given.rank, "rank");
  config.num_ranks = number(given.num_ranks, "num_ranks");
  if (config.num_ranks == 0) throw UsageFailure(UsageKind::kConfig, "num_ranks = 0: allowed are 1 or more");
  if (given.domain_of != nullptr) config.domain_of.assign(given.domain_of, given.domain_of + given.num_ranks);
  config.num_experts = given.num_experts;
  config.hidden = given.hidden;
  config.max_element_bytes = given.widest == 0 ? 4 : dtype_bytes(dtype_of(given.widest, false, "widest"));
  config.budget_bytes = given.budget_bytes == 0 ? kDefaultBudgetBytes : given.budget_bytes;
  config.window_tokens = given.window_tokens;
  if (given.arrival_timeout_s != 0) config.arrival_timeout_s = given.arrival_timeout_s;
  if (given.progress_timeout_s != 0) config.progress_timeout_s = given.progress_timeout_s;
  config.transport = given.transport == nullptr ? "auto" : given.transport;
  return config;
}

DispatchArgs dispatch_args_of(const uccl_ep_plan& plan, const uccl_ep_dispatch_args& given) {
  const uccl_ep_routing& routing = plan.routing;
  DispatchArgs args;
  args.x = static_cast<const uint8_t*>(given.x);
  args.num_tokens = routing.num_tokens;
  args.hidden = given.hidden;
  args.dtype = dtype_of(given.dtype, false, "dtype");
  args.wire = given.wire == 0 ? args.dtype : dtype_of(given.wire, true, "wire");
  args.weights = routing.weights;
  args.expert_alignment = std::max(routing.expert_alignment, 1u);
  args.compact = routing.compact != 0;
  args.stream = given.stream;
  args.plan = plan.saved;
  args.has_routing = plan.saved == nullptr;
  args.routing = {routing.is_map != 0 ? RoutingKind::kMap : RoutingKind::kTopk, routing.data, routing.width};
  if (routing.has_capacity != 0) {
    if (!plan.group->on_gpu) refuse("has_capacity: only of tensors on a GPU");
    args.capacity = static_cast<int64_t>(routing.capacity);
  }
  if (args.num_tokens > 0 && (args.x == nullptr || routing.data == nullptr))
    refuse("x or the routing's data is NULL with " + std::to_string(args.num_tokens) + " tokens");
  return args;
}

CombineArgs combine_args_of(const uccl_ep_plan& plan, const uccl_ep_combine_args& given) {
  if (plan.saved == nullptr) refuse("combine needs a plan with which a dispatch was called");
  CombineArgs args;
  args.rows = static_cast<const uint8_t*>(given.rows);
  args.hidden = given.hidden;
  args.dtype = dtype_of(given.dtype, false, "dtype");
  args.wire = given.wire == 0 ? args.dtype : dtype_of(given.wire, false, "wire");
  args.plan = plan.saved;
  args.weights = given.weights;
  args.out = static_cast<uint8_t*>(given.out);
  args.weights_out = given.weights_out;
  args.stream = given.stream;
  const PlanFacts facts = plan.saved->facts();
  if ((args.weights == nullptr) != (args.weights_out == nullptr)) refuse("weights and weights_out come together");
  if (args.out == nullptr && facts.num_tokens > 0) refuse("out is NULL");
  if (args.rows == nullptr && plan.saved->num_rows() > 0) refuse("rows is NULL");
  return args;
}

// A call that is refused has its number among the operations: the other ranks learn why this one did not come.
template <typename Call>
std::shared_ptr<Operation> queued(Engine& engine, Stream stream, const Call& call) {
  const uint64_t before = engine.num_calls();
  try {
    return call();
  } catch (const UsageFailure& failure) {
    if (engine.num_calls() == before)
      engine.refused(std::string(error_name(failure.kind())) + ": " + failure.what(), stream);
    throw;
  }
}

}  // namespace
}  // namespace uccl_ep

using namespace uccl_ep;

uint32_t uccl_ep_version(void) { return UCCL_EP_VERSION; }

const char* uccl_ep_error_text(void) { return error_text.c_str(); }

uccl_ep_status uccl_ep_group_create(const uccl_ep_group_config* config, uccl_ep_group** group) {
  return guarded([&] {
    there(group, "group") = nullptr;
    const uccl_ep_group_config given = taken(config, "config");
    auto made = std::make_unique<uccl_ep_group>();
    made->on_gpu = given.on_gpu != 0;
    SetUp set = set_up(config_of(given), made->on_gpu, all_gather_of(given), [&](const EngineConfig& complete) {
      return make_engine(complete, made->on_gpu, given.device, given.num_sms == 0 ? kDefaultSms : given.num_sms);
    });
    made->engine = std::move(set.engine);
    made->num_local_experts = set.config.num_experts / static_cast<uint32_t>(set.config.num_ranks);
    *group = made.release();
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_group_destroy(uccl_ep_group* group, int abort) {
  if (group == nullptr) return UCCL_EP_OK;
  const std::unique_ptr<uccl_ep_group> owned(group);
  return guarded([&] {
    owned->engine->close(abort != 0);
    if (abort == 0) owned->engine->check();
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_group_check(const uccl_ep_group* group) {
  return guarded([&] {
    there(group, "group").engine->check();
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_group_stats(const uccl_ep_group* group, uccl_ep_stat* stats, size_t capacity,
                                   size_t* num_stats) {
  return guarded([&] {
    const Stats all = there(group, "group").engine->stats();
    there(num_stats, "num_stats") = all.size();
    for (size_t i = 0; i < std::min(capacity, all.size()); ++i) {
      copy_text(stats[i].name, all[i].first);
      stats[i].value = all[i].second;
    }
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_plan_create(uccl_ep_group* group, const uccl_ep_routing* routing, uccl_ep_plan** plan) {
  return guarded([&] {
    there(plan, "plan") = nullptr;
    *plan = new uccl_ep_plan{&there(group, "group"), taken(routing, "routing"), nullptr};
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_plan_update(uccl_ep_plan* plan, const uccl_ep_routing* routing) {
  return guarded([&] {
    there(plan, "plan").routing = taken(routing, "routing");
    plan->saved = nullptr;
    return UCCL_EP_OK;
  });
}

void uccl_ep_plan_destroy(uccl_ep_plan* plan) { delete plan; }

uccl_ep_status uccl_ep_dispatch(uccl_ep_plan* plan, const uccl_ep_dispatch_args* args, uccl_ep_op** op) {
  return guarded([&] {
    there(op, "op") = nullptr;
    uccl_ep_group& group = *there(plan, "plan").group;
    auto made = std::make_unique<uccl_ep_op>();
    made->group = &group;
    const Stream stream = args == nullptr ? nullptr : args->stream;
    made->operation = queued(*group.engine, stream,
                             [&] { return group.engine->dispatch(dispatch_args_of(*plan, taken(args, "args"))); });
    plan->saved = made->operation->plan();
    *op = made.release();
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_counts(uccl_ep_op* op, uint64_t timeout_us, uccl_ep_sizes* sizes) {
  return guarded([&] {
    uccl_ep_sizes found = taken(sizes, "sizes");
    Operation& operation = *there(op, "op").operation;
    if (operation.is_guessed() && !operation.counts_known()) operation.give_up_guess();
    if (!operation.counts_known() && !operation.wait_counts(timeout_us)) return UCCL_EP_PENDING;
    const std::shared_ptr<SavedPlan> plan = operation.plan();
    const bool counted = !plan->facts().has_capacity;
    found.num_local_experts = op->group->num_local_experts;
    found.num_rows = plan->num_rows();
    found.plan_bytes = op->group->on_gpu ? plan->num_bytes() : 0;
    found.tokens_per_expert = counted ? plan->tokens_per_expert().data() : nullptr;
    found.tokens_per_expert_exact = counted ? plan->tokens_per_expert_exact().data() : nullptr;
    std::memcpy(static_cast<void*>(sizes), &found, std::min(found.size, sizeof(found)));
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_complete(uccl_ep_op* op, const uccl_ep_output* output) {
  return guarded([&] {
    const uccl_ep_output given = taken(output, "output");
    Operation& operation = *there(op, "op").operation;
    if (!operation.counts_known()) refuse("uccl_ep_counts() has not said UCCL_EP_OK yet");
    if (given.rows == nullptr && operation.plan()->num_rows() > 0) refuse("rows is NULL");
    if (given.plan == nullptr && op->group->on_gpu && operation.plan()->num_bytes() > 0) refuse("plan is NULL");
    DispatchOutput memory;
    memory.rows = static_cast<uint8_t*>(given.rows);
    memory.scales = given.scales;
    memory.weights = given.weights;
    memory.row_experts = given.row_experts;
    memory.plan = static_cast<uint8_t*>(given.plan);
    memory.stream = given.stream;
    operation.give_output(memory);
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_combine(uccl_ep_plan* plan, const uccl_ep_combine_args* args, uccl_ep_op** op) {
  return guarded([&] {
    there(op, "op") = nullptr;
    uccl_ep_group& group = *there(plan, "plan").group;
    auto made = std::make_unique<uccl_ep_op>();
    made->group = &group;
    const Stream stream = args == nullptr ? nullptr : args->stream;
    made->operation = queued(*group.engine, stream,
                             [&] { return group.engine->combine(combine_args_of(*plan, taken(args, "args"))); });
    *op = made.release();
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_wait(uccl_ep_op* op, void* stream, uint64_t timeout_us) {
  return guarded([&] { return there(op, "op").operation->wait(stream, timeout_us) ? UCCL_EP_OK : UCCL_EP_PENDING; });
}

int uccl_ep_is_done(const uccl_ep_op* op) { return op == nullptr || op->operation->done() ? 1 : 0; }

void uccl_ep_op_destroy(uccl_ep_op* op) { delete op; }
