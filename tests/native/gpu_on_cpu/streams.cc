#include "streams.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

static thread_local int own_device = 0;

struct CpuStream {
  CpuStream() : thread([this] { work(); }) {
    const std::lock_guard lock(all_mutex);
    all.insert(this);
  }
  ~CpuStream() {
    {
      const std::lock_guard lock(all_mutex);
      all.erase(this);
    }
    {
      const std::lock_guard lock(mutex);
      leaving = true;
    }
    changed.notify_all();
    thread.join();
  }
  void add(std::function<void()> what) {
    {
      const std::lock_guard lock(mutex);
      todo.push_back(std::move(what));
    }
    changed.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex);
    return todo.empty();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return todo.empty(); });
  }
  // Of the streams that the calling thread's device has.
  static void wait_for_all() {
    const auto are_idle = [] {
      const std::lock_guard lock(all_mutex);
      return std::all_of(all.begin(), all.end(),
                         [](CpuStream* its) { return its->device != own_device || its->idle(); });
    };
    while (!are_idle()) usleep(200);
  }
  std::atomic<CpuGraph*> graph{nullptr};

 private:
  static inline std::mutex all_mutex;
  static inline std::set<CpuStream*> all;
  const int device = own_device;
  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return leaving || !todo.empty(); });
      if (todo.empty()) return;
      const std::function<void()>& next = todo.front();
      lock.unlock();
      if (gpu_on_cpu::random_number() % 8 == 1) usleep(static_cast<useconds_t>(gpu_on_cpu::random_number() % 500));
      next();
      lock.lock();
      todo.pop_front();
      changed.notify_all();
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> todo;  // the first is under way
  bool leaving = false;
  std::thread thread;
};

namespace {

// What an event stands for since it was recorded last.
struct Record {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  void finish() {
    {
      const std::lock_guard lock(mutex);
      done = true;
    }
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
};

}  // namespace

struct CpuEvent {
  std::mutex mutex;
  std::shared_ptr<Record> record;
  std::shared_ptr<Record> last() {
    const std::lock_guard lock(mutex);
    return record;
  }
};

namespace {

std::atomic<bool> contexts[gpu_on_cpu::kDevices];

CpuStream& stream_of(CpuStream* stream) {
  static CpuStream* const defaults = new CpuStream[gpu_on_cpu::kDevices];  // of each device; never destroyed
  return stream != nullptr ? *stream : defaults[own_device];
}

}  // namespace

namespace gpu_on_cpu {

void capture(CpuStream* stream, CpuGraph* graph) {
  static std::atomic<uint64_t> captures{0};
  if (graph != nullptr) graph->capture = ++captures;
  stream->graph = graph;
}

void queue(CpuStream* stream, std::function<void()> work) { stream_of(stream).add(std::move(work)); }

void queue_grid(CpuStream* stream, const Grid& grid, std::function<void()> lane) {
  queue(stream, [grid, lane = std::move(lane)] {
    try {
      run_grid(grid, lane);
    } catch (const Fault& fault) {
      std::fprintf(stderr, "FAULT on the CPU that stands in for a GPU: %s\n", fault.what());
      std::fflush(stderr);
      std::_Exit(3);
    }
  });
}

}  // namespace gpu_on_cpu

bool gpu_on_cpu::has_context(int device) { return contexts[device]; }

static std::atomic<int> breaks_copies{-1}, breaks_streams{-1};
void gpu_on_cpu::break_copies_of(int device) { breaks_copies = device; }
void gpu_on_cpu::break_streams_of(int device) { breaks_streams = device; }

const char* cudaGetErrorString(cudaError_t status) { return status == cudaSuccess ? "no error" : "an error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = own_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= gpu_on_cpu::kDevices) return cudaErrorInvalidDevice;
  own_device = device;
  contexts[device] = true;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  CpuStream::wait_for_all();
  return cudaSuccess;
}
// As the calls that copy or fill at once do.
static cudaError_t wait_for_default_stream() {
  stream_of(nullptr).wait();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CpuStream;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = *highest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream_of(stream).wait();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (own_device == breaks_streams) return cudaErrorLaunchFailure;
  return stream_of(stream).idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph) {
  *graph = stream_of(stream).graph;
  *id = *graph != nullptr ? (*graph)->capture : 0;
  *status = *graph != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGraphAddHostNode(cudaGraphNode_t*, cudaGraph_t graph, const cudaGraphNode_t*, size_t num_dependencies,
                                 const cudaHostNodeParams* params) {
  graph->host_nodes.emplace_back([host = *params] { host.fn(host.userData); });
  graph->num_dependencies += num_dependencies;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument) {
  gpu_on_cpu::queue(stream, [=] { function(argument); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CpuEvent;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto record = std::make_shared<Record>();
  {
    const std::lock_guard lock(event->mutex);
    event->record = record;
  }
  gpu_on_cpu::queue(stream, [record] { record->finish(); });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (auto record = event->last()) gpu_on_cpu::queue(stream, [record] { record->wait(); });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto record = event->last();
  if (!record) return cudaSuccess;
  const std::lock_guard lock(record->mutex);
  return record->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (auto record = event->last()) record->wait();
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t num_bytes, cudaStream_t stream) {
  gpu_on_cpu::queue(stream, [=] { std::memset(to, value, num_bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t num_bytes) {
  cudaMemsetAsync(to, value, num_bytes, nullptr);
  return wait_for_default_stream();
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (num_bytes == 0) return cudaSuccess;
  if (kind == cudaMemcpyDefault && own_device == breaks_copies) return cudaErrorLaunchFailure;
  std::string staged;  // of memory that is not pinned CUDA takes a copy before it returns
  if (kind == cudaMemcpyHostToDevice) staged.assign(static_cast<const char*>(from), num_bytes);
  gpu_on_cpu::queue(stream, [=, staged = std::move(staged)] {
    std::memcpy(to, staged.empty() ? from : staged.data(), num_bytes);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, num_bytes, kind, nullptr);
  return wait_for_default_stream();
}
// In any order.
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* num_bytes, size_t count,
                                 cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t stream) {
  if (own_device == breaks_copies) return cudaErrorLaunchFailure;
  struct Copy {
    void* to;
    const void* from;
    size_t num_bytes;
  };
  std::vector<Copy> copies;
  for (size_t i = 0; i < count; ++i) copies.push_back({to[i], from[i], num_bytes[i]});
  std::rotate(copies.begin(), copies.begin() + static_cast<ptrdiff_t>(gpu_on_cpu::random_number() % count),
              copies.end());
  for (const Copy& copy : copies) cudaMemcpyAsync(copy.to, copy.from, copy.num_bytes, cudaMemcpyDefault, stream);
  return cudaSuccess;
}
CUresult cuStreamWriteValue64(CpuStream* stream, CUdeviceptr address, uint64_t value, unsigned) {
  gpu_on_cpu::queue(stream, [=] { __atomic_store_n(reinterpret_cast<uint64_t*>(address), value, __ATOMIC_RELEASE); });
  return CUDA_SUCCESS;
}
