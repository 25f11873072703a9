"""NeMo Automodel's calls, in their order and with their arguments; experts are those of deep_ep_dense.

Written from what these files call at 36044ad (August 2026):
  NVIDIA-NeMo/Automodel nemo_automodel/components/moe/megatron/fused_a2a.py
                        nemo_automodel/components/moe/megatron/token_dispatcher.py
                        nemo_automodel/components/moe/megatron/moe_utils.py
                        nemo_automodel/components/moe/experts.py
                        nemo_automodel/components/distributed/activation_checkpointing.py

Communication is two autograd functions, so that selective checkpoints see every operation inside.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.unit.deep_ep_dense import Case, E, Grads, H
from uccl_ep_train.deep_ep import Buffer
from uccl_ep_train.deep_ep.utils import EventHandle, EventOverlap


class Process:
    """What a process keeps between calls."""

    buffer: Any = None
    dispatches = 0  # without those of backwards


def row_bytes(x: Tensor) -> int:
    return x.size(1) * max(x.element_size(), 2)


def buffer_of(group: Any, hidden_bytes: int) -> Any:
    nvl, rdma, size, between_nodes = 0, 0, group.size(), Buffer.is_sm90_compiled()
    for config in (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)):
        nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, size), nvl)
        if between_nodes:
            rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size), rdma)
    assert between_nodes or size <= 8
    have = Process.buffer
    if have is None or have.group != group or have.num_nvl_bytes < nvl or have.num_rdma_bytes < rdma:
        Process.buffer = Buffer(group, nvl, rdma, explicitly_destroy=True)
    return Process.buffer


def free_buffer() -> None:
    Process.buffer.destroy()
    Process.buffer = None


class Fused:
    """How a call is made: ctx keeps it for the backward."""

    def __init__(self, ctx: Any, group: Any, async_finish: bool) -> None:
        ctx.group, ctx.async_finish = group, async_finish
        self.event = EventOverlap(EventHandle()) if async_finish else None
        self.options = {"async_finish": async_finish, "allocate_on_comm_stream": async_finish}

    def wait(self, event: EventOverlap) -> None:
        if self.event is not None:
            event.current_stream_wait()


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        x, idx, weights, num_experts, group, async_finish = given
        fused, buffer = Fused(ctx, group, async_finish), buffer_of(group, row_bytes(x))
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            idx, num_experts, previous_event=fused.event, **fused.options
        )
        rows, row_idx, row_weights, counts, ctx.handle, after = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            **fused.options,
        )
        fused.wait(after)
        Process.dispatches += 1
        return rows, row_idx, row_weights, torch.tensor(counts), ctx.handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x_grad, _, weights_grad, *_ = grads
        fused, buffer = Fused(ctx, ctx.group, ctx.async_finish), buffer_of(ctx.group, row_bytes(x_grad))
        grad, grad_of_weights, after = buffer.combine(
            x_grad.contiguous(),
            ctx.handle,
            topk_weights=weights_grad.float(),
            previous_event=fused.event,
            **fused.options,
        )
        fused.wait(after)
        return grad, None, grad_of_weights, None, None, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, None]:
        x, group, ctx.handle, async_finish = given
        fused, buffer = Fused(ctx, group, async_finish), buffer_of(group, row_bytes(x))
        out, _, after = buffer.combine(x, handle=ctx.handle, previous_event=fused.event, **fused.options)
        fused.wait(after)
        return out, None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        fused, buffer = Fused(ctx, ctx.group, ctx.async_finish), buffer_of(ctx.group, row_bytes(grads[0]))
        x_grad, _, _, _, _, after = buffer.dispatch(
            grads[0].contiguous(), handle=ctx.handle, previous_event=fused.event, **fused.options
        )
        fused.wait(after)
        return x_grad, None, None, None


class FlexDispatcher:
    """Rows to experts and back: dispatch, permutation by expert, its inverse, combine."""

    def __init__(self, case: Case, group: Any, async_finish: bool) -> None:
        self.case, self.group, self.async_finish = case, group, async_finish
        Buffer.set_num_sms(20)
        buffer_of(group, H * 2)  # before checkpoints see operations

    def permutation(self, x: Tensor, weights: Tensor, idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, row_idx, row_weights, counts, self.handle = FusedDispatch.apply(
            x.contiguous(), idx, weights.float(), E, self.group, self.async_finish
        )
        chosen = torch.zeros((len(rows), self.case.local), dtype=torch.long)
        weight_of = torch.zeros((len(rows), self.case.local))
        mask = row_idx != -1
        row = torch.arange(len(rows)).repeat_interleave(mask.sum(dim=1))
        chosen[row, row_idx[mask]] = 1
        weight_of[row, row_idx[mask]] = row_weights[mask]
        by_expert = chosen.bool().T.contiguous()
        self.source = torch.arange(len(rows)).expand(self.case.local, -1).masked_select(by_expert)
        assert len(self.source) == int(counts.sum()) and counts.dtype == torch.int64
        self.shape = rows.shape
        permuted = rows.index_select(0, self.source)
        return permuted, counts, weight_of.T.contiguous().masked_select(by_expert)

    def unpermutation(self, rows: Tensor) -> Tensor:
        out = torch.zeros(self.shape, dtype=rows.dtype)
        out.scatter_add_(0, self.source.unsqueeze(1).expand(-1, rows.shape[1]), rows)
        combined, _ = FusedCombine.apply(out, self.group, self.handle, self.async_finish)
        self.handle = None
        return combined


def layer(case: Case, dispatcher: FlexDispatcher, x: Tensor, weights: Tensor, factors: Tensor) -> Tensor:
    """One layer of experts. Tokens that the mask leaves out have no expert: here those without one."""
    tokens = case.tokens(dispatcher.group.rank())
    token_mask = (tokens.idx >= 0).any(1)
    # topk is kept by selective checkpoints, so that the second pass chooses the same.
    order = torch.topk(-torch.arange(case.topk).expand(len(x), -1), case.topk).indices
    idx = tokens.idx.gather(1, order).masked_fill(~token_mask.unsqueeze(-1), -1)
    rows, counts, row_weights = dispatcher.permutation(x, weights, idx)
    assert counts.tolist() == case.counts(dispatcher.group.rank())
    if counts.any():
        of_row = torch.arange(case.local).repeat_interleave(counts)
        done = (rows.float() * factors[of_row] * row_weights.unsqueeze(-1)).to(x.dtype)
    else:
        done = rows * (factors[0] * 0).to(x.dtype)  # so that factors have a gradient
    return dispatcher.unpermutation(done)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in (torch.ops.aten.topk.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def train(case: Case, group: Any, *, async_finish: bool, checkpoints: str) -> tuple[Tensor, Grads]:
    """Forward and backward. checkpoints: "none", "full" or "selective"."""
    tokens = case.tokens(group.rank())
    leaf = [tokens.x.clone(), tokens.weights.clone(), case.factors(group.rank()).clone()]
    run = partial(layer, case, FlexDispatcher(case, group, async_finish))
    options: dict[str, Any] = {"use_reentrant": False}
    if checkpoints == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    leaf = [tensor.requires_grad_() for tensor in leaf]
    out = run(*leaf) if checkpoints == "none" else checkpoint(run, *leaf, **options)
    (out.float() * tokens.grad).sum().backward()
    return out.detach(), Grads(*[tensor.grad for tensor in leaf])
