#include "backend/host/agreement.h"

#include <algorithm>

namespace uccl_ep::host {
namespace {

RankBits bits_of(const std::vector<int>& ranks) {
  RankBits bits;
  for (const int rank : ranks) bits.set(static_cast<size_t>(rank));
  return bits;
}
RankBits bits_of(const VoteWords& vote) {
  RankBits bits;
  for (uint32_t i = kVoteWords; i-- > 0;) bits = bits << 64 | RankBits(vote.ranks[i]);
  return bits;
}
VoteWords vote_of(const RankBits& bits, uint64_t number) {
  VoteWords vote;
  vote.cast = number;
  for (uint32_t i = 0; i < kVoteWords; ++i) vote.ranks[i] = (bits >> 64 * i & RankBits(UINT64_MAX)).to_ullong();
  return vote;
}
template <typename Take>
void each(const RankBits bits, Take take) {
  for (size_t rank = 0; bits.any() && rank < bits.size(); ++rank)
    if (bits.test(rank)) take(static_cast<int>(rank));
}

}  // namespace

Agreement::Agreement(const HostContext& context, uint64_t settlement, const RankBits& named, uint64_t mask_usec,
                     uint64_t now_usec)
    : context_(context),
      settlement_(settlement),
      mask_usec_(mask_usec),
      domain_(context.topo.num_domains() > 1 ? bits_of(context.members()) : RankBits()),
      mine_(named),
      gone_(whole_domains(named)),
      began_usec_(now_usec) {}

// What a rank of another domain sends may be missing because its rail here is dead. So that one alone votes for it. If
// it does not, its own rows are missing, or its vote will be.
bool Agreement::wait_for(const std::vector<WaitingOn>& missing, uint64_t now_usec) {
  if (now_usec - began_usec_ <= mask_usec_) {
    if (!told_waiting_ && now_usec - began_usec_ > mask_usec_ / kQuietPart) tell_waiting();
    return false;
  }
  for (const WaitingOn& what : missing) {
    const int rail = what.step == Step::kExchange ? context_.holder(what.peer) : context_.rank;
    if (rail == what.peer || rail == context_.rank) mine_ |= bit_of(what.peer) & ~(gone_ | bit_of(context_.rank));
  }
  gone_ = whole_domains(mine_);
  return true;
}

Agreement::State Agreement::vote(uint64_t now_usec) {
  if (!votes_) {
    votes_ = true;
    begin_round(now_usec);
    if (is_masked_itself(mine_)) return State::kMaskedItself;
  }
  const std::optional<RankBits> decision = heard_decision();
  if (!decision && !hear_votes(now_usec)) return State::kVotes;
  mine_ = decision ? *decision : mine_ | named_;
  each(gone_, [&](int rank) { mine_ |= masks_us(rank); });
  if (is_masked_itself(mine_)) return State::kMaskedItself;
  gone_ = whole_domains(mine_);
  if (decision || !differs_) {
    tell(kFirstDecision + settlement_ % 2, mine_, settlement_);
    return State::kDecided;
  }
  ++round_;
  begin_round(now_usec);
  return State::kVotes;
}

void Agreement::begin_round(uint64_t now_usec) {
  named_.reset();
  missed_ = gone_;
  differs_ = false;
  round_usec_ = now_usec;
  pending_.reset();
  for (size_t rank = 0; rank < static_cast<size_t>(context_.topo.num_ranks); ++rank) pending_.set(rank);
  pending_ &= ~(missed_ | bit_of(context_.rank));
  tell(static_cast<uint32_t>(settlement_ % 2 * 2 + round_ % 2), mine_, tag());
}

// Of a rank that is through, if there is one.
std::optional<RankBits> Agreement::heard_decision() const {
  for (int rank = 0; rank < context_.topo.num_ranks; ++rank) {
    if (rank == context_.rank || gone_.test(static_cast<size_t>(rank))) continue;
    const SharedVote& decision = heard_decision(rank, settlement_);
    if (decision.cast.read() >= settlement_) return bits_of(read_vote(decision));
  }
  return std::nullopt;
}

// True if nobody is waited for any more: all have voted, or are missed by somebody.
bool Agreement::hear_votes(uint64_t now_usec) {
  each(pending_, [&](int rank) {
    const SharedVote& vote = heard_vote(rank, round_);
    if (vote.cast.read() < tag()) return;
    const RankBits its = bits_of(read_vote(vote)), with_domains = whole_domains(its);
    named_ |= its;
    missed_ |= with_domains;
    differs_ |= with_domains != gone_;
    pending_ &= ~bit_of(rank);
  });
  pending_ &= ~missed_;
  each(pending_, [&](int rank) {
    if (now_usec - round_usec_ <= mask_usec_ * (is_waiting(rank) ? 2 : 1)) return;
    named_ |= bit_of(rank);
    missed_ |= bit_of(rank);
    differs_ = true;
  });
  pending_ &= ~missed_;
  return pending_.none();
}

// If a rank that we miss has gone on without us: whom it named.
RankBits Agreement::masks_us(int of) const {
  for (const uint64_t settlement : {settlement_, settlement_ + 1}) {
    const VoteWords decision = read_vote(heard_decision(of, settlement));
    const RankBits named = decision.cast != 0 ? bits_of(decision) : RankBits();
    if (whole_domains(named).test(static_cast<size_t>(context_.rank))) return named;
  }
  return {};
}

// With several domains the reason is a rank of ours. Most likely it has not voted and does not wait. Next likely is one
// that has not voted. Last comes one that others name, if they do not name all.
bool Agreement::is_masked_itself(const RankBits& ranks) {
  if (!whole_domains(ranks).test(static_cast<size_t>(context_.rank))) return false;
  missed_neighbour_ = context_.rank;
  int likeliest = (ranks & domain_) == domain_;
  each(domain_ & ~bit_of(context_.rank), [&](int rank) {
    const int silent = heard_vote(rank, 0).cast.read() > waiting() ? 0 : is_waiting(rank) ? 2 : 4;
    const int likely = silent + static_cast<int>(ranks.test(static_cast<size_t>(rank)));
    if (likely <= likeliest) return;
    likeliest = likely;
    missed_neighbour_ = rank;
  });
  return true;
}

RankBits Agreement::whole_domains(const RankBits& ranks) const {
  if (context_.topo.num_domains() == 1) return ranks;
  RankBits all;
  for (const std::vector<int>& members : context_.topo.members) {
    const auto is_there = [&](int rank) { return ranks.test(static_cast<size_t>(rank)); };
    if (ranks.any() && std::any_of(members.begin(), members.end(), is_there)) all |= bits_of(members);
  }
  return all;
}

// Also to ranks that we miss: who comes after all has to learn of it.
void Agreement::tell(uint32_t vote, const RankBits& ranks, uint64_t number) {
  cast_vote(context_.slots->own_votes->votes[vote], vote_of(ranks, number));
  for (Bell* voter : context_.slots->voters) voter->ring();
}

void Agreement::tell_waiting() {
  told_waiting_ = true;
  SharedVote& own = context_.slots->own_votes->votes[settlement_ % 2 * 2];
  if (own.cast.own() < waiting()) own.cast.publish(waiting());
  for (Bell* voter : context_.slots->voters) voter->ring();
}

}  // namespace uccl_ep::host
