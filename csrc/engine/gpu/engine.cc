// Life of a GPU engine: creation, connection, watching. Its end: close.cc. The operations: ops.cc.
#include "engine/gpu/engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <map>
#include <stdexcept>

#include "backend/gpu/low_latency.h"
#include "backend/gpu/topk.h"
#include "common/clock.h"
#include "common/thread.h"
#include "device/arch.h"
#include "engine/group/handle.h"

namespace uccl_ep {
namespace {

using gpu::must;
using gpu::OnDevice;

const EngineConfig& checked(const EngineConfig& config, uint32_t num_sms) {
  check_group(config);
  if (num_sms <= 1 && Topology::from_labels(config.domain_of).num_domains() > 1)
    throw UsageFailure(UsageKind::kConfig, "num_sms = " + std::to_string(num_sms) +
                                               " with several domains: at least 2, one sees to the network");
  return config;
}

constexpr uint32_t kUsualLowLatencySms = 64;  // of an H100's 132: fewer made a combine 10 us slower
uint32_t low_latency_sms_of(const EngineConfig& config) {
  if (config.low_latency_tokens == 0) return 0;
  return std::min(config.low_latency_sms == 0 ? kUsualLowLatencySms : config.low_latency_sms, gpu::kMaxSlotBlocks);
}

// Faults caused by the caller. Kernels find them, so the buffer is already broken.
bool is_bad_routing(const gpu::HostError& error) {
  const auto code = static_cast<gpu::DeviceFault>(error.code);
  return code == gpu::DeviceFault::kExpertRange || code == gpu::DeviceFault::kExpertTwice ||
         code == gpu::DeviceFault::kTooManyPairs;
}

bool on_one_host(const EngineConfig& config, int rank) {
  const std::vector<int>& host_of = config.host_of;
  return host_of.empty() || host_of[static_cast<size_t>(rank)] == host_of[static_cast<size_t>(config.rank)];
}

// Whether our domain does.
bool spans_hosts(const EngineConfig& config) {
  const Topology topo = Topology::from_labels(config.domain_of);
  return !std::ranges::all_of(topo.members[topo.domain_of[config.rank]],
                              [&](int member) { return on_one_host(config, member); });
}

gpu::DeviceMapping::Reach reach_of(const EngineConfig& config, int device) {
  if (!spans_hosts(config)) return gpu::DeviceMapping::Reach::kHost;
  if (!gpu::has_fabric_handles(device))
    throw UsageFailure(UsageKind::kConfig, "rank " + std::to_string(config.rank) +
                                               " has members of its domain on other hosts, and its GPU has no fabric "
                                               "handles: allowed are domains of one host");
  return gpu::DeviceMapping::Reach::kFabric;
}

constexpr uint64_t kPulseOffset = kPinnedBytes / 4;
static_assert(sizeof(gpu::HostError) <= kPulseOffset);
constexpr uint64_t kContextUsec = 100'000;  // between checks that the GPU's context still works

// SMs that buffers leave to others, mainly NCCL.
uint32_t reserved_sms(uint32_t all) { return std::min(32u, all / 4); }

std::mutex held_mutex;
std::map<int, uint32_t> held_sms;  // by device

}  // namespace

SmShare::SmShare(int device, uint32_t sms) : device_(device), sms_(sms) {
  const uint32_t all = gpu::num_sms_of(device), reserved = reserved_sms(all);
  const std::string own = "num_sms, stage_sms, low_latency_sms = " + std::to_string(sms) + ": ";
  const std::lock_guard lock(held_mutex);
  uint32_t& others = held_sms[device];
  if (sms == 0 || others + sms + reserved > all)
    throw UsageFailure(UsageKind::kConfig, own + "of this GPU's " + std::to_string(all) +
                                               " SMs other buffers of this process have " + std::to_string(others) +
                                               ", and " + std::to_string(reserved) + " stay free");
  others += sms;
}

void SmShare::give_back() {
  const std::lock_guard lock(held_mutex);
  held_sms[device_] -= sms_;
  sms_ = 0;
}

GpuEngine::GpuEngine(const EngineConfig& config, int device, uint32_t num_sms, uint32_t stage_sms)
    : config_(checked(config, num_sms)),
      topo_(Topology::from_labels(config.domain_of)),
      numbers_(topo_),
      device_(device),
      num_sms_(num_sms),
      stage_sms_(std::max(num_sms, stage_sms)),
      low_latency_sms_(low_latency_sms_of(config)),
      share_(device, std::max(stage_sms_, low_latency_sms_)),
      layout_(gpu_layout_of(config)),
      plane_(config, layout_.rings, gpu::pci_address(device)),
      socket_(config.rank, config.generation),
      regions_(static_cast<size_t>(config.num_ranks)),
      region_bytes_(regions_.size()) {
  const OnDevice guard(device_);
  for (gpu::Stream* stream : {&stream_, &control_stream_, &refusal_stream_}) *stream = gpu::make_stream();
  for (gpu::Event* event : {&inputs_ready_, &last_done_}) *event = gpu::make_event();
  pinned_ = gpu::PinnedMemory(gpu_pinned_bytes(config));
  stop_word_ = reinterpret_cast<uint64_t*>(pinned_.base() + kPinnedBytes / 2);
  *stop_word_ = 1;
  const uint32_t shared_bytes = gpu::most_shared_bytes(device_);
  group_.shared_bytes = shared_bytes - gpu::kStaticSharedBytes;
  group_.table_bytes = gpu::rank_table_bytes(layout_);
  check_shared_bytes(config, layout_, group_.shared_bytes);
  for (auto load : {gpu::load_dispatch, gpu::load_combine, gpu::load_refusal, gpu::load_pad, gpu::load_clock,
                    gpu::load_low_latency_dispatch, gpu::load_low_latency_combine, gpu::load_topk})
    must(load(shared_bytes), "loading the kernels");
  regions_[config.rank] = gpu::DeviceMapping::create(device_, layout_.total_bytes, reach_of(config, device_));
  region_bytes_[config.rank] = regions_[config.rank].num_bytes();
  if (has_nics()) register_with_nics(plane_, regions_[config.rank]);
}

GpuEngine::~GpuEngine() { close(true); }

std::string GpuEngine::export_handle() const {
  const gpu::DeviceMapping& own = regions_[config_.rank];
  const std::string fabric = spans_hosts(config_) ? own.export_fabric_handle() : "";
  return encode_device_handle({socket_.address(), own.num_bytes(), layout_.group_hash, fabric, plane_.export_handle()});
}

void GpuEngine::connect(const std::vector<std::string>& handles) {
  const OnDevice guard(device_);
  if (handles.size() != regions_.size()) throw UsageFailure(UsageKind::kConfig, "connect needs one handle per rank");
  std::vector<std::string> planes(handles.size());
  addresses_.resize(handles.size());
  fabric_handles_.resize(handles.size());
  for (size_t r = 0; r < handles.size(); ++r) {
    const DeviceHandle handle = decode_device_handle(handles[r]);
    if (handle.layout != layout_.group_hash)
      throw UsageFailure(UsageKind::kConfig, "rank " + std::to_string(r) + " lays out its memory otherwise than rank " +
                                                 std::to_string(config_.rank) + ": do both have the same build?");
    const bool member = topo_.domain_of[r] == topo_.domain_of[config_.rank];
    // Without NICs, all are on one host, and copy engines also write to ranks of other domains.
    if (static_cast<int>(r) != config_.rank && (member || !has_nics())) {
      const bool near = !member || on_one_host(config_, static_cast<int>(r));
      if (!near && handle.fabric.empty())
        throw UsageFailure(UsageKind::kConfig, "rank " + std::to_string(r) + " is on another host than rank " +
                                                   std::to_string(config_.rank) + ", and gives no fabric handle");
      (near ? addresses_ : fabric_handles_)[r] = near ? handle.socket_name : handle.fabric;
      region_bytes_[r] = handle.region_bytes;
    }
    planes[r] = handle.plane;
  }
  plane_.connect(planes);
}

void GpuEngine::share_memory(const std::function<void()>& look) {
  const OnDevice guard(device_);
  const gpu::Descriptors own({regions_[config_.rank].export_fd()});
  gpu::Descriptors got = socket_.exchange(addresses_, own[0], config_.arrival_timeout_s, look);
  for (size_t r = 0; r < got.size(); ++r)
    if (got[r] >= 0)
      regions_[r] = gpu::DeviceMapping::import(got.release(r), device_, region_bytes_[r]);
    else if (!fabric_handles_[r].empty())
      regions_[r] = gpu::DeviceMapping::import(fabric_handles_[r], device_, region_bytes_[r]);
  if (topo_.num_domains() > 1)
    network_ = std::make_unique<Network>(plane_, layout_, config_.rank, device_, has_nics(), regions_);
}

void GpuEngine::start() {
  const OnDevice guard(device_);
  group_.map = layout_;
  group_.experts_per_rank = config_.num_experts / static_cast<uint32_t>(config_.num_ranks);
  const int own = topo_.domain_of[config_.rank];
  group_.own = regions_[config_.rank].base();
  for (size_t member = 0; member < topo_.members[own].size(); ++member)
    group_.base[member] = regions_[topo_.members[own][member]].base();
  group_.rank = numbers_.number_of[config_.rank];
  group_.first = numbers_.first_of[own];
  group_.end = numbers_.first_of[own + 1];
  fill_tables();
  if (network_ != nullptr) {
    network_->fill(group_, numbers_);
    seen_ = network_->seen();
  }
  const auto deadline_nsec = [](double seconds) {
    return static_cast<uint64_t>(std::min(seconds * 1e9, static_cast<double>(gpu::kMostLivedNsec / 2)));
  };
  group_.arrival_nsec = deadline_nsec(config_.arrival_timeout_s);
  group_.progress_nsec = deadline_nsec(config_.progress_timeout_s);
  group_.mask_nsec = layout_.low_latency.tokens > 0 ? deadline_nsec(config_.mask_timeout_s) : 0;
  group_.bulk_copies = config_.bulk_copies && gpu::has_bulk_copies();
  group_.error = reinterpret_cast<gpu::HostError*>(pinned_.base());
  group_.counts = reinterpret_cast<gpu::HostCounts*>(pinned_.base() + kPinnedBytes);
  plane_.start();
  auto* const pulse = reinterpret_cast<gpu::HostPulse*>(pinned_.base() + kPulseOffset);
  pulse_ = std::make_unique<Pulse>(*pulse, plane_);
  group_.pulse = pulse;
  watcher_ = start_thread("watching the GPU", [this] { watch(); });
  const std::lock_guard lock(mutex_);
  started_ = true;
}

// The tables lie one behind the other.
void GpuEngine::fill_tables() {
  std::vector<uint16_t> order(numbers_.number_of);
  for (size_t i = 0; i < config_.source_order.size(); ++i)
    order[i] = numbers_.number_of[static_cast<size_t>(config_.source_order[i])];
  std::vector<uint16_t> all;
  const auto put = [&](gpu::RankTable& table, const std::vector<uint16_t>& entries) {
    table.entries = layout_.tables.in(group_.own) + all.size();
    all.insert(all.end(), entries.begin(), entries.end());
  };
  put(group_.number_of, numbers_.number_of);
  put(group_.rank_of, numbers_.rank_of);
  put(group_.domain_of, numbers_.domain_of);
  put(group_.first_of, numbers_.first_of);
  put(group_.source_order, order);
  gpu::copy_now(layout_.tables.in(group_.own), all.data(), sizeof(uint16_t) * all.size());
}

void GpuEngine::check() const {
  if (started_ && tell_fault() && is_bad_routing(*group_.error))
    throw UsageFailure(UsageKind::kRouting, text_of(*group_.error));
  plane_.check();
}

// A fault that a kernel found goes to all ranks; the first error of this rank wins. True if there is one.
bool GpuEngine::tell_fault() const {
  if (read_device_flag(&group_.error->published.value) == 0) return false;
  if (plane_.failed()) return true;
  ErrorRecord record;
  {
    const std::shared_lock held(memory_mutex_);
    if (given_back_) return true;
    record = record_of(*group_.error);
  }
  // A peer that has refused more calls will soon send the reason.
  const bool peer_knows =
      static_cast<gpu::DeviceFault>(group_.error->code) == gpu::DeviceFault::kMismatch && record.seen > record.expected;
  const uint64_t met = now_usec(), patience_usec = why_usec(config_.progress_timeout_s);
  while (peer_knows && !plane_.failed() && now_usec() - met < patience_usec) usleep(1000);
  const std::shared_lock held(memory_mutex_);
  if (given_back_ || plane_.failed()) return true;
  if (static_cast<gpu::DeviceFault>(group_.error->code) == gpu::DeviceFault::kMasked)
    plane_.keep(record);
  else
    plane_.spread(record);
  return true;
}

void GpuEngine::wake() {
  const std::shared_lock held(memory_mutex_);
  if (network_ == nullptr) return;
  plane_.wake();
  network_->wake();
}

void GpuEngine::tell_kernels_to_stop() {
  gpu::copy_to_device(&layout_.local.in(group_.own)->stop, stop_word_, sizeof(*stop_word_), control_stream_,
                      std::nothrow);
}

// Tells all ranks of this rank's faults; an error that reached this rank stops its kernels.
void GpuEngine::watch() {
  pthread_setname_np(pthread_self(), "uccl_ep_cuda");
  const OnDevice guard(device_, std::nothrow);
  const gpu::RelaxedCapture relaxed;  // the caller may be capturing a graph while an error is passed on
  bool told = false, stopped = false;
  uint64_t asked_usec = now_usec();
  while (leaving_.read() == 0) {
    try {
      if (!told) told = tell_fault();
      if (!stopped && now_usec() - asked_usec > kContextUsec) {
        asked_usec = now_usec();
        // A fault of any kernel ends the context. Then no kernel of this engine runs any more that could report its
        // deadline.
        if (const std::string why = gpu::failure_of(control_stream_); !why.empty())
          fail("lost its GPU's context, which an earlier kernel or call has broken: " + why);
      }
    } catch (const std::exception& failure) {  // out of memory, for example
      plane_.spread(failure_of(config_.rank, failure.what()));
    }
    if (!stopped && plane_.failed()) {
      stopped = true;
      tell_kernels_to_stop();
    }
    if (stopped)
      usleep(1000);
    else
      plane_.wait_for_error(2000);
  }
}

Stats GpuEngine::stats() const {
  const std::lock_guard lock(mutex_);
  Stats all = {{"dispatch.calls", static_cast<double>(num_dispatches_)},
               {"combine.calls", static_cast<double>(num_combines_)},
               {"dispatch.guesses", static_cast<double>(num_guesses_)},
               {"dispatch.guesses_too_low", static_cast<double>(num_misses_)},
               {"windows", static_cast<double>(num_windows_)},
               {"low_latency.dispatches", static_cast<double>(num_low_latency_)},
               {"rows.shipped", static_cast<double>(rows_shipped_)},
               {"rows.placed", static_cast<double>(rows_placed_)},
               {"rows.folded", static_cast<double>(rows_folded_)},
               {"rows.relayed", static_cast<double>(rows_relayed_)},
               {"memory.allocated_bytes", static_cast<double>(layout_.total_bytes + gpu_host_bytes(config_, layout_))},
               {"memory.max_tokens", static_cast<double>(layout_.max_tokens)},
               {"memory.window_bytes", static_cast<double>(layout_.half_bytes)},
               {"memory.piece_bytes", static_cast<double>(layout_.piece_bytes)}};
  if (topo_.num_domains() > 1)  // what the proxy counts
    for (const auto& [name, value] : plane_.stats())
      if (name.starts_with("ship.") || name.starts_with("credit.") || name.starts_with("proxy."))
        all.emplace_back(name, value);
  if (!started_ || closed_) return all;
  const OnDevice guard(device_);
  const gpu::RelaxedCapture relaxed;  // the caller may be capturing a graph
  gpu::Local local{};
  std::vector<uint64_t> waited_nsec(static_cast<size_t>(config_.num_ranks)), waited_usec;
  gpu::copy_to_host(&local, layout_.local.in(group_.own), sizeof(local), control_stream_, std::nothrow);
  gpu::copy_to_host(waited_nsec.data(), layout_.waited_nsec.in(group_.own), sizeof(uint64_t) * waited_nsec.size(),
                    control_stream_, std::nothrow);
  gpu::synchronize(control_stream_, std::nothrow);
  for (uint32_t s = 1; s < kNumSteps; ++s)
    if (local.step_nsec[s] > 0)
      all.emplace_back(std::string("step_seconds.") + step_name(static_cast<Step>(s)),
                       static_cast<double>(local.step_nsec[s]) * 1e-9);
  int num_masked = 0;
  for (const uint32_t word : local.low_latency.masked) num_masked += std::popcount(word);
  all.emplace_back("low_latency.masked_ranks", num_masked);
  all.emplace_back("low_latency.dropped_pairs", static_cast<double>(local.low_latency.dropped_pairs));
  for (uint16_t number : numbers_.number_of) waited_usec.push_back(waited_nsec[number] / 1000);
  put_straggler(all, waited_usec, config_.rank);
  return all;
}

}  // namespace uccl_ep
