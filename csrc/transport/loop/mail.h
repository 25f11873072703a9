// Datagrams from one rank to another: a queue of bytes in the receiver's inbox. What it has no room for is lost. It
// holds a score of heartbeats and several errors, so that a rank that was stopped finds out what it missed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "common/units.h"
#include "sync/flag.h"
#include "transport/transport.h"

namespace uccl_ep::loop {

// All zero is empty. A datagram is its length, 8 bytes, then its bytes, padded to 8.
struct MailQueue {
  // Bytes put since creation. Writer: the sender, after the bytes; reader: the receiver; never reset.
  FlagLine put;
  // Bytes taken since creation. Writer: the receiver, after it has copied them; reader: the sender; never reset.
  FlagLine taken;
  uint8_t bytes[kPageBytes - 2 * kLineBytes];
};
static_assert(sizeof(MailQueue) == kPageBytes);

constexpr uint64_t mail_bytes(uint64_t num_bytes) { return sizeof(uint64_t) + round_up(num_bytes, sizeof(uint64_t)); }

class MailWriter {
 public:
  MailWriter() = default;
  explicit MailWriter(uint8_t* queue) : queue_(reinterpret_cast<MailQueue*>(queue)) {}

  // False: there was no room.
  bool put(std::span<const uint8_t> datagram) {
    const uint64_t num_bytes = datagram.size(), needed = mail_bytes(num_bytes);
    if (sizeof(queue_->bytes) - (put_ - queue_->taken.flag.read()) < needed) return false;
    copy(put_, &num_bytes, sizeof(num_bytes));
    copy(put_ + sizeof(num_bytes), datagram.data(), num_bytes);
    queue_->put.flag.publish(put_ += needed);
    return true;
  }

 private:
  void copy(uint64_t at, const void* from, uint64_t num_bytes) {
    const uint64_t start = at % sizeof(queue_->bytes), first = std::min(num_bytes, sizeof(queue_->bytes) - start);
    std::memcpy(queue_->bytes + start, from, first);
    std::memcpy(queue_->bytes, static_cast<const uint8_t*>(from) + first, num_bytes - first);
  }
  MailQueue* queue_ = nullptr;
  uint64_t put_ = 0;
};

class MailReader {
 public:
  MailReader() = default;
  explicit MailReader(uint8_t* queue) : queue_(reinterpret_cast<MailQueue*>(queue)) {}

  bool empty() const { return queue_->put.flag.read() == taken_; }
  // The length of the next datagram, which is copied to `out`; 0: there is none. A queue that its sender cannot have
  // written is emptied.
  size_t take(std::span<uint8_t> out) {
    const uint64_t put = queue_->put.flag.read(), there = put - taken_;
    if (there == 0) return 0;
    uint64_t num_bytes = 0;
    if (there >= sizeof(num_bytes)) copy(&num_bytes, taken_, sizeof(num_bytes));
    const bool whole = num_bytes != 0 && num_bytes <= out.size() && mail_bytes(num_bytes) <= there;
    if (whole) copy(out.data(), taken_ + sizeof(num_bytes), num_bytes);
    taken_ = whole ? taken_ + mail_bytes(num_bytes) : put;
    queue_->taken.flag.publish(taken_);
    return whole ? num_bytes : 0;
  }

 private:
  void copy(void* to, uint64_t at, uint64_t num_bytes) const {
    const uint64_t start = at % sizeof(queue_->bytes), first = std::min(num_bytes, sizeof(queue_->bytes) - start);
    std::memcpy(to, queue_->bytes + start, first);
    std::memcpy(static_cast<uint8_t*>(to) + first, queue_->bytes, num_bytes - first);
  }
  MailQueue* queue_ = nullptr;
  uint64_t taken_ = 0;
};

}  // namespace uccl_ep::loop
