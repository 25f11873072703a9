// Memory that a GPU shares with peers or the host: allocations that peers map, pinned and registered host memory.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "device/runtime.h"

namespace uccl_ep::gpu {

// Whether the driver has fabric handles for memory of this GPU.
bool has_fabric_handles(int device);

// One mapped allocation of device memory: ours, or a peer's. Its pages outlive their exporter while a peer has them
// mapped.
class DeviceMapping {
 public:
  DeviceMapping() = default;
  DeviceMapping(DeviceMapping&& other) noexcept { swap(other); }
  DeviceMapping& operator=(DeviceMapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceMapping();

  // How peers get at it: by a descriptor, which is passed between processes of a host, or besides by a fabric handle,
  // bytes that are good on every host of an NVLink domain.
  enum class Reach { kHost, kFabric };

  // Zeroed memory of at least `num_bytes` on `device`.
  static DeviceMapping create(int device, uint64_t num_bytes, Reach reach = Reach::kHost);
  // Of an allocation of `num_bytes` (as num_bytes() of its creator says). Takes over `fd`.
  static DeviceMapping import(int fd, int device, uint64_t num_bytes);
  static DeviceMapping import(const std::string& fabric_handle, int device, uint64_t num_bytes);
  // A new descriptor of the allocation; the caller closes it.
  int export_fd() const;
  // kFabricHandleBytes, of an allocation with Reach::kFabric.
  std::string export_fabric_handle() const;
  // A dmabuf of the allocation, for NICs to register; the caller closes it. -1 where the driver gives none.
  int export_dmabuf() const;

  uint8_t* base() const { return reinterpret_cast<uint8_t*>(address_); }
  uint64_t num_bytes() const { return num_bytes_; }

 private:
  static DeviceMapping import(void* from, uint32_t handle_type, int device, uint64_t num_bytes);
  void export_to(void* to, uint32_t handle_type) const;
  void map(int device);
  void swap(DeviceMapping& other);

  uint64_t address_ = 0;
  uint64_t handle_ = 0;
  uint64_t num_bytes_ = 0;
};

// Zeroed memory of the host that all GPUs reach at its own address. Move only.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(uint64_t num_bytes);

  uint8_t* base() const { return memory_; }

 private:
  Owned<uint8_t*, cudaFreeHost> memory_;
};

// Host memory that somebody else allocated, registered so that the current GPU reaches it. Move only.
class HostMapping {
 public:
  HostMapping() = default;
  // Whole pages.
  HostMapping(uint8_t* memory, uint64_t num_bytes);

  // As the GPU sees it; null: none.
  uint8_t* on_device() const { return on_device_; }

 private:
  Owned<uint8_t*, cudaHostUnregister> memory_;
  uint8_t* on_device_ = nullptr;
};

}  // namespace uccl_ep::gpu
