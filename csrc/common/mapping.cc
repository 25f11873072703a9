#include "common/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <utility>

#include "common/error.h"

namespace uccl_ep {
namespace {

[[noreturn]] void fail(const std::string& what, const std::string& name, int error) {
  ErrorRecord record;
  record.kind = ErrorKind::kTransport;
  record.set_message(what + " " + name + ": " + std::strerror(error));
  throw CommunicationFailure(record);
}

}  // namespace

Mapping Mapping::create() {
  uint64_t words[2];
  if (getrandom(words, sizeof(words), 0) != static_cast<ssize_t>(sizeof(words)))
    fail("no random name for", "shared memory", errno);
  char name[64];
  std::snprintf(name, sizeof(name), "/uccl_ep.%016" PRIx64 "%016" PRIx64, words[0], words[1]);
  Mapping mapping;
  mapping.fd_ = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (mapping.fd_ < 0) fail("creating", name, errno);
  mapping.name_ = name;
  mapping.named_by_us_ = true;
  return mapping;
}

Mapping Mapping::open(const std::string& name, uint64_t num_bytes) {
  Mapping mapping;
  mapping.name_ = name;
  mapping.open_descriptor();
  struct stat info;
  if (fstat(mapping.fd_, &info) != 0) fail("looking at", name, errno);
  if (static_cast<uint64_t>(info.st_size) < num_bytes)
    fail("mapping " + std::to_string(num_bytes) + " bytes of", name, ENXIO);
  mapping.map(num_bytes);
  mapping.close_descriptor();
  return mapping;
}

Mapping Mapping::open_and_grow(const std::string& name, uint64_t num_bytes) {
  Mapping mapping;
  mapping.name_ = name;
  mapping.open_descriptor();
  mapping.grow(num_bytes);
  mapping.close_descriptor();
  return mapping;
}

Mapping::~Mapping() {
  unlink();
  close_descriptor();
  if (base_ != nullptr) munmap(base_, num_bytes_);
}

void Mapping::grow(uint64_t num_bytes) {
  if (ftruncate(fd_, static_cast<off_t>(num_bytes)) != 0)
    fail("sizing to " + std::to_string(num_bytes) + " bytes", name_, errno);
  map(num_bytes);
}

void Mapping::reserve(uint64_t offset, uint64_t num_bytes) {
  const int error = posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(num_bytes));
  if (error != 0) fail("reserving " + std::to_string(num_bytes) + " bytes of", name_, error);
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

void Mapping::map(uint64_t num_bytes) {
  void* base = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (base == MAP_FAILED) fail("mapping " + std::to_string(num_bytes) + " bytes of", name_, errno);
  base_ = static_cast<uint8_t*>(base);
  num_bytes_ = num_bytes;
}

}  // namespace uccl_ep
