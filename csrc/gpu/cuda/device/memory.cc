#include "device/memory.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "common/units.h"
#include "device/driver.h"

namespace uccl_ep::gpu {
namespace {

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  p.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  p.allocFlags.gpuDirectRDMACapable = 1;
  return p;
}

uint64_t granularity(const CUmemAllocationProp& p) {
  size_t bytes = 0;
  must(UCCL_EP_DRIVER(cuMemGetAllocationGranularity)(&bytes, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
       "cuMemGetAllocationGranularity");
  return bytes;
}

}  // namespace

void DeviceMapping::swap(DeviceMapping& other) {
  std::swap(address_, other.address_);
  std::swap(handle_, other.handle_);
  std::swap(num_bytes_, other.num_bytes_);
}

DeviceMapping DeviceMapping::create(int device, uint64_t num_bytes) {
  DeviceMapping m;
  CUmemAllocationProp p = properties(device);
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
  DeviceMapping m;
  CUmemGenericAllocationHandle handle = 0;
  const CUresult status = UCCL_EP_DRIVER(cuMemImportFromShareableHandle)(
      &handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  close(fd);
  must(status, "cuMemImportFromShareableHandle");
  m.handle_ = handle;
  m.num_bytes_ = num_bytes;
  m.map(device);
  return m;
}

int DeviceMapping::export_fd() const {
  int fd = -1;
  must(UCCL_EP_DRIVER(cuMemExportToShareableHandle)(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
       "cuMemExportToShareableHandle");
  return fd;
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
