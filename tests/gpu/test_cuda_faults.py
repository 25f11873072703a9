"""Ranks as processes, a GPU each: one that dies, and many buffers in turn."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig, cuda
from uccl_ep_train.bootstrap import TorchBootstrap
from uccl_ep_train.errors import CommunicationError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.fault,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or not cuda.built(), reason="fewer than 2 GPUs, or built without nvcc"
    ),
]

T, H, K, E = 512, 1024, 2, 8
RANKS = min(4, torch.cuda.device_count())
VICTIM = RANKS - 1
PROGRESS_S = 5.0


def make_buffer(rank: Rank) -> Buffer:
    torch.cuda.set_device(rank.rank)
    config = EpConfig(
        num_experts=E, hidden=H, backend="cuda", budget_bytes=64 << 20, arrival_timeout_s=30.0,
        progress_timeout_s=PROGRESS_S,
    )  # fmt: skip
    return Buffer(None, config, bootstrap=TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S))


def use(buffer: Buffer) -> None:
    device = buffer.device
    x_TH = torch.full((T, H), 3.0, dtype=torch.bfloat16, device=device)
    idx_TK = torch.arange(T * K, device=device).reshape(T, K) % E
    result = buffer.dispatch(x_TH, idx_TK, torch.ones(T, K, device=device))
    out_TH = buffer.combine(result.rows, result.handle)
    torch.cuda.synchronize()
    buffer.check()
    assert out_TH.eq(3.0 * K).all()


def use_until_it_fails(rank: Rank) -> Any:
    buffer = make_buffer(rank)
    use(buffer)
    rank.mark("works")
    try:
        while True:
            use(buffer)
    except CommunicationError as error:
        at = time.monotonic()
        buffer.close()
        return type(error).__name__, error.fields(), at


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_the_others_raise_in_time_and_name_the_rank(how: str) -> None:
    others = [rank for rank in range(RANKS) if rank != VICTIM]
    with ProcessRanks(RANKS, use_until_it_fails) as ranks:
        ranks.wait_mark("works", list(range(RANKS)))
        time.sleep(0.5)
        at = time.monotonic()
        (ranks.kill if how == "kill" else ranks.freeze)(VICTIM)
        outcomes = ranks.outcomes(timeout_s=60, ranks=others)
    limit_s = 2.0 if how == "kill" else 30.0 + 2.0  # a frozen rank has not entered the next operation
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
        _, fields, ended = outcome.value
        assert fields["peer"] == VICTIM, fields
        assert ended - at < limit_s


def make_and_close(rank: Rank, cycles: int) -> list[tuple[int, int, int]]:
    """(free device memory, open descriptors, threads) after each cycle."""
    seen = []
    for _ in range(cycles):
        with make_buffer(rank) as buffer:
            use(buffer)
        del buffer
        torch.cuda.empty_cache()
        dist.barrier(rank.group)  # memory is free when no other rank has it mapped any more
        threads = int(
            next(
                line for line in Path("/proc/self/status").read_text().splitlines() if "Threads" in line
            ).split()[1]
        )
        seen.append((torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd")), threads))
    return seen


def test_a_hundred_buffers_leave_nothing_behind() -> None:
    with ProcessRanks(RANKS, make_and_close, (100,)) as ranks:
        outcomes = ranks.outcomes(timeout_s=100)
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
        # The first ones load what stays loaded.
        (free_before, fds_before, threads_before), (free, fds, threads) = outcome.value[9], outcome.value[-1]
        assert free_before - free <= 4 << 20 and fds <= fds_before and threads <= threads_before, (
            outcome.value[9::30]
        )
