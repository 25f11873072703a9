"""Ranks as processes, a GPU each: one that dies, and many buffers in turn."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.machine import needs_gpus
from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import CommunicationError, ErrorFields
from uccl_ep_train.group.bootstrap import TorchBootstrap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.fault,
    needs_gpus(),
]

T, H, K = 512, 1024, 2
RANKS = 4  # processes, which take turns where there are fewer GPUs
VICTIM = RANKS - 1
SETTINGS: dict[str, Any] = {
    "num_experts": 8, "hidden": H, "backend": "cuda", "budget_bytes": 64 << 20, "arrival_timeout_s": 30.0,
    "progress_timeout_s": 5.0,
}  # fmt: skip


def make_buffer(rank: Rank, changes: dict[str, Any]) -> Buffer:
    torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    bootstrap = TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S)
    return Buffer(None, EpConfig(**(SETTINGS | changes)), bootstrap=bootstrap)


def use(buffer: Buffer) -> None:
    device = buffer.device
    x_TH = torch.full((T, H), 3.0, dtype=torch.bfloat16, device=device)
    idx_TK = torch.arange(T * K, device=device).reshape(T, K) % buffer.config.num_experts
    result = buffer.dispatch(x_TH, idx_TK, torch.ones(T, K, device=device))
    out_TH = buffer.combine(result.rows, result.handle)
    torch.cuda.synchronize()
    buffer.check()
    assert out_TH.eq(3.0 * K).all()


def use_until_it_fails(rank: Rank, changes: dict[str, Any]) -> Any:
    """Class and fields of the error, and when it was raised."""
    buffer = make_buffer(rank, changes)
    use(buffer)
    rank.mark("works")
    try:
        while True:
            use(buffer)
    except CommunicationError as error:
        at = time.monotonic()
        buffer.close()
        return type(error).__name__, error.fields(), at


def strike(num_ranks: int, victim: int, how: str, changes: dict[str, Any]) -> list[tuple[str, float]]:
    """Kills or freezes the victim at work. All others name it; their errors, and seconds until then."""
    others = [rank for rank in range(num_ranks) if rank != victim]
    with ProcessRanks(num_ranks, use_until_it_fails, (changes,)) as ranks:
        ranks.wait_mark("works", list(range(num_ranks)))
        time.sleep(0.5)
        at = time.monotonic()
        (ranks.kill if how == "kill" else ranks.freeze)(victim)
        outcomes = ranks.outcomes(timeout_s=60, ranks=others)
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
        assert outcome.value[1]["peer"] == victim, outcome.value
    return [(error, ended - at) for error, _, ended in (outcome.value for outcome in outcomes.values())]


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_the_others_raise_in_time_and_name_the_rank(how: str) -> None:
    # A frozen rank has not entered the next operation.
    limit_s = 2.0 if how == "kill" else SETTINGS["arrival_timeout_s"] + 2.0
    assert all(seconds < limit_s for _, seconds in strike(RANKS, VICTIM, how, {}))


def lose_the_context(rank: Rank, changes: dict[str, Any]) -> tuple[ErrorFields, str, float, float]:
    """Fields and text of the error, when it was raised, and how long closing took."""
    buffer = make_buffer(rank, changes)
    use(buffer)
    rank.mark("works")
    if rank.rank == VICTIM:
        rank.wait_for("strike")
        beyond = torch.full((1,), 1 << 40, device=buffer.device)
        with contextlib.suppress(RuntimeError):  # of torch, which may learn it here or later
            torch.ones(1, device=buffer.device)[beyond].cpu()
    # The victim makes no call of the engine any more that could tell the others.
    again = buffer.check if rank.rank == VICTIM else lambda: use(buffer)
    try:
        while True:
            again()
            time.sleep(0.001)
    except CommunicationError as error:
        raised = time.monotonic()
        buffer.close()
        return error.fields(), str(error), raised, time.monotonic() - raised


# Where every rank is a domain the victim's proxy lives on, too.
@pytest.mark.parametrize("domains", [None, tuple(range(RANKS))], ids=["one domain", "each alone"])
def test_a_rank_whose_context_is_lost_is_an_error_on_every_rank(domains: tuple[int, ...] | None) -> None:
    """A kernel of the program breaks it, as an index out of bounds does: no kernel runs there any more."""
    changes = {"domains": domains, "budget_bytes": 128 << 20} if domains else {}
    with ProcessRanks(RANKS, lose_the_context, (changes,)) as ranks:
        ranks.wait_mark("works")
        time.sleep(0.5)
        struck = time.monotonic()
        ranks.tell("strike")
        outcomes = ranks.outcomes(timeout_s=60)
    for rank, outcome in outcomes.items():
        assert not outcome.error, outcome.trace
        fields, text, raised, closing_s = outcome.value
        assert "lost its GPU's context" in text, text
        assert fields["peer"] == VICTIM, (rank, fields)
        # Deadlines are 5 and 30 s.
        assert raised - struck < 3.0 and closing_s < 3.0, (rank, raised - struck, closing_s)


def make_and_close(rank: Rank, cycles: int, changes: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(free device memory, open descriptors, threads) after each cycle."""
    seen = []
    for _ in range(cycles):
        with make_buffer(rank, changes) as buffer:
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


# Where every rank is a domain, the host takes part: regions of shared memory, a proxy, copies.
@pytest.mark.parametrize(
    ("cycles", "domains"),
    [(100, None), (30, "each alone"), pytest.param(100, "each alone", marks=pytest.mark.slow)],
)
def test_a_hundred_buffers_leave_nothing_behind(cycles: int, domains: str | None) -> None:
    changes = {"domains": tuple(range(RANKS)), "budget_bytes": 128 << 20} if domains else {}
    with ProcessRanks(RANKS, make_and_close, (cycles, changes)) as ranks:
        outcomes = ranks.outcomes(timeout_s=100)
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
        # The first ones load what stays loaded.
        (free_before, fds_before, threads_before), (free, fds, threads) = outcome.value[9], outcome.value[-1]
        assert free_before - free <= 4 << 20 and fds <= fds_before and threads <= threads_before, (
            outcome.value[9::30]
        )
