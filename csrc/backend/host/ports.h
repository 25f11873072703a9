// The two ends of a ring. A port never blocks: free() / ready() say whether the next chunk may be written / read.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "layout/region.h"
#include "queue/ring.h"
#include "sync/control.h"
#include "sync/trace.h"
#include "sync/word.h"

namespace uccl_ep::host {

inline Flag* stamp_of(uint8_t* region, const RingLayout& ring, uint64_t serial) {
  return reinterpret_cast<Flag*>(region + ring.stamps_offset) + serial % ring.num_slots;
}
inline Flag* consumed_of(uint8_t* region, const RingLayout& ring, uint32_t reader) {
  return &reinterpret_cast<FlagLine*>(region + ring.consumed_offset)[reader].flag;
}

// Over all producers of one ring kind. Writer: the worker.
struct PortCounters {
  Counter chunks;
  Counter waits;  // chunks that found no free slot at first
  Counter laps;   // most times that a ring was gone round
};

// A thread that sleeps on `bell` has something to look at.
struct DueBell {
  Bell* bell = nullptr;
  bool due = false;
};

// The bells that ports of one worker ring. A step may publish or read a chunk of every rank: it rings each bell once,
// at its end. Chunks that take long to copy are announced at once.
class DueBells {
 public:
  static constexpr uint64_t kLongChunkBytes = 64 << 10;

  DueBell* of(Bell* bell) {
    for (auto& known : all_)
      if (known->bell == bell) return known.get();
    all_.push_back(std::make_unique<DueBell>(DueBell{bell}));
    return all_.back().get();
  }
  void add(DueBell& of, const RingLayout& ring) {
    if (ring.slot_bytes >= kLongChunkBytes && ring.kind != RingKind::kHeader) {
      of.bell->ring();
    } else if (!of.due) {
      of.due = true;
      due_.push_back(&of);
    }
  }
  void ring() {
    for (DueBell* one : due_) {
      one->due = false;
      one->bell->ring();
    }
    due_.clear();
  }

 private:
  std::vector<std::unique_ptr<DueBell>> all_;
  std::vector<DueBell*> due_;
};

// The path of chunks to the proxy.
struct ProxyQueue {
  CommandRing* commands = nullptr;
  Bell* bell = nullptr;
  TraceBuffer* trace = nullptr;
};

// The producer's end of a ring in domain memory, or of a send ring whose chunks the proxy ships.
class OutPort {
 public:
  OutPort() = default;
  // Domain ring in `region` (ours or a peer's). `readers`: the bells of their workers.
  OutPort(uint8_t* region, const RingLayout& ring, std::vector<Bell*> readers, PortCounters* counters, DueBells& bells)
      : region_(region), ring_(ring), counters_(counters + static_cast<uint32_t>(ring.kind)), bells_(&bells) {
    for (Bell* bell : readers) wakes_.push_back(bells.of(bell));
  }
  // Send ring in our region.
  OutPort(uint8_t* region, const RingLayout& ring, const ProxyQueue& queue, uint32_t channel, PortCounters* counters,
          DueBells& bells)
      : region_(region),
        ring_(ring),
        counters_(counters + static_cast<uint32_t>(ring.kind)),
        bells_(&bells),
        wakes_({bells.of(queue.bell)}),
        queue_(queue),
        channel_(channel) {}

  // Whether the next chunk's slot is consumed by all readers and may be overwritten. Counts a wait once per chunk.
  bool free() {
    if (serial_ < ring_.num_slots) return true;
    const uint64_t before = serial_ - ring_.num_slots;  // the chunk that the slot holds
    const bool is_free = shipped() ? stamp_of(region_, ring_, before)->read() > before : slowest() > before;
    if (!is_free && counted_ != serial_ + 1) {
      counted_ = serial_ + 1;
      counters_->waits.add(1);
    }
    return is_free;
  }
  uint8_t* slot() const { return region_ + ring_.slot_offset(serial_); }

  // Makes the chunk visible to its readers, or hands it to the proxy. The command ring is never full: see
  // command_capacity in layout/wire.h.
  void publish(uint64_t num_bytes) {
    if (shipped()) {
      if (queue_.trace->on()) trace_push(num_bytes);
      if (!queue_.commands->push({channel_, num_bytes, serial_}))
        throw std::logic_error("the command ring is smaller than its send rings");
    } else {
      stamp_of(region_, ring_, serial_)->publish(serial_ + 1);
    }
    for (DueBell* wake : wakes_) bells_->add(*wake, ring_);
    ++serial_;
    counters_->chunks.add(1);
    counters_->laps.raise_to(serial_ / ring_.num_slots);
  }

  // Its slots are free without this reader, who is masked.
  void ignore(uint32_t reader) { ignored_ |= uint64_t{1} << reader; }

  uint64_t serial() const { return serial_; }
  uint64_t slot_bytes() const { return ring_.slot_bytes; }
  const RingLayout& ring() const { return ring_; }
  // Index of the reader that is furthest behind; meaningless for a send ring.
  uint32_t slowest_reader() const { return slowest_; }

 private:
  bool shipped() const { return queue_.commands != nullptr; }
  void trace_push(uint64_t num_bytes) const {
    const uint64_t now = now_nsec();
    queue_.trace->add({now, now, serial_, num_bytes, TraceKind::kPushed, ring_.kind, Step::kShip, -1, channel_});
  }
  uint64_t slowest() {
    if (all_consumed_ > serial_ - ring_.num_slots)
      return all_consumed_;  // flags only grow: the last look is a lower bound
    all_consumed_ = UINT64_MAX;
    for (uint32_t r = 0; r < ring_.num_readers; ++r) {
      if (r < 64 && (ignored_ >> r & 1) != 0) continue;
      const uint64_t consumed = consumed_of(region_, ring_, r)->read();
      if (consumed < all_consumed_) slowest_ = r;
      all_consumed_ = consumed < all_consumed_ ? consumed : all_consumed_;
    }
    return all_consumed_;
  }

  uint8_t* region_ = nullptr;
  RingLayout ring_;
  PortCounters* counters_ = nullptr;
  DueBells* bells_ = nullptr;
  std::vector<DueBell*> wakes_;
  ProxyQueue queue_;
  uint32_t channel_ = 0;
  uint64_t serial_ = 0;
  uint64_t all_consumed_ = 0;
  uint64_t counted_ = 0;
  uint32_t slowest_ = 0;
  uint64_t ignored_ = 0;  // readers, a bit each
};

// A reader's end.
class InPort {
 public:
  InPort() = default;
  // `waker`: the thread that waits for our consumption: the producer's worker, or the rail's proxy of a landing ring.
  InPort(uint8_t* region, const RingLayout& ring, uint32_t reader, Bell* waker, DueBells& bells)
      : region_(region), ring_(ring), reader_(reader), bells_(&bells), wake_(bells.of(waker)) {}

  bool ready() const { return ready(serial_); }
  const uint8_t* slot() const { return slot(serial_); }
  // Of a chunk that need not be the next one.
  bool ready(uint64_t serial) const { return stamp_of(region_, ring_, serial)->read() == serial + 1; }
  const uint8_t* slot(uint64_t serial) const { return region_ + ring_.slot_offset(serial); }
  // All loads of the slot are done: it may be overwritten.
  void release() {
    ++serial_;
    consumed_of(region_, ring_, reader_)->publish(serial_);
    bells_->add(*wake_, ring_);
  }
  uint64_t serial() const { return serial_; }
  uint64_t seen_stamp() const { return stamp_of(region_, ring_, serial_)->read(); }
  const RingLayout& ring() const { return ring_; }

 private:
  uint8_t* region_ = nullptr;
  RingLayout ring_;
  uint32_t reader_ = 0;
  DueBells* bells_ = nullptr;
  DueBell* wake_ = nullptr;
  uint64_t serial_ = 0;
};

}  // namespace uccl_ep::host
