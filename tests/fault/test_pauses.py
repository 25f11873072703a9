"""A job that was paused for longer than its deadlines goes on; a rank that was paused alone is missed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import CommunicationError
from uccl_ep_train.group.bootstrap import TorchBootstrap

pytestmark = pytest.mark.fault

T, H, K, E, RANKS = 64, 256, 2, 8, 4
DEADLINE_S, PAUSE_S, GRACE_S = 4.0, 5.5, 2.0
STAGGER_S = 0.1  # from one rank's end of the pause to the next one's
LATE = 3
DOMAINS = {"one domain": (0, 0, 0, 0), "two domains": (0, 0, 1, 1)}


def make_buffer(
    rank: Rank, domains: tuple[int, ...], *, creation_s: float = START_TIMEOUT_S, **changes: Any
) -> Buffer:
    settings: dict[str, Any] = {
        "num_experts": E, "hidden": H, "domains": domains, "budget_bytes": 16 << 20, "dispatch_dtype": "bf16",
        "arrival_timeout_s": DEADLINE_S, "progress_timeout_s": DEADLINE_S,
    }  # fmt: skip
    return Buffer(
        None, EpConfig(**(settings | changes)), bootstrap=TorchBootstrap(rank.group, timeout_s=creation_s)
    )


def step_is_right(rank: int, buffer: Buffer, number: int) -> bool:
    """Each expert sees all tokens of all ranks that named it; each token gets itself back, twice."""
    x_TH = torch.full((T, H), float(rank + 4 * (number % 8)), dtype=torch.bfloat16)
    result = buffer.dispatch(x_TH, (torch.arange(T * K).reshape(T, K) + number) % E)
    return len(result.rows) == RANKS * T * K // RANKS and bool(
        torch.equal(buffer.combine(result.rows, result.handle), K * x_TH)
    )


def train(rank: Rank, domains: tuple[int, ...], seconds: float, gbytes_per_s: float) -> Any:
    """So many steps as take some `seconds`, pauses not counted; how many, and whether all were right."""
    with make_buffer(rank, domains, loop_gbytes_per_s=gbytes_per_s) as buffer:
        right, number = True, 0
        rank.mark("trains")
        # The number of steps has to be the same on all ranks.
        while number < seconds * 40:
            right &= step_is_right(rank.rank, buffer, number)
            number += 1
            time.sleep(0.01)
    return number, right


def pause(ranks: ProcessRanks, who: list[int], seconds: float = PAUSE_S) -> float:
    """Returns when the first of them was stopped."""
    at = min(ranks.freeze(rank) for rank in who)
    time.sleep(seconds)
    for rank in reversed(who):
        ranks.thaw(rank)
        time.sleep(STAGGER_S)
    return at


EVERYBODY = list(range(RANKS))


# The link of the second is so slow that chunks are under way whenever it is.
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("layout", "gbytes_per_s"), [("one domain", 0.0), ("two domains", 0.01)])
def test_a_job_that_was_paused_goes_on(layout: str, gbytes_per_s: float) -> None:
    with ProcessRanks(RANKS, train, (DOMAINS[layout], 3.0, gbytes_per_s)) as ranks:
        ranks.wait_mark("trains")
        time.sleep(0.3)
        pause(ranks, EVERYBODY)
        assert ranks.results(timeout_s=40) == [(120, True)] * RANKS


def wait_for_late_one(rank: Rank, where: str, domains: tuple[int, ...]) -> Any:
    """All wait for rank LATE, who waits for the parent. When the call that waited ended, and how."""
    if where == "creation" and rank.rank == LATE:
        rank.wait_for("go")
    if where == "creation":
        rank.mark("waits")
    buffer = make_buffer(rank, domains, creation_s=DEADLINE_S if where == "creation" else START_TIMEOUT_S)
    error = ""
    try:
        right = step_is_right(rank.rank, buffer, 0)
        if where != "creation":
            rank.mark("waits")
            if rank.rank == LATE:
                rank.wait_for("go")
            if where == "dispatch":
                right &= step_is_right(rank.rank, buffer, 1)
    except CommunicationError as caught:
        error, right = type(caught).__name__, False
    left = time.monotonic()
    buffer.close()
    return right, error, left, time.monotonic()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("where", "layout"),
    [
        ("creation", "two domains"),
        ("dispatch", "one domain"),
        ("dispatch", "two domains"),
        ("close", "one domain"),
    ],
)
def test_waits_for_a_rank_that_is_late_go_on_after_a_pause_of_all(where: str, layout: str) -> None:
    with ProcessRanks(RANKS, wait_for_late_one, (where, DOMAINS[layout])) as ranks:
        ranks.wait_mark("waits", [rank for rank in EVERYBODY if where != "creation" or rank != LATE])
        time.sleep(0.3)
        pause(ranks, EVERYBODY)
        ranks.tell("go", ranks=[LATE])
        results = ranks.results(timeout_s=20)
    assert [(right, error) for right, error, *_ in results] == [(True, "")] * RANKS
    # Nobody gave up waiting for the late one before it closed, too.
    assert min(closed for *_, closed in results) >= results[LATE][2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", DOMAINS)
def test_a_rank_that_was_paused_alone_is_missed_and_hears_of_it(layout: str) -> None:
    """Control: pauses of others count."""
    with ProcessRanks(RANKS, wait_for_late_one, ("dispatch", DOMAINS[layout])) as ranks:
        ranks.wait_mark("waits")
        ranks.tell("go", ranks=[LATE])  # it hears that when it goes on
        at = pause(ranks, [LATE])
        results = ranks.results(timeout_s=20)
    for rank, (right, error, left, _) in enumerate(results):
        assert not right and error in ("ArrivalTimeout", "ProgressTimeout", "PeerFailed"), (
            f"rank {rank}: {error}"
        )
        if rank != LATE:
            assert left - at < DEADLINE_S + GRACE_S
