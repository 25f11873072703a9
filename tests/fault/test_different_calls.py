"""Ranks that do different things in the middle of their work: with operations queued, several at once.

One deviation at a time, in every layout: `tests/unit/test_rank_mismatch.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases import LAYOUTS, EngineSpec
from tests.harness import RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.errors import CommunicationError, PlanMismatchError, RankMismatchError

pytestmark = pytest.mark.fault

T, H, K, E = 20, 256, 2, 8
DEVIANT = 1


def group_of(layout: str) -> RankGroup:
    return EngineSpec(domains=LAYOUTS[layout], num_experts=E, hidden=H).group()


def rows(count: int = T, dtype: torch.dtype = torch.bfloat16, hidden: int = H) -> torch.Tensor:
    return torch.ones(count, hidden, dtype=dtype)


def routing(shift: int = 0) -> torch.Tensor:
    return (torch.arange(T * K).reshape(T, K) + shift) % E


def errors(group: RankGroup, step: Callable[[int, Buffer], Any]) -> list[CommunicationError]:
    outcomes = group.outcomes(step, timeout_s=30)
    found = [entry.error for entry in outcomes if isinstance(entry.error, CommunicationError)]
    assert len(found) == group.num_ranks, outcomes
    return found


@pytest.mark.parametrize("layout", ["1x4", "2x2", "4x1"])
def test_plans_of_different_dispatches_are_a_mismatch_that_names_both(layout: str) -> None:
    with group_of(layout) as group:

        def step(rank: int, buffer: Buffer) -> None:
            first, second = (buffer.dispatch(rows(), routing(shift)).handle for shift in (0, 1))
            handle = first if rank == DEVIANT else second
            buffer.combine(rows(handle.num_rows), handle)

        for error in errors(group, step):
            assert isinstance(error, RankMismatchError)
            assert "plan 1" in str(error) and "plan 2" in str(error) and f"rank {DEVIANT}" in str(error)


@pytest.mark.parametrize("layout", ["1x4", "2x2", "4x1"])
def test_an_order_that_differs_behind_operations_in_flight_is_found_when_its_turn_comes(layout: str) -> None:
    with group_of(layout) as group:

        def step(rank: int, buffer: Buffer) -> None:
            handle = buffer.dispatch(rows(), routing()).handle
            back = rows(handle.num_rows)
            ahead = [buffer.combine_async(back, handle) for _ in range(10)]
            calls = [
                lambda: buffer.combine_async(back, handle),
                lambda: buffer.dispatch_async(rows(), handle=handle),
            ]
            late = [call() for call in (reversed(calls) if rank == DEVIANT else calls)]
            # What all had called alike is not affected.
            for entry in ahead:
                assert entry.wait().eq(K).all()
            for entry in late:
                entry.wait()

        for error in errors(group, step):
            assert isinstance(error, RankMismatchError) and error.epoch == 12
            assert "combine(" in str(error) and "dispatch(" in str(error)
            assert f"rank {DEVIANT}" in str(error)


def test_when_every_rank_does_something_else_every_rank_hears_of_a_mismatch() -> None:
    with group_of("2x2") as group:

        def step(rank: int, buffer: Buffer) -> None:
            handle = buffer.dispatch(rows(), routing()).handle
            calls: list[Callable[[], Any]] = [
                lambda: buffer.dispatch(rows(), routing()),
                lambda: buffer.dispatch(rows(dtype=torch.float32), routing(), dispatch_dtype="bf16"),
                lambda: buffer.combine(rows(handle.num_rows, hidden=128), handle),
                lambda: buffer.dispatch(rows(), handle=handle),
            ]
            calls[rank]()

        for error in errors(group, step):
            assert isinstance(error, RankMismatchError)
            named = {int(number) for number in re.findall(r"rank (\d)", str(error))}
            assert len(named) == 2 and {error.rank, error.peer} == named


@pytest.mark.parametrize("form", ["topk", "map"])
@pytest.mark.parametrize("layout", ["1x4", "2x2"])
def test_routing_that_was_recomputed_differently_on_one_rank_fails_all(form: str, layout: str) -> None:
    """As in activation recomputation with a router that is not reproducible."""

    def arguments(shift: int) -> dict[str, torch.Tensor]:
        if form == "topk":
            return {"topk_idx": routing(shift)}
        return {"routing_map": torch.zeros(T, E, dtype=torch.bool).scatter(1, routing(shift), True)}

    with group_of(layout) as group:

        def again(rank: int, buffer: Buffer, deviant: int) -> None:
            handle = buffer.dispatch(rows(), **arguments(0)).handle
            result = buffer.dispatch(rows(), **arguments(1 if rank == deviant else 0), handle=handle)
            assert result.rows.eq(1).all()

        # Control: the same routing is accepted.
        group.run(lambda rank, buffer: again(rank, buffer, -1))
        for error in errors(group, lambda rank, buffer: again(rank, buffer, DEVIANT)):
            assert isinstance(error, PlanMismatchError) and error.peer == DEVIANT
