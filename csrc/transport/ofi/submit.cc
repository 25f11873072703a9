// Passes posted writes to libfabric.
#include <algorithm>

#include "common/clock.h"
#include "transport/ofi/ofi.h"

namespace uccl_ep::ofi {
namespace {

// How long refusals of writes to a peer last before its process is checked.
constexpr uint64_t kAskAfterUsec = 10'000;

}  // namespace

void OfiTransport::push(OpList& list, uint32_t idx) {
  ops_[idx].next = kNumOps;
  (list.empty() ? list.first : ops_[list.last].next) = idx;
  list.last = idx;
}

uint32_t OfiTransport::pop(OpList& list) {
  const uint32_t idx = list.first;
  list.first = ops_[idx].next;
  return idx;
}

void OfiTransport::flush() {
  for (Nic& nic : nics_) submit_held(nic, 0);
}

void OfiTransport::submit_held(Nic& nic, uint64_t flags) {
  if (nic.held == kNumOps) return;
  const uint32_t idx = nic.held;
  nic.held = kNumOps;
  latest_usec_ = now_usec();
  submit_or_park(idx, flags);
}

// Parked writes go first, or they might starve.
void OfiTransport::submit_or_park(uint32_t idx, uint64_t flags) {
  Post& op = ops_[idx];
  Peer& peer = peers_[static_cast<size_t>(op.request.peer)];
  const ssize_t result = peer.parked.empty() ? submit(op, flags) : -EAGAIN;
  if (result == -EAGAIN) {
    op.refused_since_usec = patience_.now();
    push(peer.parked, idx);
    ++num_parked_;
  } else if (result != 0) {
    set_failed(idx, own_.provider + ": " + error_text(result));
  }
}

ssize_t OfiTransport::submit(Post& op, uint64_t flags) {
  const Peer& peer = peers_[static_cast<size_t>(op.request.peer)];
  if (peer.address.naming != Naming::kMessage) return write(op, peer, flags);
  if (op.request.num_bytes == 0) op.written = true;
  return op.written ? send_notice(op, peer, flags) : write(op, peer, flags);
}

ssize_t OfiTransport::write(Post& op, const Peer& peer, uint64_t flags) const {
  const WriteRequest& request = op.request;
  const Nic& nic = nics_[op.nic];
  // Without bytes any address works, but some providers require one.
  const bool device = request.memory == Memory::kDevice && request.num_bytes != 0;
  const RegisteredMemory& local = device ? *nic.device : *nic.region;
  const RemoteMemory& remote = remote_of(peer, op.nic, device ? Memory::kDevice : Memory::kHost);
  const uint64_t local_offset = request.num_bytes != 0 ? request.local_offset : 0;
  const uint64_t remote_offset = request.num_bytes != 0 ? request.remote_offset : 0;
  const RemotePiece& piece = remote.pieces[remote_offset / remote.stride_bytes];
  const iovec from = {local.at(local_offset), request.num_bytes};
  const fi_rma_iov to = {piece.start + remote_offset % remote.stride_bytes, request.num_bytes, piece.key};
  void* desc = local.desc(local_offset);
  fi_msg_rma message = {&from, &desc, 1, peer.endpoints[op.nic], &to, 1, &op.context, 0};
  flags |= kFiCompletion | kFiDeliveryComplete;
  if (peer.address.naming != Naming::kMessage) {
    flags |= kFiRemoteCqData;
    message.data = peer.address.naming == Naming::kSource
                       ? request.immediate
                       : peer.tags.encode({static_cast<uint32_t>(own_.rank), request.immediate, request.num_bytes});
  }
  return nic.endpoint->write(message, flags);
}

ssize_t OfiTransport::send_notice(Post& op, const Peer& peer, uint64_t flags) const {
  const Nic& nic = nics_[op.nic];
  op.notice = {peer.address.secret, op.request.num_bytes, static_cast<uint32_t>(own_.rank), op.request.immediate};
  const iovec from = {&op.notice, sizeof(op.notice)};
  void* desc = nic.op_desc;
  const fi_msg message = {&from, &desc, 1, peer.endpoints[op.nic], &op.context, 0};
  return nic.endpoint->send(message, flags | kFiCompletion | kFiDeliveryComplete);
}

void OfiTransport::retry_parked(uint64_t now_usec) {
  if (num_parked_ == 0) return;
  for (int rank : setup_.rails) retry_parked_of(peers_[static_cast<size_t>(rank)], now_usec);
}

// Retries parked writes until one is refused again. After the deadline, or when the peer is gone, all of them fail.
void OfiTransport::retry_parked_of(Peer& peer, uint64_t now_usec) {
  const uint64_t patient_usec = patience_.at(now_usec);
  bool given_up = false;
  while (!peer.parked.empty()) {
    const uint32_t idx = peer.parked.first;
    const uint64_t refused_usec = patient_usec - ops_[idx].refused_since_usec;
    const ssize_t result = given_up ? -EAGAIN : submit(ops_[idx], 0);
    if (result == -EAGAIN) {
      const bool gone = refused_usec > kAskAfterUsec && !peer.process.alive();
      given_up = given_up || gone || refused_usec > setup_.progress_timeout_usec;
      if (!given_up) return;
    }
    pop(peer.parked);
    --num_parked_;
    if (result == -EAGAIN)
      set_failed(idx, own_.provider + " refused it for " + std::to_string(refused_usec / 1000) + " ms" +
                          (peer.process.alive() ? "" : ", and the peer's process is gone"));
    else if (result != 0)
      set_failed(idx, own_.provider + ": " + error_text(result));
    else
      latest_usec_ = now_usec;
  }
}

// All failures of a peer report the first reason, which is the cause of the others. Its text stays.
void OfiTransport::set_failed(uint32_t idx, const std::string& text) {
  Peer& peer = peers_[static_cast<size_t>(ops_[idx].request.peer)];
  if (peer.reason.empty()) peer.reason = text;
  ops_[idx].reason = peer.reason.c_str();
  push(failed_, idx);
}

}  // namespace uccl_ep::ofi
