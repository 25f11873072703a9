#include "backend/host/agreement.h"

namespace uccl_ep::host {
namespace {

RankBits bits_of(const std::vector<int>& ranks) {
  RankBits bits = 0;
  for (const int rank : ranks) bits |= bit_of(rank);
  return bits;
}
template <typename Take>
void each(RankBits bits, Take take) {
  for (; bits != 0; bits &= bits - 1) take(std::countr_zero(bits));
}

}  // namespace

Agreement::Agreement(const HostContext& context, uint64_t settlement, RankBits gone, uint64_t mask_usec,
                     uint64_t now_usec)
    : context_(context),
      settlement_(settlement),
      mask_usec_(mask_usec),
      domain_(context.topo.num_domains() > 1 ? bits_of(context.members()) : 0),
      gone_(gone),
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
    if (rail == what.peer || rail == context_.rank) gone_ |= bit_of(what.peer) & ~bit_of(context_.rank);
  }
  return true;
}

Agreement::State Agreement::vote(uint64_t now_usec) {
  if (!votes_) {
    votes_ = true;
    begin_round(now_usec);
    if (is_masked_itself(mine_)) return State::kMaskedItself;
  }
  const bool decided = hear_decisions();
  if (!decided && !hear_votes(now_usec)) return State::kVotes;
  RankBits next = decided ? gone_ : whole_domains(mine_ | missed_);
  each(mine_, [&](int rank) {
    if (masks_us(rank)) next |= bit_of(context_.rank);
  });
  if (is_masked_itself(next)) return State::kMaskedItself;
  gone_ = next;
  if (decided || !differs_) {
    tell(kFirstDecision + settlement_ % 2, gone_, settlement_);
    return State::kDecided;
  }
  ++round_;
  begin_round(now_usec);
  return State::kVotes;
}

void Agreement::begin_round(uint64_t now_usec) {
  mine_ = whole_domains(gone_);
  missed_ = 0;
  differs_ = false;
  round_usec_ = now_usec;
  pending_ = 0;
  for (int rank = 0; rank < context_.topo.num_ranks; ++rank) pending_ |= bit_of(rank);
  pending_ &= ~(mine_ | bit_of(context_.rank));
  tell(static_cast<uint32_t>(settlement_ % 2 * 2 + round_ % 2), mine_, tag());
}

// Of ranks that are through. True if there is one: `gone_` is its decision.
bool Agreement::hear_decisions() {
  bool decided = false;
  for (int rank = 0; rank < context_.topo.num_ranks && !decided; ++rank) {
    if (rank == context_.rank || (mine_ & bit_of(rank)) != 0) continue;
    const SharedVote& decision = heard_decision(rank, settlement_);
    if (decision.cast.read() < settlement_) continue;
    gone_ = decision.ranks.load();
    decided = true;
  }
  return decided;
}

// True if nobody is waited for any more: all have voted, or are missed by somebody.
bool Agreement::hear_votes(uint64_t now_usec) {
  each(pending_, [&](int rank) {
    const SharedVote& vote = heard_vote(rank, round_);
    if (vote.cast.read() < tag()) return;
    const RankBits its = vote.ranks.load();
    missed_ |= its;
    differs_ |= its != mine_;
    pending_ &= ~bit_of(rank);
  });
  pending_ &= ~missed_;
  each(pending_, [&](int rank) {
    if (now_usec - round_usec_ <= mask_usec_ * (is_waiting(rank) ? 2 : 1)) return;
    missed_ |= bit_of(rank);
    differs_ = true;
  });
  pending_ &= ~missed_;
  return pending_ == 0;
}

// A rank that we miss has gone on without us.
bool Agreement::masks_us(int of) const {
  for (const uint64_t settlement : {settlement_, settlement_ + 1}) {
    const SharedVote& decision = heard_decision(of, settlement);
    if (decision.cast.read() != 0 && (decision.ranks.load() & bit_of(context_.rank)) != 0) return true;
  }
  return false;
}

// With several domains the reason is a rank of ours that has not voted, and most likely does not wait, either. Votes
// name the whole domain.
bool Agreement::is_masked_itself(RankBits ranks) {
  missed_neighbour_ = context_.rank;
  each(ranks & domain_ & ~bit_of(context_.rank), [&](int rank) {
    const bool is_first = missed_neighbour_ == context_.rank;
    const bool is_likelier = is_first || is_waiting(missed_neighbour_);
    if (heard_vote(rank, 0).cast.read() <= waiting() && is_likelier && (is_first || !is_waiting(rank)))
      missed_neighbour_ = rank;
  });
  return (ranks & bit_of(context_.rank)) != 0;
}

RankBits Agreement::whole_domains(RankBits ranks) const {
  if (context_.topo.num_domains() == 1) return ranks;
  RankBits all = 0;
  for (const std::vector<int>& members : context_.topo.members)
    if (const RankBits its = bits_of(members); (ranks & its) != 0) all |= its;
  return all;
}

// Also to ranks that we miss: who comes after all has to learn of it.
void Agreement::tell(uint32_t vote, RankBits ranks, uint64_t number) {
  SharedVote& own = context_.slots->own_votes[vote];
  own.ranks.store(ranks);
  own.cast.publish(number);
  for (Bell* voter : context_.slots->voters) voter->ring();
}

void Agreement::tell_waiting() {
  told_waiting_ = true;
  SharedVote& own = context_.slots->own_votes[settlement_ % 2 * 2];
  if (own.cast.own() < waiting()) own.cast.publish(waiting());
  for (Bell* voter : context_.slots->voters) voter->ring();
}

}  // namespace uccl_ep::host
