// Turns entries of libfabric's queue into completions for the proxy.
#include <algorithm>
#include <array>
#include <cstring>

#include "common/clock.h"
#include "transport/ofi/ofi.h"

namespace uccl_ep::ofi {
namespace {

constexpr size_t kEntriesPerRead = 64;

}  // namespace

size_t OfiTransport::poll(std::span<Completion> out) {
  size_t count = 0;
  flush();
  retry_parked(now_usec());
  retry_receives();
  report_failed(out, count);
  const uint32_t num_nics = static_cast<uint32_t>(nics_.size());
  for (uint32_t i = 0; i < num_nics; ++i) read((next_read_ + i) % num_nics, out, count);
  ++next_read_;
  if (count != 0 && nic_writes_ != nullptr) nic_writes_->flush();
  if (count != 0) latest_usec_ = now_usec();
  return count;
}

void OfiTransport::read(uint32_t nic, std::span<Completion> out, size_t& count) {
  std::array<fi_cq_data_entry, kEntriesPerRead> entries;
  std::array<fi_addr_t, kEntriesPerRead> sources;
  const size_t room = std::min(entries.size(), out.size() - count);
  if (room == 0) return;
  const ssize_t result = nics_[nic].endpoint->read(entries.data(), room, sources.data());
  if (result == -kFiEavail) {
    read_error(nic);
    report_failed(out, count);
  } else if (result < 0 && result != -EAGAIN) {
    fail(own_.rank, -1, own_.provider + ": the completion queue cannot be read: " + error_text(result));
  }
  for (ssize_t i = 0; i < result; ++i)
    take(nic, entries[static_cast<size_t>(i)], sources[static_cast<size_t>(i)], out, count);
}

void OfiTransport::read_error(uint32_t nic) {
  fi_cq_err_entry entry = {};
  if (nics_[nic].endpoint->read_error(entry) != 1) return;
  const uint32_t receive = index_in(receives_.get(), kNumReceives, entry.op_context);
  if (receive != kNumReceives) {
    post_receive(receive);
    return;
  }
  if (take_send(entry.op_context)) return;
  const uint32_t idx = index_in(ops_.get(), kNumOps, entry.op_context);
  // kNumOps: a stranger's write that the provider refused.
  if (idx == kNumOps)
    ++num_strangers_;
  else
    set_failed(idx, nics_[nic].endpoint->failure_text(entry));
}

void OfiTransport::take(uint32_t nic, const fi_cq_data_entry& entry, fi_addr_t source, std::span<Completion> out,
                        size_t& count) {
  if (take_send(entry.op_context)) return;
  const uint32_t receive = index_in(receives_.get(), kNumReceives, entry.op_context);
  if (receive != kNumReceives && (own_.naming != Naming::kMessage || entry.len != sizeof(Notice))) {
    receives_[receive].num_bytes = static_cast<uint32_t>(std::min<size_t>(entry.len, kMaxDatagramBytes));
    datagrams_.push_back(receive);
    return;
  }
  const uint32_t idx = index_in(ops_.get(), kNumOps, entry.op_context);
  if (idx == kNumOps) {
    Arrival arrival;
    if (take_arrival(nic, entry, source, arrival))
      out[count++] = {
          Completion::Kind::kArrival, static_cast<int>(arrival.rank), arrival.immediate, arrival.num_bytes, 0, nullptr};
    else
      ++num_strangers_;
    return;
  }
  Post& op = ops_[idx];
  const bool notice_due =
      !op.written && peers_[static_cast<size_t>(op.request.peer)].address.naming == Naming::kMessage;
  if (!notice_due) {
    out[count++] = report(idx, Completion::Kind::kWriteDone);
    return;
  }
  op.written = true;
  submit_or_park(idx, 0);
}

// False if no rail can have sent it.
bool OfiTransport::take_arrival(uint32_t nic, const fi_cq_data_entry& entry, fi_addr_t source, Arrival& arrival) {
  if (own_.naming == Naming::kMessage) {
    const uint32_t receive = index_in(receives_.get(), kNumReceives, entry.op_context);
    if (!take_notice(receive, entry.len, arrival)) return false;
  } else if ((entry.flags & kFiRemoteCqData) == 0) {
    return false;
  } else if (own_.naming == Naming::kTag) {
    arrival = tags_.decode(entry.data);
  } else {
    const auto& rank_of = nics_[nic].rank_of;
    if (source >= rank_of.size() || rank_of[source] < 0) return false;
    arrival = {static_cast<uint32_t>(rank_of[source]), static_cast<uint32_t>(entry.data), entry.len};
  }
  return arrival.rank < peers_.size() && peers_[arrival.rank].is_rail;
}

bool OfiTransport::take_notice(uint32_t receive, size_t num_bytes, Arrival& arrival) {
  if (receive == kNumReceives) return false;
  Notice notice;
  std::memcpy(&notice, receives_[receive].bytes, sizeof(notice));
  post_receive(receive);
  arrival = {notice.rank, notice.immediate, notice.num_bytes};
  return num_bytes == sizeof(Notice) && notice.token == own_.secret;
}

void OfiTransport::report_failed(std::span<Completion> out, size_t& count) {
  while (!failed_.empty() && count < out.size()) out[count++] = report(pop(failed_), Completion::Kind::kFailure);
}

Completion OfiTransport::report(uint32_t idx, Completion::Kind kind) {
  const Post& op = ops_[idx];
  const WriteRequest& request = op.request;
  if (request.limited) nics_[op.nic].load.give_back(request.num_bytes);
  --num_in_flight_;
  push(free_, idx);
  return {kind, request.peer, 0, request.num_bytes, request.cookie, op.reason};
}

}  // namespace uccl_ep::ofi
