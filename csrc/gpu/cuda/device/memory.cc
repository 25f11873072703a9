#include "device/memory.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "common/limits.h"
#include "common/units.h"
#include "device/driver.h"

namespace uccl_ep::gpu {
namespace {

// By number, because <cuda.h> before 12.3 does not name what is the fabric's.
constexpr uint32_t kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, kFabricHandle = 8;
constexpr auto kHasFabricHandles = static_cast<CUdevice_attribute>(128);

CUmemAllocationProp properties(int device, DeviceMapping::Reach reach) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  const uint32_t types = kDescriptor | (reach == DeviceMapping::Reach::kFabric ? kFabricHandle : 0);
  p.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(types);
  p.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  p.allocFlags.gpuDirectRDMACapable = 1;
  return p;
}

// Closed at the end.
struct Descriptor {
  explicit Descriptor(int number) : fd(number) {}
  ~Descriptor() { close(fd); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  const int fd;
};

uint64_t granularity(const CUmemAllocationProp& p) {
  size_t bytes = 0;
  must(UCCL_EP_DRIVER(cuMemGetAllocationGranularity)(&bytes, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
       "cuMemGetAllocationGranularity");
  return bytes;
}

}  // namespace

bool has_fabric_handles(int device) {
  CUdevice handle = 0;
  int has = 0;
  return UCCL_EP_DRIVER(cuDeviceGet)(&handle, device) == CUDA_SUCCESS &&
         UCCL_EP_DRIVER(cuDeviceGetAttribute)(&has, kHasFabricHandles, handle) == CUDA_SUCCESS && has != 0;
}

void DeviceMapping::swap(DeviceMapping& other) {
  std::swap(address_, other.address_);
  std::swap(handle_, other.handle_);
  std::swap(num_bytes_, other.num_bytes_);
}

DeviceMapping DeviceMapping::create(int device, uint64_t num_bytes, Reach reach) {
  DeviceMapping m;
  CUmemAllocationProp p = properties(device, reach);
  m.num_bytes_ = round_up(num_bytes, granularity(p));
  auto allocate = UCCL_EP_DRIVER(cuMemCreate);
  CUmemGenericAllocationHandle handle = 0;
  CUresult status = allocate(&handle, m.num_bytes_, &p, 0);
  if (status != CUDA_SUCCESS && status != CUDA_ERROR_OUT_OF_MEMORY) {
    p.allocFlags.gpuDirectRDMACapable = 0;  // not on every machine
    status = allocate(&handle, m.num_bytes_, &p, 0);
  }
  must(status, "cuMemCreate");
  m.handle_ = handle;
  m.map(device);
  fill_now(m.base(), 0, m.num_bytes_);
  return m;
}

DeviceMapping DeviceMapping::import(int fd, int device, uint64_t num_bytes) {
  const Descriptor own(fd);
  return import(reinterpret_cast<void*>(static_cast<uintptr_t>(fd)), kDescriptor, device, num_bytes);
}

DeviceMapping DeviceMapping::import(const std::string& fabric_handle, int device, uint64_t num_bytes) {
  if (fabric_handle.size() != kFabricHandleBytes)
    throw std::runtime_error("a fabric handle of " + std::to_string(fabric_handle.size()) + " bytes, not " +
                             std::to_string(kFabricHandleBytes));
  std::string bytes = fabric_handle;
  return import(bytes.data(), kFabricHandle, device, num_bytes);
}

DeviceMapping DeviceMapping::import(void* from, uint32_t handle_type, int device, uint64_t num_bytes) {
  DeviceMapping m;
  CUmemGenericAllocationHandle handle = 0;
  must(UCCL_EP_DRIVER(cuMemImportFromShareableHandle)(&handle, from,
                                                      static_cast<CUmemAllocationHandleType>(handle_type)),
       "cuMemImportFromShareableHandle");
  m.handle_ = handle;
  m.num_bytes_ = num_bytes;
  m.map(device);
  return m;
}

int DeviceMapping::export_fd() const {
  int fd = -1;
  export_to(&fd, kDescriptor);
  return fd;
}

std::string DeviceMapping::export_fabric_handle() const {
  std::string bytes(kFabricHandleBytes, '\0');
  export_to(bytes.data(), kFabricHandle);
  return bytes;
}

void DeviceMapping::export_to(void* to, uint32_t handle_type) const {
  must(
      UCCL_EP_DRIVER(cuMemExportToShareableHandle)(to, handle_, static_cast<CUmemAllocationHandleType>(handle_type), 0),
      "cuMemExportToShareableHandle");
}

int DeviceMapping::export_dmabuf() const {
  int fd = -1;
  const CUresult status =
      UCCL_EP_DRIVER(cuMemGetHandleForAddressRange)(&fd, address_, num_bytes_, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  return status == CUDA_SUCCESS ? fd : -1;
}

void DeviceMapping::map(int device) {
  CUdeviceptr address = 0;
  must(UCCL_EP_DRIVER(cuMemAddressReserve)(&address, num_bytes_, 0, 0, 0), "cuMemAddressReserve");
  const CUresult status = UCCL_EP_DRIVER(cuMemMap)(address, num_bytes_, 0, handle_, 0);
  if (status != CUDA_SUCCESS) UCCL_EP_DRIVER(cuMemAddressFree)(address, num_bytes_);
  must(status, "cuMemMap");
  address_ = address;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, {device}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  must(UCCL_EP_DRIVER(cuMemSetAccess)(address, num_bytes_, &access, 1), "cuMemSetAccess");
}

DeviceMapping::~DeviceMapping() {
  try {
    if (address_ != 0) {
      UCCL_EP_DRIVER(cuMemUnmap)(address_, num_bytes_);
      UCCL_EP_DRIVER(cuMemAddressFree)(address_, num_bytes_);
    }
    if (handle_ != 0) UCCL_EP_DRIVER(cuMemRelease)(handle_);
  } catch (const std::runtime_error&) {  // the driver went first
  }
}

PinnedMemory::PinnedMemory(uint64_t num_bytes) {
  uint8_t* memory = nullptr;
  must(cudaHostAlloc(reinterpret_cast<void**>(&memory), num_bytes, cudaHostAllocPortable | cudaHostAllocMapped),
       "cudaHostAlloc");
  memory_ = decltype(memory_)(memory);
  std::fill_n(memory, num_bytes, uint8_t{0});
}

HostMapping::HostMapping(uint8_t* memory, uint64_t num_bytes) {
  must(cudaHostRegister(memory, num_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable), "cudaHostRegister");
  memory_ = decltype(memory_)(memory);
  must(cudaHostGetDevicePointer(reinterpret_cast<void**>(&on_device_), memory, 0), "cudaHostGetDevicePointer");
}

}  // namespace uccl_ep::gpu
