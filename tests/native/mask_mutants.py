"""Mutants of what masks ranks, and of low latency on the host, as in `mutants.py`."""

from __future__ import annotations

MASKED_WHOLE = (
    "between domains a domain that loses a rank is masked as a whole, and its other ranks have an error"
)
MASKED_BY_NUMBER = (
    "between domains ranks are masked by their numbers in the group, before a combine and after"
)
LANDS_NOTHING = "a domain is masked, and no other, when a rank that has sent all lands nothing any more"
MANY = "ranks are masked in groups of more ranks than a word has bits"
MASK_MUTANTS = {
    "sets have one word of ranks": (
        MANY, "masks.cuh", "return (g.map.num_ranks + 63) / 64 * 2;", "return g.map.num_ranks != 0;",
    ),
    "a rank votes for another that it does not land": (
        LANDS_NOTHING, "low_latency_net.cuh", "if (k.g.net.from[source].holder == k.g.rank) return note",
        "if (k.g.net.num_relayed > 0) return note",
    ),
    "masks are told by the numbers that kernels use": (
        MASKED_BY_NUMBER, "low_latency_combine.cu", "out[g.rank_of[r]] = ", "out[r] = ",
    ),
    "votes are looked up by the numbers that kernels use": (
        MASKED_BY_NUMBER, "masks.cuh", "g.slot_net.far_votes[g.rank_of[of]]", "g.slot_net.far_votes[of]",
    ),
    "who is masked is settled before sums of other domains have come": (
        MASKED_WHOLE, "low_latency_combine.cu", "good &= wait_live_sums(k, settling, sent);",
        "good &= true || wait_live_sums(k, settling, sent);",
    ),
    "chunks go to a domain that is masked": (
        "between domains a rank goes on alone", "low_latency_net.cuh",
        " && !shared.shuns(k.g, k.first_of(to));", " && (true || !shared.shuns(k.g, k.first_of(to)));",
    ),
    "a rank that misses others does not ask whether they have masked it": (
        "parts of a group that a network joins again find that they have masked each other", "masks.cuh",
        "find_who_masks_us(votes, r, round);", "round.masked_us.add_word(0, 0);",
    ),
}  # fmt: skip

DIES = "the others go on without a rank that has died, and agree"
STOOD_STILL = "a rank that stood still is masked when it comes back, and the others agree"
NAMES = "a rank whose domain has lost one names that one"
AGREEMENT = "../host/agreement.cc"
AGREEMENT_MUTANTS = {
    "a rank votes for another that it does not land": (
        DIES, AGREEMENT, "if (rail == what.peer || rail == context_.rank) mine_", "if (rail >= 0) mine_",
    ),
    "a rank that waits has no more time than others": (
        STOOD_STILL, AGREEMENT, "(is_waiting(rank) ? 2 : 1)", "1",
    ),
    "no decision is taken from another": (
        DIES, AGREEMENT, "decision = heard_decision();", "decision = std::nullopt;",
    ),
    "a rank that misses others does not ask whether they have masked it": (
        "domains that nothing joins mask each other, and find that when they are joined again", AGREEMENT,
        "mine_ |= masks_us(rank);", "mine_ |= masks_us(rank) & RankBits();",
    ),
    "a decision names domains, not ranks": (
        NAMES, AGREEMENT, "kFirstDecision + settlement_ % 2, mine_,",
        "kFirstDecision + settlement_ % 2, gone_,",
    ),
    "who was named is forgotten": (NAMES, AGREEMENT, "mine_(named),", "mine_(whole_domains(named)),"),
    "a rank does not say that it waits": (
        "nobody is masked where all come", AGREEMENT,
        "tell_waiting();\n    return false;", "return false;",
    ),
    "votes have one word of ranks": (
        "groups of more ranks than a word has bits agree as small ones do", AGREEMENT,
        "for (uint32_t i = kVoteWords; i-- > 0;)", "for (uint32_t i = 1; i-- > 0;)",
    ),
}  # fmt: skip

EVERY_TOKEN = "one domain of 4 ranks gives every token back"
SLOT_ENGINE_MUTANTS = {
    "an operation takes the weights of an earlier one": (
        EVERY_TOKEN, "../host/slot_combine.cc",
        "told = slot_of(weights_of(src));", "told = weights_of(src).slot();",
    ),
    "rows that were sent are read later": (
        EVERY_TOKEN, "../host/slot_combine.cc",
        "if (args_.phase == SlotPhase::kBoth) return;", "if (args_.width > 0) return;",
    ),
}  # fmt: skip
