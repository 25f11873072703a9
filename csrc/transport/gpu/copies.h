// Copies between GPUs of one host by their copy engines, for a transport.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "device/copy_context.h"
#include "device/memory.h"
#include "device/runtime.h"
#include "transport/copier.h"

namespace uccl_ep::gpu {

// Made and destroyed by any thread. Its errors name the call.
class GpuCopies final : public CopyEngines {
 public:
  // `device`: whose memory is the source.
  explicit GpuCopies(int device);
  // Waits for what was handed over: its memory may go afterwards.
  ~GpuCopies() override;
  GpuCopies(const GpuCopies&) = delete;
  GpuCopies& operator=(const GpuCopies&) = delete;

  // Another thread may be capturing a graph while this one copies.
  void enter_thread() override;
  void hand_over(std::span<const Copy> copies, uint64_t last) override;
  void look() override;
  bool done(uint64_t ticket) const override;

 private:
  static constexpr size_t kLanes = 2;  // one engine's next copies are set up while the other's run
  // A stream, for every other group; its copies are over in their order. Those of different lanes run side by side.
  struct Lane {
    Stream stream;
    uint64_t last = 0;  // ticket that was handed over
    // Ticket of a copy that is over. In pinned memory; writer: the stream, after what was handed over together, or
    // look(); never reset.
    uint64_t* word = nullptr;
    // Where streams write no words: events[n % size] is the n-th, of what was handed over up to tickets[n % size].
    std::vector<Event> events;
    std::vector<uint64_t> tickets;
    uint64_t num_events = 0, num_over = 0;
  };
  static size_t lane_of(uint64_t ticket) { return (ticket - 1) / kGroup % kLanes; }

  void create_lanes();
  void destroy_lanes();
  void mark(Lane& lane, uint64_t last);
  void write(const Lane& lane);
  void look_at_lanes();
  void look_at_events(Lane& lane);

  CopyContext context_;
  std::array<Lane, kLanes> lanes_;
  PinnedMemory words_;
  uint64_t next_query_nsec_ = 0, last_call_nsec_ = 0;
};

}  // namespace uccl_ep::gpu
