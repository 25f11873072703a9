// Datagrams of the loop transport: lossy queues in shared memory.
#include <algorithm>

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
  for (int copies = chance(options_.duplicate_rate) ? 2 : 1; copies > 0; --copies) {
    if (is_cut || peers_[static_cast<size_t>(peer)].lost || chance(options_.loss_rate)) continue;
    // Not by link_.send(): bytes that move there keep a progress deadline from passing.
    const uint64_t left = now + static_cast<uint64_t>(link_.transmission_nsec(bytes.size()));
    const uint64_t when = left + static_cast<uint64_t>(options_.latency_usec * 1000) +
                          (options_.seed != 0 ? disorder_nsec(bytes.size()) : 0);
    if (when <= now) {
      deliver_mail(peer, bytes);
      continue;
    }
    LateMail& late = late_mail_.emplace_back(LateMail{when, peer, static_cast<uint32_t>(bytes.size()), {}});
    std::copy(bytes.begin(), bytes.end(), late.bytes.begin());
  }
  return PostResult::kPosted;
}

// False: it is lost.
bool LoopTransport::deliver_mail(int rank, std::span<const uint8_t> datagram) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (!peer.mail_writer.put(datagram)) return false;
  peer.marks->mail.set(static_cast<uint32_t>(own_.rank));
  return true;
}

void LoopTransport::deliver_late_mail(uint64_t now_nsec) {
  std::erase_if(late_mail_, [&](const LateMail& late) {
    if (late.when_nsec > now_nsec) return false;
    if (deliver_mail(late.peer, std::span(late.bytes).first(late.num_bytes))) wake(late.peer);
    return true;
  });
}

size_t LoopTransport::receive_datagram(std::span<uint8_t> out) {
  take_marks(marks_->mail, &Peer::has_mail, mail_);
  size_t looked = 0, num_bytes = 0;
  while (looked < mail_.size() && num_bytes == 0) {
    const int rank = mail_[looked++];
    Peer& peer = peers_[static_cast<size_t>(rank)];
    num_bytes = peer.mail_reader.take(out.first(kMaxDatagramBytes));
    peer.has_mail = !peer.mail_reader.empty();
    if (peer.has_mail) mail_.push_back(rank);
    if (peer.lost) num_bytes = 0;
  }
  mail_.erase(mail_.begin(), mail_.begin() + static_cast<ptrdiff_t>(looked));
  return num_bytes;
}

}  // namespace uccl_ep::loop
