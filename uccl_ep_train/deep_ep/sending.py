"""A dispatch with a new routing, and the handle that it returns.

Shapes: T tokens, R ranks, K experts per token, E experts, L experts of this rank, N received rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from uccl_ep_train.api.buffer import Buffer as Engine
from uccl_ep_train.common.handle import DispatchHandle, DispatchResult
from uccl_ep_train.core.cuda import is_capturing
from uccl_ep_train.deep_ep.config import RANKS_OF_NODE
from uccl_ep_train.deep_ep.facts import Facts, fact
from uccl_ep_train.deep_ep.scales import Rows, caller_rows, dense, engine_rows
from uccl_ep_train.errors import DtypeError, InputError, ShapeError


class Handle(Facts, Sequence[Tensor]):
    """What a dispatch returns for combines and for dispatches with the same routing.

    Up to 8 ranks: (rank_prefix_matrix [R, R], channel_prefix_matrix, recv_channel_prefix_matrix,
    recv_src_idx [N], is_token_in_rank [T, R], send_head). In the first, this rank's column holds the end of
    each source's rows; other columns are -1. With more ranks as DeepEP's ten tensors between nodes, of which
    [-4], recv_gbl_rank_prefix_sum [R], holds those ends. What is about channels is empty: there are none.
    The tensors are made when they are asked for.
    """

    def __init__(
        self, engine: Engine, plan: DispatchHandle, num_topk: int, metadata: Tensor, is_token_in_rank: Tensor
    ) -> None:
        super().__init__(engine.device)
        self.engine, self.plan, self.num_topk = engine, plan, num_topk
        self._metadata, self._is_token_in_rank = metadata, is_token_in_rank

    @property
    def kept(self) -> tuple[Tensor | None, ...]:
        """What operations with the handle read."""
        return self._metadata, self.plan.storage

    @fact
    def _tensors(self) -> tuple[Tensor, ...]:
        ranks, source, token = self.engine.num_ranks, self._metadata[:, 0], self._metadata[:, 1]
        counts = torch.bincount(source, minlength=ranks + 1)[1:]  # unused rows have the source 0
        ends, empty = counts.cumsum(0).to(torch.int32), source.new_empty(0)
        if ranks > RANKS_OF_NODE:
            return (self._is_token_in_rank, *[empty] * 5, ends, token, empty, empty)
        prefix = ends.new_full((ranks, ranks), -1)
        prefix[:, self.engine.rank] = ends
        return prefix, empty, empty, token, self._is_token_in_rank, empty

    def __len__(self) -> int:
        return 10 if self.engine.num_ranks > RANKS_OF_NODE else 6

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, at: int | slice) -> Tensor | tuple[Tensor, ...]:
        return self._tensors[at]


class Routing(NamedTuple):
    """is_token_in_rank [T, R], num_tokens_per_expert [E]; topk_idx and topk_weights [T, K], or None."""

    is_token_in_rank: Tensor
    num_tokens_per_expert: Tensor
    topk_idx: Tensor | None
    topk_weights: Tensor | None

    def check(self, num_ranks: int) -> None:
        """The engine checks topk_idx itself. Raises `ShapeError`, `DtypeError`, `InputError`."""
        tokens = len(self.is_token_in_rank)
        if self.is_token_in_rank.shape != (tokens, num_ranks) or self.is_token_in_rank.dtype != torch.bool:
            kind = f"{list(self.is_token_in_rank.shape)} {self.is_token_in_rank.dtype}"
            raise ShapeError(f"is_token_in_rank is {kind}; allowed is [{tokens}, {num_ranks}] torch.bool")
        weights = self.topk_weights
        if weights is None:
            return
        if self.topk_idx is None:
            raise InputError("topk_weights without topk_idx; allowed is None")
        if weights.dtype != torch.float32:
            raise DtypeError(f"topk_weights is {weights.dtype}; allowed is torch.float32")
        if weights.shape != self.topk_idx.shape:
            raise ShapeError(
                f"topk_weights is {list(weights.shape)}; allowed is {list(self.topk_idx.shape)}, as topk_idx"
            )


class Received(NamedTuple):
    """recv_x; recv_topk_idx and recv_topk_weights [N, K], or None; the list of counts."""

    rows: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    counts: list[int]
    handle: Handle


class Sender:
    """Dispatches through one engine. A row's metadata: rank + 1, token, experts + 1 (0: none), weights.

    Experts are int64 as two words, and a row has an even number of words, so that few kernels pack and unpack
    them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        experts, num_local = engine.config.num_experts, engine.config.num_experts // engine.num_ranks
        first = 1 + engine.rank * num_local
        # By expert + 1: the number among this rank's, or -1.
        self._local = torch.full((experts + 1,), -1, dtype=torch.int64, device=engine.device)
        self._local[first : first + num_local] = torch.arange(num_local, device=engine.device)
        # Those that a longer one replaced may be read by graphs.
        self._heads = [torch.empty(0, 2, dtype=torch.int32, device=engine.device)]
        self._settle()

    def _settle(self) -> None:
        """What this keeps is read on any stream."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)

    def _heads_of(self, tokens: int) -> Tensor:
        """[T, 2] int32: this rank + 1, token."""
        if tokens <= len(self._heads[-1]):
            return self._heads[-1][:tokens]
        captured = is_capturing(self.engine.device)
        most = tokens if captured else max(tokens, 2 * len(self._heads[-1]))
        numbers = torch.arange(most, dtype=torch.int32, device=self.engine.device)
        heads = torch.stack([torch.full_like(numbers, self.engine.rank + 1), numbers], 1)
        if not captured:  # inside a graph they have values in its replays only
            self._settle()
            self._heads.append(heads)
        return heads[:tokens]

    def send(self, x: Rows, routing: Routing, expert_alignment: int, num_worst_tokens: int) -> Received:
        engine, topk_idx = self.engine, routing.topk_idx
        with engine.preparing("dispatch"):
            routing.check(engine.num_ranks)
            if expert_alignment < 1:
                raise InputError(f"expert_alignment = {expert_alignment}; allowed are 1 or more")
            tokens = len(routing.is_token_in_rank)
            rows, metadata = engine_rows(x), self.packed(tokens, topk_idx, routing.topk_weights)
            routing_map = None if topk_idx is not None else self._first_experts(routing.is_token_in_rank)
        result = engine.dispatch(
            rows,
            topk_idx,
            routing_map=routing_map,
            layout="compact",
            capacity=num_worst_tokens or None,
            pad_to_capacity=num_worst_tokens > 0,
            metadata=metadata,
        )
        assert result.metadata is not None
        num_topk = 0 if topk_idx is None else topk_idx.shape[1]
        handle = Handle(engine, result.handle, num_topk, result.metadata, routing.is_token_in_rank)
        local, weights = self.unpacked(result.metadata, num_topk, routing.topk_weights is not None)
        exact = [] if num_worst_tokens > 0 else self._counts(result, routing)
        aligned = [-(-count // expert_alignment) * expert_alignment for count in exact]
        return Received(caller_rows(result.rows, x), local, weights, aligned, handle)

    def packed(self, tokens: int, topk_idx: Tensor | None, topk_weights: Tensor | None) -> Tensor:
        """Metadata [T, 2 + 3 K] int32, or one more if that is odd, or without weights or experts fewer."""
        words = [self._heads_of(tokens)]
        if topk_idx is not None:
            words.append(dense(topk_idx + 1).view(torch.int32))
        if topk_weights is not None:
            words.append(topk_weights.contiguous().view(torch.int32))
            if topk_weights.shape[1] % 2:
                words.append(words[0][:, :1])
        return torch.cat(words, 1)

    def _first_experts(self, is_token_in_rank: Tensor) -> Tensor:
        """[T, E] bool: the first expert of each rank that a token goes to stands for all of them."""
        experts = self.engine.config.num_experts
        routing_map = is_token_in_rank.new_zeros(len(is_token_in_rank), experts, dtype=torch.bool)
        routing_map[:, :: experts // self.engine.num_ranks] = is_token_in_rank
        return routing_map

    def unpacked(
        self, metadata: Tensor, num_topk: int, has_weights: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Numbers of this rank's experts, -1 for others, and weights of those."""
        if num_topk == 0:
            return None, None
        local = self._local[metadata.view(torch.int64)[:, 1 : 1 + num_topk]]
        if not has_weights:
            return local, None
        weights = metadata[:, 2 + 2 * num_topk : 2 + 3 * num_topk].view(torch.float32)
        return local, torch.where(local < 0, 0.0, weights)

    def _counts(self, result: DispatchResult, routing: Routing) -> list[int]:
        """Tokens of each expert of this rank. Without top-k ranks tell each other."""
        if routing.topk_idx is not None:
            return list(result.handle.tokens_per_expert_exact or ())
        ranks, of = self.engine.num_ranks, routing.num_tokens_per_expert
        to = torch.arange(ranks, device=of.device)[:, None] * (of.numel() // ranks)
        nothing = torch.zeros(ranks, 128, dtype=torch.bfloat16, device=of.device)
        words = of.to(torch.int32).view(ranks, -1)
        told = self.engine.dispatch(nothing, to, layout="compact", metadata=words)
        assert told.metadata is not None
        return [int(count) for count in told.metadata.sum(0).tolist()]
