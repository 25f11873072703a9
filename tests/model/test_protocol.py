"""The protocol, searched to the end by spin: its models hold, and each broken rule is found."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parents[1] / "docs" / "protocol_model.md"
TIMEOUT_SECONDS = 100.0

# What pan prints of each claim; docs/protocol_model.md says what they mean.
CLAIMS = {
    "deadlock": r"invalid end state",
    "stale chunk": r"assertion violated .*landing\[.*==\(next\+1\)\)",
    "overwritten": r"assertion violated .*(>=landing\[|\)==staged\[|folded\[.*==merged\[|>=landed\[)",
    "overwritten packet": r"assertion violated .*packet\[.*==\(\(landing\[",
    "no credit": r"assertion violated \(serial<\(returned\+\d\)\)",
    "wrong credit": r"assertion violated \(serial<=posted\)",
    "not told": r"assertion violated[ (]+!\(.*found\[",
    "no cause": r"assertion violated .*&&found\[",
    "second cause": r"assertion violated \(claim\[\d\]==0\)",
    "taken for done": r"assertion violated .*!\(parts\[",
    "taken twice": r"assertion violated  !\(taken\[",
    "older": r"assertion violated \(\d>newest\)",
    "newest lost": r"assertion violated \(newest==\d\)",
    "miscounted": r"assertion violated \(first\[",
    "stale row": r"assertion violated \(half\[.*>=",
    "overwritten row": r"assertion violated \(half\[.*<=",
    "wrong chunk": r"assertion violated \(landing\[.*==\(\(2\*",
    "overwritten piece": r"assertion violated .*piece\[",
    "late write": r"assertion violated \( !\(renewed\)\|\|\(memory!=1\)\)",
    "lost event": r"assertion violated \(\(flag\[0\]==came\[0\]\)",
    "told early": r"assertion violated \(seen_count.*<=came\[",
    "write into nothing": r"assertion violated  !\(unmapped\)",
}


@dataclass(frozen=True)
class Search:
    model: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.model, *self.options))


EVENTS = Search("events")

REAL = (
    Search("channel", ("WINDOW=1",)),
    Search("channel", ("WINDOW=2", "FEW_COPIES")),
    Search("headers"),
    Search("dispatch"),
    Search("relay"),
    EVENTS,
    Search("faults", ("OPS=1",)),
    Search("faults", ("OPS=2", "NO_CRASH")),
    Search("faults", ("OPS=2", "NO_FREEZE")),
    Search("windows"),
    Search("windows", ("NET",)),
    Search("tails"),
    Search("window_sums"),
    Search("window_sums", ("BATCHES",)),
    Search("datagrams", ("FAULTS=1",)),
    Search("datagrams", ("FAULTS=3", "ONE_FINDER")),
    Search("datagrams", ("HEARTBEATS", "FAULTS=2")),
    Search("byes"),
)

# Up to a minute on a core of its own.
LARGE = (
    Search("faults", ("OPS=2",)),
    Search("datagrams", ("FAULTS=2",)),
)

ONE_SLOT, TWO_SLOTS = Search("channel", ("WINDOW=1",)), Search("channel", ("WINDOW=2", "FEW_COPIES"))
NO_CRASH = Search("faults", ("OPS=1", "NO_CRASH"))
ONE_DOMAIN, TWO_DOMAINS, SUMS = Search("windows"), Search("windows", ("NET",)), Search("window_sums")
TAILS = Search("tails")
MESSAGES, MANY_LOST = Search("datagrams", ("FAULTS=1",)), Search("datagrams", ("FAULTS=3", "ONE_FINDER"))
BEATS = Search("datagrams", ("HEARTBEATS", "FAULTS=2"))
# The rule that a mutant breaks is its name; the claim is what must fail.
MUTANTS = {
    # Contract 5: transport.
    "UNCOUNTED": (TWO_SLOTS, "stale chunk"),
    "ORDERED_CREDITS": (ONE_SLOT, "deadlock"),
    "OLD_IMMEDIATE_ACCEPTED": (ONE_SLOT, "deadlock"),
    "NARROW_SERIAL": (ONE_SLOT, "no credit"),
    "CREDIT_NOT_HELD": (Search("channel", ("WINDOW=1", "FEW_COPIES")), "wrong credit"),
    "REPOST_UNFLUSHED": (ONE_SLOT, "overwritten"),
    "LATE_REPORT": (ONE_SLOT, "no credit"),
    "MEMORY_REUSED": (NO_CRASH, "late write"),
    "UNMAPPED_EARLY": (NO_CRASH, "write into nothing"),
    "NOT_REPEATED": (MESSAGES, "not told"),
    "KNOWN_NOT_ACKNOWLEDGED": (MANY_LOST, "deadlock"),
    "DROPPED_ACKNOWLEDGED": (MESSAGES, "not told"),
    "NONCE_NOT_COMPARED": (MESSAGES, "no cause"),
    "CHECKSUM_NOT_COMPARED": (MESSAGES, "deadlock"),
    "REPEAT_TAKEN": (MESSAGES, "taken twice"),
    "OLDER_TAKEN": (BEATS, "older"),
    "OLD_ACKNOWLEDGEMENT_COUNTS": (BEATS, "newest lost"),
    "BYE_BEFORE_ERROR": (MESSAGES, "taken for done"),
    "BYE_SETTLES_ERROR": (MESSAGES, "not told"),
    "CLOSING_NOT_TOLD": (MESSAGES, "not told"),
    "TOLD_FOR_EVER": (MESSAGES, "deadlock"),
    "ERROR_KEPT": (Search("byes"), "taken for done"),
    "BYE_OVERTAKES_ERROR": (Search("byes"), "taken for done"),
    "RAIL_STANDS_FOR_ALL": (Search("byes"), "taken for done"),
    "BYE_KEPT": (Search("byes"), "deadlock"),
    "SLOT_BY_CHUNK": (TWO_DOMAINS, "wrong chunk"),
    "SLOT_NOT_AWAITED": (TWO_DOMAINS, "wrong chunk"),
    "FIRST_WINDOW_AGAIN": (TWO_DOMAINS, "wrong chunk"),
    "RETURNS_NOT_AWAITED": (SUMS, "wrong chunk"),
    "PACKET_OVER_TAIL": (TAILS, "overwritten packet"),
    # Contract 6: flags.
    "FLAG_UNSTAMPED": (ONE_SLOT, "stale chunk"),
    "FLAG_RESET": (ONE_SLOT, "deadlock"),
    "EPOCH_RECORDED": (ONE_SLOT, "stale chunk"),
    "VISIBLE_TO_ONE": (ONE_SLOT, "stale chunk"),
    "STAMP_BEFORE_DATA": (ONE_SLOT, "stale chunk"),
    "TAKEN_BEFORE_LOADS": (ONE_SLOT, "stale chunk"),
    "ABSENT_NOT_TAKEN": (ONE_SLOT, "deadlock"),
    "ABSENT_PIECE": (Search("relay"), "deadlock"),
    "FREE_NOT_AWAITED": (ONE_SLOT, "no credit"),
    "OWN_FREE_NOT_AWAITED": (Search("dispatch"), "overwritten"),
    "FOLD_NOT_AWAITED": (Search("relay"), "overwritten"),
    "ONE_HEADER_SLOT": (Search("headers"), "overwritten"),
    "FLAG_BY_OPERATION": (ONE_DOMAIN, "stale row"),
    "WINDOWS_RESTART": (ONE_DOMAIN, "stale row"),
    "WINDOWS_OF_OWN": (ONE_DOMAIN, "miscounted"),
    "HALF_NOT_AWAITED": (ONE_DOMAIN, "overwritten row"),
    "READ_BY_FIRST_BLOCK": (ONE_DOMAIN, "overwritten row"),
    "NOTHING_NOT_READ": (TWO_DOMAINS, "deadlock"),
    "TAILS_RESTART": (TAILS, "wrong chunk"),
    "TAIL_NOT_READ_WITHOUT_ROWS": (TAILS, "wrong chunk"),
    "MERGED_RESTARTS": (SUMS, "overwritten piece"),
    "HALF_FOLDED_EARLY": (SUMS, "overwritten piece"),
    "FIRST_LIKE_OTHERS": (SUMS, "overwritten piece"),
    "NOTHING_NOT_MERGED": (SUMS, "deadlock"),
    # The same: events.
    "EVENT_IN_PARTS": (EVENTS, "lost event"),
    "EVENT_BEFORE_STAMP": (EVENTS, "told early"),
    "EVENT_BEFORE_BOARD": (EVENTS, "lost event"),
    "OVERTAKEN_WAITS": (EVENTS, "lost event"),
    "BOARD_READ_FIRST": (EVENTS, "lost event"),
    "ONE_LAP_BIT": (EVENTS, "lost event"),
    "IDLE_TOO_LONG": (EVENTS, "lost event"),
    "POSITION_KEPT": (EVENTS, "lost event"),
    "GAP_SKIPPED": (EVENTS, "lost event"),
    # Contract 11: no circular waits.
    "COUNTING_STAGES_ALL": (ONE_DOMAIN, "deadlock"),
    "PUSH_NEEDS_SLOT": (TAILS, "deadlock"),
    "TAILS_IN_ANY_ORDER": (TAILS, "deadlock"),
    "MERGE_THEN_RETURN": (SUMS, "deadlock"),
    "BORROWED_SLOT": (Search("dispatch"), "deadlock"),
    "OPPOSITE_ORDERS": (Search("dispatch"), "deadlock"),
    "FOLD_OPPOSITE_ORDERS": (Search("relay"), "deadlock"),
    "ROWS_UNORDERED": (Search("relay"), "deadlock"),
    "CREDIT_BY_FIRST_READER": (ONE_SLOT, "overwritten"),
    "CREDIT_COSTS_CREDIT": (Search("dispatch"), "deadlock"),
    "ROUTING_IN_ROWS_WINDOW": (Search("dispatch"), "deadlock"),
    "ERROR_COSTS_CREDIT": (NO_CRASH, "not told"),
    "RELAY_ONE_WINDOW": (Search("relay"), "deadlock"),
    "STAGE_THEN_PLACE": (Search("dispatch"), "deadlock"),
    "FOLD_THEN_MERGE": (Search("relay"), "deadlock"),
    # Contract 7: errors.
    "PEERS_FIRST": (NO_CRASH, "not told"),
    "ERROR_BY_RELAY": (NO_CRASH, "not told"),
    "LAST_CAUSE_STAYS": (MESSAGES, "second cause"),
}


def run(command: list[str], folder: Path, timeout: float = TIMEOUT_SECONDS) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def search(
    what: Search,
    folder: Path,
    optimise: str,
    table: int,
    depth: int = 100_000,
    timeout: float = TIMEOUT_SECONDS,
) -> str:
    """What pan prints of a model. `table`: log2 of the buckets of its hash table; it grows by itself."""
    for tool, package in (("spin", "spin"), ("gcc", "gcc")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on the path (Debian package: {package})")
    run(["spin", *(f"-D{option}" for option in what.options), "-a", str(HERE / f"{what.model}.pml")], folder)
    run(["gcc", "-w", "-DSAFETY", *optimise.split(), "-o", "pan", "pan.c"], folder)
    return run(["./pan", f"-m{depth}", f"-w{table}"], folder, timeout)


def num_errors(output: str) -> int:
    match = re.search(r"errors: (\d+)", output)
    assert match is not None, output
    return int(match.group(1))


def is_exhaustive(output: str) -> bool:
    """Every reachable state was visited and kept whole: no limit of depth or memory, no states as hashes."""
    cut = ("Search not completed", "max search depth too small", "out of memory", "memory bound")
    return "Full statespace search for:" in output and not any(reason in output for reason in cut)


def check_holds(output: str) -> None:
    assert num_errors(output) == 0, output
    assert is_exhaustive(output), output
    assert re.search(r"invalid end states\s+\+", output) and re.search(r"assertion violations\s+\+", output)


@pytest.mark.parametrize("what", REAL, ids=str)
def test_the_protocol_holds_in_every_state(what: Search, tmp_path: Path) -> None:
    check_holds(search(what, tmp_path, "-O1", table=23))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("what", LARGE, ids=str)
def test_the_protocol_holds_with_more_faults(what: Search, tmp_path: Path) -> None:
    # States are stored whole, but in parts that they share: a third of the memory.
    check_holds(search(what, tmp_path, "-O2 -DCOLLAPSE", table=25, timeout=1200))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_rule_is_found(mutant: str, tmp_path: Path) -> None:
    what, claim = MUTANTS[mutant]
    # Not optimised: a counterexample is found sooner than the optimiser is done.
    output = search(Search(what.model, (*what.options, mutant)), tmp_path, "-O0", table=18)
    assert num_errors(output) == 1, output
    assert re.search(CLAIMS[claim], output), output
    assert list(tmp_path.glob("*.trail")), "pan wrote no trace"


def test_a_search_that_was_cut_off_is_noticed(tmp_path: Path) -> None:
    assert not is_exhaustive(search(Search("headers"), tmp_path, "-O0", table=18, depth=20))


def test_every_mutant_is_tested_and_documented() -> None:
    choices = {"WINDOW", "FEW_COPIES", "OPS", "NO_CRASH", "NO_FREEZE", "NET"}
    choices |= {"FAULTS", "ONE_FINDER", "HEARTBEATS", "BATCHES"}
    macros = {
        name
        for model in HERE.glob("*.pml")
        for line in re.findall(r"^#(?:ifn?def|if|elif)\b.*$", model.read_text(), re.MULTILINE)
        for name in re.findall(r"\b[A-Z][A-Z_]+\b", line)
    }
    assert macros - choices == set(MUTANTS)
    assert [name for name in MUTANTS if f"`{name}`" not in DOCUMENT.read_text()] == []
