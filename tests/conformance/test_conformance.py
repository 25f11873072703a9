"""Every transport keeps the same contract: a case per transport and claim, in programs with sanitizers."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.conformance.build import FLAVOURS, build
from tests.native import building

HERE = Path(__file__).resolve().parent
KINDS = ("loop", "ofi", "verbs")
SKIPPED = 77  # the program's exit status
# What makes a transport possible that this machine cannot run.
ELSEWHERE = {"verbs": "; scripts/soft_roce.sh runs these"}
CLAIM = re.compile(r'^(SLOW_)?CLAIM\("((?:[^"\\]|\\.)*)"\)', re.MULTILINE)
# Sanitizers make programs several times slower, and other tests use the machine as well.
PATIENCE = "4"


def claims() -> list[tuple[str, bool]]:
    """(sentence, whether it is slow), as the program lists them."""
    sources = sorted(HERE.glob("*_claims.cc"))
    return [(claim, bool(slow)) for path in sources for slow, claim in CLAIM.findall(path.read_text())]


def cases(*, sanitizer: str) -> list[object]:
    return [
        pytest.param(
            kind, claim, id=f"{kind}: {claim}", marks=[pytest.mark.slow] * (slow or sanitizer == "thread")
        )
        for kind in KINDS
        for claim, slow in claims()
    ]


@cache
def program(sanitizer: str) -> Path:
    try:
        building.compiler()
    except building.CannotBuild as reason:
        pytest.skip(str(reason))
    return build(FLAVOURS[sanitizer])


def conformance(*arguments: str, sanitizer: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return building.run([program(sanitizer), *arguments, "--patience", PATIENCE], timeout)


@cache
def obstacle(kind: str, sanitizer: str) -> str:
    """Why the transport cannot be tried here; empty: it can."""
    result = conformance(kind, "--probe", sanitizer=sanitizer, timeout=60)
    if result.returncode == 0:
        return ""
    assert result.returncode == SKIPPED, result.stdout + result.stderr
    return result.stdout.strip() + ELSEWHERE.get(kind, "")


def holds(kind: str, claim: str, sanitizer: str) -> None:
    reason = obstacle(kind, sanitizer)
    if reason:
        pytest.skip(reason)
    result = conformance(kind, claim, sanitizer=sanitizer, timeout=1000)
    if result.returncode == SKIPPED:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"ok: {claim}"), result.stdout


# The first case waits for the compiler.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "claim"), cases(sanitizer="memory"))
def test_claim(kind: str, claim: str) -> None:
    holds(kind, claim, "memory")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "claim"), cases(sanitizer="thread"))
def test_claim_without_data_races(kind: str, claim: str) -> None:
    holds(kind, claim, "thread")


@pytest.mark.timeout(1200)
def test_every_claim_is_a_case() -> None:
    listed = conformance("loop", "--list", sanitizer="memory", timeout=60).stdout.splitlines()
    assert sorted(listed) == sorted(claim for claim, _ in claims())


# ------------------------------------------------------------------------------------- seeds


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("first", "last", "sanitizer"),
    [
        pytest.param(1, 200, "memory", id="200 seeds"),
        pytest.param(201, 12_200, "plain", id="12,000 seeds", marks=pytest.mark.slow),
    ],
)
def test_streams_are_whole_under_faults_drawn_from_seeds(first: int, last: int, sanitizer: str) -> None:
    result = conformance("loop", "--seeds", str(first), str(last), sanitizer=sanitizer, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == f"ok: {last - first + 1} seeds, 0 failed\n"


@pytest.mark.timeout(1200)
def test_a_seed_that_fails_prints_how_to_run_it_again_and_fails_again() -> None:
    """Negative control, with a transport that loses bytes."""
    result = conformance("loop", "--seeds", "1", "40", "--broken", sanitizer="memory", timeout=300)
    assert result.returncode == 1, result.stdout
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED: seed ")]
    assert failed
    match = re.search(r"again: conformance (loop --seed \d+ --broken)$", failed[-1])
    assert match, failed[-1]
    again = conformance(*match.group(1).split(), sanitizer="memory", timeout=60)
    assert again.returncode == 1
    assert again.stdout.splitlines()[0] == failed[-1]


# ----------------------------------------------------------------------------------- program


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        (("loop", "no such claim"), 1, "FAILED: no such claim\n"),
        (("tokenring",), SKIPPED, "skipped: tokenring: this build has no transport tokenring\n"),
        (("loop", "--sloow"), 1, ""),
        (("loop", "--seed", "1x"), 1, ""),
    ],
)
def test_what_cannot_be_run_is_no_success(arguments: tuple[str, ...], status: int, printed: str) -> None:
    result = conformance(*arguments, sanitizer="memory", timeout=60)
    assert (result.returncode, result.stdout) == (status, printed), result.stderr
