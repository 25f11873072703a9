// Copies between GPUs of one host by their copy engines, for a transport.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <vector>

#include "transport/copier.h"

namespace uccl_ep::cuda {

// Made and destroyed by any thread. Its errors name the call.
//
// It has a context of the driver of its own. Kernels wait for these copies. Meanwhile any thread may free
// memory, launch a kernel for the first time or read a value back. Such calls block all other calls and copies of their
// context until kernels are over.
class CudaCopies final : public CopyEngines {
 public:
  // `device`: whose memory is the source.
  explicit CudaCopies(int device);
  // Waits for what was handed over: its memory may go afterwards.
  ~CudaCopies() override;
  CudaCopies(const CudaCopies&) = delete;
  CudaCopies& operator=(const CudaCopies&) = delete;

  // Another thread may be capturing a graph while this one copies.
  void enter_thread() override;
  void hand_over(std::span<const Copy> copies, uint64_t last) override;
  void look() override;
  bool done(uint64_t ticket) const override;

 private:
  static constexpr size_t kLanes = 2;  // one engine's next copies are set up while the other's run
  // A stream, for every other group; its copies are over in their order. Those of different lanes run side by side.
  struct Lane {
    cudaStream_t stream = nullptr;
    uint64_t last = 0;  // ticket that was handed over
    // Ticket of a copy that is over. In pinned memory; writer: the stream, after what was handed over together, or
    // look(); never reset.
    uint64_t* word = nullptr;
    void* device_word = nullptr;  // as the GPU sees it
    // Where streams write no words: events[n % size] is the n-th, of what was handed over up to tickets[n % size].
    std::vector<cudaEvent_t> events;
    std::vector<uint64_t> tickets;
    uint64_t num_events = 0, num_over = 0;
  };
  static size_t lane_of(uint64_t ticket) { return (ticket - 1) / kGroup % kLanes; }

  void create(int device);
  void create_lanes();
  void destroy();
  void destroy_lanes();
  void copy(const Lane& lane, std::span<const Copy> copies);
  void mark(Lane& lane, uint64_t last);
  void write(const Lane& lane);
  void look_at_events(Lane& lane);

  const int device_;
  void* context_ = nullptr;  // CUcontext; null: the process's own, where there is no driver to ask for another
  std::array<Lane, kLanes> lanes_;
  uint64_t* words_ = nullptr;
  void* write_value_ = nullptr;  // cuStreamWriteValue64; null: this GPU's streams write no words
  uint64_t next_query_nsec_ = 0, last_call_nsec_ = 0;
};

}  // namespace uccl_ep::cuda
