// Datagrams of the loop transport: lossy queues in shared memory.
#include <algorithm>
#include <cstring>

#include "transport/failure.h"
#include "transport/loop/loop.h"

namespace uccl_ep::loop {

PostResult LoopTransport::send_datagram(int peer, std::span<const uint8_t> bytes) {
  const bool known =
      peer >= 0 && static_cast<size_t>(peer) < peers_.size() && peers_[static_cast<size_t>(peer)].control != nullptr;
  if (!known) fail_transport("loop", own_.rank, peer, "rank " + std::to_string(peer) + " gets no datagrams");
  if (bytes.empty() || bytes.size() > kMaxDatagramBytes)
    fail_transport("loop", own_.rank, peer, "a datagram of " + std::to_string(bytes.size()) + " bytes");
  if (chance(options_.refuse_rate)) return PostResult::kAgain;
  const uint64_t now = clock();
  const bool is_cut = options_.cut != nullptr && options_.cut->read() % 2 != 0;
  Mail mail;
  mail.num_bytes = bytes.size();
  std::memcpy(mail.bytes, bytes.data(), bytes.size());
  for (int copies = chance(options_.duplicate_rate) ? 2 : 1; copies > 0; --copies) {
    if (is_cut || peers_[static_cast<size_t>(peer)].lost || chance(options_.loss_rate)) continue;
    // Not by link_.send(): bytes that move there keep a progress deadline from passing.
    const uint64_t left = now + static_cast<uint64_t>(link_.transmission_nsec(bytes.size()));
    const uint64_t when = left + static_cast<uint64_t>(options_.latency_usec * 1000) +
                          (options_.seed != 0 ? disorder_nsec(bytes.size()) : 0);
    if (when <= now)
      deliver_mail(peer, mail);
    else
      late_mail_.push_back({when, peer, mail});
  }
  return PostResult::kPosted;
}

void LoopTransport::deliver_mail(int rank, const Mail& mail) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.mail_writer.full()) return;
  peer.mail_writer.put(mail);
  peer.control->proxy_bell.ring();
}

void LoopTransport::deliver_late_mail(uint64_t now_nsec) {
  std::erase_if(late_mail_, [&](const LateMail& late) {
    if (late.when_nsec > now_nsec) return false;
    deliver_mail(late.peer, late.mail);
    return true;
  });
}

size_t LoopTransport::receive_datagram(std::span<uint8_t> out) {
  for (size_t i = 0; i < all_.size(); ++i) {
    const size_t at = (next_mail_ + i) % all_.size();
    Peer& peer = peers_[static_cast<size_t>(all_[at])];
    if (peer.mail_reader.available() == 0) continue;
    const Mail& mail = peer.mail_reader.take();
    const size_t num_bytes = std::min<size_t>(mail.num_bytes, kMaxDatagramBytes);
    std::memcpy(out.data(), mail.bytes, num_bytes);
    peer.mail_reader.give_back();
    next_mail_ = at + 1;
    if (!peer.lost && num_bytes != 0) return num_bytes;
  }
  return 0;
}

}  // namespace uccl_ep::loop
