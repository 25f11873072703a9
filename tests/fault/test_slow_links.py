"""A link that needs longer for a chunk than the progress deadline is slow, not dead."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.harness import RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.errors import CommunicationError

pytestmark = pytest.mark.fault

H, E, PROGRESS_S, GRACE_S = 512, 8, 1.0, 2.0
CHUNKS_TAKE = 3.0  # deadlines


def settings_of(domains: tuple[int, ...], num_tokens: int, **changes: Any) -> dict[str, Any]:
    """Rows of `num_tokens` tokens are one chunk, which takes the link CHUNKS_TAKE deadlines."""
    chunk_bytes = num_tokens * 2 * H
    rate = chunk_bytes / (CHUNKS_TAKE * PROGRESS_S) / 1e9
    return {
        "num_experts": E, "hidden": H, "domains": domains, "budget_bytes": 16 << 20, "dispatch_dtype": "bf16",
        "chunk_bytes": chunk_bytes, "loop_gbytes_per_s": rate, "arrival_timeout_s": 30.0,
        "progress_timeout_s": PROGRESS_S, **changes,
    }  # fmt: skip


def send_to_the_other_domain(rank: int, buffer: Buffer, num_tokens: int) -> tuple[bool, float]:
    """Rank 0 sends a chunk that takes long, and gets it back; the others only wait. Whether all is right."""
    started = time.monotonic()
    mine = num_tokens if rank == 0 else 0
    x_TH = torch.arange(mine, dtype=torch.bfloat16).reshape(mine, 1).expand(mine, H).contiguous()
    result = buffer.dispatch(x_TH, torch.full((mine, 1), E - 1))
    out_TH = buffer.combine(result.rows, result.handle)
    return torch.equal(out_TH, x_TH), time.monotonic() - started


@pytest.mark.timeout(120)
@pytest.mark.parametrize("domains", [(0, 1), (0, 0, 1, 1)], ids=["2x1", "2x2"])
def test_a_chunk_that_takes_three_deadlines_arrives(domains: tuple[int, ...]) -> None:
    num_tokens = 64
    with RankGroup(len(domains), settings_of(domains, num_tokens)) as group:
        results = group.run(lambda rank, buffer: send_to_the_other_domain(rank, buffer, num_tokens))
    assert all(right for right, _ in results)
    # Control: there and back it did take so long.
    assert max(seconds for _, seconds in results) > 2 * CHUNKS_TAKE * PROGRESS_S


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_slow_link_that_delivers_nothing_is_still_dead(lost: int) -> None:
    """Control: what is never delivered is no progress, on either side."""
    num_tokens = 64
    settings = settings_of((0, 1), num_tokens, loop_drop_peer=lost, arrival_timeout_s=PROGRESS_S)
    with RankGroup(2, settings) as group:
        outcomes = group.outcomes(lambda rank, buffer: send_to_the_other_domain(rank, buffer, num_tokens))
    assert all(isinstance(outcome.error, CommunicationError) for outcome in outcomes), outcomes
    assert max(outcome.seconds for outcome in outcomes) < PROGRESS_S + GRACE_S
