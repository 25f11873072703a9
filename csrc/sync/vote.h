// A vote in memory that processes share (layout/votes.h). Writer: a rank's worker, of its own; its proxy, of ranks of
// other domains. Readers: its domain, of its own; its worker, of the others. `cast` publishes `ranks`.
#pragma once

#include "layout/votes.h"
#include "sync/flag.h"
#include "sync/word.h"

namespace uccl_ep {

struct SharedVote {
  Word ranks[kVoteWords];
  Flag cast;
};
struct alignas(kLineBytes) SharedVotes {
  SharedVote votes[kVotesOfRank];
};
static_assert(sizeof(SharedVote) == sizeof(VoteWords) && sizeof(SharedVotes) == sizeof(RankVotes));

// What has been cast.
inline VoteWords read_vote(const SharedVote& vote) {
  VoteWords words;
  words.cast = vote.cast.read();
  for (uint32_t i = 0; i < kVoteWords; ++i) words.ranks[i] = vote.ranks[i].load();
  return words;
}
// By the writer.
inline void cast_vote(SharedVote& vote, const VoteWords& words) {
  for (uint32_t i = 0; i < kVoteWords; ++i) vote.ranks[i].store(words.ranks[i]);
  vote.cast.publish(words.cast);
}
// By the writer: takes what another has cast; an older vote changes nothing.
inline void take_votes(SharedVotes& votes, const VoteWords (&from)[kVotesOfRank]) {
  for (uint32_t i = 0; i < kVotesOfRank; ++i)
    if (from[i].cast > votes.votes[i].cast.own()) cast_vote(votes.votes[i], from[i]);
}

}  // namespace uccl_ep
