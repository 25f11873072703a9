// Device memory goes between the ranks of a domain as file descriptors, over local sockets.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace uccl_ep::gpu {

// File descriptors that this object owns; -1: none. One that is left open keeps its rank's memory for the life of this
// process.
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
  // `key` is the same on all ranks of the buffer: a message with another key is not for this buffer.
  DescriptorSocket(int rank, uint64_t key);
  ~DescriptorSocket();
  DescriptorSocket(const DescriptorSocket&) = delete;
  DescriptorSocket& operator=(const DescriptorSocket&) = delete;

  const std::string& address() const { return address_; }
  // Collective. `addresses` by rank; those of ranks that take no part, and our own, are empty. Returns what each rank
  // sent, by rank (none: takes no part). Throws std::runtime_error naming the rank that did not come, and
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

}  // namespace uccl_ep::gpu
