// Where arrivals are reported and datagrams come in: a shared-memory segment of each rank with two queues per sender,
// one of arrivals and one of datagrams, and marks that say which to look at. All zero is empty.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/units.h"
#include "sync/flag.h"
#include "sync/marks.h"
#include "transport/loop/mail.h"

namespace uccl_ep::loop {

struct ArrivalEvent {
  uint64_t num_bytes;
  uint32_t immediate;
  uint32_t reserved;
};

struct InboxQueue {
  // Events put since creation. Writer: the sender, after the payload and the event; reader: the owner; never reset.
  FlagLine put;
  // Events taken since creation. Writer: the owner, after it has copied them; reader: the sender; never reset.
  FlagLine taken;
  ArrivalEvent* events() { return reinterpret_cast<ArrivalEvent*>(this + 1); }
};
static_assert(sizeof(InboxQueue) == 2 * kLineBytes);

// By sender. Writers: senders, after an arrival or a datagram; reader: the owner.
struct InboxMarks {
  MarkLine arrivals, mail;
};
constexpr uint64_t kInboxMarksBytes = kPageBytes;
static_assert(sizeof(InboxMarks) <= kInboxMarksBytes);

// Each queue has its own pages, so that exactly those of connected senders are reserved.
constexpr uint64_t inbox_queue_bytes(uint32_t num_slots) {
  return round_up(sizeof(InboxQueue) + num_slots * sizeof(ArrivalEvent), kPageBytes);
}
// Ranks may choose different numbers of slots: the address says the owner's.
constexpr uint64_t inbox_bytes(uint32_t num_slots, size_t num_ranks) {
  return kInboxMarksBytes + (inbox_queue_bytes(num_slots) + sizeof(MailQueue)) * num_ranks;
}
constexpr uint64_t inbox_queue_offset(uint32_t num_slots, int sender) {
  return kInboxMarksBytes + inbox_queue_bytes(num_slots) * static_cast<uint64_t>(sender);
}
constexpr uint64_t mail_queue_offset(uint32_t num_slots, size_t num_ranks, int sender) {
  return inbox_queue_offset(num_slots, static_cast<int>(num_ranks)) + sizeof(MailQueue) * static_cast<uint64_t>(sender);
}

// The sender's end.
class ArrivalWriter {
 public:
  ArrivalWriter() = default;
  ArrivalWriter(uint8_t* queue, uint32_t num_slots)
      : queue_(reinterpret_cast<InboxQueue*>(queue)), num_slots_(num_slots) {}

  bool full() {
    if (put_ - known_taken_ < num_slots_) return false;
    known_taken_ = queue_->taken.flag.read();
    return put_ - known_taken_ == num_slots_;
  }
  // Only when not full. Releases the payload copied before.
  void put(const ArrivalEvent& event) {
    queue_->events()[put_ % num_slots_] = event;
    queue_->put.flag.publish(++put_);
  }

 private:
  InboxQueue* queue_ = nullptr;
  uint32_t num_slots_ = 0;
  uint64_t put_ = 0;
  uint64_t known_taken_ = 0;
};

// The owner's end.
class ArrivalReader {
 public:
  ArrivalReader() = default;
  ArrivalReader(uint8_t* queue, uint32_t num_slots)
      : queue_(reinterpret_cast<InboxQueue*>(queue)), num_slots_(num_slots) {}

  uint64_t available() const { return queue_->put.flag.read() - taken_; }
  // Only `available()` times; give_back() makes their slots free.
  ArrivalEvent take() { return queue_->events()[taken_++ % num_slots_]; }
  void give_back() { queue_->taken.flag.publish(taken_); }

 private:
  InboxQueue* queue_ = nullptr;
  uint32_t num_slots_ = 0;
  uint64_t taken_ = 0;
};

}  // namespace uccl_ep::loop
