"""Buffers of DeepEP's second interface that are made anew for more tokens, on some ranks and not on others.

Ranks are processes with a gloo group.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.process_ranks import Rank
from tests.unit.deep_ep_gpus import module_ranks
from tests.unit.deep_ep_ranks import RANKS, E, H
from uccl_ep_train.deep_ep import ElasticBuffer, EPHandle
from uccl_ep_train.errors import ClosedError

TIMEOUT_S = 110


def in_step(rank: Rank, sizes: tuple[tuple[int, ...], ...]) -> tuple[int, str]:
    """As a trainer calls it: a buffer with more tokens where a batch is larger than all before on this rank.
    Buffers of earlier steps stay until their backward has run, a step later. Returns the number of buffers,
    and what a call on the first one raises when the last one was destroyed.
    """
    buffers: list[Any] = []
    earlier: list[tuple[Any, EPHandle, Tensor]] = []
    for tokens in sizes[rank.rank]:
        if not buffers or buffers[-1].num_max_tokens_per_rank < tokens:
            buffers.append(ElasticBuffer(rank.group, num_max_tokens_per_rank=tokens))
        idx = torch.arange(tokens * 2).view(tokens, 2) % E
        x = torch.full((tokens, H), 2.0, dtype=torch.bfloat16)
        rows, *_, handle, _ = buffers[-1].dispatch(
            x, topk_idx=idx, topk_weights=torch.ones(tokens, 2), num_experts=E,
            num_max_tokens_per_rank=tokens,
        )  # fmt: skip
        ranks_of_token = torch.tensor([len({e // (E // RANKS) for e in row}) for row in idx.tolist()])
        sums = buffers[-1].combine(rows, handle)[0]
        assert torch.equal(sums, x * ranks_of_token[:, None])
        earlier.append((buffers[-1], handle, x))
        if len(earlier) == 2:
            buffer, handle, x = earlier.pop(0)
            assert buffer.dispatch(x, handle=handle)[0].eq(2).all()
    for buffer in buffers:
        buffer.destroy()
    first = buffers[0]
    with pytest.raises(ClosedError) as raised:
        first.dispatch(x[:1], topk_idx=idx[:1], num_experts=E)
    return len(buffers), str(raised.value)


def test_a_buffer_for_more_tokens_takes_the_place_of_an_earlier_one_on_any_rank() -> None:
    sizes = ((4, 16, 4, 40), (8, 8, 8, 8), (3, 2, 9, 9), (1, 2, 3, 4))
    with module_ranks(RANKS, in_step, (sizes,)) as ranks:
        for rank, outcome in ranks.outcomes(timeout_s=TIMEOUT_S).items():
            assert not outcome.error, outcome.trace
            assert outcome.value == ((3, 1, 2, 4)[rank], "the buffer was destroyed")


def apart(rank: Rank) -> bool:
    """Buffers for as many tokens are two; destroying one leaves the other."""
    one, two = (ElasticBuffer(rank.group, num_max_tokens_per_rank=8) for _ in range(2))
    x, idx = torch.ones(8, H, dtype=torch.bfloat16), torch.zeros(8, 1, dtype=torch.int64)
    engines = [b.dispatch(x, topk_idx=idx, num_experts=E)[3].sender.engine for b in (one, two)]
    one.destroy()
    two.dispatch(x, topk_idx=idx, num_experts=E)
    two.destroy()
    return engines[0] is not engines[1]


def test_buffers_for_as_many_tokens_have_engines_of_their_own() -> None:
    """Control, and for programs that use two at once."""
    with module_ranks(RANKS, apart, ()) as ranks:
        for outcome in ranks.outcomes(timeout_s=TIMEOUT_S).values():
            assert not outcome.error, outcome.trace
            assert outcome.value
