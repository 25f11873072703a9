#include "engine/gpu/trial.h"

#include <unistd.h>

#include <stdexcept>
#include <vector>

#include "device/memory.h"
#include "engine/gpu/network.h"

namespace uccl_ep {

using gpu::DeviceMapping;
using gpu::OnDevice;

bool try_device_memory(int device, uint64_t num_bytes) {
  constexpr uint8_t kPattern = 0x5A;
  const OnDevice there(device);
  const DeviceMapping own = DeviceMapping::create(device, num_bytes);
  const DeviceMapping other = DeviceMapping::import(own.export_fd(), device, own.num_bytes());
  gpu::fill_now(own.base(), kPattern, own.num_bytes());
  std::vector<uint8_t> seen(own.num_bytes());
  gpu::copy_now(seen.data(), other.base(), seen.size());
  for (uint8_t byte : seen)
    if (byte != kPattern) throw std::runtime_error("device memory that was exported and imported holds other bytes");
  const int fd = own.export_dmabuf();
  if (fd >= 0) close(fd);
  return fd >= 0;
}

void try_device_registration(Trial trial, int device, uint64_t num_bytes) {
  const OnDevice there(device);
  const DeviceMapping own = DeviceMapping::create(device, num_bytes);
  trial.near_pci = gpu::pci_address(device);
  trial.device = {own.base(), own.num_bytes(), "", own.export_dmabuf()};
  try {
    try_registration(trial);
  } catch (...) {
    if (trial.device.dmabuf_fd >= 0) close(trial.device.dmabuf_fd);
    throw;
  }
  if (trial.device.dmabuf_fd >= 0) close(trial.device.dmabuf_fd);
}

}  // namespace uccl_ep
