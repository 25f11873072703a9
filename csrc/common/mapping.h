// A POSIX shared-memory segment in our address space: the symmetric memory of a domain on the host, and a loop
// transport's inbox. The pages live while any process maps them, and a name is never used twice. So a late or
// frozen peer can never write into memory of another owner.
// The creator holds a lock (flock) on the segment for as long as it lives. A named segment that is not locked was left
// behind: `uccl_ep_train/group/leftovers.py` removes it.
#pragma once

#include <cstdint>
#include <string>

namespace uccl_ep {

// Move-only. The destructor unmaps; the creator's also removes the name. A reached limit of the host throws
// LimitFailure, every other failure CommunicationFailure(kTransport).
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Mapping();

  // A new empty segment under our pid and a random 128-bit name, locked.
  static Mapping create();
  // Opens another process's segment; it must have `num_bytes` already.
  static Mapping open(const std::string& name, uint64_t num_bytes);
  // Likewise, but ranks that are threads of one process get one map, which lives as long as one of them. The creator's
  // is such a map, too.
  static Mapping open_shared(const std::string& name, uint64_t num_bytes);
  // A shared one that owner and users size equally, in any order.
  static Mapping open_and_grow(const std::string& name, uint64_t num_bytes);

  // Created segments: sizes and maps it.
  void grow(uint64_t num_bytes);
  // Backs a range with memory now: a full /dev/shm becomes an exception here instead of SIGBUS at the first touch.
  void reserve(uint64_t offset, uint64_t num_bytes);
  void unlink();

  uint8_t* base() const { return base_; }
  uint64_t num_bytes() const { return num_bytes_; }
  const std::string& name() const { return name_; }

 private:
  static Mapping create_unlocked();
  bool lock();
  void swap(Mapping& other) noexcept;
  void open_descriptor();
  void close_descriptor();
  bool share(uint64_t num_bytes);
  void map(uint64_t num_bytes);

  std::string name_;
  bool named_by_us_ = false;
  int fd_ = -1;
  uint8_t* base_ = nullptr;
  uint64_t num_bytes_ = 0;
};

}  // namespace uccl_ep
