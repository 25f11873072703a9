#include "c_api/convert.h"

#include <stdexcept>
#include <vector>

namespace uccl_ep {
namespace {

static_assert(UCCL_EP_MXFP8 == static_cast<int>(Dtype::kMxfp8) && UCCL_EP_BF16 == static_cast<int>(Dtype::kBf16));
static_assert(UCCL_EP_MXFP8 == std::size(kRowFormats), "a row format has no enumerator in uccl_ep.h");

Dtype dtype_of(uccl_ep_dtype given, bool may_be_quantised, const char* name) {
  const auto dtype = static_cast<Dtype>(given);
  const int most = may_be_quantised ? UCCL_EP_MXFP8 : UCCL_EP_FP32;
  if (static_cast<int>(given) < UCCL_EP_BF16 || static_cast<int>(given) > most)
    throw UsageFailure(UsageKind::kDtype, std::string(name) + " = " + std::to_string(static_cast<int>(given)) +
                                              ": allowed is 1 to " + std::to_string(most));
  return dtype;
}

int number_of(uint32_t value, const char* name) {
  if (value > kMostRanks)
    throw UsageFailure(UsageKind::kConfig, std::string(name) + " = " + std::to_string(value) + ": allowed are up to " +
                                               std::to_string(kMostRanks));
  return static_cast<int>(value);
}

int num_ranks_of(const uccl_ep_group_config& given) {
  if (given.num_ranks == 0) throw UsageFailure(UsageKind::kConfig, "num_ranks = 0: allowed are 1 or more");
  return number_of(given.num_ranks, "num_ranks");
}

// Kernels read 16 bytes at a time.
void check_rows(const void* rows, uint64_t num_rows, const uccl_ep_group& group, const char* name) {
  if (rows == nullptr && num_rows > 0)
    refuse(std::string(name) + " is NULL with " + std::to_string(num_rows) + " rows");
  if (group.on_gpu && reinterpret_cast<uintptr_t>(rows) % kRowAlign != 0)
    refuse(std::string(name) + " begins at a byte that is no multiple of " + std::to_string(kRowAlign));
}

// Of a plan that a dispatch has made.
std::shared_ptr<SavedPlan> completed(const uccl_ep_plan& plan) {
  if (plan.sent == nullptr || !plan.sent->is_complete)
    refuse("the plan's first dispatch has to be completed by uccl_ep_complete() before");
  return plan.sent->saved;
}

}  // namespace

AllGather all_gather_of(const uccl_ep_group_config& config) {
  if (config.all_gather == nullptr) refuse("all_gather is NULL");
  const auto ranks = static_cast<size_t>(num_ranks_of(config));  // what is gathered has room for so many
  return [config, ranks](const std::string& mine, const std::string& step) {
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
  config.rank = number_of(given.rank, "rank");
  config.num_ranks = num_ranks_of(given);
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

uccl_ep_routing routing_of(const uccl_ep_group& group, const uccl_ep_routing* given) {
  const uccl_ep_routing routing = taken(given, "routing");
  const bool is_map = routing.is_map != 0;
  const std::string width = "width = " + std::to_string(routing.width);
  if (is_map && routing.width != group.num_experts)
    throw UsageFailure(UsageKind::kShape, width + " of a map: allowed is " + std::to_string(group.num_experts));
  if (!is_map && (routing.width == 0 || routing.width > kMostTopk))
    throw UsageFailure(UsageKind::kShape, width + ": allowed is 1 to " + std::to_string(kMostTopk));
  if (routing.data == nullptr && routing.num_tokens > 0)
    refuse("data is NULL with " + std::to_string(routing.num_tokens) + " tokens");
  if (routing.has_capacity != 0 && !group.on_gpu) refuse("has_capacity: allowed for tensors on a GPU");
  if (routing.max_tokens != 0 && routing.has_capacity == 0)
    refuse("max_tokens = " + std::to_string(routing.max_tokens) + " without a capacity: allowed is 0");
  if (routing.capacity > kMostCapacity)
    refuse("capacity = " + std::to_string(routing.capacity) + ": allowed is 0 to " + std::to_string(kMostCapacity));
  return routing;
}

DispatchArgs dispatch_args_of(const uccl_ep_plan& plan, const uccl_ep_dispatch_args& given) {
  const uccl_ep_routing& routing = plan.routing;
  DispatchArgs args;
  args.x = static_cast<const uint8_t*>(given.x);
  args.num_tokens = routing.num_tokens;
  args.hidden = given.hidden;
  args.dtype = dtype_of(given.dtype, true, "dtype");
  args.wire = given.wire == 0 ? args.dtype : dtype_of(given.wire, true, "wire");
  args.scales = given.scales;
  args.metadata = given.metadata;
  args.num_metadata = given.num_metadata;
  args.weights = routing.weights;
  args.expert_alignment = std::max(routing.expert_alignment, 1u);
  args.compact = routing.compact != 0;
  args.stream = given.stream;
  if (plan.sent != nullptr) args.plan = completed(plan);
  args.has_routing = plan.sent == nullptr;
  args.routing = {routing.is_map != 0 ? RoutingKind::kMap : RoutingKind::kTopk, routing.data, routing.width};
  if (routing.has_capacity != 0) args.capacity = static_cast<int64_t>(routing.capacity);
  args.max_tokens = routing.max_tokens;
  check_rows(args.x, args.num_tokens, *plan.group, "x");
  return args;
}

DispatchOutput output_of(const uccl_ep_op& op, const uccl_ep_output& given) {
  if (op.is_complete) refuse("op is completed already");
  if (!op.operation->counts_known()) refuse("uccl_ep_counts() has not said UCCL_EP_OK yet");
  const bool has_rows = op.operation->plan()->num_rows() > 0;
  check_rows(given.rows, op.operation->plan()->num_rows(), *op.group, "rows");
  if (given.weights == nullptr && has_rows && op.has_weights) refuse("weights is NULL, and weights travel");
  if (given.metadata == nullptr && has_rows && op.has_metadata) refuse("metadata is NULL, and metadata travels");
  if (given.scales == nullptr && has_rows && op.has_codes) refuse("scales is NULL, and rows come as codes");
  if (given.scales != nullptr && !op.is_quantised) refuse("scales: allowed is NULL, as no FP8 rows travel");
  if (given.row_experts != nullptr && op.operation->plan()->facts().compact_width == 0)
    refuse("row_experts: allowed is NULL, as rows are not compact");
  if (given.plan == nullptr && op.group->on_gpu && !op.sent->is_complete) refuse("plan is NULL");
  DispatchOutput memory;
  memory.rows = static_cast<uint8_t*>(given.rows);
  memory.scales = given.scales;
  memory.weights = op.has_weights ? given.weights : nullptr;
  memory.row_experts = given.row_experts;
  memory.metadata = op.has_metadata ? given.metadata : nullptr;
  memory.plan = static_cast<uint8_t*>(given.plan);
  memory.stream = given.stream;
  return memory;
}

CombineArgs combine_args_of(const uccl_ep_plan& plan, const uccl_ep_combine_args& given) {
  CombineArgs args;
  args.plan = completed(plan);
  args.rows = static_cast<const uint8_t*>(given.rows);
  args.hidden = given.hidden;
  args.dtype = dtype_of(given.dtype, false, "dtype");
  args.wire = given.wire == 0 ? args.dtype : dtype_of(given.wire, false, "wire");
  args.weights = given.weights;
  args.out = static_cast<uint8_t*>(given.out);
  args.weights_out = given.weights_out;
  args.stream = given.stream;
  if ((args.weights == nullptr) != (args.weights_out == nullptr)) refuse("weights and weights_out come together");
  check_rows(args.out, args.plan->facts().num_tokens, *plan.group, "out");
  check_rows(args.rows, args.plan->num_rows(), *plan.group, "rows");
  return args;
}

}  // namespace uccl_ep
