"""The module of DeepEP's shape on two GPUs: a masked rank comes back."""

from __future__ import annotations

import time

import pytest
import torch

from tests.machine import needs_gpus
from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train.deep_ep import Buffer
from uccl_ep_train.errors import PeerFailed

E, H, K, T, M = 8, 512, 2, 8, 8
MASK_TIMEOUT_S = 1.0

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(2),
]


def come_late(rank: Rank) -> list[int]:
    """Rows of this rank's first dispatch; of its last, after all were taken back; masked ranks then."""
    torch.cuda.set_device(rank.rank)
    buffer = Buffer(rank.group, 0, 0, low_latency_mode=True, enable_shrink=True)
    x = torch.ones(T, H, dtype=torch.bfloat16, device="cuda")
    idx = torch.arange(T * K, device="cuda").view(T, K) % E
    masked = torch.zeros(2, dtype=torch.int32, device="cuda")

    def num_rows() -> int:
        got = buffer.low_latency_dispatch(x, idx, M, E, use_fp8=False)
        torch.cuda.synchronize()
        return int(got[1].sum())

    before = [num_rows()]
    if rank.rank == 1:
        time.sleep(4 * MASK_TIMEOUT_S)
        with pytest.raises(PeerFailed):  # it was masked, or others have left the engine already
            num_rows()
            num_rows()
    else:
        before.append(num_rows())
        buffer.low_latency_query_mask_buffer(masked)
        assert masked.tolist() == [0, 1]
    buffer.low_latency_clean_mask_buffer()
    after = num_rows()
    buffer.low_latency_query_mask_buffer(masked)
    buffer.destroy()
    return [*before, after, *masked.tolist()]


def test_masked_ranks_come_back_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCCL_EP_BACKEND", "cuda")
    monkeypatch.setenv("UCCL_EP_MASK_TIMEOUT_S", str(MASK_TIMEOUT_S))
    with ProcessRanks(2, come_late, ()) as ranks:
        outcomes = ranks.outcomes(timeout_s=110)
    for outcome in outcomes.values():
        assert not outcome.error, outcome.trace
    every = T * K  # of both ranks, half of all rows come here
    assert outcomes[0].value == [every, every // 2, every, 0, 0]
    assert outcomes[1].value == [every, every, 0, 0]
