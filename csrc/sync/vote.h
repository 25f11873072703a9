// A vote in memory that processes share (layout/votes.h): the number is published after the ranks.
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
