"""A dispatch with a new routing, and the handle that it returns.

Shapes: T tokens, R ranks, K experts per token, E experts, N received rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uccl_ep_train.api.buffer import Buffer as Engine
from uccl_ep_train.common.handle import DispatchHandle, DispatchResult, Fp8Rows
from uccl_ep_train.deep_ep.config import RANKS_OF_NODE


class Handle(tuple[Tensor, ...]):
    """What a dispatch returns for combines and for dispatches with the same routing.

    Up to 8 ranks: (rank_prefix_matrix [R, R], channel_prefix_matrix, recv_channel_prefix_matrix,
    recv_src_idx [N], is_token_in_rank [T, R], send_head). In the first, this rank's column holds the end of
    each source's rows; other columns are -1. With more ranks as DeepEP's ten tensors between nodes, of which
    [-4], recv_gbl_rank_prefix_sum [R], holds those ends. What is about channels is empty: there are none.
    """

    engine: Engine
    plan: DispatchHandle
    num_topk: int

    @classmethod
    def of(
        cls, result: DispatchResult, engine: Engine, num_topk: int, is_token_in_rank: Tensor, num_ranks: int
    ) -> Handle:
        assert result.metadata is not None
        source, token = result.metadata[:, 0], result.metadata[:, 1]
        counts = torch.bincount(source, minlength=num_ranks + 1)[1:]  # unused rows have the source 0
        ends, empty = counts.cumsum(0).to(torch.int32), source.new_empty(0)
        if num_ranks <= RANKS_OF_NODE:
            prefix = ends.new_full((num_ranks, num_ranks), -1)
            prefix[:, engine.rank] = ends
            made = cls((prefix, empty, empty, token, is_token_in_rank, empty))
        else:
            made = cls((is_token_in_rank, *[empty] * 5, ends, token, empty, empty))
        made.engine, made.plan, made.num_topk = engine, result.handle, num_topk
        return made


@dataclass(frozen=True)
class Sending:
    """A dispatch with a new routing."""

    engine: Engine
    is_token_in_rank: Tensor
    num_tokens_per_expert: Tensor
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    expert_alignment: int

    def send(
        self, rows: Tensor | Fp8Rows, num_worst_tokens: int
    ) -> tuple[DispatchResult, Tensor | None, Tensor | None, list[int], Handle]:
        """Returns (result, recv_topk_idx, recv_topk_weights, counts, handle)."""
        engine, topk_idx = self.engine, self.topk_idx
        with engine.preparing("dispatch"):
            metadata = self._metadata()
            routing_map = None if topk_idx is not None else self._first_experts()
        result = engine.dispatch(
            rows,
            None if topk_idx is None else topk_idx.contiguous(),
            routing_map=routing_map,
            layout="compact",
            capacity=num_worst_tokens or None,
            pad_to_capacity=num_worst_tokens > 0,
            metadata=metadata,
        )
        num_topk = 0 if topk_idx is None else topk_idx.shape[1]
        handle = Handle.of(result, engine, num_topk, self.is_token_in_rank, engine.num_ranks)
        local, weights = self._received(result, num_topk)
        return result, local, weights, self._counts(result, num_worst_tokens), handle

    def _metadata(self) -> Tensor:
        """[T, 2 + K or 2 K] int32: rank + 1, token, experts + 1 (0: none), weights."""
        tokens, device = len(self.is_token_in_rank), self.is_token_in_rank.device
        numbers = torch.arange(tokens, dtype=torch.int32, device=device)
        words = [torch.full_like(numbers, self.engine.rank + 1)[:, None], numbers[:, None]]
        if self.topk_idx is not None:
            words.append((self.topk_idx + 1).to(torch.int32))
        if self.topk_weights is not None:
            words.append(self.topk_weights.contiguous().view(torch.int32))
        return torch.cat(words, 1)

    def _first_experts(self) -> Tensor:
        """[T, E] bool: the first expert of each rank that a token goes to stands for all of them."""
        experts = self.engine.config.num_experts
        routing_map = self.is_token_in_rank.new_zeros(len(self.is_token_in_rank), experts, dtype=torch.bool)
        routing_map[:, :: experts // self.engine.num_ranks] = self.is_token_in_rank
        return routing_map

    def _received(self, result: DispatchResult, num_topk: int) -> tuple[Tensor | None, Tensor | None]:
        """Numbers of this rank's experts, -1 for others, and weights of those."""
        if num_topk == 0:
            return None, None
        assert result.metadata is not None
        engine = self.engine
        num_local = engine.config.num_experts // engine.num_ranks
        local = result.metadata[:, 2 : 2 + num_topk].to(torch.int64) - (1 + engine.rank * num_local)
        is_here = (local >= 0) & (local < num_local)
        weights = None
        if self.topk_weights is not None:
            weights = result.metadata[:, 2 + num_topk :].view(torch.float32).masked_fill(~is_here, 0.0)
        return local.masked_fill_(~is_here, -1), weights

    def _counts(self, result: DispatchResult, num_worst_tokens: int) -> list[int]:
        """Tokens of each expert of this rank, aligned. Without top-k ranks tell each other."""
        if num_worst_tokens > 0:
            return []
        if self.topk_idx is not None:
            exact = list(result.handle.tokens_per_expert_exact or ())
        else:
            ranks, of = self.engine.num_ranks, self.num_tokens_per_expert
            to = torch.arange(ranks, device=of.device)[:, None] * (of.numel() // ranks)
            nothing = torch.zeros(ranks, 128, dtype=torch.bfloat16, device=of.device)
            told = self.engine.dispatch(
                nothing, to, layout="compact", metadata=of.to(torch.int32).view(ranks, -1)
            )
            assert told.metadata is not None
            exact = told.metadata.sum(0).tolist()
        return [-(-count // self.expert_alignment) * self.expert_alignment for count in exact]
