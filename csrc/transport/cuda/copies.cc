#include "transport/cuda/copies.h"

#include <cuda.h>
#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "backend/cuda/memory.h"
#include "common/units.h"
#include "sync/flag.h"

namespace uccl_ep::cuda {
namespace {

constexpr size_t kEvents = 256;
// A context that broke writes no word: the streams are asked now and then.
constexpr uint64_t kQueryNsec = 20'000'000;
// After a pause of milliseconds a call to the driver takes 20 to 50 us. This one is made meanwhile.
constexpr uint64_t kWarmNsec = 100'000;

[[noreturn]] void fail(const char* call, const std::string& why) {
  ErrorRecord record;
  record.kind = ErrorKind::kTransport;
  record.step = Step::kShip;
  record.set_message(std::string("copy between GPUs: ") + call + ": " + why);
  throw CommunicationFailure(record);
}
void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) fail(call, cudaGetErrorString(status));
}
void check(CUresult status, const char* call) {
  if (status != CUDA_SUCCESS) fail(call, "error " + std::to_string(status));
}

// Null where the driver has none.
template <typename Function>
Function find_driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}
#define UCCL_EP_FIND_DRIVER(name) find_driver<decltype(&name)>(#name)

using WriteValue = decltype(&cuStreamWriteValue64);

// Null where this GPU's streams write no words.
WriteValue find_write_value(int device) {
  const auto device_get = UCCL_EP_FIND_DRIVER(cuDeviceGet);
  const auto get_attribute = UCCL_EP_FIND_DRIVER(cuDeviceGetAttribute);
  if (device_get == nullptr || get_attribute == nullptr) return nullptr;
  CUdevice handle = 0;
  int can = 0;
  if (device_get(&handle, device) != CUDA_SUCCESS ||
      get_attribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, handle) != CUDA_SUCCESS || can == 0)
    return nullptr;
  return UCCL_EP_FIND_DRIVER(cuStreamWriteValue64);
}

// The driver's calls for contexts; by name, because their forms differ between versions under one.
struct Contexts {
  CUresult (*create)(CUcontext*, unsigned, CUdevice) = nullptr;
  CUresult (*destroy)(CUcontext) = nullptr;
  CUresult (*push)(CUcontext) = nullptr;
  CUresult (*pop)(CUcontext*) = nullptr;
  CUresult (*make_current)(CUcontext) = nullptr;
  CUresult (*device_get)(CUdevice*, int) = nullptr;

  Contexts() {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);  // the runtime has loaded it
    if (driver == nullptr) return;
    const auto find = [&](auto& call, const char* name) {
      call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(driver, name));
      return call != nullptr;
    };
    there = find(create, "cuCtxCreate_v2") && find(destroy, "cuCtxDestroy_v2") && find(push, "cuCtxPushCurrent_v2") &&
            find(pop, "cuCtxPopCurrent_v2") && find(make_current, "cuCtxSetCurrent") && find(device_get, "cuDeviceGet");
  }
  bool there = false;
};
const Contexts& contexts() {
  static const Contexts calls;
  return calls;
}

// This thread is in a context, or stays where it is where that is null.
class InContext {
 public:
  explicit InContext(void* context) : context_(context) {
    if (context != nullptr) check(contexts().push(static_cast<CUcontext>(context)), "cuCtxPushCurrent");
  }
  ~InContext() {
    CUcontext popped = nullptr;
    if (context_ != nullptr) contexts().pop(&popped);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  void* const context_;
};

}  // namespace

CudaCopies::CudaCopies(int device) : device_(device) {
  try {
    create(device);
  } catch (...) {
    destroy();
    throw;
  }
}

CudaCopies::~CudaCopies() { destroy(); }

void CudaCopies::create(int device) {
  const OnDevice guard(device);
  if (contexts().there) {
    CUdevice handle = 0;
    CUcontext made = nullptr, popped = nullptr;
    check(contexts().device_get(&handle, device), "cuDeviceGet");
    check(contexts().create(&made, 0, handle), "cuCtxCreate");
    context_ = made;
    check(contexts().pop(&popped), "cuCtxPopCurrent");
  }
  write_value_ = reinterpret_cast<void*>(find_write_value(device));
  create_lanes();
}

void CudaCopies::create_lanes() {
  const InContext guard(context_);
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  check(cudaHostAlloc(reinterpret_cast<void**>(&words_), kLanes * kLineBytes,
                      cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc");
  for (size_t i = 0; i < kLanes; ++i) {
    Lane& lane = lanes_[i];
    lane.word = words_ + i * (kLineBytes / sizeof(uint64_t));
    *lane.word = 0;
    check(cudaHostGetDevicePointer(&lane.device_word, lane.word, 0), "cudaHostGetDevicePointer");
    check(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
    if (write_value_ != nullptr) continue;
    lane.tickets.resize(kEvents);
    lane.events.resize(kEvents, nullptr);
    for (cudaEvent_t& event : lane.events)
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
}

void CudaCopies::destroy() {
  try {
    destroy_lanes();
  } catch (const CommunicationFailure&) {  // of a context that cannot be entered nothing can be given back but itself
  }
  if (context_ != nullptr) contexts().destroy(static_cast<CUcontext>(context_));
}

void CudaCopies::destroy_lanes() {
  const InContext guard(context_);
  for (Lane& lane : lanes_) {
    if (lane.stream != nullptr) {
      cudaStreamSynchronize(lane.stream);
      cudaStreamDestroy(lane.stream);
    }
    for (cudaEvent_t event : lane.events)
      if (event != nullptr) cudaEventDestroy(event);
  }
  if (words_ != nullptr) cudaFreeHost(words_);
}

void CudaCopies::enter_thread() {
  if (context_ != nullptr)
    check(contexts().make_current(static_cast<CUcontext>(context_)), "cuCtxSetCurrent");
  else
    check(cudaSetDevice(device_), "cudaSetDevice");
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
}

void CudaCopies::hand_over(std::span<const Copy> copies, uint64_t last) {
  Lane& lane = lanes_[lane_of(last)];
  copy(lane, copies);
  mark(lane, last);
}

void CudaCopies::copy(const Lane& lane, std::span<const Copy> copies) {
#if CUDART_VERSION >= 13000
  if (copies.size() > 1) {
    std::array<void*, kGroup> to{};
    std::array<const void*, kGroup> from{};
    std::array<size_t, kGroup> num_bytes{};
    for (size_t i = 0; i < copies.size(); ++i) {
      to[i] = copies[i].to;
      from[i] = copies[i].from;
      num_bytes[i] = copies[i].num_bytes;
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    check(cudaMemcpyBatchAsync(to.data(), from.data(), num_bytes.data(), copies.size(), &attributes, &first, 1,
                               lane.stream),
          "cudaMemcpyBatchAsync");
    return;
  }
#endif
  for (const Copy& copy : copies)
    check(cudaMemcpyAsync(copy.to, copy.from, copy.num_bytes, cudaMemcpyDefault, lane.stream), "cudaMemcpyAsync");
}

// The copies so far of a lane.
void CudaCopies::mark(Lane& lane, uint64_t last) {
  lane.last = last;
  if (write_value_ != nullptr) return write(lane);
  while (lane.num_events - lane.num_over == kEvents) look_at_events(lane);
  check(cudaEventRecord(lane.events[lane.num_events % kEvents], lane.stream), "cudaEventRecord");
  lane.tickets[lane.num_events++ % kEvents] = last;
}

void CudaCopies::write(const Lane& lane) {
  // By default the write comes after a fence of the whole system, so who sees the number sees the bytes.
  check(reinterpret_cast<WriteValue>(write_value_)(lane.stream, reinterpret_cast<CUdeviceptr>(lane.device_word),
                                                   lane.last, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue64");
  last_call_nsec_ = now_nsec();
}

bool CudaCopies::done(uint64_t ticket) const { return read_device_flag(lanes_[lane_of(ticket)].word) >= ticket; }

void CudaCopies::look() {
  if (write_value_ == nullptr)
    for (Lane& lane : lanes_) look_at_events(lane);
  const uint64_t now = now_nsec();
  if (write_value_ != nullptr && now - last_call_nsec_ > kWarmNsec &&
      read_device_flag(lanes_[0].word) == lanes_[0].last)
    write(lanes_[0]);  // not behind copies that hang
  if (now < next_query_nsec_) return;
  next_query_nsec_ = now + kQueryNsec;
  for (Lane& lane : lanes_) {
    if (read_device_flag(lane.word) == lane.last) continue;
    const cudaError_t status = cudaStreamQuery(lane.stream);
    if (status != cudaErrorNotReady) check(status, "cudaStreamQuery");
  }
}

void CudaCopies::look_at_events(Lane& lane) {
  for (; lane.num_over < lane.num_events; ++lane.num_over) {
    const cudaError_t status = cudaEventQuery(lane.events[lane.num_over % kEvents]);
    if (status == cudaErrorNotReady) return;
    check(status, "cudaEventQuery");
    reinterpret_cast<Flag*>(lane.word)->publish(lane.tickets[lane.num_over % kEvents]);
  }
}

}  // namespace uccl_ep::cuda
