"""The oracle's plan: which row of which rank each (token, expert) pair of a group gets.

See ``reference.py`` for what is done with it, and for the legend of the shape suffixes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from uccl_ep_train.errors import RoutingError


def members_of_domains(domain_of: Sequence[int]) -> list[list[int]]:
    """Group ranks of each domain, ascending. Domains are numbered by lowest rank, whatever their ids."""
    names = list(dict.fromkeys(domain_of))
    return [[rank for rank, name in enumerate(domain_of) if name == wanted] for wanted in names]


def rail(members: list[list[int]], source: int, domain: int) -> int:
    """The rank of ``domain`` that relays for the rank ``source`` of another domain."""
    (own,) = [ranks for ranks in members if source in ranks]
    return members[domain][own.index(source) % len(members[domain])]


@dataclass(frozen=True)
class Routing:
    """One rank's routing as a map, whichever of the two forms it came in.

    routed_TE is bool; weights_TE float32 (read only where routed) or None; topk_idx_TK int64, None if the
    routing was given as a map.
    """

    routed_TE: Tensor
    weights_TE: Tensor | None
    topk_idx_TK: Tensor | None = None

    @property
    def width(self) -> int:
        """K or E: how many experts a token can name."""
        return (self.routed_TE if self.topk_idx_TK is None else self.topk_idx_TK).shape[1]

    @classmethod
    def from_topk(cls, topk_idx_TK: Tensor, topk_weights_TK: Tensor | None, num_experts: int) -> Routing:
        """int64 [T, K] expert numbers, -1 = dropped, and float32 [T, K] weights or None.

        Raises:
            RoutingError: an expert out of range, or one that a token names twice.
        """
        if topk_idx_TK.numel() and not (topk_idx_TK.min() >= -1 and topk_idx_TK.max() < num_experts):
            raise RoutingError(f"experts are -1 (dropped) or 0..{num_experts - 1}")
        count_TE = torch.zeros(len(topk_idx_TK), num_experts, dtype=torch.int64)
        weights_TE = torch.zeros(count_TE.shape, dtype=torch.float32)
        token_P, k_P = (topk_idx_TK >= 0).nonzero(as_tuple=True)
        expert_P = topk_idx_TK[token_P, k_P]
        count_TE.index_put_((token_P, expert_P), torch.ones_like(expert_P), accumulate=True)
        if (count_TE > 1).any():
            raise RoutingError("a token names the same expert twice")
        if topk_weights_TK is None:
            return cls(count_TE > 0, None, topk_idx_TK)
        weights_TE[token_P, expert_P] = topk_weights_TK[token_P, k_P]
        return cls(count_TE > 0, weights_TE, topk_idx_TK)

    @classmethod
    def from_map(cls, routing_map_TE: Tensor, probs_TE: Tensor | None) -> Routing:
        """bool [T, E] and float32 [T, E] or None. The map alone decides: a routed probability may be 0."""
        return cls(routing_map_TE, probs_TE)

    def in_own_form(self, grad_TE: Tensor) -> Tensor:
        """A gradient per (token, expert) in the shape in which the weights were given: [T, K] or [T, E]."""
        if self.topk_idx_TK is None:
            return grad_TE
        grad_TK = grad_TE.gather(1, self.topk_idx_TK.clamp(min=0))
        return grad_TK.masked_fill(self.topk_idx_TK < 0, 0.0)


class Segment(NamedTuple):
    """The pairs of one source with one expert, tokens ascending; n of them.

    tokens and rows are int64 [n]: the tokens' numbers at the source, and their rows at the expert's owner.
    columns is int64 [n]: where the weight of a pair stands in its row, 0 if rows are expert-major.
    """

    expert: int
    owner: int
    source: int
    tokens: Tensor
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Plan:
    """Where every row goes. ``segments`` ascend by expert, inside an expert in the order of the sources.

    Expert-major: a row per pair, ``width`` is None, row weights are [R]. Compact: a row per (token, owner),
    row weights are [R, width].
    """

    routings: tuple[Routing, ...]
    segments: tuple[Segment, ...]
    tokens_per_expert: tuple[Tensor, ...]  # per rank int64 [L], padded to the expert alignment
    tokens_per_expert_exact: tuple[Tensor, ...]  # per rank int64 [L]
    rows_per_rank: tuple[int, ...]
    width: int | None = None
    overflow: tuple[bool, ...] | None = None  # per rank: rows were cut off; None: the plan is whole

    def num_tokens(self, source: int) -> int:
        return self.routings[source].routed_TE.shape[0]

    def num_rows(self, owner: int) -> int:
        return self.rows_per_rank[owner]

    @cached_property
    def segments_between(self) -> dict[tuple[int, int], list[Segment]]:
        """``segments`` by (owner, source); a pair of ranks without any is missing."""
        found: dict[tuple[int, int], list[Segment]] = defaultdict(list)
        for segment in self.segments:
            found[segment.owner, segment.source].append(segment)
        return dict(found)

    def cut(self, capacities: Sequence[int], padded: Sequence[bool]) -> Plan:
        """The plan without what lies beyond the first ``capacities[rank]`` rows of each rank.

        A rank that is ``padded`` has so many rows even if fewer come.
        """

        def kept(segment: Segment) -> Segment:
            keep = segment.rows < capacities[segment.owner]
            tokens, rows, columns = (part[keep] for part in segment[3:])
            return segment._replace(tokens=tokens, rows=rows, columns=columns)

        return replace(
            self,
            segments=tuple(map(kept, self.segments)),
            rows_per_rank=tuple(
                capacity if pads else min(rows, capacity)
                for rows, capacity, pads in zip(self.rows_per_rank, capacities, padded, strict=True)
            ),
            overflow=tuple(map(int.__gt__, self.rows_per_rank, capacities)),
        )


def make_plan(
    routings: Sequence[Routing], num_experts: int, source_order: Sequence[int], expert_alignment: int = 1
) -> Plan:
    """Rows are expert-major, then source in ``source_order``, then token; each expert is padded."""
    experts_per_rank = num_experts // len(routings)
    segments: list[Segment] = []
    padded: list[list[int]] = []
    exact: list[list[int]] = []
    for owner in range(len(routings)):
        padded.append([])
        exact.append([])
        first_row = 0
        for expert in range(owner * experts_per_rank, (owner + 1) * experts_per_rank):
            next_row = first_row
            for source in source_order:
                tokens = routings[source].routed_TE[:, expert].nonzero().flatten()
                rows = next_row + torch.arange(len(tokens))
                segments.append(Segment(expert, owner, source, tokens, rows, torch.zeros_like(rows)))
                next_row += len(tokens)
            exact[-1].append(next_row - first_row)
            padded[-1].append(-(-exact[-1][-1] // expert_alignment) * expert_alignment)
            first_row += padded[-1][-1]
    return Plan(
        tuple(routings),
        tuple(segments),
        tuple(map(torch.tensor, padded)),
        tuple(map(torch.tensor, exact)),
        tuple(map(sum, padded)),
    )


def make_compact_plan(routings: Sequence[Routing], num_experts: int, source_order: Sequence[int]) -> Plan:
    """Rows are in ``source_order``, then token: one for each token with an expert of the rank.

    A row's columns are its experts of the rank, ascending; there are as many as a token can name there.
    """
    experts_per_rank = num_experts // len(routings)
    plan = make_plan(routings, num_experts, source_order)
    segments: list[Segment] = []
    num_rows: list[int] = []
    for owner in range(len(routings)):
        first_row = 0
        first_of_source: dict[int, int] = {}
        local = slice(owner * experts_per_rank, (owner + 1) * experts_per_rank)
        for source in source_order:
            first_of_source[source] = first_row
            first_row += int(routings[source].routed_TE[:, local].any(dim=1).sum())
        num_rows.append(first_row)
        for segment in plan.segments:
            if segment.owner == owner:
                here_TL = routings[segment.source].routed_TE[:, local]
                row_T = first_of_source[segment.source] + here_TL.any(dim=1).cumsum(0) - 1
                column_TL = here_TL.cumsum(1) - 1
                rows, columns = row_T[segment.tokens], column_TL[segment.tokens, segment.expert - local.start]
                segments.append(segment._replace(rows=rows, columns=columns))
    width = min(routings[0].width, experts_per_rank)
    return replace(plan, segments=tuple(segments), rows_per_rank=tuple(num_rows), width=width)
