// A stack that runs on the thread that switches to it. With AddressSanitizer it is told of every switch.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__) && !defined(GPU_ON_CPU_ADDRESS)
#define GPU_ON_CPU_ADDRESS
#endif
#ifdef GPU_ON_CPU_ADDRESS
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace gpu_on_cpu {

constexpr size_t kStackBytes = 256 << 10;

// Stacks are used again: their pages have been touched.
class Stack {
 public:
  Stack() {
    const std::lock_guard lock(mutex());
    if (!spare().empty()) {
      base_ = spare().back();
      spare().pop_back();
    } else {
      base_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (base_ == MAP_FAILED) throw std::bad_alloc();
    }
  }
  ~Stack() {
#ifdef GPU_ON_CPU_ADDRESS
    __asan_unpoison_memory_region(base_, kStackBytes);  // a lane that was given up has left its frames
#endif
    const std::lock_guard lock(mutex());
    spare().push_back(base_);
  }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  void* base() const { return base_; }

 private:
  static std::mutex& mutex() {
    static std::mutex the;
    return the;
  }
  static std::vector<void*>& spare() {
    static auto* const the = new std::vector<void*>;
    return *the;
  }
  void* base_;
};

#ifdef __x86_64__
extern "C" void gpu_on_cpu_switch(void** from, void* to);
struct Context {
  void* stack_pointer = nullptr;
  // entry() never returns.
  void make(void* stack, void (*entry)()) {
    auto* top = reinterpret_cast<uint64_t*>(static_cast<uint8_t*>(stack) + kStackBytes) - 3;
    *top = 0;  // where entry() would return to, aligned as after a call
    *--top = reinterpret_cast<uint64_t>(entry);
    for (int i = 0; i < 6; ++i) *--top = 0;  // the registers that a switch restores
    stack_pointer = top;
  }
  static void change(Context& from, Context& to) { gpu_on_cpu_switch(&from.stack_pointer, to.stack_pointer); }
};
#else
struct Context {
  ucontext_t context{};
  void make(void* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void change(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};
#endif

}  // namespace gpu_on_cpu
