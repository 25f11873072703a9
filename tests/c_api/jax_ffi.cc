// An example: dispatch and combine as handlers of JAX's foreign function interface, on the CPU. jax_rank.py uses them.
//
// A plan lives from a dispatch to the last combine of its routing. A compiled program names it by a small integer, and
// a table here holds it. No address would do: the routing is an input, so its plan is made while the program runs; and
// JAX may keep compiled programs in files, in which an address means nothing.
//
// XLA runs calls in an order of its own, unless one needs the result of another. All ranks have to make the same calls
// in the same order. So each handler takes `after`, a result of the call before it, and does not look at it.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "uccl_ep.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32, 2>;
using Indices = ffi::Buffer<ffi::S32, 2>;
using Counts = ffi::Buffer<ffi::S32, 1>;

// The library's own timeouts end a wait that is in vain.
constexpr uint64_t kNoTimeout = UINT64_MAX;

struct HeldPlan {
  uccl_ep_plan* plan = nullptr;
  bool is_sent = false;  // its first dispatch is over: the routing's memory is no longer used
  uint64_t num_tokens = 0, num_rows = 0;  // known from then on
};

struct Table {
  std::mutex mutex;  // calls about a group come one at a time
  uccl_ep_group* group = nullptr;
  std::map<int64_t, HeldPlan> plans;
};

Table& table() {
  static Table the_table;
  return the_table;
}

struct OpDeleter {
  void operator()(uccl_ep_op* op) const { uccl_ep_op_destroy(op); }
};
using OpPtr = std::unique_ptr<uccl_ep_op, OpDeleter>;

template <typename T>
T initial() {
  T fields{};
  fields.size = sizeof(T);
  fields.magic = UCCL_EP_MAGIC;
  return fields;
}

ffi::Error wrong(const std::string& text) { return ffi::Error::InvalidArgument(text); }

// Called before the thread calls the C interface again: the text is that of its last call.
ffi::Error error_of(uccl_ep_status status) {
  if (status == UCCL_EP_OK) return ffi::Error::Success();
  const bool is_broken = status >= UCCL_EP_ARRIVAL_TIMEOUT;
  return ffi::Error(is_broken ? ffi::ErrorCode::kAborted : ffi::ErrorCode::kInvalidArgument, uccl_ep_error_text());
}

std::string named(int64_t key) { return "plan " + std::to_string(key) + ": "; }

// Gives the plan a routing. `wide` has to live until its first dispatch is over.
ffi::Error route(Table& held, HeldPlan& mine, Indices idx, const std::vector<int64_t>& wide) {
  mine.is_sent = false;
  auto routing = initial<uccl_ep_routing>();
  routing.num_tokens = mine.num_tokens = static_cast<uint64_t>(idx.dimensions()[0]);
  routing.width = static_cast<uint32_t>(idx.dimensions()[1]);
  routing.data = wide.data();
  return error_of(mine.plan == nullptr ? uccl_ep_plan_create(held.group, &routing, &mine.plan)
                                       : uccl_ep_plan_update(mine.plan, &routing));
}

// Dispatches x into `rows` if they fit, otherwise into `spill`: other ranks wait until this one is through.
ffi::Error receive(HeldPlan& mine, Floats x, Floats rows, std::vector<float>& spill, uccl_ep_sizes& sizes) {
  auto args = initial<uccl_ep_dispatch_args>();
  args.hidden = static_cast<uint32_t>(x.dimensions()[1]);
  args.x = x.typed_data();
  args.dtype = UCCL_EP_FP32;
  uccl_ep_op* started = nullptr;
  uccl_ep_status status = uccl_ep_dispatch(mine.plan, &args, &started);
  const OpPtr op(started);
  if (status == UCCL_EP_OK) status = uccl_ep_counts(op.get(), kNoTimeout, &sizes);
  if (status != UCCL_EP_OK) return error_of(status);
  mine.num_rows = sizes.num_rows;
  auto output = initial<uccl_ep_output>();
  output.rows = rows.typed_data();
  if (sizes.num_rows > static_cast<uint64_t>(rows.dimensions()[0])) {
    spill.resize(sizes.num_rows * args.hidden);
    output.rows = spill.data();
  }
  status = uccl_ep_complete(op.get(), &output);
  if (status == UCCL_EP_OK) status = uccl_ep_wait(op.get(), nullptr, kNoTimeout);
  if (status == UCCL_EP_OK) mine.is_sent = true;
  return error_of(status);
}

// x [T, H], idx [T, K], after [...] -> rows [R, H], counts [E] of the local experts. Rows that nothing came for are
// zeros. Without columns in idx (K = 0), the rows go where they went before: that is the gradient of a combine.
ffi::Error dispatch(Floats x, Indices idx, ffi::AnyBuffer, ffi::Result<Floats> rows, ffi::Result<Counts> counts,
                    int64_t key) {
  Table& held = table();
  const std::lock_guard<std::mutex> lock(held.mutex);
  HeldPlan& mine = held.plans[key];
  const int64_t num_tokens = x.dimensions()[0], room = rows->dimensions()[0];
  const bool is_new = idx.dimensions()[1] > 0;
  if (!is_new && !mine.is_sent) return wrong(named(key) + "no dispatch has sent its routing");
  if (idx.dimensions()[0] != num_tokens || (!is_new && num_tokens != static_cast<int64_t>(mine.num_tokens)))
    return wrong(named(key) + "x and the routing have different numbers of tokens");
  if (rows->dimensions()[1] != x.dimensions()[1]) return wrong(named(key) + "x and rows have different widths");

  // JAX's integers have 32 bits by default.
  const std::vector<int64_t> wide(idx.typed_data(), idx.typed_data() + idx.element_count());
  ffi::Error error = is_new ? route(held, mine, idx, wide) : ffi::Error::Success();
  if (error.failure()) return error;
  std::vector<float> spill;
  auto sizes = initial<uccl_ep_sizes>();
  error = receive(mine, x, *rows, spill, sizes);
  if (error.failure()) return error;

  if (!spill.empty())
    return wrong(named(key) + std::to_string(sizes.num_rows) + " rows came, and there is room for " +
                 std::to_string(room));
  if (counts->element_count() != sizes.num_local_experts)
    return wrong(named(key) + std::to_string(sizes.num_local_experts) + " experts are local, and there are " +
                 std::to_string(counts->element_count()) + " counts");
  float* const out = rows->typed_data();
  std::fill(out + sizes.num_rows * static_cast<uint64_t>(x.dimensions()[1]), out + rows->element_count(), 0.0f);
  std::copy_n(sizes.tokens_per_expert_exact, sizes.num_local_experts, counts->typed_data());
  return ffi::Error::Success();
}

// rows [R, H] as dispatch made them, after [...] -> out [T, H]: the sum of each token's rows.
ffi::Error combine(Floats rows, ffi::AnyBuffer, ffi::Result<Floats> out, int64_t key) {
  Table& held = table();
  const std::lock_guard<std::mutex> lock(held.mutex);
  const HeldPlan& mine = held.plans[key];
  if (!mine.is_sent) return wrong(named(key) + "no dispatch has sent its routing");
  // The C interface gets pointers. It cannot know how much memory lies there.
  const auto num_rows = static_cast<uint64_t>(rows.dimensions()[0]);
  const auto num_tokens = static_cast<uint64_t>(out->dimensions()[0]);
  if (num_rows < mine.num_rows)
    return wrong(named(key) + std::to_string(num_rows) + " rows are given, and " + std::to_string(mine.num_rows) +
                 " rows came");
  if (num_tokens != mine.num_tokens)
    return wrong(named(key) + "the output has " + std::to_string(num_tokens) + " tokens, and the routing has " +
                 std::to_string(mine.num_tokens));
  if (out->dimensions()[1] != rows.dimensions()[1]) return wrong(named(key) + "rows and output have different widths");

  auto args = initial<uccl_ep_combine_args>();
  args.rows = rows.typed_data();
  args.hidden = static_cast<uint32_t>(rows.dimensions()[1]);
  args.dtype = UCCL_EP_FP32;
  args.out = out->typed_data();
  uccl_ep_op* started = nullptr;
  uccl_ep_status status = uccl_ep_combine(mine.plan, &args, &started);
  const OpPtr op(started);
  if (status == UCCL_EP_OK) status = uccl_ep_wait(op.get(), nullptr, kNoTimeout);
  return error_of(status);
}

}  // namespace

// Destroys all plans, and makes those to come in `group`. NULL: there will be none; then the group can be destroyed.
extern "C" __attribute__((visibility("default"))) void jax_ffi_use_group(uccl_ep_group* group) {
  Table& held = table();
  const std::lock_guard<std::mutex> lock(held.mutex);
  for (const auto& entry : held.plans)
    if (entry.second.plan != nullptr) uccl_ep_plan_destroy(entry.second.plan);
  held.plans.clear();
  held.group = group;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jax_ffi_dispatch, dispatch,
    ffi::Ffi::Bind().Arg<Floats>().Arg<Indices>().Arg<ffi::AnyBuffer>().Ret<Floats>().Ret<Counts>().Attr<int64_t>(
        "plan"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ffi_combine, combine,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<ffi::AnyBuffer>().Ret<Floats>().Attr<int64_t>("plan"));
