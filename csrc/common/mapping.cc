#include "common/mapping.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "common/limits.h"

namespace uccl_ep {
namespace {

// Memory of a segment is reserved piece by piece, so that signals that interrupt it cannot keep it from coming to an
// end.
constexpr uint64_t kReservedAtOnce = 64 << 20;

// As `shm_open` finds it.
std::string path_of(const std::string& name) { return "/dev/shm" + name; }

[[noreturn]] void fail(const std::string& what, const std::string& name, int error, uint64_t wanted_bytes = 0) {
  const std::string text = what + " " + path_of(name) + ": " + std::strerror(error);
  if (lacks_descriptors(error)) throw LimitFailure(HostLimit::kDescriptors, text);
  if (error == ENOSPC || error == EDQUOT) throw LimitFailure(HostLimit::kSharedMemory, text, wanted_bytes);
  if (error == EFBIG) throw LimitFailure(HostLimit::kFileSize, text, wanted_bytes);
  if (error == ENOMEM) throw LimitFailure(HostLimit::kAddressSpace, text, wanted_bytes);
  ErrorRecord record;
  record.kind = ErrorKind::kTransport;
  record.set_message(text);
  throw CommunicationFailure(record);
}

// The folder is missing, or nothing may be written there, if it is not full.
[[noreturn]] void cannot_create(const std::string& name, int error) {
  if (lacks_descriptors(error) || error == ENOMEM) fail("creating", name, error);
  throw LimitFailure(HostLimit::kSharedMemory, "creating " + path_of(name) + ": " + std::strerror(error));
}

// Maps that ranks of this process share, by name. With one for each pair of ranks the kernel's work, and the number of
// maps, would grow with the square of their number.
class Maps {
 public:
  // Where the segment is mapped, with at least `num_bytes`; nullptr: nowhere.
  uint8_t* share(const std::string& name, uint64_t num_bytes) {
    const std::lock_guard lock(mutex_);
    const auto it = maps_.find(name);
    if (it == maps_.end() || it->second.num_bytes < num_bytes) return nullptr;
    ++it->second.users;
    return it->second.base;
  }
  // Of one user. If another map of the segment is shared, this one is not.
  void add(const std::string& name, uint8_t* base, uint64_t num_bytes) {
    const std::lock_guard lock(mutex_);
    maps_.try_emplace(name, Map{base, num_bytes, 1});
  }
  // One user of a map less. Returns the bytes to unmap.
  uint64_t leave(const std::string& name, const uint8_t* base, uint64_t num_bytes) {
    const std::lock_guard lock(mutex_);
    const auto it = maps_.find(name);
    if (it == maps_.end() || it->second.base != base) return num_bytes;
    if (--it->second.users != 0) return 0;
    const uint64_t all = it->second.num_bytes;
    maps_.erase(it);
    return all;
  }

  static Maps& of_process() {
    static Maps* const maps = new Maps;  // outlives every user
    return *maps;
  }

 private:
  struct Map {
    uint8_t* base;
    uint64_t num_bytes;
    uint64_t users;
  };
  std::mutex mutex_;
  std::map<std::string, Map> maps_;
};

std::string sized(const char* doing, uint64_t num_bytes) {
  return std::string(doing) + " " + std::to_string(num_bytes) + " bytes of";
}

}  // namespace

Mapping Mapping::create() {
  while (true) {
    Mapping mapping = create_unlocked();
    if (mapping.lock()) return mapping;
  }
}

Mapping Mapping::create_unlocked() {
  uint64_t words[2];
  if (getrandom(words, sizeof(words), 0) != static_cast<ssize_t>(sizeof(words)))
    fail("no random name for shared memory in", "", errno);
  char name[64];
  std::snprintf(name, sizeof(name), "/uccl_ep.%d.%016" PRIx64 "%016" PRIx64, static_cast<int>(getpid()), words[0],
                words[1]);
  Mapping mapping;
  mapping.fd_ = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (mapping.fd_ < 0) cannot_create(name, errno);
  mapping.name_ = name;
  mapping.named_by_us_ = true;
  return mapping;
}

// False: a sweeping process took the new segment for a leftover and removes it.
bool Mapping::lock() {
  if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    fail("locking", name_, errno);
  }
  struct stat info;
  if (fstat(fd_, &info) != 0) fail("looking at", name_, errno);
  return info.st_nlink != 0;
}

Mapping Mapping::open_shared(const std::string& name, uint64_t num_bytes) {
  Mapping mapping;
  mapping.name_ = name;
  if (mapping.share(num_bytes)) return mapping;
  mapping = open(name, num_bytes);
  Maps::of_process().add(name, mapping.base_, num_bytes);
  return mapping;
}

Mapping Mapping::open(const std::string& name, uint64_t num_bytes) {
  Mapping mapping;
  mapping.name_ = name;
  mapping.open_descriptor();
  struct stat info;
  if (fstat(mapping.fd_, &info) != 0) fail("looking at", name, errno);
  if (static_cast<uint64_t>(info.st_size) < num_bytes) fail(sized("mapping", num_bytes), name, ENXIO);
  mapping.map(num_bytes);
  mapping.close_descriptor();
  return mapping;
}

Mapping Mapping::open_and_grow(const std::string& name, uint64_t num_bytes) {
  Mapping mapping;
  mapping.name_ = name;
  if (mapping.share(num_bytes)) return mapping;
  mapping.open_descriptor();
  mapping.grow(num_bytes);
  mapping.close_descriptor();
  return mapping;
}

Mapping::~Mapping() {
  unlink();
  close_descriptor();
  if (base_ == nullptr) return;
  if (const uint64_t num_bytes = Maps::of_process().leave(name_, base_, num_bytes_)) munmap(base_, num_bytes);
}

void Mapping::grow(uint64_t num_bytes) {
  const std::string what = "sizing to " + std::to_string(num_bytes) + " bytes";
  rlimit most = {};
  // Asked before, because the kernel ends a process that exceeds it, unless the signal is ignored.
  if (getrlimit(RLIMIT_FSIZE, &most) == 0 && num_bytes > most.rlim_cur)
    throw LimitFailure(HostLimit::kFileSize, what + " " + path_of(name_) + ": " + std::strerror(EFBIG), num_bytes);
  if (ftruncate(fd_, static_cast<off_t>(num_bytes)) != 0) fail(what, name_, errno, num_bytes);
  if (share(num_bytes)) return;
  map(num_bytes);
  Maps::of_process().add(name_, base_, num_bytes);
}

void Mapping::reserve(uint64_t offset, uint64_t num_bytes) {
  uint64_t done = 0;
  while (done < num_bytes) {
    const uint64_t piece = std::min(num_bytes - done, kReservedAtOnce);
    const int error = posix_fallocate(fd_, static_cast<off_t>(offset + done), static_cast<off_t>(piece));
    if (error == EINTR) continue;
    if (error == ENOMEM)  // a cgroup's memory
      throw LimitFailure(HostLimit::kSharedMemory,
                         sized("reserving", num_bytes) + " " + path_of(name_) + ": " + std::strerror(error), num_bytes);
    if (error != 0) fail(sized("reserving", num_bytes), name_, error, num_bytes);
    done += piece;
  }
}

void Mapping::unlink() {
  if (named_by_us_) shm_unlink(name_.c_str());
  named_by_us_ = false;
}

void Mapping::swap(Mapping& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(named_by_us_, other.named_by_us_);
  std::swap(fd_, other.fd_);
  std::swap(base_, other.base_);
  std::swap(num_bytes_, other.num_bytes_);
}

void Mapping::open_descriptor() {
  fd_ = shm_open(name_.c_str(), O_RDWR, 0);
  if (fd_ < 0) fail("opening", name_, errno);
}

void Mapping::close_descriptor() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

bool Mapping::share(uint64_t num_bytes) {
  base_ = Maps::of_process().share(name_, num_bytes);
  if (base_ != nullptr) num_bytes_ = num_bytes;
  return base_ != nullptr;
}

void Mapping::map(uint64_t num_bytes) {
  void* base = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (base == MAP_FAILED) fail(sized("mapping", num_bytes), name_, errno, num_bytes);
  base_ = static_cast<uint8_t*>(base);
  num_bytes_ = num_bytes;
}

}  // namespace uccl_ep
