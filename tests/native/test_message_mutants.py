"""Negative control of the claims about messages: each fails where the code lacks what it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native import building
from tests.native.building import run

HERE = Path(__file__).resolve().parent
LOST = "a message that is lost, doubled, late or overtaken reaches every rank once, within a second"
STOPPED = (
    "who is stopped for a minute finds a dozen heartbeats in its queue, and is told the next when it is heard"
)
TOLD_BY_ONE = "what a rank hears of one whose rows it lands its domain knows"
LEFT = "an error needs not reach a rank that has left or died, though only another rank of the domain knows"
# (a claim that does not hold, what the file says, what a mutant says instead)
MESSAGE_MUTANTS = {
    "no message is sent again": (
        LOST, "debt.due_usec = now_usec + std::min(", "debt.due_usec = UINT64_MAX / 2 + now_usec + std::min(",
    ),
    "no message is acknowledged": (
        "a network without faults has one datagram for a message and one for its acknowledgement",
        "  acknowledge(header);\n", "",
    ),
    "what has come is not acknowledged again": (
        LOST, "  acknowledge(header);\n",
        "  if (header.serial > peers_[header.sender].newest[header.kind]) acknowledge(header);\n",
    ),
    "what comes again is taken again": (LOST, "if (header.serial <= newest) {", "if (false) {"),
    "an old acknowledgement stands for the newest message": (
        "of heartbeats that overtake each other the newest counts, and old acknowledgements are not its own",
        "header.serial == composed_[header.kind].serial", "true",
    ),
    "a bye does not wait for the error": (
        "a bye comes after the error of its sender, whatever the network loses",
        "peer.debts[static_cast<size_t>(MessageKind::kError)].owed", "false",
    ),
    "a rank that is stopped finds its queue full of heartbeats": (
        STOPPED, "kind == MessageKind::kHeartbeat ? kSilentPauseUsec : ", "",
    ),
    "who is heard again is told no sooner": (
        STOPPED, "  wake(peers_[header.sender]);\n", "",
    ),
    "who has left is told for ever": (
        "who leaves is told twelve times at most, who stays until it acknowledges, who is gone never again",
        "peer.parting && debt.attempts >= kMostParting", "false",
    ),
}  # fmt: skip
HEALTH_MUTANTS = {
    "who said bye is not told of an error": (
        "a rank that said bye and waits for the others learns of an error that one of them finds then",
        "if (!remote.dead) messages_.owe(remote.rank, MessageKind::kError);",
        "if (!closed(remote.rank)) messages_.owe(remote.rank, MessageKind::kError);",
    ),
    "who is no rail is told too": (
        "a rank gets heartbeats from one rank of each other domain",
        "remote.lands_our_rows && ",
        "",
    ),
    "a bye is kept from the domain": (
        TOLD_BY_ONE,
        "its->ended.publish(kSaidBye);",
        "{}",
    ),
    "a rank is silent because its teller is": (
        "a rank is not silent because the one that would tell of it is",
        " || unknown",
        " || (unknown && false)",
    ),
    "who has left is told, though another rank has its bye": (
        LEFT,
        "      messages_.part(remote.rank);",
        "",
    ),
    "who has died is told, though another rank found it": (
        LEFT,
        "      messages_.forget(remote.rank);",
        "",
    ),
}
# (the file, who claims)
MUTANTS = {
    **{name: ("messages.cc", "messages_claims.cc", *of) for name, of in MESSAGE_MUTANTS.items()},
    **{name: ("health.cc", "life_claims.cc", *of) for name, of in HEALTH_MUTANTS.items()},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_breaks_its_claim(mutant: str, tmp_path: Path) -> None:
    name, claims, claim, right, wrong = MUTANTS[mutant]
    file = Path("proxy") / name
    text = (building.CSRC / file).read_text()
    assert text.count(right) == 1
    changed = building.shutil.copytree(building.CSRC, tmp_path / "csrc") / file
    changed.write_text(text.replace(right, wrong))
    sources = [path for path in building.product_sources() if path != building.CSRC / file]
    binary = building.link(tmp_path / "claims", [HERE / claims, changed, *sources], building.MEMORY)
    result = run([binary, claim], 150)
    assert result.returncode != 0, result.stdout
    assert "FAILED: " in result.stdout, result.stdout + result.stderr
