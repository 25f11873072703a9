"""Jobs on GPUs that are paused: kernels' clocks run on while their hosts stand still."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train import Buffer, EpConfig
from uccl_ep_train.errors import CommunicationError
from uccl_ep_train.group.bootstrap import TorchBootstrap

T, H, K, E = 64, 256, 2, 8
DEADLINE_S, PAUSE_S, GRACE_S = 1.5, 4.0, 2.0
LATE = 1
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, there are {GPUS}"),
]


def wait_for_late_one(rank: Rank, domains: tuple[int, ...]) -> Any:
    """Rank LATE enters when it is told; the others' kernels wait on their GPUs. What it came to, and when."""
    device = torch.device("cuda", rank.rank)
    torch.cuda.set_device(device)
    config = EpConfig(
        num_experts=E, hidden=H, domains=domains, budget_bytes=64 << 20, dispatch_dtype="bf16",
        backend="cuda", arrival_timeout_s=DEADLINE_S, progress_timeout_s=DEADLINE_S,
    )  # fmt: skip
    with Buffer(None, config, bootstrap=TorchBootstrap(rank.group)) as buffer:
        x_TH = torch.full((T, H), float(rank.rank + 1), dtype=torch.bfloat16, device=device)
        topk_idx_TK = (torch.arange(T * K, device=device) % E).reshape(T, K)
        handle = buffer.dispatch(x_TH, topk_idx_TK).handle
        torch.cuda.synchronize()
        rank.mark("waits")
        if rank.rank == LATE:
            rank.wait_for("go")
        try:
            result = buffer.dispatch(x_TH, handle=handle)
            out_TH = buffer.combine(result.rows, handle)
            torch.cuda.synchronize()
            buffer.check()
        except CommunicationError as error:
            return type(error).__name__, time.monotonic()
        return "right" if torch.equal(out_TH, K * x_TH) else "wrong", time.monotonic()


@pytest.mark.parametrize("domains", [(0, 0), (0, 1)], ids=["one domain", "two domains"])
def test_kernels_that_wait_go_on_after_a_pause_of_all_hosts(domains: tuple[int, ...]) -> None:
    with ProcessRanks(2, wait_for_late_one, (domains,)) as ranks:
        ranks.wait_mark("waits")
        time.sleep(0.3)
        for rank in range(2):
            ranks.freeze(rank)
        time.sleep(PAUSE_S)
        for rank in range(2):
            ranks.thaw(rank)
            time.sleep(0.3)
        ranks.tell("go", ranks=[LATE])
        assert [said for said, _ in ranks.results(timeout_s=30)] == ["right", "right"]


@pytest.mark.parametrize("domains", [(0, 0), (0, 1)], ids=["one domain", "two domains"])
def test_a_host_that_is_paused_alone_is_missed(domains: tuple[int, ...]) -> None:
    """Control: only a kernel's own host stops its clock."""
    with ProcessRanks(2, wait_for_late_one, (domains,)) as ranks:
        ranks.wait_mark("waits")
        at = ranks.freeze(LATE)
        ranks.tell("go", ranks=[LATE])
        time.sleep(PAUSE_S)
        ranks.thaw(LATE)
        (said, ended), (late, _) = ranks.results(timeout_s=30)
    assert said in ("ArrivalTimeout", "ProgressTimeout") and ended - at < DEADLINE_S + GRACE_S
    assert late in ("ArrivalTimeout", "ProgressTimeout", "PeerFailed")
