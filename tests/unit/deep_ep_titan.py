"""torchtitan's calls, in their order and with their arguments; experts are those of deep_ep_dense.

Written from what this file calls at 756213e15^ (June 2026): from 756213e15 on it needs `ElasticBuffer`.
  pytorch/torchtitan torchtitan/distributed/deepep/deepep.py
                     torchtitan/distributed/activation_checkpoint.py

Communication is two operators, so that selective checkpoints can keep their results. A handle cannot pass
through an operator: its number does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, library
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.unit.deep_ep_dense import Case, E, Grads
from uccl_ep_train.deep_ep import Buffer, EventHandle, EventOverlap

_LIBRARY = library.Library("titan_calls", "DEF")
_LIBRARY.define(
    "dispatch(Tensor x, Tensor topk_idx, Tensor weights, Tensor per_rank, Tensor? per_node, Tensor in_rank, "
    "Tensor per_expert) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("combine(Tensor x, Tensor number) -> Tensor")


class Process:
    """What a process keeps between calls."""

    buffer: Any = None
    handles: ClassVar[dict[int, Any]] = {}
    last = 0  # dispatches, without those of backwards
    pending: EventOverlap | None = None


def buffer_of(group: Any, row_bytes: int) -> Any:
    nvl, rdma, size = 0, 0, group.size()
    for config in (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)):
        nvl = max(config.get_nvl_buffer_size_hint(row_bytes, size), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(row_bytes, size), rdma)
    have = Process.buffer
    if have is None or have.group != group or have.num_nvl_bytes < nvl or have.num_rdma_bytes < rdma:
        Process.buffer = Buffer(group, nvl, rdma)
    return Process.buffer


def _now() -> dict[str, Any]:
    event = EventOverlap(EventHandle())
    return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}


@library.impl(_LIBRARY, "dispatch", "CPU")
@library.impl(_LIBRARY, "dispatch", "CUDA")
def _dispatch(x: Tensor, topk_idx: Tensor, weights: Tensor, *layout: Tensor | None) -> tuple[Tensor, ...]:
    per_rank, per_node, in_rank, per_expert = layout
    rows, idx, row_weights, counts, handle, event = Process.buffer.dispatch(
        x=x,
        topk_idx=topk_idx,
        topk_weights=weights.to(torch.float32),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        **_now(),
    )
    event.current_stream_wait()
    Process.last += 1
    Process.handles[Process.last] = handle
    # Operators make tensors on CPUs, whatever torch's default device.
    on_device = torch.tensor(counts, dtype=torch.int32, device=rows.device)
    return rows, idx, row_weights, on_device, torch.tensor([Process.last])


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtype, ctx.handle = inputs[0].dtype, Process.handles.get(int(output[-1]))


def _dispatch_backward(ctx: Any, x_grad: Tensor, _idx: Any, weights_grad: Tensor, *_: Any) -> tuple[Any, ...]:
    grad, grad_of_weights, event = Process.buffer.combine(
        x=x_grad,
        handle=ctx.handle,
        topk_weights=None if weights_grad is None else weights_grad.float(),
        **_now(),
    )
    event.current_stream_wait()
    # Cast to the dtype of x, as torchtitan does: gradients of weights here are BF16 numbers.
    return grad.to(ctx.dtype), None, grad_of_weights.to(ctx.dtype), None, None, None, None


@library.impl(_LIBRARY, "combine", "CPU")
@library.impl(_LIBRARY, "combine", "CUDA")
def _combine(x: Tensor, number: Tensor) -> Tensor:
    found = Process.handles.pop if torch.is_inference_mode_enabled() else Process.handles.get
    out, _, Process.pending = Process.buffer.combine(x=x, handle=found(int(number)), **_now())
    return out


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.handle = Process.handles.pop(int(inputs[1]), None)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    x_grad, _, _, _, _, event = Process.buffer.dispatch(
        x=grad,
        topk_idx=None,
        topk_weights=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        handle=ctx.handle,
        **_now(),
    )
    event.current_stream_wait()
    return x_grad, None


library.register_autograd(
    "titan_calls::dispatch", _dispatch_backward, setup_context=_keep_for_dispatch, lib=_LIBRARY
)
library.register_autograd(
    "titan_calls::combine", _combine_backward, setup_context=_keep_for_combine, lib=_LIBRARY
)


class Routed(NamedTuple):
    """Rows by expert, their tokens among those received, their weights, tokens of each expert."""

    rows: Tensor
    token: Tensor
    weights: Tensor
    counts: Tensor
    received: int
    number: Tensor


def dispatch_tokens(x: Tensor, topk_idx: Tensor, scores: Tensor, group: Any) -> Routed:
    """Choices with a score of 0 are dropped."""
    topk_idx = topk_idx.contiguous().masked_fill(scores == 0, -1)
    scores = scores.contiguous().float()
    # Selective checkpoints must not see the making of the buffer: the second pass has none.
    with _disable_current_modes():
        buffer = buffer_of(group, x.size(1) * max(x.element_size(), 2))
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            topk_idx=topk_idx, num_experts=E
        )
    rows, idx, weights, counts, number = torch.ops.titan_calls.dispatch(
        x, topk_idx, scores, per_rank, per_node, in_rank, per_expert
    )
    mask = idx != -1
    by_expert = torch.argsort(idx[mask], stable=True)
    token = torch.arange(len(rows)).repeat_interleave(mask.sum(dim=1))[by_expert]
    return Routed(rows.index_select(0, token), token, weights[mask][by_expert], counts, len(rows), number)


def combine_tokens(rows: Tensor, routed: Routed) -> Tensor:
    """Call `sync_combine` before the result is read."""
    rows = rows * routed.weights.to(rows.dtype).reshape(-1, 1)
    out = torch.zeros((routed.received, rows.shape[1]), dtype=rows.dtype)
    out.scatter_add_(0, routed.token.unsqueeze(1).expand(-1, rows.shape[1]), rows)
    return torch.ops.titan_calls.combine(out, routed.number)


def sync_combine() -> None:
    if Process.pending is not None:
        Process.pending.current_stream_wait()
        Process.pending = None


def layer(case: Case, group: Any, x: Tensor, scores: Tensor, factors: Tensor) -> Tensor:
    """One layer of experts; the routing is the case's, with dropped choices as scores of 0."""
    idx = case.tokens(group.rank()).idx
    routed = dispatch_tokens(x, torch.where(idx < 0, 0, idx), scores, group)
    assert routed.counts.tolist() == case.counts(group.rank())
    of_row = torch.arange(case.local).repeat_interleave(routed.counts)
    out = combine_tokens((routed.rows.float() * factors[of_row]).to(x.dtype), routed)
    shared = x * 0  # a shared expert runs beside the combine
    sync_combine()
    return out + shared


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (torch.ops.titan_calls.dispatch.default, torch.ops.titan_calls.combine.default)
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def train(cases: list[Case], group: Any, checkpoints: str) -> list[tuple[Tensor, Grads]]:
    """Forward of all cases, then the backward of their sum. checkpoints: "none", "full" or "selective"."""
    leaves, outs, losses = [], [], []
    options: dict[str, Any] = {"use_reentrant": False}
    if checkpoints == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for case in cases:
        tokens = case.tokens(group.rank())
        scores = torch.where(tokens.idx < 0, 0.0, tokens.weights)
        leaf = [tokens.x.clone(), scores, case.factors(group.rank()).clone()]
        leaves.append([tensor.requires_grad_() for tensor in leaf])
        run = partial(layer, case, group)
        with set_checkpoint_early_stop(False):
            out = run(*leaves[-1]) if checkpoints == "none" else checkpoint(run, *leaves[-1], **options)
        outs.append(out)
        losses.append((out.float() * tokens.grad).sum())
    torch.stack(losses).sum().backward()
    assert not Process.handles, "handles are left over"
    return [
        (out.detach(), Grads(*[tensor.grad for tensor in leaf]))
        for out, leaf in zip(outs, leaves, strict=True)
    ]
