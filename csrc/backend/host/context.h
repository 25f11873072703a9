// Shared by the steps of the host backend: this rank's place, and the ports of every stream. Used by the worker only.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/host/ports.h"
#include "layout/region.h"
#include "layout/topology.h"
#include "sync/control.h"
#include "sync/vote.h"
#include "sync/word.h"

namespace uccl_ep::host {

// Our rows for one domain.
struct OutgoingPorts {
  OutPort header, meta, rows;
  InPort returned;  // sums that the domain returns to us (other domains only)
};
// The rows of one source for our domain.
struct IncomingPorts {
  InPort header, meta, rows;
  OutPort pieces;  // our partial sums, to the rank that merges the stream
};
// A stream that we merge: our own rows (src == rank) or rows that we relay to `src`.
struct MergedPorts {
  int src = -1;
  std::vector<InPort> pieces;  // by member
  OutPort returned;            // relayed streams only
};

// Writer: the worker.
struct StepCounters {
  Counter rows_staged;    // wire rows, over all domains
  Counter rows_shipped;   // of them for other domains
  Counter pairs_shipped;
  Counter rows_placed;    // rows of the output written
  Counter rows_folded;    // partial rows written
  Counter rows_relayed;   // merged rows sent back to other domains
  Counter pairs_relayed;
  Counter rows_merged;    // rows of the output
  PortCounters ports[kNumRingKinds];
};

// Of low latency: chunk n - 1 of each is operation n of its kind.
struct SlotPorts {
  uint32_t max_tokens = 0;
  std::vector<OutPort> rows, weights;     // [domain] that get ours
  std::vector<InPort> rows_of, weights_of;  // [source rank]
  std::vector<OutPort> pieces;            // [source rank] our sums for it, to the rank that merges them
  std::vector<MergedPorts> merged;        // as below
  std::vector<InPort> returned;           // [domain] its sums for us (other domains only)
  std::vector<bool> masked;               // [rank]
  Counter dropped_pairs;                  // of combines: their experts' ranks are masked
  // Only where ranks may be masked.
  SharedVotes* own_votes = nullptr;
  std::vector<const SharedVotes*> votes_of;  // [rank]
  std::vector<Bell*> voters;              // to be rung when this rank has voted
};

struct HostContext {
  int rank = 0;
  int domain = 0;
  uint32_t member = 0;  // our index in the domain
  Topology topo;
  uint32_t num_experts = 0;
  uint32_t experts_per_rank = 0;
  std::vector<int> source_order;          // the order of sources inside an expert
  std::vector<OutgoingPorts> outgoing;    // [domain]
  std::vector<IncomingPorts> incoming;    // [source rank]
  std::vector<MergedPorts> merged;        // [0] own, then relayed
  std::unique_ptr<SlotPorts> slots;       // nullptr: no low latency
  uint64_t patience_usec = 0;             // of a Meeting
  StepCounters counters;
  DueBells bells;  // rung after each step's advance()

  // The rank of our domain in whose region the stream of `src` lies.
  int holder(int src) const { return topo.domain_of[src] == domain ? src : topo.rail(src, domain); }
  const std::vector<int>& members() const { return topo.members[domain]; }
};

struct OwnRank {
  int rank;
  std::vector<int> source_order;  // of the rows that it gets
};
// Where this rank's rings are.
struct Layout {
  const Topology& topo;
  const RingParams& rings;
  const RegionLayout& own;
  const Channels& channels;
};
// `regions`: by rank, nullptr outside our domain.
std::unique_ptr<HostContext> make_context(const Layout& layout, OwnRank own, const std::vector<uint8_t*>& regions,
                                          const ProxyQueue& proxy);

}  // namespace uccl_ep::host
