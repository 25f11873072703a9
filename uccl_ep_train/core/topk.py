"""What a top-k routing says of ranks and experts, and routing that travels beside rows as metadata.

On a GPU each function is one kernel, because a dozen of torch's take the host longer than a small dispatch.

Shapes: T tokens, K experts per token, E experts, R ranks, N rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from uccl_ep_train.core.cuda import built
from uccl_ep_train.core.native import load_native
from uccl_ep_train.core.operations import address


class TopkLayout(NamedTuple):
    """Tokens by rank [R], by node [R / ranks_of_node] or None, and by expert [E], int32; which ranks a token
    goes to, [T, R] bool."""

    per_rank: Tensor
    per_node: Tensor | None
    per_expert: Tensor
    in_rank: Tensor


def layout_of(topk_idx: Tensor, num_experts: int, num_ranks: int, ranks_of_node: int = 0) -> TopkLayout:
    """topk_idx: [T, K] int64, contiguous, -1: none. ranks_of_node = 0: nodes are not counted.

    A token counts once for each rank, node and expert. What is no expert does not count: a dispatch
    refuses it.
    """
    tokens, nodes = len(topk_idx), num_ranks // ranks_of_node if ranks_of_node else 0
    if topk_idx.is_cuda and built():
        counts = topk_idx.new_zeros(num_ranks + nodes + num_experts, dtype=torch.int32)
        in_rank = topk_idx.new_empty(tokens, num_ranks, dtype=torch.bool)
        memory, sizes = (topk_idx, counts, in_rank), (tokens, topk_idx.shape[1], num_experts, num_ranks)
        load_native().gpu_topk_layout(*_place(topk_idx), [*map(address, memory)], [*sizes, ranks_of_node])
        per_rank, per_node, per_expert = counts.split([num_ranks, nodes, num_experts])
        return TopkLayout(per_rank, per_node if nodes else None, per_expert, in_rank)
    named = torch.zeros(tokens, num_experts + 1, dtype=torch.bool, device=topk_idx.device)
    none = (topk_idx < 0) | (topk_idx >= num_experts)
    named = named.scatter_(1, topk_idx.masked_fill(none, num_experts), True)[:, :num_experts]
    in_rank = named.view(tokens, num_ranks, num_experts // num_ranks).any(2)
    in_node = in_rank.view(tokens, nodes, ranks_of_node).any(2).sum(0, dtype=torch.int32) if nodes else None
    return TopkLayout(in_rank.sum(0, dtype=torch.int32), in_node, named.sum(0, dtype=torch.int32), in_rank)


def num_words(num_topk: int, has_weights: bool) -> int:
    """Of a row's metadata: rank + 1, token, K experts + 1 of two words each (0: none), K weights or none; one
    more if that is odd, so that experts are int64 where they lie."""
    return 2 + 2 * num_topk + ((num_topk + 1) // 2 * 2 if has_weights else 0)


def pack(
    device: torch.device, tokens: int, rank: int, topk_idx: Tensor | None, topk_weights: Tensor | None
) -> Tensor:
    """Metadata of tokens 0 .. T - 1 of a rank, [T, num_words] int32.

    topk_idx [T, K] int64 and topk_weights [T, K] float32, both contiguous there, or None.
    """
    num_topk = 0 if topk_idx is None else topk_idx.shape[1]
    shape = tokens, num_words(num_topk, topk_weights is not None)
    if device.type == "cuda":
        words = torch.empty(shape, dtype=torch.int32, device=device)
        memory = topk_idx, topk_weights, words
        load_native().gpu_topk_pack(*_place(words), [*map(address, memory)], [rank, tokens, num_topk])
        return words
    words = torch.zeros(shape, dtype=torch.int32, device=device)
    words[:, 0], words[:, 1] = rank + 1, torch.arange(tokens, device=device)
    if topk_idx is not None:
        words.view(torch.int64)[:, 1 : 1 + num_topk] = topk_idx + 1
    if topk_weights is not None:
        words[:, 2 + 2 * num_topk : 2 + 3 * num_topk] = topk_weights.view(torch.int32)
    return words


def unpack(
    words: Tensor, num_topk: int, has_weights: bool, first_expert: int, num_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Of metadata: experts [N, K] int64, numbered from first_expert, -1: others; weights [N, K] float32.

    has_weights  weights are wanted; they may have travelled anyway
    """
    if words.is_cuda:
        experts = words.new_empty((len(words), num_topk), dtype=torch.int64)
        weights = words.new_empty((len(words), num_topk), dtype=torch.float32) if has_weights else None
        words = words.contiguous()
        memory = words, experts, weights
        sizes = [len(words), num_topk, first_expert, num_experts, words.shape[1]]
        load_native().gpu_topk_unpack(*_place(words), [*map(address, memory)], sizes)
        return experts, weights
    experts = words.view(torch.int64)[:, 1 : 1 + num_topk] - (1 + first_expert)
    experts = torch.where((experts >= 0) & (experts < num_experts), experts, -1)
    if not has_weights:
        return experts, None
    weights = words[:, 2 + 2 * num_topk : 2 + 3 * num_topk].view(torch.float32)
    return experts, torch.where(experts < 0, 0.0, weights)


def _place(tensor: Tensor) -> tuple[int, int]:
    """The GPU of a tensor, and the caller's stream there."""
    device = tensor.device.index
    return device, int(torch._C._cuda_getCurrentRawStream(device))
