"""Processes that make low-latency calls while one of them is killed or frozen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from tests.cases import LAYOUTS as OTHER_LAYOUTS
from tests.low_latency import settle
from tests.process_ranks import START_TIMEOUT_S, ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.errors import PeerFailed
from uccl_ep_train.group.bootstrap import TorchBootstrap
from uccl_ep_train.settings.sections import Backend

T, H, K, OF_RANK = 64, 1024, 4, 2
LAYOUTS = OTHER_LAYOUTS | {"1x2": (0, 0)}
MASK_S = 3.0
ROUNDS = 30  # after the loss
LOSSES: list[tuple[str, int, list[int]]] = [
    ("1x2", 1, [1]), ("1x4", 2, [2]), ("2x1", 1, [1]), ("2x1", 0, [0]), ("3+1", 3, [3]),
    ("3+1", 1, [0, 1, 2]), ("2x2", 3, [2, 3]), ("interleaved", 0, [0, 2]),
]  # fmt: skip
"""Layout, victim, ranks that are masked."""


def use(calls: LowLatency, number: int) -> list[int]:
    """One dispatch and combine; the ranks that it did without. A token's sum is itself times the experts that
    are left: no sum rounds.
    """
    buffer = calls.buffer
    num_experts, device = buffer.config.num_experts, buffer.device
    x = torch.full((T, H), 1.0 + (number + buffer.rank) % 16, dtype=torch.bfloat16, device=device)
    topk_idx = (torch.arange(T, device=device)[:, None] * 3 + torch.arange(K, device=device)) % num_experts
    rows = calls.dispatch(x, topk_idx, wire="bf16")
    assert isinstance(rows.rows, torch.Tensor)
    out = calls.combine(rows.rows, topk_idx, torch.ones(T, K, device=device), rows.handle)
    masked = calls.masked_ranks()
    settle(buffer)
    left = (masked[topk_idx // OF_RANK] == 0).sum(1, keepdim=True)
    assert torch.equal(out, (x * left).to(torch.bfloat16)), number
    return masked.nonzero().flatten().tolist()


def go_on(
    rank: Rank, backend: Backend, layout: str, loses: int, settings: Sequence[dict[str, Any]]
) -> tuple[str, Any]:
    """Until `loses` ranks are masked, and some rounds more. ("went on", whom) or ("masked", its error)."""
    on_gpus = backend == "cuda"
    if on_gpus:
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    usual: dict[str, Any] = {
        "num_experts": OF_RANK * rank.num_ranks, "hidden": H, "backend": backend, "domains": LAYOUTS[layout],
        "num_sms": 8, "budget_bytes": 96 << 20, "low_latency_tokens": T, "low_latency_topk": K,
        "low_latency_sms": 8, "mask_timeout_s": MASK_S if on_gpus else MASK_S / 2, "progress_timeout_s": 5.0,
    }  # fmt: skip
    config = EpConfig(**usual | settings[LAYOUTS[layout][rank.rank] % len(settings)])
    buffer = Buffer(None, config, bootstrap=TorchBootstrap(rank.group, timeout_s=START_TIMEOUT_S))
    calls, masked, number, left = LowLatency(buffer), list[int](), 0, ROUNDS
    try:
        while left > 0:
            masked = use(calls, number)
            number += 1
            left -= len(masked) == loses
            if number == 1:
                rank.mark("works")
        rank.mark("went on")
        rank.wait_for("end")
    except PeerFailed as error:
        return "masked", str(error)
    finally:
        buffer.close()
    return "went on", masked


def lose(
    backend: Backend,
    layout: str,
    victim: int,
    lost: list[int],
    how: str,
    *,
    settings: Sequence[dict[str, Any]] = ({},),
    method: str = "forkserver",
) -> None:
    """how: "kill" | "freeze"; who was frozen comes back in the end. settings: of `EpConfig`, by domain."""
    num_ranks = len(LAYOUTS[layout])
    work = (backend, layout, len(lost), settings)
    with ProcessRanks(num_ranks, go_on, work, method=method) as ranks:
        ranks.wait_mark("works", list(range(num_ranks)))
        time.sleep(0.5)
        (ranks.kill if how == "kill" else ranks.freeze)(victim)
        outcomes = ranks.outcomes(timeout_s=60, ranks=[rank for rank in lost if rank != victim])
        ranks.wait_mark("went on", [rank for rank in range(num_ranks) if rank not in lost], timeout_s=60)
        if how == "freeze":
            ranks.thaw(victim)
            outcomes |= ranks.outcomes(timeout_s=60, ranks=[victim])
        ranks.tell("end")
        outcomes |= ranks.outcomes(
            timeout_s=60, ranks=[rank for rank in range(num_ranks) if rank not in lost]
        )
    for rank, outcome in outcomes.items():
        assert not outcome.error, outcome.trace
        said, what = outcome.value
        if rank not in lost:
            assert (said, what) == ("went on", lost), (rank, outcome.value)
        elif rank == victim:  # it may have been stopped after it had sent all
            assert said == "masked" and f"rank {victim}" in what, what
        else:
            assert said == "masked" and f"rank {victim}, of its domain, did not come" in what, what
