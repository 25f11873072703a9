"""Generated cases that feed both the engine and the oracle.

A case (`make_case`) is everything that one dispatch and one combine need on every rank, drawn from a seed.
`expect` asks the oracle what must come out, gradients included; `check_case` lets a live group do it and
compares bit by bit.

    with spec.group() as group:
        check_case(group, make_case(7, spec, form="map"))

Shape suffixes: T tokens of a rank, H hidden size, K experts a token can name, E experts, R rows of a rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bits import bit_difference
from tests.case_values import experts_in_focus, make_biases, make_map, make_rows, make_topk
from tests.harness import ON_GPUS, RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.common.handle import LayoutName
from uccl_ep_train.oracle.reference import Combined, Dispatched, ReferenceGroup, Routing, WireCounts
from uccl_ep_train.settings.sections import WireDtype

# "domains x ranks": the domain of each rank of the group.
LAYOUTS: dict[str, tuple[int, ...]] = {
    "1x4": (0, 0, 0, 0),
    "2x2": (0, 0, 1, 1),
    "4x1": (0, 1, 2, 3),
    "2x1": (0, 1),
    "3x2": (0, 0, 1, 1, 2, 2),
    "3+1": (0, 0, 0, 1),
    "interleaved": (0, 1, 0, 1),
}
HIDDEN_SIZES = (32, 128, 160, 256, 384, 608, 1024)
NO_CAPACITY = -1
PLAIN: dict[str, Any] = {"layout": "expert_major", "capacity": NO_CAPACITY}


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What is fixed when a buffer is created, as far as it changes a result; `settings` for the rest."""

    domains: tuple[int, ...] = LAYOUTS["2x2"]
    num_experts: int = 8
    hidden: int = 256
    combine_wire_dtype: str = "bf16"
    fp8_scale: str = "pow2"
    source_order: tuple[int, ...] | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.domains)

    def config(self) -> dict[str, Any]:
        named = ("domains", "num_experts", "hidden", "combine_wire_dtype", "fp8_scale", "source_order")
        return {name: getattr(self, name) for name in named} | dict(self.settings)

    def group(self) -> RankGroup:
        """Ranks as threads. On GPUs each has its own: kernels of one process that wait for each other."""
        if ON_GPUS and self.num_ranks > torch.cuda.device_count():
            pytest.skip(f"{self.num_ranks} ranks need as many GPUs, there are {torch.cuda.device_count()}")
        return RankGroup(self.num_ranks, self.config())

    def oracle(self) -> ReferenceGroup:
        return ReferenceGroup(
            self.domains,
            self.num_experts,
            source_order=self.source_order,
            combine_wire_dtype=self.combine_wire_dtype,
            fp8_scale=self.fp8_scale,
        )


@dataclass(frozen=True)
class RankInput:
    """One rank's arguments of a dispatch: x [T, H] and a routing in one of two forms; weights may be None."""

    x: Tensor
    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None
    routing_map: Tensor | None = None
    probs: Tensor | None = None

    @property
    def weights(self) -> Tensor | None:
        return self.topk_weights if self.topk_idx is not None else self.probs

    def on(self, device: torch.device) -> RankInput:
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return replace(self, **{name: t.to(device) for name, t in given.items() if t is not None})

    def routing(self, num_experts: int) -> Routing:
        if self.topk_idx is not None:
            return Routing.from_topk(self.topk_idx, self.topk_weights, num_experts)
        assert self.routing_map is not None
        return Routing.from_map(self.routing_map, self.probs)

    def routing_arguments(self, weights: Tensor | None) -> dict[str, Any]:
        """Keyword arguments of `Buffer.dispatch`, with these weights in the place of the stored ones."""
        if self.topk_idx is not None:
            return {"topk_idx": self.topk_idx, "topk_weights": weights}
        return {"routing_map": self.routing_map, "probs": weights}


@dataclass(frozen=True)
class Case:
    seed: int
    spec: EngineSpec
    inputs: tuple[RankInput, ...]
    dispatch_dtype: WireDtype
    grad_dtype: WireDtype
    expert_alignment: int
    layout: LayoutName = "expert_major"
    capacities: tuple[int, ...] | None = None
    padded: tuple[bool, ...] = ()  # pad_to_capacity of each rank
    biases: tuple[int, ...] = ()  # of each rank's combine

    def __repr__(self) -> str:
        first = self.inputs[0]
        form = f"top-{first.topk_idx.shape[1]}" if first.topk_idx is not None else "map"
        return (
            f"Case(seed {self.seed}, T {[len(entry.x) for entry in self.inputs]}, H {first.x.shape[1]}, "
            f"{first.x.dtype}, {form}, weights {first.weights is not None}, {self.dispatch_dtype} forward, "
            f"{self.grad_dtype} backward, alignment {self.expert_alignment}, {self.layout}, "
            f"capacities {self.capacities}, padded {self.padded}, biases {self.biases}, {self.spec})"
        )


# ------------------------------------------------------------------------------------------- making


def make_case(
    seed: int,
    spec: EngineSpec,
    *,
    num_tokens: Sequence[int] | None = None,
    hidden: int | None = None,
    dtype: torch.dtype | None = None,
    dispatch_dtype: str | None = None,
    grad_dtype: str | None = None,
    form: str | None = None,
    top_k: int | None = None,
    focus: str | None = None,
    drop_rate: float | None = None,
    density: float | None = None,
    weighted: bool | None = None,
    special: bool | None = None,
    expert_alignment: int | None = None,
    layout: LayoutName | None = None,
    capacity: int | None = None,
    padded: bool | None = None,
    biased: bool | None = None,
    max_tokens: int = 24,
) -> Case:
    """A case for a buffer made from `spec`; whatever is None is drawn from the seed.

    num_tokens  T of each rank
    form        "topk" | "map"
    focus       "spread": any experts; "expert": all tokens go to one; "rank": to experts of one rank
    drop_rate   share of top-k entries that are -1; density: share of experts that a token of a map reaches
    weighted    whether weights travel
    special     whether rows hold zeros, -0.0, huge, tiny and non-finite values
    layout      "expert_major" | "compact"; drawn only where the alignment may be 1
    capacity    about so many rows, one more on each rank; NO_CAPACITY: none is given
    padded      whether all ranks pad to it; drawn for each
    biased      whether combine has biases: none, one or two by rank
    """
    rng = random.Random(seed)
    pick = lambda given, choices: rng.choice(choices) if given is None else given  # noqa: E731
    # Every choice is drawn, given or not, so that fixing one leaves the others as they were.
    tokens = [0 if rng.random() < 0.15 else rng.randint(1, max_tokens) for _ in spec.domains]
    tokens = list(num_tokens) if num_tokens is not None else tokens
    hidden = pick(hidden, [size for size in HIDDEN_SIZES if size <= spec.hidden])
    dtype = pick(dtype, [torch.bfloat16, torch.bfloat16, torch.float32])
    wire: WireDtype = pick(dispatch_dtype, ["fp8", "bf16"]) if dtype == torch.bfloat16 else "bf16"
    grad_wire: WireDtype = pick(grad_dtype, ["fp8", "bf16", "bf16"]) if dtype == torch.bfloat16 else "bf16"
    form = pick(form, ["topk", "map"])
    top_k = min(pick(top_k, [1, 2, 2, 3, 4, 8]), spec.num_experts)
    focus = pick(focus, ["spread", "spread", "spread", "expert", "rank"])
    drop_rate = pick(drop_rate, [0.0, 0.0, 0.2, 0.2, 1.0])
    density = pick(density, [0.0, 0.1, 0.3, 0.3, 1.0])
    weighted = pick(weighted, [True, True, False])
    special = pick(special, [False, False, True])
    alignment = pick(expert_alignment, [1, 1, 8, 16])
    generator = torch.Generator().manual_seed(seed)
    allowed = experts_in_focus(rng, spec.num_experts, spec.num_experts // spec.num_ranks, focus)
    drawn = ["expert_major"] * (2 if expert_alignment in (None, 1) else 3)
    layout = pick(layout, [*drawn, "compact"][:3])
    capacity = pick(capacity, [NO_CAPACITY] * 4 + [3, 20, 200])
    alignment = 1 if layout == "compact" else alignment
    capacities = None if capacity < 0 else tuple(capacity + rank for rank in range(spec.num_ranks))
    pads = tuple(pick(padded, [False, True]) and capacities is not None for _ in spec.domains)
    biases = tuple((rank + seed) % 3 for rank in range(spec.num_ranks if pick(biased, [False, True]) else 0))

    def rank_input(count: int) -> RankInput:
        x_TH = make_rows(generator, count, hidden, dtype, special=special)
        if form == "topk":
            topk_idx_TK = make_topk(generator, count, top_k, allowed, drop_rate)
            weights_TK = torch.rand(count, top_k, generator=generator) if weighted else None
            return RankInput(x_TH, topk_idx=topk_idx_TK, topk_weights=weights_TK)
        map_TE = make_map(generator, count, spec.num_experts, allowed, density)
        probs_TE = torch.rand(count, spec.num_experts, generator=generator) if weighted else None
        return RankInput(x_TH, routing_map=map_TE, probs=probs_TE)

    inputs = tuple(rank_input(count) for count in tokens)
    return Case(seed, spec, inputs, wire, grad_wire, alignment, layout, capacities, pads, biases)


# ---------------------------------------------------------------------------------------- expecting


@dataclass(frozen=True)
class Expected:
    """What the oracle says of a case, and what it was fed beyond the case itself. Lists are by rank."""

    dispatched: Dispatched
    expert_rows: list[Tensor]  # [R, H] what combine is given; garbage in the padding
    bias: list[tuple[Tensor, ...]]  # [T, H] each
    combined: Combined
    grad_out: list[Tensor]  # [T, H]
    grad_expert_rows: list[Tensor]
    grad_wire: WireCounts
    grad_rows: list[Tensor]  # [R, H]
    grad_row_weights: list[Tensor] | None  # [R]
    dispatch_backward: Combined

    def wire_bytes(self, rank: int) -> int:
        """Payload that a rank sends to other domains over the four operations of `run_case`."""
        wires = (self.dispatched.wire, self.combined.wire, self.grad_wire, self.dispatch_backward.wire)
        return sum(int(wire.bytes[rank].sum()) for wire in wires)


def expect(case: Case) -> Expected:
    """Dispatch, combine and both backward operations of a case, by the oracle."""
    oracle = case.spec.oracle()
    generator = torch.Generator().manual_seed(case.seed + 1)
    x = [entry.x for entry in case.inputs]
    hidden, dtype = x[0].shape[1], x[0].dtype
    routings = [entry.routing(case.spec.num_experts) for entry in case.inputs]
    dispatched = oracle.dispatch(
        x,
        routings,
        expert_alignment=case.expert_alignment,
        dispatch_dtype=case.dispatch_dtype,
        layout=case.layout,
        capacities=case.capacities,
        pad_to_capacity=case.padded,
    )
    plan = dispatched.plan
    num_rows = [len(rows) for rows in dispatched.rows]
    expert_rows = [make_rows(generator, count, hidden, dtype) for count in num_rows]
    bias = make_biases(case.seed, case.biases, x)
    grad_out = [make_rows(generator, len(entry), hidden, dtype) for entry in x]
    grad_rows = [make_rows(generator, count, hidden, dtype) for count in num_rows]
    weights = dispatched.row_weights
    grad_weights = None if weights is None else [torch.randn(w.shape, generator=generator) for w in weights]
    grad_expert_rows, grad_wire = oracle.combine_backward(grad_out, plan, grad_dtype=case.grad_dtype)
    return Expected(
        dispatched,
        expert_rows,
        bias,
        oracle.combine(expert_rows, plan, bias),
        grad_out,
        grad_expert_rows,
        grad_wire,
        grad_rows,
        grad_weights,
        oracle.dispatch_backward(grad_rows, grad_weights, plan),
    )


# ------------------------------------------------------------------------------ running, comparing


@dataclass(frozen=True)
class Observed:
    """What a rank's buffer did with a case. Weights and their gradients are None where none travel.

    Without the rows of a capacity that nothing was written to.
    """

    rows: Tensor
    tokens_per_expert: Tensor
    row_weights: Tensor | None
    row_experts: Tensor | None
    overflow: bool | None
    out: Tensor
    grad_bias: list[Tensor]
    grad_expert_rows: Tensor
    grad_x: Tensor
    grad_weights: Tensor | None
    handle: Any = field(repr=False)


def run_case(case: Case, expected: Expected, rank: int, buffer: Buffer) -> Observed:
    """One rank's dispatch, combine and both backwards, through autograd, where the buffer works."""
    return begin_case(case, expected, rank, buffer)()


def begin_case(case: Case, expected: Expected, rank: int, buffer: Buffer) -> Callable[[], Observed]:
    """As `run_case`, but returns after dispatch and combine; what it returns does the backwards."""
    given = case.inputs[rank].on(buffer.device)
    x_TH = given.x.clone().requires_grad_()
    weights = None if given.weights is None else given.weights.clone().requires_grad_()
    result = buffer.dispatch(
        x_TH,
        **given.routing_arguments(weights),
        expert_alignment=case.expert_alignment,
        dispatch_dtype=case.dispatch_dtype,
        layout=case.layout,
        capacity=None if case.capacities is None else case.capacities[rank],
        pad_to_capacity=case.padded[rank],
    )
    num_rows = len(expected.expert_rows[rank])
    assert case.capacities is None or len(result.rows) == case.capacities[rank]

    def filled_up(rows: Tensor) -> Tensor:
        """On the device; what the oracle does not have is not read: NaN."""
        rest = rows.new_full((len(result.rows) - num_rows, *rows.shape[1:]), torch.nan)
        return torch.cat([rows, rest]).to(buffer.device)

    expert_rows_RH = filled_up(expected.expert_rows[rank]).requires_grad_()
    bias = tuple(addend.detach().to(buffer.device).requires_grad_() for addend in expected.bias[rank])
    out_TH = buffer.combine(expert_rows_RH, result.handle, bias=bias, grad_dtype=case.grad_dtype)

    def finish() -> Observed:
        torch.autograd.backward(out_TH, expected.grad_out[rank].to(buffer.device))
        outputs, grads = [result.rows], [filled_up(expected.grad_rows[rank])]
        if weights is not None:
            assert expected.grad_row_weights is not None and result.row_weights is not None
            outputs.append(result.row_weights)
            grads.append(filled_up(expected.grad_row_weights[rank]))
        torch.autograd.backward(outputs, grads)
        assert expert_rows_RH.grad is not None and x_TH.grad is not None
        if buffer.device.type == "cuda":
            torch.cuda.synchronize()
            buffer.check()  # an error that came after the launches
        return Observed(
            result.rows[:num_rows].detach().cpu(),
            result.tokens_per_expert.cpu(),
            None if result.row_weights is None else result.row_weights[:num_rows].detach().cpu(),
            None if result.row_experts is None else result.row_experts[:num_rows].cpu(),
            None if result.overflow is None else bool(result.overflow),
            out_TH.detach().cpu(),
            [addend.grad.cpu() for addend in bias if addend.grad is not None],
            expert_rows_RH.grad[:num_rows].cpu(),
            x_TH.grad.cpu(),
            None if weights is None or weights.grad is None else weights.grad.cpu(),
            result.handle,
        )

    return finish


def differences(case: Case, expected: Expected, rank: int, observed: Observed) -> list[str]:
    """What a rank saw that is not bit for bit what the oracle says; empty if all is well."""
    dispatched, backward = expected.dispatched, expected.dispatch_backward
    of_rank = lambda values: None if values is None else values[rank]  # noqa: E731
    pairs = [
        ("tokens_per_expert", observed.tokens_per_expert, dispatched.plan.tokens_per_expert[rank]),
        ("rows", observed.rows, dispatched.rows[rank]),
        ("row_weights", observed.row_weights, of_rank(dispatched.row_weights)),
        ("row_experts", observed.row_experts, of_rank(dispatched.row_experts)),
        ("out", observed.out, expected.combined.outputs[rank]),
        ("gradient of combine's rows", observed.grad_expert_rows, expected.grad_expert_rows[rank]),
        ("gradient of x", observed.grad_x, backward.outputs[rank]),
        ("gradient of the weights", observed.grad_weights, of_rank(backward.grad_weights)),
    ]
    pairs += [("gradient of a bias", grad, expected.grad_out[rank]) for grad in observed.grad_bias]
    found = [
        f"rank {rank}, {name}: {why}" for name, seen, wanted in pairs if (why := bit_difference(seen, wanted))
    ]
    if len(observed.grad_bias) != len(expected.bias[rank]):
        found.append(f"rank {rank}: {len(observed.grad_bias)} gradients of {len(expected.bias[rank])} biases")
    if observed.overflow != (overflow := of_rank(dispatched.plan.overflow)):
        found.append(f"rank {rank}, overflow: got {observed.overflow}, wanted {overflow}")
    return found


def check_case(group: RankGroup, case: Case, expected: Expected | None = None) -> list[Observed]:
    """Runs a case on a live group; every rank must get the oracle's bits. Returns what the ranks saw."""
    wanted = expect(case) if expected is None else expected
    observed = group.run(lambda rank, buffer: run_case(case, wanted, rank, buffer))
    found = [line for rank, seen in enumerate(observed) for line in differences(case, wanted, rank, seen)]
    assert not found, f"{case}\n" + "\n".join(found)
    return observed


def with_inputs(case: Case, change: Any) -> Case:
    """The case with `change(rank, input)` in the place of each rank's input."""
    return replace(case, inputs=tuple(change(rank, entry) for rank, entry in enumerate(case.inputs)))
