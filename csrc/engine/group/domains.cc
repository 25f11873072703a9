#include "engine/group/domains.h"

#include <sys/random.h>

#include <cstring>

#include "common/error.h"
#include "common/limits.h"
#include "engine/group/handle.h"

namespace uccl_ep {
namespace {

constexpr const char* kOffer = "topology: offer";
constexpr const char* kReach = "topology: reach";

std::string new_nonce() {
  std::string nonce(kNonceBytes, '\0');
  for (size_t have = 0; have < nonce.size();) {
    const ssize_t got = getrandom(nonce.data() + have, nonce.size() - have, 0);
    if (got > 0) have += static_cast<size_t>(got);
  }
  return nonce;
}

DomainOffer offer_of(int rank, int peer, const std::string& said) {
  try {
    return decode_domain_offer(said);
  } catch (const UsageFailure&) {
    malformed(rank, kOffer, peer, said);
  }
}

// Whether this process maps the segment and finds the nonce.
bool is_readable(const DomainOffer& offer) {
  try {
    const Mapping segment = Mapping::open(offer.segment, kNonceBytes);
    return std::memcmp(segment.base(), offer.nonce.data(), kNonceBytes) == 0;
  } catch (const CommunicationFailure&) {
    return false;  // there is no such segment here
  }
}

std::string list_of(const std::string& reached) {
  std::string text;
  for (size_t rank = 0; rank < reached.size(); ++rank)
    if (reached[rank] == '1') text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return "[" + text + "]";
}

[[noreturn]] void disagree(const std::string& text) {
  throw UsageFailure(UsageKind::kTopology, text + "; set domains or domain_size");
}

}  // namespace

DomainProbe::DomainProbe(const std::string& kernel) : kernel_(kernel), segment_(Mapping::create()) {
  const std::string nonce = new_nonce();
  segment_.grow(kNonceBytes);
  segment_.reserve(0, kNonceBytes);
  std::memcpy(segment_.base(), nonce.data(), nonce.size());
  offer_ = encode_domain_offer({kernel_, segment_.name(), nonce});
}

std::string DomainProbe::reach(int rank, const std::vector<std::string>& offers) const {
  std::string reached;
  for (int peer = 0; peer < static_cast<int>(offers.size()); ++peer) {
    const DomainOffer offer = offer_of(rank, peer, offers[static_cast<size_t>(peer)]);
    reached += peer == rank || (offer.kernel == kernel_ && is_readable(offer)) ? '1' : '0';
  }
  return reached;
}

std::vector<int> domains_of(int rank, const std::vector<std::string>& reached) {
  const size_t ranks = reached.size();
  for (size_t r = 0; r < ranks; ++r)
    if (reached[r].size() != ranks || reached[r].find_first_not_of("01") != std::string::npos)
      malformed(rank, kReach, static_cast<int>(r), reached[r]);
  std::vector<int> domain_of;
  for (size_t r = 0; r < ranks; ++r) {
    if (reached[r][r] != '1')
      disagree("rank " + std::to_string(r) + " does not reach its own memory, only that of " + list_of(reached[r]));
    for (size_t peer = 0; peer < ranks; ++peer)
      if (reached[r][peer] == '1' && reached[peer] != reached[r])
        disagree("ranks disagree on their domain: rank " + std::to_string(r) + " reaches the memory of " +
                 list_of(reached[r]) + ", rank " + std::to_string(peer) + " that of " + list_of(reached[peer]));
    domain_of.push_back(static_cast<int>(reached[r].find('1')));
  }
  return domain_of;
}

void malformed(int rank, const std::string& step, int peer, const std::string& said) {
  constexpr size_t kMostShown = 80;
  ErrorRecord record;
  record.kind = ErrorKind::kTransport;
  record.rank = rank;
  record.peer = peer;
  record.seen = said.size();
  record.set_message("creation, " + step + ": rank " + std::to_string(peer) + " sent '" + said.substr(0, kMostShown) +
                     "', which no rank of this version sends");
  throw CommunicationFailure(record);
}

}  // namespace uccl_ep
