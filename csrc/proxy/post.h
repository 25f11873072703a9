// Shared by the parts of a proxy: cookies that identify flushed posts, the deadline of refused posts, errors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/error.h"
#include "common/patience.h"
#include "layout/words.h"

namespace uccl_ep {

enum class PostKind : uint32_t { kData = 1, kCredit, kProbe };

// kind 4 bits | index 28 bits | slot 32 bits.  index: the channel (data, credit) or the peer's rank.
struct Cookie {
  PostKind kind;
  uint32_t index;
  uint32_t slot = 0;  // data only
};
using CookieSlot = BitField<uint64_t, 0, 32>;
using CookieIndex = BitsAbove<CookieSlot, 28>;
using CookieKind = BitsAbove<CookieIndex, 4>;
static_assert(CookieKind::kEnd == 64 && CookieKind::fits(static_cast<uint64_t>(PostKind::kProbe)));
constexpr uint32_t kMaxCookieIndex = static_cast<uint32_t>(CookieIndex::kMost);

constexpr uint64_t encode_cookie(const Cookie& c) {
  return CookieKind::put(static_cast<uint64_t>(c.kind)) | CookieIndex::put(c.index) | CookieSlot::put(c.slot);
}
constexpr Cookie decode_cookie(uint64_t cookie) {
  return {static_cast<PostKind>(CookieKind::get(cookie)), static_cast<uint32_t>(CookieIndex::get(cookie)),
          static_cast<uint32_t>(CookieSlot::get(cookie))};
}

// Needs no memory besides that of `message`.
inline ErrorRecord make_error(ErrorKind kind, int rank, int peer, std::string_view message) {
  ErrorRecord record;
  record.kind = kind;
  record.step = Step::kShip;
  record.rank = rank;
  record.peer = peer;
  record.set_message_of(rank, ": ", message);
  return record;
}

// The time since which the transport has refused a post.
class Refusal {
 public:
  void clear() { refused_ = false; }
  // Throws CommunicationFailure(kTransport) once the refusals last longer than `limit_usec`.
  void note(uint64_t now_usec, uint64_t limit_usec, int rank, int peer, const char* what) {
    const uint64_t patient_usec = patience_.at(now_usec);
    if (!refused_) since_usec_ = patient_usec;
    refused_ = true;
    if (patient_usec - since_usec_ <= limit_usec) return;
    throw CommunicationFailure(make_error(ErrorKind::kTransport, rank, peer,
                                          std::string("the transport refused ") + what + " to rank " +
                                              std::to_string(peer) + " for " +
                                              std::to_string((patient_usec - since_usec_) / 1000) + " ms"));
  }

 private:
  PatienceClock patience_;
  bool refused_ = false;
  uint64_t since_usec_ = 0;
};

}  // namespace uccl_ep
