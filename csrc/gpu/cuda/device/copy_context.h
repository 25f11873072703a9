// A separate context of the driver, for copies between GPUs that kernels wait for. Meanwhile any thread may free
// memory, launch a kernel for the first time or read a value back. Such calls block all other calls and copies of
// their own context until kernels are over.
#pragma once

#include <cstdint>
#include <span>

#include "common/copy.h"
#include "device/runtime.h"

namespace uccl_ep::gpu {

// Its errors are std::runtime_error naming the call.
class CopyContext {
 public:
  static constexpr size_t kMostAtOnce = 8;

  // `device`: whose memory is the source.
  explicit CopyContext(int device);
  // All that was made in it is destroyed.
  ~CopyContext();
  CopyContext(const CopyContext&) = delete;
  CopyContext& operator=(const CopyContext&) = delete;

  // The calling thread enters the context and stays in it. Another may be capturing a graph meanwhile.
  void enter_thread();
  // Whether its streams write words; else events say what is over.
  bool writes_words() const { return write_value_ != nullptr; }
  // Up to kMostAtOnce copies, side by side.
  void copy(std::span<const Copy> copies, StreamHandle stream);
  // Writes a word of pinned memory when what is queued is over and the whole system can see it.
  void write_word(uint64_t* word, uint64_t value, StreamHandle stream);

  // The calling thread is in it for the guard's life.
  class Guard {
   public:
    explicit Guard(const CopyContext& context);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    void* const context_;
  };

 private:
  const int device_;
  void* context_ = nullptr;      // null: the process's own, where there is no driver to ask for another
  void* write_value_ = nullptr;  // the driver's function; null: this GPU's streams write no words
};

}  // namespace uccl_ep::gpu
