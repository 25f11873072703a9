// Facts about processes of this host: identity, and whether another process is alive.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "common/limits.h"

namespace uccl_ep {

// Pids of two processes can be compared only when these are equal.
inline uint64_t pid_namespace() {
  struct stat info;
  return stat("/proc/self/ns/pid", &info) == 0 ? static_cast<uint64_t>(info.st_ino) : 0;
}

// The same for all processes of a running kernel, other containers included; "unknown" if there is none. Throws
// LimitFailure if no file can be opened: that must not make a rank of this host look like another host.
inline std::string host_boot_id() {
  char text[64] = {};
  FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "r");
  if (file == nullptr) {
    if (lacks_descriptors(errno)) throw LimitFailure(HostLimit::kDescriptors, "reading the host's boot id");
    return "unknown";
  }
  const bool read = std::fscanf(file, "%63s", text) == 1;
  std::fclose(file);
  return read ? text : "unknown";
}

// Says when a process is gone. A zombie is gone: it runs nothing any more, and its parent may never reap it.
// Create it while the process lives, so that a new process with the same pid is not mistaken for it.
class ProcessWatch {
 public:
  ProcessWatch() = default;  // watches no process; it is always alive
  // `its_namespace`: pid_namespace() of that process. If it is another one, its end cannot be seen from here.
  explicit ProcessWatch(int pid, uint64_t its_namespace = 0) : pid_(pid) {
    if (pid <= 0 || pid == getpid()) return;
    if (its_namespace != 0 && its_namespace != pid_namespace()) return;
    watched_ = true;
    fd_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    gone_ = fd_ < 0 && errno == ESRCH;  // anything else (an old kernel, no descriptor left): ask by pid
  }
  ProcessWatch(ProcessWatch&& other) noexcept { *this = std::move(other); }
  ProcessWatch& operator=(ProcessWatch&& other) noexcept {
    std::swap(pid_, other.pid_);
    std::swap(fd_, other.fd_);
    std::swap(watched_, other.watched_);
    std::swap(gone_, other.gone_);
    return *this;
  }
  ~ProcessWatch() {
    if (fd_ >= 0) close(fd_);
  }

  int pid() const { return pid_; }
  bool alive() const {
    if (!watched_) return true;
    if (!gone_) gone_ = fd_ >= 0 ? ended() : absent();
    return !gone_;
  }

 private:
  bool ended() const {
    pollfd request{fd_, POLLIN, 0};
    return poll(&request, 1, 0) == 1 && (request.revents & POLLIN) != 0;
  }
  bool absent() const {
    if (kill(pid_, 0) != 0) return errno == ESRCH;
    FILE* file = std::fopen(("/proc/" + std::to_string(pid_) + "/stat").c_str(), "r");
    if (file == nullptr) return false;
    char state = 0;
    const bool read = std::fscanf(file, "%*d (%*[^)]) %c", &state) == 1;
    std::fclose(file);
    return read && (state == 'Z' || state == 'X');
  }

  int pid_ = 0;
  int fd_ = -1;
  bool watched_ = false;
  mutable bool gone_ = false;
};

}  // namespace uccl_ep
