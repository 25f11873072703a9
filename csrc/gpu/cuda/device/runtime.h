// Devices, streams, events, graphs and copies, by the same names for every vendor. Functions that throw, throw
// std::runtime_error naming the vendor's call. Those that take std::nothrow ignore errors, which later calls will meet.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

namespace uccl_ep::gpu {

using StreamHandle = cudaStream_t;
using EventHandle = cudaEvent_t;
using GraphHandle = cudaGraph_t;
using Status = cudaError_t;  // of launches

void must(Status status, const char* what);
// The status of the last launch on this thread.
inline Status launch_status() { return cudaGetLastError(); }

// ---- devices --------------------------------------------------------------------------------------------------------
uint32_t num_sms_of(int device);
// Shared memory that a block may have, what its kernel declares included.
uint32_t most_shared_bytes(int device);
// "0000:1b:00.0"
std::string pci_address(int device);
// Whether this process has its context on a device, which takes half a gigabyte there.
bool has_context(int device);
// By a thread that stays there.
void enter_device(int device);

// For its life the calling thread's current device is `device`. Afterwards it is the previous one, unless this process
// has no context there, which going back would make. (A new thread's device is GPU 0.)
class OnDevice {
 public:
  explicit OnDevice(int device);
  // For callers that must go on despite an error of the GPU.
  OnDevice(int device, std::nothrow_t) noexcept;
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// ---- streams and events ---------------------------------------------------------------------------------------------
template <typename Handle, auto kDestroy>
class Owned {
 public:
  Owned() = default;
  explicit Owned(Handle handle) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_ != nullptr) kDestroy(handle_);
  }
  operator Handle() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};
using Stream = Owned<cudaStream_t, cudaStreamDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;

// On the current device, with its highest priority. The stream does not wait for the default stream.
Stream make_stream();
Event make_event();
void record(EventHandle event, StreamHandle stream);
// `stream` waits until what `event` recorded is over.
void follow(StreamHandle stream, EventHandle event);
// Whether what it recorded is over or has failed.
bool is_over(EventHandle event);
// The same; throws if it failed.
bool is_over_well(EventHandle event);
// The calling thread waits.
void synchronize(EventHandle event);
void synchronize(EventHandle event, std::nothrow_t) noexcept;
void synchronize(StreamHandle stream);
void synchronize(StreamHandle stream, std::nothrow_t) noexcept;
// Waits until the device has no work, at most so long; false: it may have some.
bool wait_until_idle(int device, uint64_t usec) noexcept;
// The error of a stream's work: "" while all is well, or when the process ends.
std::string failure_of(StreamHandle stream);

// ---- graphs ---------------------------------------------------------------------------------------------------------
// The graph that is being captured from the stream, or null; `id`: of the capture, no other of the process has it.
GraphHandle captured_graph(StreamHandle stream, uint64_t* id = nullptr);
// Adds a node that waits for nothing. Whenever the graph begins, a thread that must not call the runtime calls
// function(argument).
void add_host_node(GraphHandle graph, void (*function)(void*), void* argument);
// For its life this thread's calls are allowed while another stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// ---- copies ---------------------------------------------------------------------------------------------------------
// Between any two memories, at once: the calling thread waits.
void copy_now(void* to, const void* from, size_t num_bytes);
void fill_now(void* to, uint8_t value, size_t num_bytes);
void copy_to_device(void* to, const void* from, size_t num_bytes, StreamHandle stream);
void copy_to_device(void* to, const void* from, size_t num_bytes, StreamHandle stream, std::nothrow_t) noexcept;
void copy_to_host(void* to, const void* from, size_t num_bytes, StreamHandle stream);
void copy_to_host(void* to, const void* from, size_t num_bytes, StreamHandle stream, std::nothrow_t) noexcept;
void zero(void* to, size_t num_bytes, StreamHandle stream);

}  // namespace uccl_ep::gpu
