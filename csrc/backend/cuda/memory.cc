#include "backend/cuda/memory.h"

#include <cuda.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "common/limits.h"
#include "common/patience.h"
#include "common/units.h"

namespace uccl_ep::cuda {

void must(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

namespace {

// The driver is looked up when it is first needed, so that the library loads where there is none.
template <typename Function>
Function driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  return reinterpret_cast<Function>(found);
}
#define UCCL_EP_DRIVER(name) driver<decltype(&name)>(#name)

void must(CUresult status, const char* what) {
  if (status != CUDA_SUCCESS)
    throw std::runtime_error(std::string("CUDA driver: ") + what + " failed (" + std::to_string(status) + ")");
}

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

bool has_context(int device) try {
  CUdevice handle = 0;
  unsigned flags = 0;
  int active = 0;
  return UCCL_EP_DRIVER(cuDeviceGet)(&handle, device) == CUDA_SUCCESS &&
         UCCL_EP_DRIVER(cuDevicePrimaryCtxGetState)(handle, &flags, &active) == CUDA_SUCCESS && active != 0;
} catch (const std::runtime_error&) {  // the driver went first
  return false;
}

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
  must(cudaMemset(m.base(), 0, m.num_bytes_), "cudaMemset");
  must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
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

namespace {

struct Message {
  uint64_t key;
  int32_t rank;
};

std::runtime_error system_failure(const char* what) {
  return std::runtime_error(std::string("passing memory between processes: ") + what + ": " + std::strerror(errno));
}

[[noreturn]] void fail_gone(int rank, size_t peer) {
  ErrorRecord record;
  record.kind = ErrorKind::kPeerDied;
  record.rank = rank;
  record.peer = static_cast<int32_t>(peer);
  record.set_message("rank " + std::to_string(peer) + " is gone: nobody takes what it is to be passed");
  throw CommunicationFailure(record);
}

sockaddr_un abstract_address(const std::string& name, socklen_t& length) {
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path + 1, name.data(), std::min(name.size(), sizeof(to.sun_path) - 1));
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return to;
}

// Whether a socket has the address. Asked through a socket of its own: ours must go on hearing everybody.
bool is_there(const std::string& address) {
  const Descriptors probe({socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)});
  socklen_t length = 0;
  const sockaddr_un to = abstract_address(address, length);
  return probe[0] < 0 || connect(probe[0], reinterpret_cast<const sockaddr*>(&to), length) == 0 ||
         errno != ECONNREFUSED;
}

}  // namespace

DescriptorSocket::DescriptorSocket(int rank, uint64_t key) : rank_(rank), key_(key) {
  socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_ < 0 && lacks_descriptors(errno))
    throw LimitFailure(HostLimit::kDescriptors, "a socket that passes memory between processes");
  if (socket_ < 0) throw system_failure("socket");
  address_ = "uccl_ep_" + std::to_string(getpid()) + "_" + std::to_string(now_nsec()) + "_" +
             std::to_string(reinterpret_cast<uintptr_t>(this));
  socklen_t length = 0;
  const sockaddr_un own = abstract_address(address_, length);
  if (bind(socket_, reinterpret_cast<const sockaddr*>(&own), length) != 0) {
    close(socket_);
    throw system_failure("bind");
  }
}

DescriptorSocket::~DescriptorSocket() { close(socket_); }

// False: not yet, or the peer is gone, which the caller finds out.
bool DescriptorSocket::send(const std::string& address, int fd) {
  socklen_t length = 0;
  sockaddr_un to = abstract_address(address, length);
  Message message{key_, rank_};
  iovec part{&message, sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_name = &to;
  header.msg_namelen = length;
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  cmsghdr* c = CMSG_FIRSTHDR(&header);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(c), &fd, sizeof(fd));
  if (sendmsg(socket_, &header, 0) >= 0) return true;
  // The peer's queue is full for now.
  if (errno == EAGAIN || errno == ENOBUFS || errno == EINTR || errno == ECONNREFUSED) return false;
  throw system_failure("sendmsg");
}

bool DescriptorSocket::receive(Descriptors& received) {
  Message message{};
  iovec part{&message, sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const ssize_t bytes = recvmsg(socket_, &header, MSG_CMSG_CLOEXEC);
  if (bytes < 0) return false;
  if ((header.msg_flags & MSG_CTRUNC) != 0)
    throw LimitFailure(HostLimit::kDescriptors, "taking the memory that a rank passes on");
  const cmsghdr* c = CMSG_FIRSTHDR(&header);
  if (c == nullptr || c->cmsg_type != SCM_RIGHTS) return true;
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(c), sizeof(fd));
  const bool ours = bytes == sizeof(message) && message.key == key_ && message.rank >= 0 &&
                    static_cast<size_t>(message.rank) < received.size() && received[message.rank] < 0;
  if (ours)
    received[message.rank] = fd;
  else
    close(fd);
  return true;
}

Descriptors::~Descriptors() {
  for (int fd : fds_)
    if (fd >= 0) close(fd);
}

Descriptors DescriptorSocket::exchange(const std::vector<std::string>& addresses, int fd, double timeout_s,
                                       const std::function<void()>& look) {
  Descriptors received(std::vector<int>(addresses.size(), -1));
  std::vector<size_t> unsent;
  for (size_t r = 0; r < addresses.size(); ++r)
    if (!addresses[r].empty()) unsent.push_back(r);
  const std::vector<size_t> peers = unsent;
  constexpr uint64_t kLookUsec = 200'000;
  uint64_t look_usec = now_usec() + kLookUsec;
  Patience patience(static_cast<uint64_t>(timeout_s * 1e6));
  const auto missing = [&] {
    for (size_t r : peers)
      if (received[r] < 0) return static_cast<int>(r);
    return -1;
  };
  // Sending and receiving in turn: every queue may be full.
  while (!unsent.empty() || missing() >= 0) {
    std::erase_if(unsent, [&](size_t r) { return send(addresses[r], fd); });
    while (receive(received)) {
    }
    if (now_usec() > look_usec) {
      look_usec = now_usec() + kLookUsec;
      for (size_t r : peers)
        if (!is_there(addresses[r])) fail_gone(rank_, r);
    }
    if (patience.over())
      throw std::runtime_error("rank " + std::to_string(missing()) + " did not pass its device memory within " +
                               std::to_string(timeout_s) + " s");
    pollfd waits{socket_, POLLIN, 0};
    poll(&waits, 1, 5);
    look();
  }
  return received;
}

}  // namespace uccl_ep::cuda
