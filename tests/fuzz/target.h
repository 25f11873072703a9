// What every fuzz target shares. A target is a program that is fed bytes: by libFuzzer, or by driver.cc where there is
// only g++. What it finds wrong ends it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

// The last input was one that the product takes; seeds named valid* have to be.
inline bool fuzz_accepted = false;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace fuzz {

inline void must(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", claim);
  std::abort();
}

inline bool is_printable(const char* text, size_t most_bytes) {
  const size_t size = strnlen(text, most_bytes);
  for (size_t i = 0; i < size; ++i)
    if (text[i] < ' ' || text[i] > '~') return false;
  return size < most_bytes;
}

// Reads an input from its front; past its end everything is 0.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return at_ >= size_; }
  template <typename T>
  T take() {
    T value{};
    copy(&value, sizeof(value));
    return value;
  }
  void copy(void* to, size_t num_bytes) {
    const size_t left = empty() ? 0 : size_ - at_;
    if (left != 0) std::memcpy(to, data_ + at_, num_bytes < left ? num_bytes : left);
    at_ += num_bytes;
  }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

}  // namespace fuzz
