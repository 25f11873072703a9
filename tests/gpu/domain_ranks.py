"""Processes that do one job after another on GPUs, which they may share; each is a rank of a buffer's group.

    def job(seat: Seat, factor: int) -> float:        # at module level: it is pickled by name
        with seat.buffer({"num_experts": 8, "hidden": 256, "domains": (0, 1)}) as buffer:
            ...

    values = domain_ranks.run(2, job, 3)              # by rank; `domain_ranks` is a fixture

They outlive a test that passes, since a process needs seconds until it can use a GPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases import LAYOUTS, Case, EngineSpec, differences, expect, make_case, run_case
from tests.machine import needs_gpus
from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig, memory_plan
from uccl_ep_train.group.bootstrap import StoreBootstrap

NEEDS_GPU = [
    pytest.mark.gpu,
    needs_gpus(),
]
MOST_RANKS = 6
IDLE_S = 3600.0

# Ranks that share a GPU take turns on it.
SETTINGS: dict[str, Any] = {
    "backend": "cuda", "budget_bytes": 128 << 20, "arrival_timeout_s": 40.0, "progress_timeout_s": 20.0,
    "num_sms": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Seat:
    """A rank's place in a job."""

    rank: int
    num_ranks: int
    job: int

    def buffer(self, config: dict[str, Any]) -> Buffer:
        store = dist.distributed_c10d._get_default_store()
        bootstrap = StoreBootstrap(
            store, self.rank, self.num_ranks, name=f"job {self.job}", timeout_s=START_TIMEOUT_S
        )
        return Buffer(None, EpConfig(**(SETTINGS | config)), bootstrap=bootstrap)


def take_gpu(rank: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())


def serve(rank: Rank) -> None:
    take_gpu(rank.rank)
    while True:
        number, num_ranks, job, args = rank.wait_for("job", IDLE_S)
        trace, value = "", None
        try:
            value = job(Seat(rank.rank, num_ranks, number), *args)
        except BaseException:  # a failed pytest.raises is no Exception
            trace = traceback.format_exc()
        torch.cuda.empty_cache()
        rank.mark(f"done {number}", (trace, value))


class DomainRanks:
    """The processes; started by the first job, and anew by the one after a failure."""

    def __init__(self) -> None:
        self._ranks: ProcessRanks | None = None
        self._num_jobs = 0

    def run(self, num_ranks: int, job: Callable[..., Any], *args: Any, timeout_s: float = 55.0) -> list[Any]:
        """job(seat, *args) on ranks 0 to num_ranks - 1 at once; what it returned, by rank."""
        if self._ranks is None:
            self._ranks = ProcessRanks(MOST_RANKS, serve)
            timeout_s += START_TIMEOUT_S
        self._num_jobs += 1
        everybody = range(num_ranks)
        try:
            self._ranks.tell("job", (self._num_jobs, num_ranks, job, args), everybody)
            results = self._ranks.wait_mark(f"done {self._num_jobs}", everybody, timeout_s)
            traces = [f"rank {rank}:\n{trace}" for rank, (trace, _) in enumerate(results) if trace]
            assert not traces, "\n".join(traces)
        except BaseException:
            self.close()
            raise
        return [value for _, value in results]

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


# ------------------------------------------------------------------------------------ generated cases


def spec_of(layout: str, **changes: Any) -> EngineSpec:
    domains = LAYOUTS[layout]
    fixed: dict[str, Any] = {"num_experts": 2 * len(domains), "hidden": 1024}
    return EngineSpec(**{**fixed, "domains": domains, **changes})


def wrong_with(case: Case, seat: Seat, buffer: Buffer, given: Case | None = None) -> list[str]:
    """What this rank gets of a case (or of `given` in its place) that is not what the oracle says of it."""
    expected = expect(case)
    seen = run_case(given or case, expected, seat.rank, buffer)
    return [f"{line}: {case!r}" for line in differences(case, expected, seat.rank, seen)]


def tight_spec(layout: str, **settings: Any) -> EngineSpec:
    """Wide rows in a page more than the least budget: windows of few tokens, chunks of few rows."""
    spec = spec_of(layout, num_experts=8, hidden=4096)
    config = EpConfig(**spec.config(), backend="cuda")
    least = memory_plan(config, spec.num_ranks).least_budget_bytes
    return replace(spec, settings=(("budget_bytes", least + (2 << 20)), *settings.items()))


def as_many_as_fit(buffer: Buffer) -> tuple[int, ...]:
    """Tokens of each rank: of the first as many as the buffer takes, or 700; of the others fewer, and
    none."""
    most = min(int(buffer.stats()["memory.max_tokens"]), 700)
    return tuple((most, most * 4 // 5, 0, most // 4)[rank % 4] for rank in range(buffer.num_ranks))


def run_cases(
    seat: Seat, spec: EngineSpec, seeds: Iterable[int], filled: bool, options: dict[str, Any]
) -> tuple[list[str], dict[str, float]]:
    """Every rank makes all of each case and looks at its own part. What is wrong, and counters."""
    found: list[str] = []
    with seat.buffer(spec.config()) as buffer:
        if filled:
            options = options | {"num_tokens": as_many_as_fit(buffer)}
        for seed in seeds:
            found += wrong_with(make_case(seed, spec, **options), seat, buffer)
        return found, buffer.stats()


def check(
    domain_ranks: DomainRanks, spec: EngineSpec, seeds: Iterable[int], *, filled: bool = False, **options: Any
) -> list[dict[str, float]]:
    """Every rank gets the oracle's bits of `make_case(seed, spec, **options)`; counters by rank.

    filled  with `as_many_as_fit`
    """
    results = domain_ranks.run(spec.num_ranks, run_cases, spec, seeds, filled, options)
    found = [line for lines, _ in results for line in lines]
    assert not found, "\n".join(found[:20])
    return [stats for _, stats in results]
