// Device memory that the ranks of a domain map into each other: VMM allocations, exported as file descriptors that
// travel over a local socket. The pages outlive their exporter while a peer has them mapped.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace uccl_ep::cuda {

// Throws std::runtime_error naming the call.
void must(cudaError_t status, const char* what);

// Whether this process has its context on a device, which takes half a gigabyte there.
bool has_context(int device);

// For its life the calling thread's current device is `device`. Afterwards the one of before, unless going back would
// make this process's context there: a new thread's is GPU 0.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    must(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) must(cudaSetDevice(device), "cudaSetDevice");
  }
  // Where an error of the GPU must not keep the caller from what comes next.
  OnDevice(int device, std::nothrow_t) noexcept {
    changed_ = cudaGetDevice(&before_) == cudaSuccess && before_ != device;
    if (changed_) cudaSetDevice(device);
  }
  ~OnDevice() {
    if (changed_ && has_context(before_)) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// One mapped allocation: ours, or a peer's.
class DeviceMapping {
 public:
  DeviceMapping() = default;
  DeviceMapping(DeviceMapping&& other) noexcept { swap(other); }
  DeviceMapping& operator=(DeviceMapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceMapping();

  // Zeroed memory of at least `num_bytes` on `device`.
  static DeviceMapping create(int device, uint64_t num_bytes);
  // Takes over `fd`, the exported handle of an allocation of `num_bytes` (as num_bytes() of its creator says).
  static DeviceMapping import(int fd, int device, uint64_t num_bytes);
  // A new descriptor of the allocation; the caller closes it.
  int export_fd() const;
  // A dmabuf of the allocation, for NICs to register; the caller closes it. -1 where the driver gives none.
  int export_dmabuf() const;

  uint8_t* base() const { return reinterpret_cast<uint8_t*>(address_); }
  uint64_t num_bytes() const { return num_bytes_; }

 private:
  void map(int device);
  void swap(DeviceMapping& other);

  uint64_t address_ = 0;
  uint64_t handle_ = 0;
  uint64_t num_bytes_ = 0;
};

// Owned ones, -1: none. A descriptor that is left open keeps the memory of its rank for the life of this process.
class Descriptors {
 public:
  explicit Descriptors(std::vector<int> fds) : fds_(std::move(fds)) {}
  Descriptors(Descriptors&& other) noexcept : fds_(std::exchange(other.fds_, {})) {}
  ~Descriptors();

  size_t size() const { return fds_.size(); }
  int& operator[](size_t i) { return fds_[i]; }
  int operator[](size_t i) const { return fds_[i]; }
  int release(size_t i) { return std::exchange(fds_[i], -1); }

 private:
  std::vector<int> fds_;
};

// Passes one descriptor to each peer and gets one from each. Made before the addresses are exchanged.
class DescriptorSocket {
 public:
  // `key` is the same on all ranks of the buffer: what bears another key is not ours.
  DescriptorSocket(int rank, uint64_t key);
  ~DescriptorSocket();
  DescriptorSocket(const DescriptorSocket&) = delete;
  DescriptorSocket& operator=(const DescriptorSocket&) = delete;

  const std::string& address() const { return address_; }
  // Collective. `addresses` by rank; those of ranks that take no part, and our own, are empty. By rank, what each
  // sent (none: takes no part). Throws std::runtime_error naming the rank that did not come, and
  // CommunicationFailure(kPeerDied) for one that is gone. Calls `look` while it waits, and throws what that throws.
  Descriptors exchange(const std::vector<std::string>& addresses, int fd, double timeout_s,
                       const std::function<void()>& look);

 private:
  bool send(const std::string& address, int fd);
  bool receive(Descriptors& received);

  const int rank_;
  const uint64_t key_;
  int socket_ = -1;
  std::string address_;
};

}  // namespace uccl_ep::cuda
