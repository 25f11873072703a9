"""The module of DeepEP's shape: rows of any width, and handles that autograd has saved as tensors.

Ranks are processes with a gloo group.

Shapes: T tokens, H hidden, K experts per token, E experts.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.process_ranks import Rank
from tests.unit.deep_ep_gpus import drawn_on_cpu, module_ranks
from uccl_ep_train.deep_ep import Buffer, ElasticBuffer
from uccl_ep_train.errors import DtypeError, InputError

E, K, RANKS = 8, 3, 2
TIMEOUT_S = 110


@drawn_on_cpu
def tokens_of(rank: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = 11 + rank
    x = torch.randint(-8, 8, (tokens, hidden), generator=generator).to(torch.bfloat16)
    idx = torch.rand(tokens, E, generator=generator).argsort(dim=1)[:, :K].contiguous()
    return x, idx, torch.rand(tokens, K, generator=generator)


def layout_of(buffer: Buffer, idx: Tensor) -> dict[str, Any]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, E)
    return {
        "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert,
    }  # fmt: skip


def of_any_width(rank: Rank, hidden: int) -> str:
    """Integers, so that sums are exact: a token gets itself from each rank that has one of its experts."""
    x, idx, weights = tokens_of(rank.rank, hidden)
    wanted = x * torch.stack([(idx // (E // RANKS) == r).any(1) for r in range(RANKS)]).sum(0)[:, None]
    buffer = Buffer(dist.group.WORLD)
    layout = layout_of(buffer, idx)
    rows, _, _, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=weights)
    here = torch.cat([tokens_of(r, hidden)[0] for r in range(RANKS)])
    routes = torch.cat([tokens_of(r, hidden)[1] for r in range(RANKS)])
    assert torch.equal(rows, here[(routes // (E // RANKS) == rank.rank).any(1)]) and rows.is_contiguous()
    assert torch.equal(buffer.dispatch(x, handle=handle)[0], rows)
    assert torch.equal(buffer.combine(rows, handle)[0], wanted)
    assert torch.equal(buffer.combine(rows, handle, bias=(x, x))[0], wanted + 2 * x)
    elastic = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=16)
    for expand in (False, True):
        recv_x, _, _, its, _ = elastic.dispatch(x, idx, weights, num_experts=E, do_expand=expand)
        assert isinstance(recv_x, Tensor) and recv_x.shape[1] == hidden
        again = elastic.dispatch(x, handle=its, do_expand=expand)[0]
        assert isinstance(again, Tensor) and torch.equal(again, recv_x)
        times = idx.shape[1] if expand else 1
        out, _, _ = elastic.combine(recv_x, its)
        assert torch.equal(out, x * times if expand else wanted)
    elastic.destroy()
    buffer.destroy()
    return "done"


@pytest.mark.parametrize("hidden", [1, 16, 100, 160, 2880])
def test_rows_have_any_width(hidden: int) -> None:
    with module_ranks(RANKS, of_any_width, (hidden,)) as ranks:
        for outcome in ranks.outcomes(timeout_s=TIMEOUT_S).values():
            assert outcome.value == "done", outcome.trace


class Dispatch(torch.autograd.Function):
    """Saves the handle as callers do: its tensors, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Buffer, routing: tuple[Tensor, Tensor]) -> Tensor:
        idx, weights = routing
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, **layout_of(buffer, idx), topk_idx=idx, topk_weights=weights
        )
        assert isinstance(handle, tuple) and len(handle) == len(list(handle)) == 6
        assert handle == handle and handle != tuple(handle)
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        assert isinstance(rows, Tensor)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gc.collect()
        handle = ctx.saved_tensors
        assert type(handle) is tuple
        again = ctx.buffer.dispatch(grads[0].new_zeros(ctx.needs, grads[0].shape[1]), handle=handle)[0]
        assert again.shape == grads[0].shape and not again.any()
        return ctx.buffer.combine(grads[0].contiguous(), handle)[0], None, None


def saved_by_autograd(rank: Rank) -> str:
    buffer = Buffer(dist.group.WORLD)
    x, idx, weights = tokens_of(rank.rank, 128)
    x.requires_grad_()
    rows = Dispatch.apply(x, buffer, (idx, weights))
    rows.grad_fn.needs = len(x)
    rows.sum().backward()
    reached = torch.stack([(idx // (E // RANKS) == r).any(1) for r in range(RANKS)]).sum(0)
    assert x.grad is not None and torch.equal(x.grad, reached[:, None].expand(x.shape).to(x.dtype))
    handle = buffer.dispatch(x.detach(), **layout_of(buffer, idx), topk_idx=idx, topk_weights=weights)[4]
    assert handle is not None
    # Control: tensors with the same values are no handle.
    for wrong in (tuple(part.clone() for part in handle), tuple(handle)[:5], 3):
        with pytest.raises(DtypeError, match="allowed is what a dispatch returned, or its tensors"):
            buffer.combine(rows.detach(), wrong)
    assert len(buffer.combine(rows.detach(), handle)[0]) == len(x)
    buffer.destroy()
    assert buffer.runtime is None
    return "done"


def test_a_handle_s_tensors_are_as_good_as_the_handle() -> None:
    with module_ranks(RANKS, saved_by_autograd) as ranks:
        for outcome in ranks.outcomes(timeout_s=TIMEOUT_S).values():
            assert outcome.value == "done", outcome.trace


def test_what_callers_clear_is_theirs_and_hints_know_the_experts() -> None:
    group: Any = type("Group", (), {"rank": lambda self: 0, "size": lambda self: 1})()
    buffer = Buffer(group, is_intranode=True)
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    assert buffer.get_local_buffer_tensor(torch.int32, size=torch.Size([2, 3])).tolist() == [[0] * 3] * 2
    few, many = (Buffer.get_low_latency_rdma_size_hint(64, 256, 8, experts) for experts in (64, 128))
    assert few != many
    with pytest.raises(InputError, match="comm"):
        Buffer(group, comm=1)
