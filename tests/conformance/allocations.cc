#include "allocations.h"

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

thread_local bool counts = false;
thread_local uint64_t num_allocations = 0;

void* allocate(std::size_t num_bytes, std::size_t alignment) {
  num_allocations += counts;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, num_bytes) != 0) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t num_bytes) { return allocate(num_bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t num_bytes) { return allocate(num_bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t num_bytes, std::align_val_t alignment) {
  return allocate(num_bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t num_bytes, std::align_val_t alignment) {
  return allocate(num_bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace conformance {

AllocationCount::AllocationCount() {
  num_allocations = 0;
  counts = true;
}
AllocationCount::~AllocationCount() { counts = false; }
uint64_t AllocationCount::value() const { return num_allocations; }

}  // namespace conformance
