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

// Without words: more copies than this under way wait for the oldest.
constexpr size_t kEvents = 256;
// A context that broke writes no word: the stream is asked now and then.
constexpr uint64_t kLooksPerQuery = 1 << 16;

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

// The proxy's thread, when it comes first. Another thread may be capturing a graph while this one copies.
void CudaCopies::enter_thread() {
  if (entered_) return;
  if (context_ != nullptr)
    check(contexts().make_current(static_cast<CUcontext>(context_)), "cuCtxSetCurrent");
  else
    check(cudaSetDevice(device_), "cudaSetDevice");
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  entered_ = true;
}

uint64_t CudaCopies::start(void* to, const void* from, uint64_t num_bytes) {
  enter_thread();
  const size_t idx = next_;
  Lane& lane = lanes_[idx];
  const size_t waiting = lane.started - lane.marked;
  lane.to[waiting] = to;
  lane.from[waiting] = from;
  lane.num_bytes[waiting] = num_bytes;
  if (waiting == 0) lane.waiting_since_nsec = now_nsec();
  ++lane.started;
  if (waiting + 1 == (write_value_ != nullptr ? kBatch : 1)) hand_over(lane);
  return lane.started * kLanes + idx;
}

void CudaCopies::flush() {
  Lane& lane = lanes_[next_];
  if (lane.started != lane.marked && now_nsec() - lane.waiting_since_nsec >= kHoldNsec) hand_over(lane);
}

// Throws nothing: whoever hands over goes on with what has nothing to do with these copies, the news of their error
// among it. Who asks whether one of them is done hears of it.
void CudaCopies::hand_over(Lane& lane) {
  try {
    if (lane.error == nullptr) return copy(lane);
  } catch (const CommunicationFailure&) {
    lane.error = std::current_exception();
  }
  lane.marked = lane.started;
  next_ = (next_ + 1) % kLanes;
}

void CudaCopies::copy(Lane& lane) {
  const size_t count = lane.started - lane.marked;
#if CUDART_VERSION >= 13000
  if (count > 1) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    check(cudaMemcpyBatchAsync(lane.to.data(), lane.from.data(), lane.num_bytes.data(), count, &attributes, &first, 1,
                               lane.stream),
          "cudaMemcpyBatchAsync");
    mark(lane);
    return;
  }
#endif
  for (size_t i = 0; i < count; ++i)
    check(cudaMemcpyAsync(lane.to[i], lane.from[i], lane.num_bytes[i], cudaMemcpyDefault, lane.stream),
          "cudaMemcpyAsync");
  mark(lane);
}

// The copies so far of a lane; those that follow go to the next one.
void CudaCopies::mark(Lane& lane) {
  const uint64_t number = lane.started;
  if (write_value_ != nullptr) {
    // By default the write comes after a fence of the whole system, so who sees the number sees the bytes.
    check(reinterpret_cast<WriteValue>(write_value_)(lane.stream, reinterpret_cast<CUdeviceptr>(lane.device_word),
                                                     number, CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue64");
  } else {
    const cudaEvent_t event = lane.events[number % lane.events.size()];
    if (number - lane.over > lane.events.size()) {  // it stands for a copy that nobody asked for yet
      check(cudaEventSynchronize(event), "cudaEventSynchronize");
      lane.over = number - lane.events.size();
    }
    check(cudaEventRecord(event, lane.stream), "cudaEventRecord");
  }
  lane.marked = number;
  next_ = (next_ + 1) % kLanes;
}

bool CudaCopies::done(uint64_t ticket) {
  Lane& lane = lanes_[ticket % kLanes];
  const uint64_t number = ticket / kLanes;
  if (lane.marked < number) {
    flush();
    if (lane.marked < number) return false;
  }
  if (lane.over < number && lane.error != nullptr) std::rethrow_exception(lane.error);
  if (lane.over < number) look(lane);
  return lane.over >= number;
}

void CudaCopies::look(Lane& lane) {
  const uint64_t before = lane.over;
  if (write_value_ != nullptr) {
    lane.over = read_device_flag(lane.word);
  } else {
    while (lane.over < lane.marked) {
      const cudaError_t status = cudaEventQuery(lane.events[(lane.over + 1) % lane.events.size()]);
      if (status == cudaErrorNotReady) break;
      check(status, "cudaEventQuery");
      ++lane.over;
    }
  }
  lane.fruitless = lane.over != before ? 0 : lane.fruitless + 1;
  if (lane.fruitless == 0 || lane.fruitless % kLooksPerQuery != 0) return;
  const cudaError_t status = cudaStreamQuery(lane.stream);
  if (status != cudaErrorNotReady) check(status, "cudaStreamQuery");
}

}  // namespace uccl_ep::cuda
