#include "device/runtime.h"

#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>

#include "common/thread.h"
#include "device/driver.h"

namespace uccl_ep::gpu {

void must(Status status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

namespace {

int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  must(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

uint32_t num_sms_of(int device) { return static_cast<uint32_t>(attribute_of(device, cudaDevAttrMultiProcessorCount)); }

uint32_t most_shared_bytes(int device) {
  return static_cast<uint32_t>(attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

std::string pci_address(int device) {
  char text[32] = {};
  must(cudaDeviceGetPCIBusId(text, sizeof(text), device), "cudaDeviceGetPCIBusId");
  return text;
}

bool has_context(int device) try {
  CUdevice handle = 0;
  unsigned flags = 0;
  int active = 0;
  return UCCL_EP_DRIVER(cuDeviceGet)(&handle, device) == CUDA_SUCCESS &&
         UCCL_EP_DRIVER(cuDevicePrimaryCtxGetState)(handle, &flags, &active) == CUDA_SUCCESS && active != 0;
} catch (const std::runtime_error&) {  // the driver went first
  return false;
}

void enter_device(int device) { must(cudaSetDevice(device), "cudaSetDevice"); }

OnDevice::OnDevice(int device) {
  must(cudaGetDevice(&before_), "cudaGetDevice");
  changed_ = before_ != device;
  if (changed_) enter_device(device);
}

OnDevice::OnDevice(int device, std::nothrow_t) noexcept {
  changed_ = cudaGetDevice(&before_) == cudaSuccess && before_ != device;
  if (changed_) cudaSetDevice(device);
}

OnDevice::~OnDevice() {
  if (changed_ && has_context(before_)) cudaSetDevice(before_);
}

Stream make_stream() {
  int lowest = 0, highest = 0;
  must(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  StreamHandle stream = nullptr;
  must(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
  return Stream(stream);
}

Event make_event() {
  EventHandle event = nullptr;
  must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return Event(event);
}

void record(EventHandle event, StreamHandle stream) { must(cudaEventRecord(event, stream), "cudaEventRecord"); }

void follow(StreamHandle stream, EventHandle event) {
  must(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

bool is_over(EventHandle event) { return cudaEventQuery(event) != cudaErrorNotReady; }

bool is_over_well(EventHandle event) {
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) return false;
  must(status, "cudaEventQuery");
  return true;
}

void synchronize(EventHandle event) { must(cudaEventSynchronize(event), "cudaEventSynchronize"); }
void synchronize(EventHandle event, std::nothrow_t) noexcept { cudaEventSynchronize(event); }
void synchronize(StreamHandle stream) { must(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }
void synchronize(StreamHandle stream, std::nothrow_t) noexcept { cudaStreamSynchronize(stream); }

// The runtime has no deadline, so another thread waits.
bool wait_until_idle(int device, uint64_t usec) noexcept {
  const auto wait = [device] {
    cudaSetDevice(device);
    const RelaxedCapture relaxed;
    // In a context that an error has broken nothing runs any more.
    const cudaError_t status = cudaDeviceSynchronize();
    return status != cudaErrorStreamCaptureUnsupported && status != cudaErrorStreamCaptureInvalidated;
  };
  try {
    auto end = std::make_shared<std::promise<bool>>();
    std::future<bool> is_idle = end->get_future();
    start_thread("waiting for the GPU", [wait, end] { end->set_value(wait()); }).detach();
    return is_idle.wait_for(std::chrono::microseconds(usec)) == std::future_status::ready && is_idle.get();
  } catch (const std::exception&) {  // no thread, no memory
    return false;
  }
}

std::string failure_of(StreamHandle stream) {
  const cudaError_t status = cudaStreamQuery(stream);
  const bool is_well = status == cudaSuccess || status == cudaErrorNotReady || status == cudaErrorCudartUnloading;
  return is_well ? "" : cudaGetErrorString(status);
}

GraphHandle captured_graph(StreamHandle stream, uint64_t* id) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  GraphHandle graph = nullptr;
  unsigned long long its = 0;
#if CUDART_VERSION >= 13000
  must(cudaStreamGetCaptureInfo(stream, &status, &its, &graph), "cudaStreamGetCaptureInfo");
#else
  must(cudaStreamGetCaptureInfo_v2(stream, &status, &its, &graph), "cudaStreamGetCaptureInfo");
#endif
  if (id != nullptr) *id = its;
  return status == cudaStreamCaptureStatusNone ? nullptr : graph;
}

void add_host_node(GraphHandle graph, void (*function)(void*), void* argument) {
  cudaGraphNode_t node;
  const cudaHostNodeParams params{function, argument};
  must(cudaGraphAddHostNode(&node, graph, nullptr, 0, &params), "cudaGraphAddHostNode");
}

void copy_now(void* to, const void* from, size_t num_bytes) {
  must(cudaMemcpy(to, from, num_bytes, cudaMemcpyDefault), "cudaMemcpy");
}

void fill_now(void* to, uint8_t value, size_t num_bytes) {
  must(cudaMemset(to, value, num_bytes), "cudaMemset");
  must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void copy_to_device(void* to, const void* from, size_t num_bytes, StreamHandle stream) {
  must(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
}
void copy_to_device(void* to, const void* from, size_t num_bytes, StreamHandle stream, std::nothrow_t) noexcept {
  cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, stream);
}
void copy_to_host(void* to, const void* from, size_t num_bytes, StreamHandle stream) {
  must(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
}
void copy_to_host(void* to, const void* from, size_t num_bytes, StreamHandle stream, std::nothrow_t) noexcept {
  cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToHost, stream);
}
void zero(void* to, size_t num_bytes, StreamHandle stream) {
  must(cudaMemsetAsync(to, 0, num_bytes, stream), "cudaMemsetAsync");
}

}  // namespace uccl_ep::gpu
