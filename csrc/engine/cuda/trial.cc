#include "engine/cuda/trial.h"

#include <unistd.h>

#include <stdexcept>
#include <vector>

#include "backend/cuda/memory.h"
#include "engine/cuda/network.h"

namespace uccl_ep {

using cuda::DeviceMapping;
using cuda::must;
using cuda::OnDevice;

bool try_device_memory(int device, uint64_t num_bytes) {
  constexpr int kPattern = 0x5A;
  const OnDevice there(device);
  const DeviceMapping own = DeviceMapping::create(device, num_bytes);
  const DeviceMapping other = DeviceMapping::import(own.export_fd(), device, own.num_bytes());
  must(cudaMemset(own.base(), kPattern, own.num_bytes()), "cudaMemset");
  std::vector<uint8_t> seen(own.num_bytes());
  must(cudaMemcpy(seen.data(), other.base(), seen.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  for (uint8_t byte : seen)
    if (byte != kPattern) throw std::runtime_error("device memory that was exported and imported holds other bytes");
  const int fd = own.export_dmabuf();
  if (fd >= 0) close(fd);
  return fd >= 0;
}

void try_device_registration(Trial trial, int device, uint64_t num_bytes) {
  const OnDevice there(device);
  const DeviceMapping own = DeviceMapping::create(device, num_bytes);
  trial.near_pci = pci_address(device);
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
