// Copies between GPUs of one host by their copy engines, for a transport.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <exception>
#include <vector>

#include "transport/transport.h"

namespace uccl_ep::cuda {

// Made and destroyed by any thread; used by one. Its errors are CommunicationFailure(kTransport) that name the call.
//
// It has a context of the driver of its own. Kernels wait for these copies, and some calls that any thread of the
// process may make meanwhile (freeing memory, the first launch of a kernel, reading a value back) keep every other call
// of their context, or its copies, waiting until kernels are over.
class CudaCopies final : public DeviceCopies {
 public:
  // `device`: whose memory is the source.
  explicit CudaCopies(int device);
  // Waits for what was started: its memory may go afterwards.
  ~CudaCopies() override;
  CudaCopies(const CudaCopies&) = delete;
  CudaCopies& operator=(const CudaCopies&) = delete;

  uint64_t start(void* to, const void* from, uint64_t num_bytes) override;
  void flush() override;
  bool done(uint64_t ticket) override;

 private:
  static constexpr size_t kLanes = 2;  // one engine's next copies are set up while the other's run
  // Copies that are handed over and told of together: handing over and telling cost as much as copying.
  static constexpr size_t kBatch = 8;
  // Fewer are handed over after this time, also if somebody asks before whether one is done: a call to the driver takes
  // 10 us, after a pause 20 to 50, in which the thread would be late for the first rows behind a header, and the link
  // would idle.
  static constexpr uint64_t kHoldNsec = 10'000;
  // A stream; its copies are over in their order. Those of different lanes run side by side.
  struct Lane {
    cudaStream_t stream = nullptr;
    uint64_t started = 0;  // copies since creation
    uint64_t marked = 0;   // of them, those that a word or an event will tell of
    // The others, which have not been handed to the GPU yet.
    std::array<void*, kBatch> to{};
    std::array<const void*, kBatch> from{};
    std::array<size_t, kBatch> num_bytes{};
    uint64_t waiting_since_nsec = 0;  // of the first of them
    uint64_t over = 0;     // of those that were started, as far as known
    // Copies that are over. In pinned memory; writer: the stream, after each batch; reader: the host; never reset.
    uint64_t* word = nullptr;
    void* device_word = nullptr;  // as the GPU sees it
    // Where streams write no words: a batch records the event of its last copy, events[n % size].
    std::vector<cudaEvent_t> events;
    uint64_t fruitless = 0;    // looks in a row
    std::exception_ptr error;  // of what could not be handed over
  };

  void create(int device);
  void create_lanes();
  void destroy();
  void destroy_lanes();
  void enter_thread();
  void hand_over(Lane& lane);
  void copy(Lane& lane);
  void mark(Lane& lane);
  void look(Lane& lane);

  const int device_;
  void* context_ = nullptr;  // CUcontext; null: the process's own, where there is no driver to ask for another
  bool entered_ = false;
  std::array<Lane, kLanes> lanes_;
  size_t next_ = 0;
  uint64_t* words_ = nullptr;
  void* write_value_ = nullptr;  // cuStreamWriteValue64; null: this GPU's streams write no words
};

}  // namespace uccl_ep::cuda
