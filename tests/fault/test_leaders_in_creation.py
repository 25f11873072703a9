"""Leaders and members that are killed or frozen during a creation are named by all other ranks in time."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest

from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.group import presence
from uccl_ep_train.group.bootstrap import TorchBootstrap
from uccl_ep_train.group.store_tree import StoreTree

pytestmark = pytest.mark.fault

NOTICED_S = 3.0
NUM_RANKS, RANKS_OF_A_HOST = 4, 2
LEADER, MEMBER = 2, 3
"""Of the second host."""
SETTINGS: dict[str, Any] = {
    "num_experts": 4, "hidden": 128, "budget_bytes": 8 << 20, "backend": "host", "domain_size": 1,
}  # fmt: skip


class StoppingTree(StoreTree):
    """Comes to a stop in the step "allocate": before it posts, or before its bundle or what it waits for."""

    rank_process: Rank
    stop: str

    def post(self, step: int, frame: bytes) -> None:
        self._stop_at("post", frame)
        super().post(step, frame)
        self._stop_at("collect", frame)

    def _stop_at(self, when: str, frame: bytes) -> None:
        if self.stop == when and frame.startswith(b"allocate\0"):
            self.rank_process.mark("stopped")
            self.rank_process.wait_for("go")


def make(rank: Rank, victim: int, stop: str, timeout_s: float) -> str:
    """Hosts, and what a rank sees of the other hosts' processes, are imitated."""
    here = presence.Presence.here()
    host = f"node{rank.rank // RANKS_OF_A_HOST}"
    placed = presence.Presence(presence.transport.Place(host, here.place.memory), here.pid, here.pid_space)
    keys = property(lambda process: process.place.host)
    StoppingTree.rank_process, StoppingTree.stop = rank, stop if rank.rank == victim else ""
    rank.mark("pid", os.getpid())
    with (
        mock.patch.object(presence.Presence, "here", lambda: placed),
        mock.patch.object(presence.Presence, "host_key", keys),
        mock.patch("uccl_ep_train.group.bootstrap.StoreTree", StoppingTree),
    ):
        bootstrap = TorchBootstrap(rank.group, timeout_s=timeout_s)
        Buffer(None, EpConfig(**SETTINGS), bootstrap=bootstrap).close()
    return "closed"


@pytest.mark.parametrize(
    ("victim", "stop"), [(0, "collect"), (LEADER, "post"), (LEADER, "collect"), (MEMBER, "post")]
)
def test_a_leader_or_a_member_that_is_killed_is_named_by_all(victim: int, stop: str) -> None:
    with ProcessRanks(NUM_RANKS, make, (victim, stop, START_TIMEOUT_S)) as ranks:
        pids = ranks.wait_mark("pid")
        ranks.wait_mark("stopped", [victim])
        killed = ranks.kill(victim)
        others = [rank for rank in range(NUM_RANKS) if rank != victim]
        for outcome in ranks.outcomes(timeout_s=20, ranks=others).values():
            assert outcome.error == "PeerDied" and outcome.fields["peer"] == victim, outcome
            assert f"rank {victim} on node{victim // 2} (pid {pids[victim]}) died" in outcome.message
            assert outcome.at - killed < NOTICED_S


@pytest.mark.parametrize(("victim", "stop"), [(0, "collect"), (LEADER, "collect")])
def test_a_leader_or_a_member_that_is_frozen_is_named_within_the_deadline(victim: int, stop: str) -> None:
    deadline_s = 1.5
    with ProcessRanks(NUM_RANKS, make, (victim, stop, deadline_s)) as ranks:
        ranks.wait_mark("stopped", [victim])
        frozen = ranks.freeze(victim)
        others = [rank for rank in range(NUM_RANKS) if rank != victim]
        for outcome in ranks.outcomes(timeout_s=20, ranks=others).values():
            assert outcome.error == "ArrivalTimeout" and outcome.fields["peer"] == victim, outcome
            assert f"look first at rank {victim} on node{victim // 2}" in outcome.message
            assert outcome.at - frozen < deadline_s + NOTICED_S
        ranks.tell("go", ranks=[victim])
        ranks.thaw(victim)
        # Its own pause does not count. What the others said ends it; or it has their frames, and their memory
        # is gone.
        error = ranks.outcomes(timeout_s=20, ranks=[victim])[victim].error
        assert error == ("TransportError" if victim == 0 else "ArrivalTimeout")


def test_ranks_that_only_pause_meet() -> None:
    """Control of both: nothing else ends such a creation."""
    with ProcessRanks(NUM_RANKS, make, (LEADER, "collect", START_TIMEOUT_S)) as ranks:
        ranks.wait_mark("stopped", [LEADER])
        ranks.freeze(LEADER)
        time.sleep(0.5)
        ranks.thaw(LEADER)
        ranks.tell("go")
        assert ranks.results() == ["closed"] * NUM_RANKS
