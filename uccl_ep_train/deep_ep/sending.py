"""A dispatch with a new routing, and the handle that it returns.

Shapes: T tokens, R ranks, K experts per token, E experts, L experts of this rank, N received rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, SupportsIndex, overload

import torch
from torch import Tensor

from uccl_ep_train.api.buffer import Buffer as Engine
from uccl_ep_train.common.handle import DispatchHandle, DispatchResult
from uccl_ep_train.core import topk
from uccl_ep_train.deep_ep.checks import check_number, check_topk
from uccl_ep_train.deep_ep.config import RANKS_OF_NODE
from uccl_ep_train.deep_ep.facts import Facts, fact
from uccl_ep_train.deep_ep.scales import Rows, cut, engine_rows
from uccl_ep_train.errors import DtypeError, InputError, ShapeError


class Route(NamedTuple):
    """What operations with a handle need, and what its tensors are made of."""

    engine: Engine
    plan: DispatchHandle
    num_topk: int
    metadata: Tensor
    is_token_in_rank: Tensor


class Handle(Facts, tuple[Tensor, ...]):
    """What a dispatch returns for combines and for dispatches with the same routing.

    Up to 8 ranks: (rank_prefix_matrix [R, R], channel_prefix_matrix, recv_channel_prefix_matrix,
    recv_src_idx [N], is_token_in_rank [T, R], send_head). In the first, this rank's column holds the end of
    each source's rows; other columns are -1. With more ranks as DeepEP's ten tensors between nodes, of which
    [-4], recv_gbl_rank_prefix_sum [R], holds those ends. What is about channels is empty: there are none.
    The tensors are made when they are asked for. A tuple of them is as good as the handle.
    """

    __eq__, __hash__, __repr__ = object.__eq__, object.__hash__, object.__repr__

    def __new__(cls, *_: Any) -> Handle:
        return super().__new__(cls)

    def __init__(self, route: Route) -> None:
        super().__init__(route.engine.device)
        self.route = route

    @staticmethod
    def of(given: Any) -> Route:
        """Of a handle, or of its tensors in a tuple, as autograd saves them. Raises `DtypeError`."""
        if isinstance(given, Handle):
            return given.route
        parts = given if isinstance(given, tuple | list) and len(given) in (6, 10) else ()
        for tensor in parts:
            route = getattr(tensor, "uccl_ep_route", None)
            if isinstance(route, Route):
                return route
        raise DtypeError(
            f"handle is {type(given).__name__}; allowed is what a dispatch returned, or its tensors"
        )

    @property
    def kept(self) -> tuple[Tensor | None, ...]:
        """What operations with the handle read."""
        return self.route.metadata, self.route.plan.storage

    @fact
    def _tensors(self) -> tuple[Tensor, ...]:
        engine, metadata = self.route.engine, self.route.metadata
        ranks, source, token = engine.num_ranks, metadata[:, 0], metadata[:, 1]
        counts = torch.bincount(source, minlength=ranks + 1)[1:]  # unused rows have the source 0
        ends, empty = counts.cumsum(0).to(torch.int32), source.new_empty(0)
        ends.uccl_ep_route = self.route  # type: ignore[attr-defined]
        if ranks > RANKS_OF_NODE:
            return (self.route.is_token_in_rank, *[empty] * 5, ends, token, empty, empty)
        prefix = ends.new_full((ranks, ranks), -1)
        prefix[:, engine.rank] = ends
        prefix.uccl_ep_route = self.route  # type: ignore[attr-defined]
        return prefix, empty, empty, token, self.route.is_token_in_rank, empty

    def __len__(self) -> int:
        return 10 if self.route.engine.num_ranks > RANKS_OF_NODE else 6

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    @overload
    def __getitem__(self, at: SupportsIndex) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> Tensor | tuple[Tensor, ...]:
        return self._tensors[at]


class Routing(NamedTuple):
    """is_token_in_rank [T, R], num_tokens_per_expert [E]; topk_idx and topk_weights [T, K], or None."""

    is_token_in_rank: Tensor
    num_tokens_per_expert: Tensor
    topk_idx: Tensor | None
    topk_weights: Tensor | None

    def check(self, x: Rows, num_ranks: int) -> None:
        """What `Sender.packed` does not. x: its rows. Raises `ShapeError`, `InputError`."""
        tokens = len(x[0] if isinstance(x, tuple) else x)
        if self.is_token_in_rank.shape != (tokens, num_ranks) or self.is_token_in_rank.dtype != torch.bool:
            kind = f"{list(self.is_token_in_rank.shape)} {self.is_token_in_rank.dtype}"
            raise ShapeError(f"is_token_in_rank is {kind}; allowed is [{tokens}, {num_ranks}] torch.bool")
        if self.topk_weights is not None and self.topk_idx is None:
            raise InputError("topk_weights without topk_idx; allowed is None")


class Received(NamedTuple):
    """recv_x; recv_topk_idx and recv_topk_weights [N, K], or None; the list of counts."""

    rows: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    counts: list[int]
    handle: Handle


class Sender:
    """Dispatches through one engine. Where a row is from, its experts and weights are its metadata."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_local = engine.config.num_experts // engine.num_ranks

    def send(self, x: Rows, routing: Routing, expert_alignment: int, num_worst_tokens: int) -> Received:
        engine, topk_idx = self.engine, routing.topk_idx
        with engine.preparing("dispatch"):
            routing.check(x, engine.num_ranks)
            expert_alignment = check_number("expert_alignment", expert_alignment, 1)
            num_worst_tokens = check_number("num_worst_tokens", num_worst_tokens, 0)
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
        route = Route(engine, result.handle, num_topk, result.metadata, routing.is_token_in_rank)
        local, weights = self.unpacked(result.metadata, num_topk, routing.topk_weights is not None)
        exact = [] if num_worst_tokens > 0 else self._counts(result, routing)
        if expert_alignment > 1:
            exact = [-(-count // expert_alignment) * expert_alignment for count in exact]
        return Received(cut(result.rows, x), local, weights, exact, Handle(route))

    def packed(self, tokens: int, topk_idx: Tensor | None, topk_weights: Tensor | None) -> Tensor:
        """Metadata of this rank's tokens. Raises `DtypeError`, `ShapeError`, `DeviceError`."""
        device = self.engine.device
        if topk_idx is not None:
            check_topk(topk_idx, topk_weights, tokens, device)
            topk_idx = topk_idx.contiguous()
            topk_weights = None if topk_weights is None else topk_weights.contiguous()
        return topk.pack(device, tokens, self.engine.rank, topk_idx, topk_weights)

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
        first = self.engine.rank * self._num_local
        return topk.unpack(metadata, num_topk, has_weights, first, self._num_local)

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
