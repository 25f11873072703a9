#include "device/copy_context.h"

#include <dlfcn.h>

#include <array>
#include <type_traits>

#include "device/driver.h"

namespace uccl_ep::gpu {
namespace {

using WriteValue = decltype(&cuStreamWriteValue64);

// Null if this GPU's streams cannot write words.
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

// The driver's calls for contexts. They are looked up by the name with its version, because one name has different
// forms in different versions.
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

}  // namespace

CopyContext::Guard::Guard(const CopyContext& context) : context_(context.context_) {
  if (context_ != nullptr) must(contexts().push(static_cast<CUcontext>(context_)), "cuCtxPushCurrent");
}

CopyContext::Guard::~Guard() {
  CUcontext popped = nullptr;
  if (context_ != nullptr) contexts().pop(&popped);
}

CopyContext::CopyContext(int device) : device_(device) {
  const OnDevice guard(device);
  if (contexts().there) {
    CUdevice handle = 0;
    CUcontext made = nullptr, popped = nullptr;
    must(contexts().device_get(&handle, device), "cuDeviceGet");
    must(contexts().create(&made, 0, handle), "cuCtxCreate");
    context_ = made;
    contexts().pop(&popped);
  }
  write_value_ = reinterpret_cast<void*>(find_write_value(device));
}

CopyContext::~CopyContext() {
  if (context_ != nullptr) contexts().destroy(static_cast<CUcontext>(context_));
}

void CopyContext::enter_thread() {
  if (context_ != nullptr)
    must(contexts().make_current(static_cast<CUcontext>(context_)), "cuCtxSetCurrent");
  else
    enter_device(device_);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  must(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
}

void CopyContext::copy(std::span<const Copy> copies, StreamHandle stream) {
#if CUDART_VERSION >= 13000
  if (copies.size() > 1) {
    std::array<void*, kMostAtOnce> to{};
    std::array<const void*, kMostAtOnce> from{};
    std::array<size_t, kMostAtOnce> num_bytes{};
    for (size_t i = 0; i < copies.size(); ++i) {
      to[i] = copies[i].to;
      from[i] = copies[i].from;
      num_bytes[i] = copies[i].num_bytes;
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    must(cudaMemcpyBatchAsync(to.data(), from.data(), num_bytes.data(), copies.size(), &attributes, &first, 1, stream),
         "cudaMemcpyBatchAsync");
    return;
  }
#endif
  for (const Copy& copy : copies)
    must(cudaMemcpyAsync(copy.to, copy.from, copy.num_bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}

void CopyContext::write_word(uint64_t* word, uint64_t value, StreamHandle stream) {
  // By default the write comes after a fence of the whole system, so whoever sees the number also sees the bytes.
  must(reinterpret_cast<WriteValue>(write_value_)(stream, reinterpret_cast<CUdeviceptr>(word), value,
                                                  CU_STREAM_WRITE_VALUE_DEFAULT),
       "cuStreamWriteValue64");
}

}  // namespace uccl_ep::gpu
