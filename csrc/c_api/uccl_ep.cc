// The C interface: its calls, and errors as numbers. Nothing is thrown across it.
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "c_api/convert.h"

namespace uccl_ep {
namespace {

thread_local std::string error_text;

uccl_ep_status status_of(ErrorKind kind) { return static_cast<uccl_ep_status>(32 + static_cast<int>(kind)); }
uccl_ep_status status_of(UsageKind kind) { return static_cast<uccl_ep_status>(16 + static_cast<int>(kind)); }
static_assert(UCCL_EP_PEER_FAILED == 32 + static_cast<int>(ErrorKind::kPeerFailed) &&
              UCCL_EP_ARRIVAL_TIMEOUT == 32 + static_cast<int>(ErrorKind::kArrivalTimeout) &&
              UCCL_EP_TOPOLOGY_ERROR == 16 + static_cast<int>(UsageKind::kTopology) &&
              UCCL_EP_CONFIG_ERROR == 16 + static_cast<int>(UsageKind::kConfig));

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

uint64_t bounded(uint64_t timeout_us) { return std::min(timeout_us, kMostTimeoutUsec); }

// Queues what call(plan, args) makes of a struct. A call that is refused has its number among the operations: the other
// ranks learn why this one did not come.
template <typename Given, typename Call>
uccl_ep_status queue(uccl_ep_plan* plan, const Given* args, uccl_ep_op** op, const Call& call) {
  return guarded([&] {
    if (op != nullptr) *op = nullptr;
    uccl_ep_group& group = *there(plan, "plan").group;
    Stream stream = nullptr;
    const uint64_t before = group.engine->num_calls();
    try {
      const Given given = taken(args, "args");
      stream = given.stream;
      there(op, "op");
      auto made = std::make_unique<uccl_ep_op>();
      made->group = &group;
      call(given, *group.engine, *made);
      *op = made.release();
    } catch (const CommunicationFailure&) {
      throw;
    } catch (const std::exception& failure) {
      if (group.engine->num_calls() == before)
        group.engine->refused(std::string(error_name(failure)) + ": " + failure.what(), stream);
      throw;
    }
    return UCCL_EP_OK;
  });
}

uccl_ep_op& dispatch_of(uccl_ep_op* op) {
  if (there(op, "op").sent == nullptr) refuse("op is a combine, which has neither counts nor an output of rows");
  return *op;
}

}  // namespace
}  // namespace uccl_ep

using namespace uccl_ep;

uint32_t uccl_ep_version(void) { return UCCL_EP_VERSION; }

const char* uccl_ep_error_text(void) { return error_text.c_str(); }

uccl_ep_status uccl_ep_group_create(const uccl_ep_group_config* config, uccl_ep_group** group) {
  return guarded([&] {
    if (group != nullptr) *group = nullptr;
    const uccl_ep_group_config given = taken(config, "config");
    const AllGather all_gather = all_gather_of(given);
    EngineConfig wanted;
    try {
      there(group, "group");
      wanted = config_of(given);
    } catch (const std::exception&) {
      refuse_creation(static_cast<int>(given.rank), all_gather, std::current_exception());
    }
    auto made = std::make_unique<uccl_ep_group>();
    made->on_gpu = given.on_gpu != 0;
    SetUp set = set_up(wanted, made->on_gpu, all_gather, [&](const EngineConfig& complete) {
      return make_engine(complete, made->on_gpu, given.device, given.num_sms == 0 ? kDefaultSms : given.num_sms);
    });
    made->engine = std::move(set.engine);
    made->num_experts = set.config.num_experts;
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
    if (capacity > 0) there(stats, "stats");
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
    *plan = new uccl_ep_plan{&there(group, "group"), routing_of(*group, routing), nullptr};
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_plan_update(uccl_ep_plan* plan, const uccl_ep_routing* routing) {
  return guarded([&] {
    uccl_ep_plan& changed = there(plan, "plan");  // before the right side of the assignment, which reads it
    changed.routing = routing_of(*changed.group, routing);
    plan->sent = nullptr;
    return UCCL_EP_OK;
  });
}

void uccl_ep_plan_destroy(uccl_ep_plan* plan) { delete plan; }

uccl_ep_status uccl_ep_dispatch(uccl_ep_plan* plan, const uccl_ep_dispatch_args* args, uccl_ep_op** op) {
  return queue(plan, args, op, [plan](const uccl_ep_dispatch_args& given, Engine& engine, uccl_ep_op& made) {
    const DispatchArgs native = dispatch_args_of(*plan, given);
    auto sent = plan->sent == nullptr ? std::make_shared<SentRouting>() : plan->sent;
    made.operation = engine.dispatch(native);
    made.has_weights = native.weights != nullptr;
    made.has_metadata = native.num_metadata > 0;
    made.is_quantised = is_quantised(native.wire);
    made.has_codes = is_quantised(native.dtype);
    sent->saved = made.operation->plan();
    made.sent = plan->sent = std::move(sent);
  });
}

uccl_ep_status uccl_ep_counts(uccl_ep_op* op, uint64_t timeout_us, uccl_ep_sizes* sizes) {
  return guarded([&] {
    uccl_ep_sizes found = taken(sizes, "sizes");
    Operation& operation = *dispatch_of(op).operation;
    if (operation.is_guessed() && !operation.counts_known()) operation.give_up_guess();
    if (!operation.counts_known() && !operation.wait_counts(bounded(timeout_us))) return UCCL_EP_PENDING;
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
    Operation& operation = *dispatch_of(op).operation;
    const DispatchOutput memory = output_of(*op, given);
    operation.give_output(memory);
    op->is_complete = op->sent->is_complete = true;
    return UCCL_EP_OK;
  });
}

uccl_ep_status uccl_ep_combine(uccl_ep_plan* plan, const uccl_ep_combine_args* args, uccl_ep_op** op) {
  return queue(plan, args, op, [plan](const uccl_ep_combine_args& given, Engine& engine, uccl_ep_op& made) {
    made.operation = engine.combine(combine_args_of(*plan, given));
  });
}

uccl_ep_status uccl_ep_wait(uccl_ep_op* op, void* stream, uint64_t timeout_us) {
  return guarded([&] {
    if (there(op, "op").sent != nullptr && !op->is_complete) refuse("a dispatch needs uccl_ep_complete() before");
    return op->operation->wait(stream, bounded(timeout_us)) ? UCCL_EP_OK : UCCL_EP_PENDING;
  });
}

int uccl_ep_is_done(const uccl_ep_op* op) { return op == nullptr || op->operation->done() ? 1 : 0; }

void uccl_ep_op_destroy(uccl_ep_op* op) { delete op; }
