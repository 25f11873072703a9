// The writes to one peer over one NIC, from posting until they are flushed. All kinds of queue pairs take writes in the
// same way.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "transport/transport.h"
#include "transport/verbs/queue_pairs.h"

namespace uccl_ep::verbs {

// Posts to one queue pair that the NIC does not have yet: one doorbell hands all of them over.
struct Doorbell {
  ibv_qp_ex* qp = nullptr;
  bool open = false;

  void prepare() {
    if (!open) ibv_wr_start(qp);
    open = true;
  }
  // 0, or an errno: then none of them was posted.
  int ring() {
    open = false;
    return ibv_wr_complete(qp);
  }
};

struct Write {
  uint64_t cookie = 0;
  uint64_t num_bytes = 0;
  const uint8_t* from = nullptr;
  uint64_t to = 0;
  uint32_t local_key = 0, remote_key = 0;
  uint32_t immediate = 0;
  bool limited = false;
};

class Link {
 public:
  // wr_id of a write: link 24 bits (counted from 1) | number of the write, low 40 bits: far more than are ever in
  // flight.
  static constexpr int kSerialBits = 40;
  static uint32_t index_of(uint64_t wr_id) { return static_cast<uint32_t>(wr_id >> kSerialBits) - 1; }

  Link(uint32_t index, int peer, uint32_t depth, bool in_order, const Outlet& outlet, Doorbell* doorbell)
      : peer_(peer), in_order_(in_order), index_(index), outlet_(outlet), doorbell_(doorbell), entries_(depth) {}

  static constexpr uint64_t num_bytes(uint32_t depth) { return sizeof(Link) + depth * sizeof(Entry); }

  int peer() const { return peer_; }
  // Why nothing can be posted any more; nullptr: the link works.
  const char* broken() const { return broken_; }
  const Doorbell* doorbell() const { return doorbell_; }
  bool full() const { return posted_ - done_ == entries_.size(); }
  // Keeps the newest write back until the next one or flush(). If completions come in order, only the last write of a
  // batch and every kSignalEvery-th ask for one. It stands for the writes before it. True: the write is the first since
  // build_last().
  bool post(const Write& write) {
    if (kept_) build(!in_order_ || unsignalled_ + 1 >= kSignalEvery);
    entries_[posted_ % entries_.size()] = {write, false};
    ++posted_;
    kept_ = true;
    return !std::exchange(waits_, true);
  }
  // Called before the doorbell is rung.
  void build_last() {
    if (kept_) build(true);
    waits_ = false;
  }

  // Calls tell(write, delivered) for each write that `completion` ends. True: the link broke.
  template <typename Tell>
  bool complete(const ibv_wc& completion, Tell tell) {
    const uint64_t mask = (uint64_t{1} << kSerialBits) - 1;
    const uint64_t serial = done_ + ((completion.wr_id - done_) & mask);
    const bool good = completion.status == IBV_WC_SUCCESS;
    if (broken_ != nullptr || serial >= posted_) return false;
    if (!in_order_) {
      finish(serial, good, tell);
      return false;
    }
    // The writes before a failed one were acknowledged.
    for (uint64_t s = done_; s < serial; ++s) finish(s, true, tell);
    finish(serial, good, tell);
    return !good;
  }
  // Afterwards nothing is posted any more, and all writes in flight have failed. `reason` lives as long as the link.
  template <typename Tell>
  void break_off(const char* reason, Tell tell) {
    broken_ = reason;
    kept_ = false;
    for (uint64_t s = done_; s < posted_; ++s) finish(s, false, tell);
  }

 private:
  static constexpr uint32_t kSignalEvery = 16;
  struct Entry {
    Write write;
    bool over = false;
  };

  void build(bool signalled) {
    const Entry& entry = entries_[(posted_ - 1) % entries_.size()];
    const Write& write = entry.write;
    ibv_qp_ex* const qp = outlet_.qp;
    doorbell_->prepare();
    qp->wr_id = (uint64_t{index_} + 1) << kSerialBits | ((posted_ - 1) & ((uint64_t{1} << kSerialBits) - 1));
    qp->wr_flags = signalled ? unsigned{IBV_SEND_SIGNALED} : 0;
    ibv_wr_rdma_write_imm(qp, write.remote_key, write.to, htobe32(write.immediate));
    if (outlet_.ah != nullptr) ibv_wr_set_ud_addr(qp, outlet_.ah, outlet_.remote_qp, kQueueKey);
    if (write.num_bytes != 0)
      ibv_wr_set_sge(qp, write.local_key, reinterpret_cast<uint64_t>(write.from),
                     static_cast<uint32_t>(write.num_bytes));
    else
      ibv_wr_set_sge_list(qp, 0, nullptr);
    unsignalled_ = signalled ? 0 : unsignalled_ + 1;
    kept_ = false;
  }
  template <typename Tell>
  void finish(uint64_t serial, bool delivered, Tell tell) {
    Entry& entry = entries_[serial % entries_.size()];
    if (entry.over) return;
    entry.over = true;
    tell(entry.write, delivered);
    while (done_ < posted_ && entries_[done_ % entries_.size()].over) ++done_;
  }

  int peer_;
  bool in_order_;
  const char* broken_ = nullptr;
  bool kept_ = false, waits_ = false;
  uint32_t index_;
  uint32_t unsignalled_ = 0;
  Outlet outlet_;
  Doorbell* doorbell_;
  std::vector<Entry> entries_;
  uint64_t posted_ = 0, done_ = 0;  // writes since creation; all before done_ are over
};

}  // namespace uccl_ep::verbs
