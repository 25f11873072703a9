"""Low latency in groups of more than 64 ranks: they go on without one that does not come."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.cases import EngineSpec
from tests.harness import ON_GPUS
from tests.low_latency import settle
from tests.machine import needs_kernels
from uccl_ep_train import Buffer, EpConfig, Topology, memory_plan
from uccl_ep_train.api.low_latency import LowLatency
from uccl_ep_train.errors import ConfigError, PeerFailed

pytestmark = pytest.mark.skipif(ON_GPUS, reason="they would share one GPU; kernels: low_latency_masks_claims")

T, H, K = 4, 128, 2
MASKS = (("low_latency_tokens", T), ("low_latency_topk", K), ("mask_timeout_s", 8.0))


def sum_of_one(calls: LowLatency, rank: int, num_ranks: int) -> set[int]:
    """A dispatch and a combine of ones, whose sums count the experts that are left; who is masked."""
    x = torch.ones(T, H, dtype=torch.bfloat16)
    topk_idx = (rank + 11 * torch.arange(T)[:, None] + torch.arange(K)) % num_ranks
    rows = calls.dispatch(x, topk_idx, wire="bf16")
    assert isinstance(rows.rows, torch.Tensor)
    out = calls.combine(rows.rows, topk_idx, torch.ones(T, K), rows.handle)
    settle(calls.buffer)
    masked = calls.masked_ranks()
    left = (masked[topk_idx] == 0).sum(1, keepdim=True)
    assert torch.equal(out, left.expand(T, H).to(torch.bfloat16))
    return set(masked.nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("domains", "lost"), [((0,) * 66, {65}), (tuple(r // 5 for r in range(70)), set(range(65, 70)))]
)
def test_many_ranks_go_on_without_one(domains: tuple[int, ...], lost: set[int]) -> None:
    """Between domains all of its domain go."""
    num_ranks = len(domains)
    spec = EngineSpec(domains=domains, num_experts=num_ranks, hidden=H, settings=MASKS)
    through = threading.Semaphore(0)
    with spec.group() as group:

        def step(rank: int, buffer: Buffer) -> None:
            calls = LowLatency(buffer)
            assert sum_of_one(calls, rank, num_ranks) == set()
            if rank == num_ranks - 1:  # it comes no more, and says nothing
                for _ in range(num_ranks - 1):
                    assert through.acquire(timeout=60)
                return
            try:
                if rank not in lost:
                    assert sum_of_one(calls, rank, num_ranks) == lost
                    assert sum_of_one(calls, rank, num_ranks) == lost
                else:
                    with pytest.raises(
                        PeerFailed, match=f"rank {num_ranks - 1}, of its domain, did not come"
                    ):
                        sum_of_one(calls, rank, num_ranks)
            finally:
                through.release()

        group.run(step)


@pytest.mark.parametrize("backend", ["host", pytest.param("cuda", marks=needs_kernels)])
def test_a_group_that_is_too_large_for_masks_is_refused(backend: str) -> None:
    def plan(num_ranks: int) -> None:
        settings = dict(MASKS) | {"num_experts": num_ranks, "hidden": H, "budget_bytes": 1 << 30}
        memory_plan(EpConfig(**settings, backend=backend), Topology.split(num_ranks, 8))

    plan(512)
    with pytest.raises(ConfigError, match=r"520 ranks with mask_timeout_s.* at most 512"):
        plan(520)
