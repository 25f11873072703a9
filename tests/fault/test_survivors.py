"""A frozen rank that wakes up after the others have gone on without it: it raises, and disturbs nobody."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases import EngineSpec, differences, expect, make_case, run_case
from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import CommunicationError
from uccl_ep_train.group.bootstrap import StoreBootstrap, TorchBootstrap

pytestmark = pytest.mark.fault

OPERATIONS_A_ROUND = 4  # dispatch, combine, and the backward of both
NUM_CASES = 25


@dataclass(frozen=True)
class Plot:
    """What happens.

    victim     who is frozen
    rounds     of the survivors
    thaw_at    round at which the victim wakes up; -1: it is killed instead
    keeps_old  the survivors go on while their broken buffers are still open
    settings   of all buffers, in the place of those that are given here
    """

    victim: int
    rounds: int
    thaw_at: int
    keeps_old: bool
    domains: tuple[int, ...] = (0, 0, 1, 1)
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(len(self.domains)) if rank != self.victim]


def work_until_it_fails(rank: Rank, plot: Plot) -> tuple[Buffer, CommunicationError]:
    """Big operations over a slow network: whenever the victim is struck, it is in the middle of one."""
    num_experts = 2 * len(plot.domains)
    config: dict[str, Any] = {
        "num_experts": num_experts, "hidden": 256, "domains": plot.domains, "budget_bytes": 4 << 20,
        "chunk_bytes": 2048, "window_chunks": 2, "loop_latency_us": 1000.0, "loop_seed": 3,
        "loop_duplicate_rate": 0.3, "arrival_timeout_s": 4.0, "progress_timeout_s": 2.0,
    }  # fmt: skip
    bootstrap = TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S)
    buffer = Buffer(None, EpConfig(**(config | dict(plot.settings))), bootstrap=bootstrap)
    x_TH = torch.randn(200, 256).bfloat16().to(buffer.device)
    topk_idx_TK = torch.rand(200, num_experts).argsort(dim=1)[:, :3].contiguous().to(buffer.device)
    turn = 0
    try:
        while True:
            result = buffer.dispatch(x_TH, topk_idx_TK)
            buffer.combine(result.rows, result.handle)
            turn += 1
            rank.mark(f"turn {turn}")
    except CommunicationError as error:
        return buffer, error


def outlive(rank: Rank, plot: Plot) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    old, error = work_until_it_fails(rank, plot)
    rank.mark("failed", (type(error).__name__, error.fields()))
    if rank.rank == plot.victim:
        return last_words(old)
    if not plot.keeps_old:
        old.close()
    place = plot.survivors.index(rank.rank)
    store = dist.distributed_c10d._get_default_store()
    bootstrap = StoreBootstrap(store, place, len(plot.survivors), name="survivors", timeout_s=START_TIMEOUT_S)
    domains = tuple(plot.domains[entry] for entry in plot.survivors)
    settings = (("budget_bytes", 8 << 20), ("loop_seed", 1), ("window_chunks", 2), ("chunk_bytes", 8192))
    spec = EngineSpec(domains=domains, num_experts=2 * len(domains), settings=settings + plot.settings)
    cases = [make_case(seed, spec, hidden=256) for seed in range(NUM_CASES)]
    wanted = [expect(case) for case in cases]
    found: list[str] = []
    with Buffer(None, EpConfig(**spec.config()), bootstrap=bootstrap) as buffer:
        for turn in range(plot.rounds):
            if turn == plot.thaw_at:
                rank.mark("half way")
            case, expected = cases[turn % NUM_CASES], wanted[turn % NUM_CASES]
            seen = run_case(case, expected, place, buffer)
            found += [f"round {turn}: {line}" for line in differences(case, expected, place, seen)]
        stats = buffer.stats()
        # Control: the results of another case are not these.
        other = [i for i in range(NUM_CASES) if cases[i].inputs[place].x.shape == case.inputs[place].x.shape]
        wrong = [line for i in other for line in differences(cases[i], wanted[i], place, seen)]
    assert len(other) == 1 or wrong
    rank.mark("ended")
    old.close()
    return {"found": found, "operations": stats["dispatch.calls"] + stats["combine.calls"]}


def last_words(old: Buffer) -> dict[str, Any]:
    """What the rank that slept can still do with its buffer."""
    errors = []
    x_TH = torch.zeros(1, 256, dtype=torch.bfloat16, device=old.device)
    topk_idx_TK = torch.zeros(1, 1, dtype=torch.int64, device=old.device)
    for call in (old.check, lambda: old.dispatch(x_TH, topk_idx_TK)):
        try:
            call()
        except CommunicationError as error:
            errors.append(type(error).__name__)
    started = time.monotonic()
    old.close()
    return {"errors": errors, "close_seconds": time.monotonic() - started}


def play(plot: Plot) -> None:
    with ProcessRanks(len(plot.domains), outlive, (plot,)) as ranks:
        ranks.wait_mark("turn 2")
        time.sleep(0.01)
        struck = ranks.freeze(plot.victim) if plot.thaw_at >= 0 else ranks.kill(plot.victim)
        for error, fields in ranks.wait_mark("failed", plot.survivors):
            assert error in (["ProgressTimeout", "ArrivalTimeout"] if plot.thaw_at >= 0 else ["PeerDied"])
            assert fields["peer"] == plot.victim, fields
        failed = max(ranks.mark_time(rank, "failed") for rank in plot.survivors) - struck
        if plot.thaw_at >= 0:
            ranks.wait_mark("half way", plot.survivors)
            thawed = time.monotonic()
            ranks.thaw(plot.victim)
            victim = ranks.outcomes(ranks=[plot.victim])[plot.victim]
            assert not victim.error, victim.trace
            assert len(victim.value["errors"]) == 2 and victim.value["close_seconds"] < 2, victim.value
            assert ranks.mark_time(plot.victim, "failed") - thawed < 2
            # It woke up while they were at work.
            assert all((rank, "ended") not in ranks._marks for rank in plot.survivors)
        outcomes = ranks.outcomes(timeout_s=100, ranks=plot.survivors)
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
        assert not outcome.value["found"], "\n".join(outcome.value["found"][:10])
        assert outcome.value["operations"] >= OPERATIONS_A_ROUND * plot.rounds
    operations = min(outcome.value["operations"] for outcome in outcomes.values())
    print(f"{plot}: failed after {failed:.2f} s, then {operations:.0f} exact operations")


@pytest.mark.timeout(120)
def test_a_thawed_rank_raises_and_a_thousand_operations_of_the_others_stay_exact() -> None:
    play(Plot(victim=1, rounds=250, thaw_at=25, keeps_old=False))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("keeps_old", [False, True])
@pytest.mark.parametrize("victim", range(4))
def test_whoever_it_was_and_whether_or_not_the_old_buffers_are_closed(victim: int, keeps_old: bool) -> None:
    play(Plot(victim, rounds=250, thaw_at=60, keeps_old=keeps_old))


@pytest.mark.timeout(60)
def test_after_a_death_the_others_go_on_with_a_new_buffer() -> None:
    play(Plot(victim=2, rounds=25, thaw_at=-1, keeps_old=True))
