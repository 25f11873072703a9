"""The oracle: dispatch and combine of a whole expert-parallel group in one process, in plain torch.

This module computes what the engine does over several ranks in the obvious way. The order of sums and the
roundings are the same, so tests compare with ``torch.equal``. Nothing here is differentiable; the two
backward operations are methods of their own. The steps are named as in the engine.

Legend of the shape suffixes: T tokens of a rank (differs per rank, may be 0), H hidden size, K experts a
token can name, E experts of the whole group, L experts of a rank, R rows at a rank (padding included), W
columns of a compact row's weights, P (token, expert) pairs of a rank, S ranks of the group, D domains. Lists
are indexed by group rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uccl_ep_train.common.handle import Fp8Rows
from uccl_ep_train.errors import ConfigError, DtypeError, RoutingError, ShapeError
from uccl_ep_train.oracle import fp8
from uccl_ep_train.oracle.plan import (
    Plan,
    Routing,
    make_compact_plan,
    make_plan,
    members_of_domains,
    rail,
)


def wire_of_rows(setting: str, dtype: torch.dtype) -> str:
    """Wire format of dispatched rows. "fp8": BF16 rows, quantised. "bf16": rows travel in their own dtype.

    Raises:
        DtypeError: float32 rows with "fp8", or rows that are neither bfloat16 nor float32.
        ConfigError: the setting is unknown.
    """
    if setting not in ("fp8", "bf16"):
        raise ConfigError(f"rows are dispatched as fp8 or bf16, got {setting!r}")
    if dtype not in (torch.bfloat16, torch.float32):
        raise DtypeError(f"rows are bfloat16 or float32, got {dtype}")
    if setting == "fp8" and dtype != torch.bfloat16:
        raise DtypeError(f"FP8 dispatch takes bfloat16 rows, got {dtype}")
    return "fp8" if setting == "fp8" else "bf16" if dtype == torch.bfloat16 else "fp32"


def stage(x_TH: Tensor, wire: str, scale_mode: str) -> Tensor:
    """What the receivers get to see of the staged rows. Rows for the own domain are quantised too."""
    if wire != "fp8":
        return x_TH
    return fp8.dequantize(*fp8.quantize(x_TH, scale_mode), x_TH.dtype)


def place(plan: Plan, owner: int, staged: Sequence[Tensor], padding: float = 0) -> Tensor:
    """The rows [R, H] of one rank, out of the staged rows [T, H] of every source; the rest is ``padding``."""
    rows_RH = staged[owner].new_full((plan.num_rows(owner), staged[owner].shape[1]), padding)
    for segment in plan.segments:
        if segment.owner == owner:
            rows_RH[segment.rows] = staged[segment.source][segment.tokens]
    return rows_RH


def place_weights(plan: Plan, owner: int) -> Tensor:
    """The float32 weights [R] (compact: [R, W]) of the rows of one rank; 0 where there is no pair."""
    weights_RW = torch.zeros(plan.num_rows(owner), plan.width or 1, dtype=torch.float32)
    for segment in plan.segments:
        if segment.owner == owner:
            weights_TE = plan.routings[segment.source].weights_TE
            assert weights_TE is not None
            weights_RW[segment.rows, segment.columns] = weights_TE[segment.tokens, segment.expert]
    return weights_RW[:, 0] if plan.width is None else weights_RW


def place_experts(plan: Plan, owner: int) -> Tensor:
    """The experts int64 [R, W] of the compact rows of one rank, by local index; -1 where there is no pair."""
    assert plan.width is not None
    experts_RW = torch.full((plan.num_rows(owner), plan.width), -1)
    for segment in plan.segments:
        if segment.owner == owner:
            experts_RW[segment.rows, segment.columns] = segment.expert - owner * len(
                plan.tokens_per_expert[owner]
            )
    return experts_RW


class Piece(NamedTuple):
    """Rows [n, H] that belong to the tokens [n] (int64, ascending) of one source."""

    tokens: Tensor
    rows: Tensor


def add_in_order(pieces: Sequence[Piece], num_tokens: int, hidden: int, dtype: torch.dtype) -> Piece:
    """Every hop of combine: sum the pieces in the order given, round once to ``dtype``.

    fp32 accumulators start at +0.0, also where a token has a single row (so -0.0 becomes +0.0). The result
    has the tokens that any piece has. Every NaN in it is canonical.
    """
    acc_TH = torch.zeros(num_tokens, hidden, dtype=torch.float32)
    touched_T = torch.zeros(num_tokens, dtype=torch.bool)
    for piece in pieces:
        acc_TH[piece.tokens] = acc_TH[piece.tokens] + piece.rows.to(torch.float32)
        touched_T[piece.tokens] = True
    tokens = touched_T.nonzero().flatten()
    return Piece(tokens, fp8.with_canonical_nans(acc_TH[tokens].to(dtype)))


def fold(plan: Plan, owner: int, source: int, rows_RH: Tensor, dtype: torch.dtype) -> Piece:
    """At the experts: what one rank returns for the tokens of one source, experts ascending.

    A compact row holds the sum of its experts already: it counts once, with the first of them.
    """
    pieces = [
        Piece(segment.tokens[first], rows_RH[segment.rows[first]])
        for segment in plan.segments_between.get((owner, source), [])
        for first in [segment.columns == 0]
    ]
    return add_in_order(pieces, plan.num_tokens(source), rows_RH.shape[1], dtype)


class WireCounts(NamedTuple):
    """Payload between domains, however it is cut into chunks: two int64 tensors, zero inside a domain.

    Dispatch: [source rank, destination domain], domains numbered as in ``members_of_domains``. Combine:
    [relay rank, source rank]; the relay is the sender. ``rows`` counts a row once per domain; ``bytes`` is
    rows * row bytes, plus, where weights or their gradients travel, 4 bytes for each pair in that domain.
    """

    rows: Tensor
    bytes: Tensor


class Dispatched(NamedTuple):
    rows: list[Tensor]  # [R, H] in the dtype of x
    row_weights: list[Tensor] | None  # float32 [R] (compact: [R, W]); None if the routings have no weights
    plan: Plan  # has tokens_per_expert (padded) and tokens_per_expert_exact
    wire: WireCounts
    row_experts: list[Tensor] | None  # int64 [R, W] of compact rows; else None


class Combined(NamedTuple):
    outputs: list[Tensor]  # [T, H] in the dtype of the rows
    grad_weights: list[Tensor] | None  # float32 in the form of the routing: [T, K] or [T, E]
    wire: WireCounts


class ReferenceGroup:
    """An expert-parallel group: its domains, its experts and the settings that change a bit of the result.

    Args:
        domain_of: the domain id of each group rank; any ids, domains may interleave and differ in size.
        num_experts: over the whole group, a multiple of its size; rank r owns experts r*L .. (r+1)*L - 1.
        source_order: order of the sources inside an expert; None: ascending group rank.
        dispatch_dtype: "fp8" or "bf16" (unquantised): how hidden states are dispatched.
        grad_dtype: the same for the gradients of combine's output.
        combine_wire_dtype: "bf16" or "fp32": what BF16 rows are rounded to on each hop before the last.
        fp8_scale: "pow2" or "fp32".

    Raises:
        ConfigError: a value does not fit the others or is unknown.
    """

    def __init__(
        self,
        domain_of: Sequence[int],
        num_experts: int,
        *,
        source_order: Sequence[int] | None = None,
        dispatch_dtype: str = "fp8",
        grad_dtype: str = "bf16",
        combine_wire_dtype: str = "bf16",
        fp8_scale: str = "pow2",
    ) -> None:
        self.num_ranks = len(domain_of)
        self.members = members_of_domains(domain_of)
        domain_of_rank = {rank: d for d, ranks in enumerate(self.members) for rank in ranks}
        self.domain_of = [domain_of_rank[rank] for rank in range(self.num_ranks)]
        self.source_order = list(range(self.num_ranks)) if source_order is None else list(source_order)
        if num_experts % self.num_ranks:
            raise ConfigError(f"{num_experts} experts do not divide over {self.num_ranks} ranks")
        if sorted(self.source_order) != list(range(self.num_ranks)):
            raise ConfigError(f"source_order is a permutation of the group ranks, got {self.source_order}")
        if combine_wire_dtype not in ("bf16", "fp32"):
            raise ConfigError(f"combine_wire_dtype is bf16 or fp32, got {combine_wire_dtype!r}")
        self.num_experts = num_experts
        self.dispatch_dtype = dispatch_dtype
        self.grad_dtype = grad_dtype
        self.combine_wire_dtype = combine_wire_dtype
        self.fp8_scale = fp8_scale

    def dispatch(
        self,
        x: Sequence[Tensor],
        routings: Sequence[Routing],
        *,
        expert_alignment: int = 1,
        dispatch_dtype: str | None = None,
        layout: str = "expert_major",
        capacities: Sequence[int] | None = None,
        pad_to_capacity: Sequence[bool] | None = None,
    ) -> Dispatched:
        """Rows of every rank's tokens x [T, H] (bfloat16 or float32) at the experts that ``routings`` name.

        ``layout`` is "expert_major", or "compact" (a row per token and rank; the alignment is then ignored).
        ``capacities`` are the most rows that each rank keeps; those after are dropped, and absent from every
        operation on the plan. The counts of the plan stay those of all rows. Ranks that ``pad_to_capacity``
        have so many rows, the last of them padding; others only those that came.

        Raises:
            DtypeError, ConfigError: see ``wire_of_rows``.
            ShapeError: not one x and one routing of equal T for every rank.
            RoutingError: some routings have weights and some have none.
        """
        num_tokens = [len(routing.routed_TE) for routing in routings]
        if len(num_tokens) != self.num_ranks or [len(x_TH) for x_TH in x] != num_tokens:
            raise ShapeError("dispatch takes one x [T, H] and one routing of the same T for every rank")
        weighted = [routing.weights_TE is not None for routing in routings]
        if any(weighted) != all(weighted):
            raise RoutingError("either every rank's routing has weights or none has")
        if layout == "compact":
            plan = make_compact_plan(routings, self.num_experts, self.source_order)
        else:
            plan = make_plan(routings, self.num_experts, self.source_order, expert_alignment)
        if capacities is not None:
            plan = plan.cut(capacities, pad_to_capacity or [False] * self.num_ranks)
        rows, wire = self._dispatch_rows(x, plan, dispatch_dtype or self.dispatch_dtype, any(weighted))
        ranks = range(self.num_ranks)
        weights = [place_weights(plan, owner) for owner in ranks] if any(weighted) else None
        experts = [place_experts(plan, owner) for owner in ranks] if plan.width is not None else None
        return Dispatched(rows, weights, plan, wire, experts)

    def fp8_rows(self, x: Sequence[Tensor], plan: Plan) -> list[Fp8Rows]:
        """The rows of an FP8 dispatch on this plan as they travel. Padding: codes 0 and scales 1.0."""
        codes, scales = zip(*(fp8.quantize(x_TH, self.fp8_scale) for x_TH in x), strict=True)
        return [
            Fp8Rows(place(plan, owner, codes).view(torch.float8_e4m3fn), place(plan, owner, scales, 1.0))
            for owner in range(self.num_ranks)
        ]

    def combine(
        self, rows: Sequence[Tensor], plan: Plan, bias: Sequence[Sequence[Tensor]] | None = None
    ) -> Combined:
        """The unweighted sum [T, H] over ``bias`` [T, H] and the token's rows [R, H] at every rank."""
        return self._combine(rows, None, plan, bias)

    def combine_of(self, source: int, rows: Sequence[Tensor], plan: Plan) -> Tensor:
        """As `combine`, of one source only: its output [T, H]."""
        wire_bf16 = rows[0].dtype == torch.bfloat16 and self.combine_wire_dtype == "bf16"
        return self._combine_source(source, rows, plan, "bf16" if wire_bf16 else "fp32")

    def combine_backward(
        self, grad_outputs: Sequence[Tensor], plan: Plan, *, grad_dtype: str | None = None
    ) -> tuple[list[Tensor], WireCounts]:
        """Gradients of combine's rows [R, H] from those of its output [T, H]: a dispatch on the saved plan.

        Padding rows get zero. No weights travel.
        """
        return self._dispatch_rows(grad_outputs, plan, grad_dtype or self.grad_dtype, False)

    def dispatch_backward(
        self, grad_rows: Sequence[Tensor], grad_row_weights: Sequence[Tensor] | None, plan: Plan
    ) -> Combined:
        """Gradients of dispatch's x [T, H] and, if those of the row weights are given, of the weights.

        The gradient of x is a combine. Those of the weights are copied: zero where nothing was routed.
        """
        return self._combine(grad_rows, grad_row_weights, plan)

    def _dispatch_rows(
        self, x: Sequence[Tensor], plan: Plan, setting: str, weights_travel: bool
    ) -> tuple[list[Tensor], WireCounts]:
        wire = wire_of_rows(setting, x[0].dtype)
        staged = [stage(x_TH, wire, self.fp8_scale) for x_TH in x]
        rows = [place(plan, owner, staged) for owner in range(self.num_ranks)]
        return rows, self._dispatch_counts(plan, fp8.wire_row_bytes(x[0].shape[1], wire), weights_travel)

    def _combine(
        self,
        rows: Sequence[Tensor],
        grad_row_weights: Sequence[Tensor] | None,
        plan: Plan,
        bias: Sequence[Sequence[Tensor]] | None = None,
    ) -> Combined:
        dtype = rows[0].dtype
        if [len(rows_RH) for rows_RH in rows] != [plan.num_rows(owner) for owner in range(self.num_ranks)]:
            raise ShapeError("combine takes as many rows of every rank as the plan has slots there")
        if dtype not in (torch.bfloat16, torch.float32):
            raise DtypeError(f"rows are bfloat16 or float32, got {dtype}")
        wire = "bf16" if dtype == torch.bfloat16 and self.combine_wire_dtype == "bf16" else "fp32"
        outputs = [
            self._combine_source(source, rows, plan, wire, () if bias is None else bias[source])
            for source in range(self.num_ranks)
        ]
        grad_weights = None if grad_row_weights is None else self._return_weights(grad_row_weights, plan)
        row_bytes = fp8.wire_row_bytes(rows[0].shape[1], wire)
        sent = self._dispatch_counts(plan, row_bytes, grad_weights is not None)
        return Combined(outputs, grad_weights, self._returned(sent))

    def _combine_source(
        self, source: int, rows: Sequence[Tensor], plan: Plan, wire: str, bias: Sequence[Tensor] = ()
    ) -> Tensor:
        """merge at the source: biases, its own domain piece by piece, other domains as a relay's row."""
        num_tokens, hidden = plan.num_tokens(source), rows[0].shape[1]
        wire_dtype = torch.bfloat16 if wire == "bf16" else torch.float32
        incoming = [Piece(torch.arange(num_tokens), addend) for addend in bias]
        for domain, ranks in enumerate(self.members):
            pieces = [fold(plan, owner, source, rows[owner], wire_dtype) for owner in ranks]
            if domain == self.domain_of[source]:
                incoming += pieces
            else:
                incoming.append(add_in_order(pieces, num_tokens, hidden, wire_dtype))
        merged = add_in_order(incoming, num_tokens, hidden, rows[0].dtype)
        output_TH = torch.zeros(num_tokens, hidden, dtype=rows[0].dtype)
        output_TH[merged.tokens] = merged.rows
        return output_TH

    def _return_weights(self, grad_row_weights: Sequence[Tensor], plan: Plan) -> list[Tensor]:
        shapes = [routing.routed_TE.shape for routing in plan.routings]
        grads = [torch.zeros(shape, dtype=torch.float32) for shape in shapes]
        for segment in plan.segments:
            grad_RW = grad_row_weights[segment.owner].reshape(-1, plan.width or 1)
            grad_P = grad_RW[segment.rows, segment.columns]
            grads[segment.source][segment.tokens, segment.expert] = grad_P
        return [routing.in_own_form(grad_TE) for routing, grad_TE in zip(plan.routings, grads, strict=True)]

    def _dispatch_counts(self, plan: Plan, row_bytes: int, weights_travel: bool) -> WireCounts:
        rows_SD = torch.zeros(self.num_ranks, len(self.members), dtype=torch.int64)
        pairs_SD = torch.zeros_like(rows_SD)
        owner_of_E = torch.arange(self.num_experts) // (self.num_experts // self.num_ranks)
        for source, routing in enumerate(plan.routings):
            for domain, ranks in enumerate(self.members):
                if domain != self.domain_of[source]:
                    routed = routing.routed_TE[:, torch.isin(owner_of_E, torch.tensor(ranks))]
                    rows_SD[source, domain] = routed.any(dim=1).sum()
                    pairs_SD[source, domain] = routed.sum()
        return WireCounts(rows_SD, rows_SD * row_bytes + (4 * pairs_SD if weights_travel else 0))

    def _returned(self, sent: WireCounts) -> WireCounts:
        """Combine's traffic: what a source sent to a domain comes back, row for row, from its rail there."""
        rows_SS = torch.zeros(self.num_ranks, self.num_ranks, dtype=torch.int64)
        bytes_SS = torch.zeros_like(rows_SS)
        for source in range(self.num_ranks):
            for domain in range(len(self.members)):
                if domain != self.domain_of[source]:
                    relay = rail(self.members, source, domain)
                    rows_SS[relay, source] = sent.rows[source, domain]
                    bytes_SS[relay, source] = sent.bytes[source, domain]
        return WireCounts(rows_SS, bytes_SS)
