// What a rank has voted about who is masked (backend/gpu/masks.cuh, backend/host/agreement.h), as it travels to the
// other domains.
#pragma once

#include <cstdint>

#include "common/units.h"

namespace uccl_ep {

constexpr uint32_t kMaxMaskedRanks = 512;  // of a group whose ranks may be masked; a datagram holds all votes of one
constexpr uint32_t kVotesOfRank = 6;  // [2 settlements][2 rounds], then decisions of [2 settlements]
constexpr uint32_t kFirstDecision = 4;

constexpr uint32_t kVoteWords = kMaxMaskedRanks / 64;
// Ranks, a bit each, and the number of the vote; a vote with a higher number replaces it. In a region: the number is a
// flag, which publishes the ranks. Who reads a vote while another replaces it may see some ranks of each. That does no
// harm, because from vote to vote ranks are only added.
struct VoteWords {
  uint64_t ranks[kVoteWords] = {};
  uint64_t cast = 0;
};
// Lines of their own, as each rank's has another writer.
struct alignas(kLineBytes) RankVotes {
  VoteWords votes[kVotesOfRank];
};
constexpr uint64_t kVoteBytes = sizeof(RankVotes::votes);  // what travels

}  // namespace uccl_ep
