// Votes about masked ranks, between a rank's region, where its kernels or its worker write and read them, and messages
// to the other domains.
#pragma once

#include <cstdint>

#include "layout/votes.h"
#include "proxy/proxy.h"
#include "sync/vote.h"

namespace uccl_ep {

class VoteBox {
 public:
  explicit VoteBox(const ProxyContext& context)
      : own_(context.layout->votes_offset == 0
                 ? nullptr
                 : reinterpret_cast<SharedVotes*>(context.region + context.layout->votes_offset)) {}

  // True if this rank has voted since; then `votes` is all that others may still need.
  bool take_own(RankVotes& votes) {
    if (own_ == nullptr) return false;
    uint64_t sum = 0;  // of flags that only grow
    for (uint32_t i = 0; i < kVotesOfRank; ++i) {
      votes.votes[i] = read_vote(own_->votes[i]);
      sum += votes.votes[i].cast;
    }
    if (sum == told_) return false;
    told_ = sum;
    return true;
  }
  // What `rank` has voted; older votes change nothing.
  void put(int rank, const RankVotes& votes) {
    if (own_ != nullptr) take_votes(own_[1 + static_cast<size_t>(rank)], votes.votes);
  }

 private:
  SharedVotes* const own_;  // ours, then of every rank
  uint64_t told_ = 0;
};

}  // namespace uccl_ep
