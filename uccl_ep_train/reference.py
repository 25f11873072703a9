"""The oracle: dispatch and combine of a whole expert-parallel group in one process, in plain torch.

What the engine does over several ranks is done here in the obvious way, with the same order of sums and the
same roundings, so that tests can compare with ``torch.equal``. Nothing here is differentiable; the two
backward operations are methods of their own. The steps are named as in the engine.

Legend of the shape suffixes: T tokens of a rank (differs per rank, may be 0), H hidden size, K experts a
token can name, E experts of the whole group, L experts of a rank, R rows at a rank (its padded slots),
P (token, expert) pairs of a rank, S ranks of the group, D domains. Lists are indexed by group rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from uccl_ep_train import fp8
from uccl_ep_train.errors import ConfigError, DtypeError, RoutingError, ShapeError


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

    @classmethod
    def from_topk(cls, topk_idx_TK: Tensor, topk_weights_TK: Tensor | None, num_experts: int) -> Routing:
        """int64 [T, K] expert numbers, -1 = dropped, and float32 [T, K] weights or None.

        Raises:
            RoutingError: an expert out of range, or one that a token names twice.
        """
        if topk_idx_TK.numel() and not (topk_idx_TK.min() >= -1 and topk_idx_TK.max() < num_experts):
            raise RoutingError(f"experts are -1 (dropped) or 0..{num_experts - 1}")
        count_TE = torch.zeros(len(topk_idx_TK), num_experts, dtype=torch.int64)
        weights_TE = torch.zeros(count_TE.shape)
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
    """The rows from one source to one expert: consecutive slots of the expert's owner, tokens ascending."""

    expert: int
    owner: int
    source: int
    first_slot: int
    tokens: Tensor  # int64 [n], token numbers at the source

    @property
    def slots(self) -> slice:
        return slice(self.first_slot, self.first_slot + len(self.tokens))


@dataclass(frozen=True)
class Plan:
    """Where every row goes. ``segments`` ascend by expert, inside an expert in the order of the sources."""

    routings: tuple[Routing, ...]
    segments: tuple[Segment, ...]
    tokens_per_expert: tuple[Tensor, ...]  # per rank int64 [L], padded to the expert alignment
    tokens_per_expert_exact: tuple[Tensor, ...]  # per rank int64 [L]

    def num_tokens(self, source: int) -> int:
        return self.routings[source].routed_TE.shape[0]

    def num_rows(self, owner: int) -> int:
        return int(self.tokens_per_expert[owner].sum())


def make_plan(
    routings: Sequence[Routing], num_experts: int, source_order: Sequence[int], expert_alignment: int = 1
) -> Plan:
    """Slots are expert-major, then source in ``source_order``, then token; each expert is padded."""
    experts_per_rank = num_experts // len(routings)
    segments: list[Segment] = []
    padded: list[list[int]] = []
    exact: list[list[int]] = []
    for owner in range(len(routings)):
        padded.append([])
        exact.append([])
        first_slot = 0
        for expert in range(owner * experts_per_rank, (owner + 1) * experts_per_rank):
            next_slot = first_slot
            for source in source_order:
                tokens = routings[source].routed_TE[:, expert].nonzero().flatten()
                segments.append(Segment(expert, owner, source, next_slot, tokens))
                next_slot += len(tokens)
            exact[-1].append(next_slot - first_slot)
            padded[-1].append(-(-exact[-1][-1] // expert_alignment) * expert_alignment)
            first_slot += padded[-1][-1]
    return Plan(
        tuple(routings), tuple(segments), tuple(map(torch.tensor, padded)), tuple(map(torch.tensor, exact))
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


def place(plan: Plan, owner: int, staged: Sequence[Tensor]) -> Tensor:
    """The rows [R, H] of one rank, out of the staged rows [T, H] of every source. Padding rows are zero."""
    rows_RH = staged[owner].new_zeros(plan.num_rows(owner), staged[owner].shape[1])
    for segment in plan.segments:
        if segment.owner == owner:
            rows_RH[segment.slots] = staged[segment.source][segment.tokens]
    return rows_RH


def place_weights(plan: Plan, owner: int) -> Tensor:
    """The float32 weights [R] that belong to the rows of one rank; 0 for padding rows."""
    weights_R = torch.zeros(plan.num_rows(owner))
    for segment in plan.segments:
        if segment.owner == owner:
            weights_TE = plan.routings[segment.source].weights_TE
            assert weights_TE is not None
            weights_R[segment.slots] = weights_TE[segment.tokens, segment.expert]
    return weights_R


class Piece(NamedTuple):
    """Rows [n, H] that belong to the tokens [n] (int64, ascending) of one source."""

    tokens: Tensor
    rows: Tensor


def add_in_order(pieces: Sequence[Piece], num_tokens: int, hidden: int, dtype: torch.dtype) -> Piece:
    """Every hop of combine: sum the pieces in the order given, round once to ``dtype``.

    fp32 accumulators start at +0.0, also where a token has a single row (so -0.0 becomes +0.0). The result
    has the tokens that any piece has. Every NaN in it is canonical.
    """
    acc_TH = torch.zeros(num_tokens, hidden)
    touched_T = torch.zeros(num_tokens, dtype=torch.bool)
    for piece in pieces:
        acc_TH[piece.tokens] = acc_TH[piece.tokens] + piece.rows.to(torch.float32)
        touched_T[piece.tokens] = True
    tokens = touched_T.nonzero().flatten()
    return Piece(tokens, fp8.with_canonical_nans(acc_TH[tokens].to(dtype)))


def fold(plan: Plan, owner: int, source: int, rows_RH: Tensor, dtype: torch.dtype) -> Piece:
    """At the experts: what one rank returns for the tokens of one source, experts ascending."""
    pieces = [
        Piece(segment.tokens, rows_RH[segment.slots])
        for segment in plan.segments
        if segment.owner == owner and segment.source == source
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
    row_weights: list[Tensor] | None  # float32 [R]; None if the routings have no weights
    plan: Plan  # has tokens_per_expert (padded) and tokens_per_expert_exact
    wire: WireCounts


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
    ) -> Dispatched:
        """Rows of every rank's tokens x [T, H] (bfloat16 or float32) at the experts that ``routings`` name.

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
        plan = make_plan(routings, self.num_experts, self.source_order, expert_alignment)
        rows, wire = self._dispatch_rows(x, plan, dispatch_dtype or self.dispatch_dtype, any(weighted))
        if not any(weighted):
            return Dispatched(rows, None, plan, wire)
        return Dispatched(rows, [place_weights(plan, owner) for owner in range(self.num_ranks)], plan, wire)

    def combine(self, rows: Sequence[Tensor], plan: Plan) -> Combined:
        """The unweighted sum [T, H] over each token's experts, from the rows [R, H] of every rank."""
        return self._combine(rows, None, plan)

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
        """Gradients of dispatch's x [T, H] and, if those of the row weights [R] are given, of the weights.

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
        self, rows: Sequence[Tensor], grad_row_weights: Sequence[Tensor] | None, plan: Plan
    ) -> Combined:
        dtype = rows[0].dtype
        if [len(rows_RH) for rows_RH in rows] != [plan.num_rows(owner) for owner in range(self.num_ranks)]:
            raise ShapeError("combine takes as many rows of every rank as the plan has slots there")
        if dtype not in (torch.bfloat16, torch.float32):
            raise DtypeError(f"rows are bfloat16 or float32, got {dtype}")
        wire = "bf16" if dtype == torch.bfloat16 and self.combine_wire_dtype == "bf16" else "fp32"
        outputs = [self._combine_source(source, rows, plan, wire) for source in range(self.num_ranks)]
        grad_weights = None if grad_row_weights is None else self._return_weights(grad_row_weights, plan)
        row_bytes = fp8.wire_row_bytes(rows[0].shape[1], wire)
        sent = self._dispatch_counts(plan, row_bytes, grad_weights is not None)
        return Combined(outputs, grad_weights, self._returned(sent))

    def _combine_source(self, source: int, rows: Sequence[Tensor], plan: Plan, wire: str) -> Tensor:
        """merge at the source: its own domain piece by piece, every other domain as its relay's one row."""
        num_tokens, hidden = plan.num_tokens(source), rows[0].shape[1]
        wire_dtype = torch.bfloat16 if wire == "bf16" else torch.float32
        incoming: list[Piece] = []
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
        grads = [torch.zeros(routing.routed_TE.shape) for routing in plan.routings]
        for segment in plan.segments:
            grad_P = grad_row_weights[segment.owner][segment.slots]
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
