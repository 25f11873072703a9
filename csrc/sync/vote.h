// A vote in memory that processes share (layout/votes.h). Writer: a rank's worker, of its own; its proxy, of ranks of
// other domains. Readers: its domain, of its own; its worker, of the others. `cast` publishes `ranks`.
#pragma once

#include "layout/votes.h"
#include "sync/flag.h"
#include "sync/word.h"

namespace uccl_ep {

struct SharedVote {
  Word ranks;
  Flag cast;
};
static_assert(sizeof(SharedVote) == sizeof(VoteWords) && sizeof(RankVotes) % sizeof(SharedVote) == 0);
constexpr size_t kSharedVotesOfRank = sizeof(RankVotes) / sizeof(SharedVote);  // from one rank's to the next one's

}  // namespace uccl_ep
