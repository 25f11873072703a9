// Datagrams over libfabric: messages, with buffers of their own.
#include <algorithm>
#include <cstring>

#include "common/clock.h"
#include "transport/ofi/ofi.h"

namespace uccl_ep::ofi {

void OfiTransport::open_datagrams() {
  unposted_.reserve(kNumReceives);
  for (uint32_t idx = 0; idx < kNumSends; ++idx) free_sends_.push_back(idx);
  for (uint32_t idx = 0; idx < kNumReceives; ++idx) {
    receives_[idx].nic = idx % static_cast<uint32_t>(nics_.size());
    post_receive(idx);
  }
}

void OfiTransport::post_receive(uint32_t idx) {
  Receive& receive = receives_[idx];
  const Nic& nic = nics_[receive.nic];
  const iovec to = {receive.bytes, sizeof(receive.bytes)};
  void* desc = nic.receive_desc;
  const fi_msg message = {&to, &desc, 1, kFiAddrUnspec, &receive.context, 0};
  if (nic.endpoint->receive(message) != 0) unposted_.push_back(idx);
}

void OfiTransport::retry_receives() {
  for (size_t i = unposted_.size(); i != 0; --i) {
    const uint32_t idx = unposted_.back();
    unposted_.pop_back();
    post_receive(idx);
  }
}

// A provider that refuses a message has no connection to the peer yet, or is about to find that there will be none.
// Other peers must not wait for that: the datagram counts as lost.
PostResult OfiTransport::send_datagram(int rank, std::span<const uint8_t> bytes) {
  const bool known =
      rank >= 0 && static_cast<size_t>(rank) < peers_.size() && peers_[static_cast<size_t>(rank)].connected;
  if (!known) fail(own_.rank, rank, "rank " + std::to_string(rank) + " is not connected");
  if (bytes.empty() || bytes.size() > kMaxDatagramBytes)
    fail(own_.rank, rank, "a datagram of " + std::to_string(bytes.size()) + " bytes");
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.num_sends == kMostSendsToPeer) return PostResult::kPosted;  // lost
  if (free_sends_.empty()) return PostResult::kAgain;
  const uint32_t idx = free_sends_.back();
  Send& send = sends_[idx];
  send.peer = rank;
  std::memcpy(send.bytes, bytes.data(), bytes.size());
  const size_t nic = next_sender_++ % nics_.size();
  const iovec from = {send.bytes, bytes.size()};
  void* desc = nics_[nic].send_desc;
  const fi_msg message = {&from, &desc, 1, peer.endpoints[nic], &send.context, 0};
  if (nics_[nic].endpoint->send(message, kFiCompletion) != 0) return PostResult::kPosted;  // lost
  free_sends_.pop_back();
  ++peer.num_sends;
  return PostResult::kPosted;
}

// A datagram of ours is over, if the context is one's.
bool OfiTransport::take_send(const void* context) {
  const uint32_t idx = index_in(sends_.get(), kNumSends, context);
  if (idx == kNumSends) return false;
  --peers_[static_cast<size_t>(sends_[idx].peer)].num_sends;
  free_sends_.push_back(idx);
  return true;
}

size_t OfiTransport::receive_datagram(std::span<uint8_t> out) {
  if (datagrams_.empty()) return 0;
  const uint32_t idx = datagrams_.front();
  datagrams_.pop_front();
  const size_t num_bytes = receives_[idx].num_bytes;
  std::memcpy(out.data(), receives_[idx].bytes, num_bytes);
  post_receive(idx);
  latest_usec_ = now_usec();
  return num_bytes;
}

}  // namespace uccl_ep::ofi
