"""The module of DeepEP's shape on two GPUs: a masked rank comes back; calls inside and outside of graphs."""

from __future__ import annotations

import time

import pytest
import torch

from tests.machine import needs_gpus
from tests.process_ranks import ProcessRanks, Rank
from uccl_ep_train.deep_ep import Buffer
from uccl_ep_train.deep_ep.sending import Handle
from uccl_ep_train.errors import ConfigError, PeerFailed

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


def inside_and_outside(rank: Rank) -> None:
    """A graph's call has more tokens than all before it; a later one outside has still more."""
    torch.cuda.set_device(rank.rank)
    buffer = Buffer(rank.group, 0, 0)
    inputs = {}
    for tokens in (4, 16, 12, 64):
        x = torch.ones(tokens, H, dtype=torch.bfloat16, device="cuda")
        idx = torch.arange(tokens * K, device="cuda").view(tokens, K) % E
        weights = torch.ones(tokens, K, device="cuda")
        inputs[tokens] = x, idx, weights, buffer.get_dispatch_layout(idx, E)

    def dispatch(tokens: int) -> Handle:
        x, idx, weights, (_, _, per_expert, in_rank, _) = inputs[tokens]
        got = buffer.dispatch(
            x, None, None, None, in_rank, per_expert, idx, weights, num_worst_tokens=2 * tokens
        )
        assert got[4] is not None
        return got[4]

    def check(handle: Handle, tokens: int) -> None:
        """The tokens that came from each rank, in order; unused rows count as token 0."""
        there = inputs[tokens][3][3][:, rank.rank].nonzero().flatten().tolist()
        assert handle[3].tolist() == [*there, *there, *[0] * (2 * (tokens - len(there)))]

    check(dispatch(4), 4)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        captured = dispatch(16)
    check(dispatch(12), 12)
    check(dispatch(64), 64)
    for _ in range(2):
        captured.route.metadata.zero_()
        graph.replay()
        check(captured, 16)
    other = Buffer(rank.group, 0, 0)
    with pytest.raises(ConfigError, match="captured in a graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x, idx, weights, (_, _, per_expert, in_rank, _) = inputs[4]
        other.dispatch(x, None, None, None, in_rank, per_expert, idx, weights, num_worst_tokens=8)
    check(dispatch(4), 4)
    buffer.destroy()
    other.destroy()


def test_calls_inside_and_outside_of_graphs_do_not_disturb_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCCL_EP_BACKEND", "cuda")
    with ProcessRanks(2, inside_and_outside, ()) as ranks:
        for outcome in ranks.outcomes(timeout_s=110).values():
            assert not outcome.error, outcome.trace
