#include "engine/gpu/descriptors.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "common/clock.h"
#include "common/error.h"
#include "common/limits.h"
#include "common/patience.h"

namespace uccl_ep::gpu {
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

// Whether a socket has the address. It is asked through a separate socket, because ours must go on receiving from
// everybody.
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
  // Sends and receives in turn, because every queue may be full.
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

}  // namespace uccl_ep::gpu
