// Which ranks form a domain: those that can map each other's memory. Two ranks share a domain if they run on the same
// kernel and each has read the other's nonce in shared memory. Containers of one host may fail the second test, clones
// of one machine image the first.
#pragma once

#include <string>
#include <vector>

#include "common/mapping.h"

namespace uccl_ep {

// A rank's part of the handshake, in two steps that all ranks take: everybody offers, and everybody looks at all
// offers. What a rank says is bytes, which a stranger may have written: they are looked at before they are used.
class DomainProbe {
 public:
  // `kernel`: equal for processes of the same kernel. Makes a segment of shared memory with a nonce, which lives as
  // long as this object. Throws LimitFailure, CommunicationFailure(kTransport).
  explicit DomainProbe(const std::string& kernel);

  const std::string& offer() const { return offer_; }
  // offers: by rank. Which ranks' memory this one can map, itself among them, for `domains_of`. Throws LimitFailure
  // where it cannot try, and CommunicationFailure(kTransport) naming a rank that offers what no rank of this version
  // offers.
  std::string reach(int rank, const std::vector<std::string>& offers) const;

 private:
  std::string kernel_;
  Mapping segment_;
  std::string offer_;
};

// reached: what each rank said that it reaches. The lowest rank of each rank's domain. Throws UsageFailure(kTopology)
// naming two ranks that disagree, and CommunicationFailure(kTransport) as above. rank: ours, for errors.
std::vector<int> domains_of(int rank, const std::vector<std::string>& reached);

// Rank `peer` has sent `said` in `step` of the creation, which no rank of this version sends.
[[noreturn]] void malformed(int rank, const std::string& step, int peer, const std::string& said);

}  // namespace uccl_ep
