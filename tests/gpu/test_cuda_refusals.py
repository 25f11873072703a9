"""Refused calls take their numbers in the order of a stream, and replays of a graph know of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import EngineSpec
from tests.harness import Outcome, RankGroup
from tests.machine import needs_gpus
from uccl_ep_train import Buffer
from uccl_ep_train.errors import InputError, RankMismatchError

RANKS = 2  # as threads, a GPU each
pytestmark = [
    pytest.mark.gpu,
    needs_gpus(RANKS),
]

T, H, K, E = 64, 512, 2, 8
DEVIANT = 1
LAYOUTS = pytest.mark.parametrize("domains", [(0, 0), (0, 1)], ids=["one domain", "two domains"])


def group_of(domains: tuple[int, ...]) -> RankGroup:
    settings = (
        ("backend", "cuda"), ("budget_bytes", 128 << 20), ("arrival_timeout_s", 20.0),
        ("progress_timeout_s", 20.0),
    )  # fmt: skip
    return EngineSpec(domains=domains, num_experts=E, hidden=H, settings=settings).group()


def given(buffer: Buffer) -> tuple[torch.Tensor, torch.Tensor]:
    x_TH = torch.ones(T, H, dtype=torch.bfloat16, device=buffer.device)
    return x_TH, torch.arange(T * K, device=buffer.device).reshape(T, K) % E


def call(buffer: Buffer, **changes: Any) -> torch.Tensor:
    """A dispatch and a combine: [T, H], all K."""
    x_TH, topk_idx_TK = given(buffer)
    result = buffer.dispatch(x_TH, topk_idx_TK, **changes)
    return buffer.combine(result.rows, result.handle)


def refuse(buffer: Buffer) -> None:
    with pytest.raises(InputError):
        call(buffer, capacity=-1)


def finish(buffer: Buffer) -> None:
    torch.cuda.synchronize()
    buffer.check()


def expect_mismatch(outcomes: list[Outcome]) -> None:
    for entry in outcomes:
        assert isinstance(entry.error, RankMismatchError), entry
        assert f"rank {DEVIANT} refused call" in str(entry.error)
        assert "InputError: capacity = -1" in str(entry.error)


@LAYOUTS
@pytest.mark.parametrize("capacity", [None, RANKS * T * K])
def test_a_rank_that_goes_on_after_a_refusal_is_a_mismatch_on_all(
    domains: tuple[int, ...], capacity: int | None
) -> None:
    with group_of(domains) as group:

        def step(rank: int, buffer: Buffer) -> None:
            call(buffer, capacity=capacity)
            if rank == DEVIANT:
                refuse(buffer)
            call(buffer, capacity=capacity)
            finish(buffer)

        expect_mismatch(group.outcomes(step))


@LAYOUTS
@pytest.mark.parametrize("where", ["nowhere", "everywhere", "in the capture", "between replays"])
def test_replays_carry_the_refusals_of_when_they_run(domains: tuple[int, ...], where: str) -> None:
    """Controls: no refusal, and one on every rank in the capture and after it."""
    with group_of(domains) as group:

        def step(rank: int, buffer: Buffer) -> None:
            deviates = where == "everywhere" or rank == DEVIANT
            x_TH, topk_idx_TK = given(buffer)
            call(buffer)
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            with torch.no_grad(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                if deviates and where in ("everywhere", "in the capture"):
                    refuse(buffer)
                result = buffer.dispatch(x_TH, topk_idx_TK, capacity=RANKS * T * K)
                out_TH = buffer.combine(result.rows, result.handle)
            for turn in range(3):
                if turn == 1 and deviates and where in ("everywhere", "between replays"):
                    refuse(buffer)
                graph.replay()
                try:
                    finish(buffer)
                except RankMismatchError:
                    assert out_TH.isnan().all() and (turn == 0) == (where == "in the capture")
                    raise
                assert out_TH.eq(K).all()

        outcomes = group.outcomes(step)
        if where in ("nowhere", "everywhere"):
            assert all(entry.error is None for entry in outcomes), outcomes
        else:
            expect_mismatch(outcomes)


@LAYOUTS
def test_memory_that_runs_out_before_the_launch_refuses_the_call(
    domains: tuple[int, ...],
) -> None:
    with group_of(domains) as group:

        def step(rank: int, buffer: Buffer) -> None:
            x_TH, topk_idx_TK = given(buffer)
            handle = buffer.dispatch(x_TH, topk_idx_TK).handle
            launcher, before = buffer._launcher, buffer._launcher.num_calls()
            if rank == DEVIANT:
                launcher._receive = _no_memory  # type: ignore[assignment,method-assign]
                with pytest.raises(torch.OutOfMemoryError):
                    buffer.dispatch(x_TH, handle=handle)
                del launcher._receive
                assert launcher.num_calls() == before + 1
            buffer.dispatch(x_TH, handle=handle)
            finish(buffer)

        for entry in group.outcomes(step):
            assert isinstance(entry.error, RankMismatchError), entry
            assert "OutOfMemoryError: none left" in str(entry.error)


def _no_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("none left")
