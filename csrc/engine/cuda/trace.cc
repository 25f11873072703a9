// Traces of a CUDA engine: what its kernels note, on the host's clock, beside what its proxy does.
#include "backend/cuda/trace.h"

#include "engine/cuda/engine.h"

namespace uccl_ep {
namespace {

using cuda::must;

// The caller may be capturing a graph meanwhile.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// From the GPU's clock to the host's, by two samples: neither is steady by the other's measure.
uint64_t host_time(uint64_t gpu_nsec, const cuda::ClockSample& first, const cuda::ClockSample& last) {
  const double host = static_cast<double>(last.host_nsec - first.host_nsec);
  const double gpu = static_cast<double>(static_cast<int64_t>(last.gpu_nsec - first.gpu_nsec));
  const double since = static_cast<double>(static_cast<int64_t>(gpu_nsec - first.gpu_nsec));
  return first.host_nsec + static_cast<uint64_t>(static_cast<int64_t>(gpu > 0 ? since * (host / gpu) : since));
}

}  // namespace

void CudaEngine::start_trace(uint64_t max_events) {
  const cuda::OnDevice guard(device_);
  plane_.start_trace(max_events);
  const std::lock_guard lock(mutex_);
  const RelaxedCapture relaxed;
  try {
    const uint64_t num_bytes = sizeof(cuda::TraceLog) + max_events * sizeof(cuda::TraceRecord);
    if (trace_memory_.empty() || trace_memory_.back().num_bytes() < num_bytes)
      trace_memory_.push_back(cuda::DeviceMapping::create(device_, num_bytes));
    uint8_t* const memory = trace_memory_.back().base();
    const cuda::TraceLog log{0, static_cast<uint32_t>(max_events)};
    must(cudaMemsetAsync(memory, 0, num_bytes, control_stream_), "cudaMemset");
    must(cudaMemcpyAsync(memory, &log, sizeof(log), cudaMemcpyHostToDevice, control_stream_), "cudaMemcpy");
    trace_began_ = cuda::sample_clock(stop_word_ + 1, control_stream_);
    group_.trace = reinterpret_cast<cuda::TraceLog*>(memory);
  } catch (...) {
    plane_.stop_trace();
    throw;
  }
}

Trace CudaEngine::stop_trace() {
  const cuda::OnDevice guard(device_);
  cuda::TraceLog* on_device = nullptr;
  {
    const std::lock_guard lock(mutex_);
    std::swap(on_device, group_.trace);
  }
  if (on_device != nullptr) must(cudaEventSynchronize(last_done_), "cudaEventSynchronize");
  Trace trace = plane_.stop_trace();
  const std::lock_guard lock(mutex_);
  const RelaxedCapture relaxed;
  const cuda::ClockSample last = cuda::sample_clock(stop_word_ + 1, control_stream_);
  cuda::TraceLog log{};
  must(cudaMemcpyAsync(&log, on_device, sizeof(log), cudaMemcpyDeviceToHost, control_stream_), "cudaMemcpy");
  must(cudaStreamSynchronize(control_stream_), "cudaStreamSynchronize");
  std::vector<cuda::TraceRecord> records(std::min(log.next, log.capacity));
  must(cudaMemcpyAsync(records.data(), on_device + 1, records.size() * sizeof(records[0]), cudaMemcpyDeviceToHost,
                       control_stream_),
       "cudaMemcpy");
  must(cudaStreamSynchronize(control_stream_), "cudaStreamSynchronize");
  for (const cuda::TraceRecord& record : records) {
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

// But for its times.
TraceEvent CudaEngine::event_of(const cuda::TraceRecord& record) const {
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
