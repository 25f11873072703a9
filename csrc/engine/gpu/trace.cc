// Traces of a GPU engine: what its kernels note, on the host's clock, beside what its proxy does.
#include "backend/gpu/trace.h"

#include "engine/gpu/engine.h"

namespace uccl_ep {
namespace {

// Converts a time of the GPU's clock to the host's by two samples, because the clocks drift against each other.
uint64_t host_time(uint64_t gpu_nsec, const gpu::ClockSample& first, const gpu::ClockSample& last) {
  const double host = static_cast<double>(last.host_nsec - first.host_nsec);
  const double gpu = static_cast<double>(static_cast<int64_t>(last.gpu_nsec - first.gpu_nsec));
  const double since = static_cast<double>(static_cast<int64_t>(gpu_nsec - first.gpu_nsec));
  return first.host_nsec + static_cast<uint64_t>(static_cast<int64_t>(gpu > 0 ? since * (host / gpu) : since));
}

}  // namespace

void GpuEngine::start_trace(uint64_t max_events) {
  const gpu::OnDevice guard(device_);
  plane_.start_trace(max_events);
  const std::lock_guard lock(mutex_);
  const gpu::RelaxedCapture relaxed;  // the caller may be capturing a graph
  try {
    const uint64_t num_bytes = sizeof(gpu::TraceLog) + max_events * sizeof(gpu::TraceRecord);
    if (trace_memory_.empty() || trace_memory_.back().num_bytes() < num_bytes)
      trace_memory_.push_back(gpu::DeviceMapping::create(device_, num_bytes));
    uint8_t* const memory = trace_memory_.back().base();
    const gpu::TraceLog log{0, static_cast<uint32_t>(max_events)};
    gpu::zero(memory, num_bytes, control_stream_);
    gpu::copy_to_device(memory, &log, sizeof(log), control_stream_);
    trace_began_ = gpu::sample_clock(stop_word_ + 1, control_stream_);
    group_.trace = reinterpret_cast<gpu::TraceLog*>(memory);
  } catch (...) {
    plane_.stop_trace();
    throw;
  }
}

Trace GpuEngine::stop_trace() {
  const gpu::OnDevice guard(device_);
  gpu::TraceLog* on_device = nullptr;
  {
    const std::lock_guard lock(mutex_);
    std::swap(on_device, group_.trace);
  }
  if (on_device != nullptr) gpu::synchronize(last_done_);
  Trace trace = plane_.stop_trace();
  const std::lock_guard lock(mutex_);
  const gpu::RelaxedCapture relaxed;  // the caller may be capturing a graph
  const gpu::ClockSample last = gpu::sample_clock(stop_word_ + 1, control_stream_);
  gpu::TraceLog log{};
  gpu::copy_to_host(&log, on_device, sizeof(log), control_stream_);
  gpu::synchronize(control_stream_);
  std::vector<gpu::TraceRecord> records(std::min(log.next, log.capacity));
  gpu::copy_to_host(records.data(), on_device + 1, records.size() * sizeof(records[0]), control_stream_);
  gpu::synchronize(control_stream_);
  for (const gpu::TraceRecord& record : records) {
    if (record.kind == 0 || record.begin_nsec == 0) continue;
    TraceEvent event = event_of(record);
    event.begin_nsec = host_time(record.begin_nsec, trace_began_, last);
    event.end_nsec = host_time(record.end_nsec, trace_began_, last);
    trace.events.push_back(event);
  }
  trace.lost += log.next - records.size();
  if (given_back_) trace_memory_.clear();
  return trace;
}

// The event without its times.
TraceEvent GpuEngine::event_of(const gpu::TraceRecord& record) const {
  TraceEvent event;
  event.kind = static_cast<TraceKind>(record.kind);
  event.serial = record.number;
  event.num_bytes = record.num_bytes;
  event.channel = record.what;
  if (event.kind == TraceKind::kKernelStep) event.step = static_cast<Step>(record.what);
  if (event.kind == TraceKind::kPushed) {
    const OutChannel& out = plane_.channels().out[record.what];
    event.ring = out.send.kind;
    event.peer = out.peer;
  }
  if (event.kind == TraceKind::kSeenArrived) {
    const Network::Seen& seen = seen_[record.what];
    event.kind = seen.kind;
    event.ring = seen.ring;
    event.peer = seen.peer;
    event.channel = static_cast<uint32_t>(seen.member);
  }
  return event;
}

}  // namespace uccl_ep
