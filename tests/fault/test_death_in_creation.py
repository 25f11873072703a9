"""A rank is killed at each step of a creation: the others say so in time, and nothing stays in /dev/shm."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.process_ranks import START_TIMEOUT_S, Outcome, ProcessRanks, Rank
from tests.unit.by_hand import close, create
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.group.bootstrap import TorchBootstrap
from uccl_ep_train.group.patience import Patience

pytestmark = pytest.mark.fault

NOTICED_S = 2.0
NUM_RANKS, VICTIM = 3, 1
SETTINGS: dict[str, Any] = {"num_experts": 6, "hidden": 128, "budget_bytes": 8 << 20, "backend": "host"}
LAYOUTS: dict[str, dict[str, Any]] = {"probed": {}, "two domains": {"domains": (0, 0, 1)}}


class Stopping(TorchBootstrap):
    """Comes to a stop at a step, before or after it tells the others of it."""

    def __init__(self, rank: Rank, step: str, when: str) -> None:
        super().__init__(rank.group, timeout_s=START_TIMEOUT_S)
        self._own = rank
        self._stop = (step, when)

    def _post(self, step: int, frame: bytes, patience: Patience) -> None:
        name = frame.partition(b"\0")[0].decode()
        if self._stop == (name, "before"):
            self._wait()
        super()._post(step, frame, patience)
        if self._stop == (name, "after"):
            self._wait()

    def _wait(self) -> None:
        self._own.mark("stopped")
        self._own.wait_for("go")


def make(rank: Rank, layout: str, stops: Iterable[int], step: str, when: str) -> str:
    rank.mark("pid", os.getpid())
    config = EpConfig(**SETTINGS, **LAYOUTS[layout])
    bootstrap = (
        Stopping(rank, step, when)
        if rank.rank in stops
        else TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S)
    )
    Buffer(None, config, bootstrap=bootstrap).close()
    return "closed"


def segments_of(pids: Iterable[int]) -> set[str]:
    """Names carry the pid of who made them."""
    found = set()
    for pid in pids:
        found |= {path.name for path in Path("/dev/shm").glob(f"uccl_ep.{pid}.*")}
    return found


def check_noticed(outcome: Outcome, killed: float, pid: int) -> None:
    assert outcome.error == "PeerDied", outcome
    assert outcome.at - killed < NOTICED_S + 1.0, outcome
    assert outcome.fields["peer"] == VICTIM and outcome.fields["step"] == "bootstrap"
    for text in (
        f"rank {VICTIM} on {os.uname().nodename} (pid {pid}) died",
        "creation, ",
        "dmesg",
        "its log",
    ):
        assert text in outcome.message


STEPS = ["configuration", "allocate", "connect", "start"]
DEATHS = [
    *(("probed", step, "before") for step in STEPS),
    *(("two domains", step, "before") for step in ("allocate", "connect", "start")),
    ("probed", "processes", "after"),
    ("two domains", "connect", "after"),
]


@pytest.mark.parametrize(("layout", "step", "when"), DEATHS)
def test_a_death_is_noticed_and_its_memory_is_swept(layout: str, step: str, when: str) -> None:
    survivors = [rank for rank in range(NUM_RANKS) if rank != VICTIM]
    with ProcessRanks(NUM_RANKS, make, (layout, (VICTIM,), step, when)) as ranks:
        pids = ranks.wait_mark("pid")
        ranks.wait_mark("stopped", [VICTIM])
        killed = ranks.kill(VICTIM)
        outcomes = ranks.outcomes(timeout_s=20, ranks=survivors)
        for rank in survivors:
            check_noticed(outcomes[rank], killed, pids[VICTIM])
        assert segments_of(pids) == set()
    close(create(2))


def test_what_a_killed_job_left_goes_with_the_next_creation_and_what_lives_stays() -> None:
    everyone = tuple(range(NUM_RANKS))
    with (
        ProcessRanks(NUM_RANKS, make, ("two domains", everyone, "connect", "before")) as dead,
        ProcessRanks(NUM_RANKS, make, ("two domains", everyone, "connect", "before")) as living,
    ):
        pids = {job: job.wait_mark("pid") for job in (dead, living)}
        for job in (dead, living):
            job.wait_mark("stopped")
        for rank in everyone:
            dead.kill(rank)
        left, used = segments_of(pids[dead]), segments_of(pids[living])
        # A region of each rank, and an inbox of the transport.
        assert len(left) == len(used) == 2 * NUM_RANKS
        close(create(2))
        assert segments_of(pids[dead]) == set()
        assert segments_of(pids[living]) == used
        living.tell("go")
        assert living.results() == ["closed"] * NUM_RANKS
        assert segments_of(pids[living]) == set()


def test_a_rank_that_never_came_is_waited_for_and_is_not_said_to_have_died() -> None:
    """Control: what is not known to have died leaves the deadline."""
    with ProcessRanks(2, late, ()) as ranks:
        assert ranks.outcomes(timeout_s=20, ranks=[0])[0].error == "ArrivalTimeout"
        ranks.tell("go")


def late(rank: Rank) -> None:
    if rank.rank == 1:
        rank.wait_for("go")
        return
    time.sleep(0.1)
    Buffer(None, EpConfig(**SETTINGS), bootstrap=TorchBootstrap(rank.group, timeout_s=1.5))
