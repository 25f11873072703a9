"""The dispatches of DeepEP's second interface, new ones and those with a handle.

Shapes: T tokens, K experts per token, N received rows, W columns of a compact row's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uccl_ep_train.deep_ep.checks import check, check_topk
from uccl_ep_train.deep_ep.elastic_handle import Asked, EPHandle
from uccl_ep_train.deep_ep.scales import Rows, cut, engine_rows
from uccl_ep_train.deep_ep.sending import Sender
from uccl_ep_train.errors import InputError

Received = tuple[Rows, Tensor | None, Tensor | None, EPHandle]
"""recv_x, recv_topk_idx, recv_topk_weights, the handle."""


def send(
    sender: Sender,
    asked: Asked,
    x: Rows,
    routing: tuple[Tensor | None, Tensor | None],
    stats: Tensor | None,
    copies: bool,
) -> Received:
    """A dispatch with a new routing: topk_idx, topk_weights. copies: the handle's topk_idx is a copy"""
    engine, (topk_idx, topk_weights) = sender.engine, routing
    with engine.preparing("dispatch"):
        if topk_idx is None:
            raise InputError("topk_idx = None without a handle; allowed is a tensor [T, K]")
        codes = x[0] if isinstance(x, tuple) else x
        check_topk(topk_idx, topk_weights, len(codes))
        if stats is not None:
            local = asked.num_experts // engine.num_ranks
            check("cumulative_local_expert_recv_stats", stats, (local,), torch.int32)
        # Expanded rows have weights of their own.
        metadata = sender.packed(len(codes), topk_idx, None if asked.do_expand else topk_weights)
        rows, topk, most = engine_rows(x), topk_idx.shape[1], None
    if not asked.do_cpu_sync:
        ranks = engine.num_ranks
        most = asked.most_expanded(ranks, topk) if asked.do_expand else asked.most_tokens(ranks)
    result = engine.dispatch(
        rows,
        topk_idx,
        topk_weights if asked.do_expand else None,
        expert_alignment=asked.expert_alignment if asked.do_expand else 1,
        layout="expert_major" if asked.do_expand else "compact",
        capacity=most,
        pad_to_capacity=most is not None and not asked.do_expand,
        max_tokens=None if most is None else asked.num_max_tokens_per_rank,
        metadata=metadata,
    )
    handle = EPHandle(sender, asked, topk_idx.clone() if copies else topk_idx, result)
    if stats is not None:
        stats += handle.num_unaligned_recv_tokens_per_expert
    recv_x = cut(result.rows, x)
    if asked.do_expand:
        return recv_x, None, result.row_weights, handle
    assert result.metadata is not None
    return recv_x, *sender.unpacked(result.metadata, topk, topk_weights is not None), handle


def send_again(handle: EPHandle, x: Rows, topk_weights: Tensor | None) -> Received:
    """A dispatch with the handle's routing. Weights of rows that are not expanded travel as metadata."""
    engine, metadata = handle.sender.engine, None
    with engine.preparing("dispatch"):
        rows = engine_rows(x)
        if topk_weights is not None:
            check("topk_weights", topk_weights, tuple(handle.topk_idx.shape), torch.float32)
            if not handle.do_expand:
                metadata = topk_weights.contiguous().view(torch.int32)
    expanded = topk_weights if handle.do_expand else None
    result = engine.dispatch(rows, None, expanded, handle=handle.plan, metadata=metadata)
    recv_x = cut(result.rows, x)
    if handle.do_expand:
        return recv_x, None, result.row_weights, handle
    local = handle.recv_topk_idx()
    if result.metadata is None:
        return recv_x, local, None, handle
    return recv_x, local, result.metadata.view(torch.float32).masked_fill(local < 0, 0.0), handle


def by_expert(topk_weights: Tensor, handle: EPHandle) -> Tensor:
    """Weights as the engine takes them: [N], or [N, W] by experts of this rank, ascending."""
    if handle.do_expand:
        return topk_weights.contiguous()
    local = handle.recv_topk_idx()
    order = torch.where(local < 0, handle.num_experts, local).argsort(dim=1, stable=True)
    return topk_weights.gather(1, order[:, : handle.plan.row_layout.width]).contiguous()
