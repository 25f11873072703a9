// A buffer of trace events. One thread writes it; another switches it on and reads it. While it is off, an event costs
// one load of a flag.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/error.h"
#include "layout/region.h"
#include "sync/flag.h"

namespace uccl_ep {

enum class TraceKind : uint32_t {
  // By the proxy. Of chunks: serial, num_bytes. Of credits: serial = chunks that are consumed.
  kTaken,  // its command, from the queue
  kPosted,
  kFlushed,
  kArrived,
  kCreditWait,  // an interval that ends when the chunk is posted
  kCreditSent,
  kCreditReceived,
  // By the worker, intervals. serial = epoch.
  kOperation,  // channel = OpKind
  kStep,
  kWait,  // asleep while `step` waited for `peer`
  // By kernels. serial = epoch.
  kKernelBegin,  // channel = OpKind
  kKernelEnd,
  kKernelStep,  // an interval
  // By who makes the chunks, a kernel or the worker: the command of chunk `serial`, into the queue.
  kPushed,
  // By kernels.
  kSeenArrived,  // serial = chunks from `peer` that are there at rank `channel`
  kSeenFlushed,  // serial = chunks to `peer` that have left
};
inline const char* trace_name(TraceKind kind) {
  static const char* const names[] = {
      "taken", "posted", "flushed",      "arrived",    "credit_wait", "credit_sent", "credit_received", "operation",
      "step",  "wait",   "kernel_begin", "kernel_end", "kernel_step", "pushed",      "seen_arrived",    "seen_flushed"};
  return names[static_cast<uint32_t>(kind)];
}

struct TraceEvent {
  uint64_t begin_nsec = 0, end_nsec = 0;  // CLOCK_MONOTONIC; equal unless it is an interval
  uint64_t serial = 0;
  uint64_t num_bytes = 0;
  TraceKind kind = TraceKind::kTaken;
  RingKind ring = RingKind::kHeader;  // of chunks and credits, as channel
  Step step = Step::kNone;
  int32_t peer = -1;
  uint32_t channel = 0;
};

struct Trace {
  std::vector<TraceEvent> events;
  uint64_t lost = 0;  // events that came when a buffer was full

  void append(const Trace& other) {
    events.insert(events.end(), other.events.begin(), other.events.end());
    lost += other.lost;
  }
};

constexpr uint64_t kMaxTraceEvents = 1u << 24;

class TraceBuffer {
 public:
  // ---- one thread at a time
  // Room for at least `max_events`, 1 .. kMaxTraceEvents. The memory is kept: the writer may be late.
  void start(uint64_t max_events) {
    const uint64_t size_log2 = std::bit_width(max_events - 1);
    if (memory_[size_log2] == nullptr) memory_[size_log2] = std::make_unique<TraceEvent[]>(uint64_t{1} << size_log2);
    wanted_.publish((session(wanted_.own()) + 1) << kSizeBits | size_log2);
  }
  Trace stop() {
    const uint64_t wanted = wanted_.own();
    wanted_.publish(wanted + (uint64_t{1} << kSizeBits));
    const TraceEvent* const events = memory_[wanted % kNumSizes].get();
    return {{events, events + of_session(filled_.read(), session(wanted))}, of_session(lost_.read(), session(wanted))};
  }

  // When there is no writer any more, and it is off.
  void forget() { memory_ = {}; }

  // ---- the writer
  bool on() const { return is_on(wanted_.read()); }
  void add(const TraceEvent& event) {
    const uint64_t wanted = wanted_.read();
    if (!is_on(wanted)) return;
    const uint64_t mine = session(wanted), count = of_session(filled_.own(), mine);
    if (count == uint64_t{1} << wanted % kNumSizes) {
      lost_.publish(mine << kCountBits | (of_session(lost_.own(), mine) + 1));
      return;
    }
    memory_[wanted % kNumSizes][count] = event;
    filled_.publish(mine << kCountBits | (count + 1));
  }

 private:
  static constexpr uint64_t kSizeBits = 5, kNumSizes = 1 << kSizeBits, kCountBits = 32;
  static constexpr uint64_t session(uint64_t wanted) { return wanted >> kSizeBits; }
  static constexpr bool is_on(uint64_t wanted) { return session(wanted) % 2 != 0; }
  static constexpr uint64_t of_session(uint64_t counted, uint64_t session) {
    return counted >> kCountBits == session ? counted & 0xFFFFFFFFu : 0;
  }

  // session | log2 of the events that there is room for; odd sessions are on. Writer: who controls; reader: the writer
  // of events, for whom it publishes the memory of that size, which never changes.
  Flag wanted_;
  // session | count. Writer: that of events; reader: who controls. `filled_` publishes the events before the count.
  Flag filled_, lost_;
  std::array<std::unique_ptr<TraceEvent[]>, kNumSizes> memory_;
};

}  // namespace uccl_ep
