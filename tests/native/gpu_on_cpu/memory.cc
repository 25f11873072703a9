// Devices and their memory: allocations are files in memory, mapped by whoever gets their descriptor.
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "streams.h"

namespace {

constexpr size_t kPage = 2u << 20;
constexpr size_t kAlign = 256;
constexpr size_t kFabricHandleBytes = 64;
std::atomic<uint64_t> flushes{0}, fabric_imports{0};
std::atomic<bool> fabric{true};

int fd_of(CUmemGenericAllocationHandle handle) { return static_cast<int>(handle) - 1; }
CUresult result_of(bool good) { return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

}  // namespace

void gpu_on_cpu::have_fabric(bool has) { fabric = has; }
uint64_t gpu_on_cpu::num_fabric_imports() { return fabric_imports.load(); }
uint64_t gpu_on_cpu::num_flushes() { return flushes.load(); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    case cudaDevAttrGPUDirectRDMAFlushWritesOptions:
      *value = cudaFlushGPUDirectRDMAWritesOptionHost;
      break;
    case cudaDevAttrGPUDirectRDMAWritesOrdering:
      *value = 0;
      break;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", 0xf0 + device);
  return cudaSuccess;
}
cudaError_t cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTarget, cudaFlushGPUDirectRDMAWritesScope) {
  flushes.fetch_add(1);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t num_bytes) {
  *p = std::aligned_alloc(kAlign, (num_bytes + kAlign - 1) / kAlign * kAlign);
  return *p != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* p) {
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, size_t num_bytes, unsigned) { return cudaMalloc(p, num_bytes); }
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = gpu_on_cpu::has_context(device);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute != CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED || fabric.load();
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kPage;
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long) {
  if ((properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0 && !fabric.load())
    return CUDA_ERROR_NOT_SUPPORTED;
  const int fd = memfd_create("gpu_on_cpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = static_cast<CUmemGenericAllocationHandle>(fd) + 1;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return result_of(close(fd_of(handle)) == 0); }
CUresult cuMemExportToShareableHandle(void* handle, CUmemGenericAllocationHandle of, CUmemAllocationHandleType type,
                                      unsigned long long) {
  const int fd = dup(fd_of(of));
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) std::memset(handle, 0xFA, kFabricHandleBytes);  // of this process alone
  *static_cast<int*>(handle) = fd;
  return result_of(fd >= 0);
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from,
                                        CUmemAllocationHandleType type) {
  const bool of_fabric = type == CU_MEM_HANDLE_TYPE_FABRIC;
  fabric_imports.fetch_add(of_fabric);
  const int fd = dup(of_fabric ? *static_cast<int*>(from) : static_cast<int>(reinterpret_cast<uintptr_t>(from)));
  *handle = static_cast<CUmemGenericAllocationHandle>(fd) + 1;
  return result_of(fd >= 0);
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* const p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = reinterpret_cast<CUdeviceptr>(p);
  return p != MAP_FAILED ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  return result_of(munmap(reinterpret_cast<void*>(address), bytes) == 0);
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  return result_of(mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                        fd_of(handle), static_cast<off_t>(offset)) != MAP_FAILED);
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  return result_of(mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED);
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemGetHandleForAddressRange(void*, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
#define FUNCTION(name)                    \
  {                                       \
    #name, reinterpret_cast<void*>(&name) \
  }
  static const struct {
    const char* name;
    void* function;
  } functions[] = {FUNCTION(cuDeviceGet),
                   FUNCTION(cuDevicePrimaryCtxGetState),
                   FUNCTION(cuDeviceGetAttribute),
                   FUNCTION(cuMemGetAllocationGranularity),
                   FUNCTION(cuMemCreate),
                   FUNCTION(cuMemRelease),
                   FUNCTION(cuMemExportToShareableHandle),
                   FUNCTION(cuMemImportFromShareableHandle),
                   FUNCTION(cuMemAddressReserve),
                   FUNCTION(cuMemAddressFree),
                   FUNCTION(cuMemMap),
                   FUNCTION(cuMemUnmap),
                   FUNCTION(cuMemSetAccess),
                   FUNCTION(cuMemGetHandleForAddressRange),
                   FUNCTION(cuStreamWriteValue64)};
#undef FUNCTION
  *result = cudaDriverEntryPointSymbolNotFound;
  for (const auto& known : functions)
    if (std::strcmp(name, known.name) == 0) {
      *function = known.function;
      *result = cudaDriverEntryPointSuccess;
    }
  return cudaSuccess;
}
