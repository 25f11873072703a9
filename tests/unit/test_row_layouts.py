"""Compact rows, rows as FP8 codes and scales, outputs of a given capacity. Random cases have them, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bits import bit_difference
from tests.cases import (
    LAYOUTS,
    NO_CAPACITY,
    Case,
    EngineSpec,
    check_case,
    differences,
    expect,
    make_case,
    run_case,
)
from tests.harness import ON_GPUS, RankGroup
from uccl_ep_train import Buffer
from uccl_ep_train.errors import InputError
from uccl_ep_train.oracle import fp8

SMALL_WINDOWS = (("chunk_bytes", 4096), ("window_chunks", 2))
SPECS = {
    "1x4": EngineSpec(domains=LAYOUTS["1x4"], num_experts=16, source_order=(2, 0, 3, 1)),
    "2x2, small windows": EngineSpec(domains=LAYOUTS["2x2"], num_experts=16, settings=SMALL_WINDOWS),
    "3+1": EngineSpec(domains=LAYOUTS["3+1"], num_experts=16, combine_wire_dtype="fp32"),
}
# Four of 16 experts, so that some rows have several of a rank's four, and some tokens have none.
SPREAD: dict[str, Any] = {"focus": "spread", "drop_rate": 0.2, "density": 0.2, "top_k": 6, "hidden": 256}
FP8: dict[str, Any] = {"dtype": torch.bfloat16, "dispatch_dtype": "fp8", "grad_dtype": "fp8"}
TOKENS = (40, 0, 25, 33)


@pytest.fixture(scope="module", params=SPECS)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[EngineSpec, RankGroup]]:
    spec = SPECS[request.param]
    with spec.group() as group:
        yield spec, group


Engine = tuple[EngineSpec, RankGroup]


def busy(spec: EngineSpec, seed: int, **choices: Any) -> Case:
    return make_case(seed, spec, **{"num_tokens": TOKENS, "weighted": True, **SPREAD, **choices})


def arguments_of(case: Case, rank: int, buffer: Buffer) -> dict[str, Any]:
    """Of `buffer.dispatch`."""
    given = case.inputs[rank].on(buffer.device)
    return {
        "x": given.x,
        **given.routing_arguments(given.weights),
        "layout": case.layout,
        "expert_alignment": case.expert_alignment,
        "dispatch_dtype": case.dispatch_dtype,
        "capacity": None if case.capacities is None else case.capacities[rank],
        "pad_to_capacity": case.padded[rank],
    }


class TestCompact:
    @pytest.mark.parametrize("form", ["topk", "map"])
    def test_rows_experts_weights_and_gradients_are_the_oracles(self, engine: Engine, form: str) -> None:
        spec, group = engine
        for seed, wire in enumerate([{}, FP8]):
            case = busy(spec, seed, form=form, layout="compact", capacity=NO_CAPACITY, special=True, **wire)
            for seen in check_case(group, case):
                assert seen.row_experts is not None and seen.handle.layout == "compact"
                assert len(seen.rows) == seen.handle.num_rows
                # What it is for: fewer rows than pairs.
                pairs = int(seen.tokens_per_expert.sum())
                assert pairs == int((seen.row_experts >= 0).sum()) > len(seen.rows)

    def test_ranks_without_tokens_and_without_rows(self, engine: Engine) -> None:
        spec, group = engine
        for focus in ("rank", "expert"):
            check_case(group, busy(spec, 1, layout="compact", focus=focus, num_tokens=(0, 0, 0, 9)))
        check_case(group, busy(spec, 1, layout="compact", num_tokens=(0, 0, 0, 0)))
        check_case(group, busy(spec, 1, layout="compact", form="topk", drop_rate=1.0))

    def test_an_oracle_that_was_told_something_else_disagrees(self, engine: Engine) -> None:
        spec, group = engine
        case = busy(spec, 5, form="topk", layout="compact", capacity=NO_CAPACITY, special=False)
        right = expect(case)
        observed = group.run(lambda rank, buffer: run_case(case, right, rank, buffer))
        wrongs = {
            "row_experts": replace(case, inputs=tuple(map(with_another_expert, case.inputs))),
            "rows": replace(case, spec=replace(spec, source_order=(0, 3, 1, 2))),
        }
        for where, wrong in wrongs.items():
            found = [
                line
                for rank, seen in enumerate(observed)
                for line in differences(case, expect(wrong), rank, seen)
            ]
            assert any(f", {where}: " in line for line in found), found

    def test_a_cached_dispatch_has_the_plans_layout(self, engine: Engine) -> None:
        spec, group = engine
        case = busy(spec, 2, form="topk", layout="compact", capacity=NO_CAPACITY, special=False)

        def step(rank: int, buffer: Buffer) -> None:
            arguments = arguments_of(case, rank, buffer)
            first = buffer.dispatch(**arguments)
            experts = first.row_experts.clone()
            first.row_experts.fill_(7)  # The caller's to change.
            given = {name: arguments[name] for name in ("x", "topk_weights", "dispatch_dtype")}
            again = buffer.dispatch(**given, handle=first.handle)
            assert again.handle is first.handle and torch.equal(again.row_experts, experts)
            assert torch.equal(again.rows, first.rows) and torch.equal(again.row_weights, first.row_weights)
            sent = sum(int((entry.topk_idx >= 0).sum()) for entry in case.inputs[rank : rank + 1])
            pairs = sent + int((experts >= 0).sum())
            if not ON_GPUS:  # there its memory is of what recent dispatches had
                assert first.handle.nbytes <= 16 * pairs + 4 * sum(TOKENS) + 8192

        group.run(step)


def with_another_expert(entry: Any) -> Any:
    topk_idx = entry.topk_idx.clone()
    for row in topk_idx:
        row[0] = next(expert for expert in range(16) if expert not in row)
    return replace(entry, topk_idx=topk_idx)


def test_compact_experts_compute_what_a_dense_layer_does() -> None:
    """Independent of the oracle: the caller multiplies and sums over `row_experts`, in both directions."""
    spec = EngineSpec(num_experts=8, hidden=128)
    case = make_case(
        3, spec, num_tokens=(7, 5, 0, 8), hidden=128, dtype=torch.float32, dispatch_dtype="bf16",
        grad_dtype="bf16", form="topk", top_k=3, focus="spread", drop_rate=0.2, weighted=True, special=False,
        layout="compact", capacity=NO_CAPACITY,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    matrices_EHH = torch.randn(8, 128, 128, generator=generator) / 700
    grad_out = [torch.randn(entry.x.shape, generator=generator) for entry in case.inputs]

    def layer(rank: int, buffer: Buffer) -> tuple[Tensor, ...]:
        given = case.inputs[rank].on(buffer.device)
        assert given.topk_weights is not None
        x, weights = given.x.clone().requires_grad_(), given.topk_weights.clone().requires_grad_()
        result = buffer.dispatch(x, given.topk_idx, weights, layout="compact", dispatch_dtype="bf16")
        # Padding names any expert, with weight 0.
        own_LHH = matrices_EHH[2 * rank : 2 * rank + 2].to(buffer.device)
        matrices_RWHH = own_LHH[result.row_experts.clamp(min=0)]
        y_RH = torch.einsum("rh,rwhj,rw->rj", result.rows, matrices_RWHH, result.row_weights)
        out = buffer.combine(y_RH, result.handle, grad_dtype="bf16")
        out.backward(grad_out[rank].to(buffer.device))
        assert x.grad is not None and weights.grad is not None
        return out.detach().cpu(), x.grad.cpu(), weights.grad.cpu()

    with spec.group() as group:
        results = group.run(layer)
    for given, grads, (out, grad_x, grad_weights) in zip(case.inputs, grad_out, results, strict=True):
        assert given.topk_weights is not None and given.topk_idx is not None
        x64, w64 = given.x.double().requires_grad_(), given.topk_weights.double().requires_grad_()
        every_TEH = torch.einsum("th,ehj->tej", x64, matrices_EHH.double())
        chosen_TKH = every_TEH.gather(1, given.topk_idx.clamp(min=0)[:, :, None].expand(-1, -1, 128))
        dense = (chosen_TKH * (w64 * (given.topk_idx >= 0))[:, :, None]).sum(dim=1)
        dense.backward(grads.double())
        for seen, wanted in ((out, dense), (grad_x, x64.grad), (grad_weights, w64.grad)):
            torch.testing.assert_close(seen.double(), wanted, rtol=1e-4, atol=1e-3)


class TestCodesAndScales:
    @pytest.mark.parametrize("layout", ["expert_major", "compact"])
    @pytest.mark.parametrize("capacity", [NO_CAPACITY, 30, 400])
    @pytest.mark.parametrize("hidden", [256, 160])
    def test_rows_are_the_codes_and_scales_that_travelled(
        self, engine: Engine, layout: str, capacity: int, hidden: int
    ) -> None:
        spec, group = engine
        padded = capacity == 400
        case = busy(
            spec, 8, layout=layout, capacity=capacity, padded=padded, expert_alignment=8, special=True,
            hidden=hidden, **FP8,
        )  # fmt: skip
        expected = expect(case)
        wanted = spec.oracle().fp8_rows([entry.x for entry in case.inputs], expected.dispatched.plan)

        def step(rank: int, buffer: Buffer) -> list[str]:
            arguments = arguments_of(case, rank, buffer)
            arguments["x"] = arguments["x"].clone().requires_grad_()
            first = buffer.dispatch(**arguments, output_dtype="fp8")
            assert not first.rows.codes.requires_grad and not first.row_weights.requires_grad
            again = buffer.dispatch(
                arguments["x"], handle=first.handle, dispatch_dtype="fp8", output_dtype="fp8"
            )
            plain = buffer.dispatch(arguments["x"].detach(), handle=first.handle, dispatch_dtype="fp8")
            assert first.fp8_rows is first.rows
            with pytest.raises(InputError, match=r"^rows are torch\.bfloat16: allowed are those of"):
                plain.fp8_rows  # noqa: B018
            num_rows = len(wanted[rank].codes)
            found = []
            for result in (first, again):
                codes, scales = (part[:num_rows].cpu() for part in result.rows)
                found += [bit_difference(codes, wanted[rank].codes)]
                found += [bit_difference(scales, wanted[rank].scales)]
                values = fp8.dequantize(codes.view(torch.uint8), scales)
                found += [bit_difference(values, plain.rows[:num_rows].cpu())]
            weights = first.row_weights[:num_rows].cpu()
            found += [bit_difference(weights, expected.dispatched.row_weights[rank])]
            return [line for line in found if line]

        assert group.run(step) == [[]] * 4


class TestCapacity:
    @pytest.mark.parametrize("layout", ["expert_major", "compact"])
    @pytest.mark.parametrize("share", [0.0, 0.4, 0.99, 1.0, 1.6])
    def test_rows_beyond_it_are_absent_everywhere(self, engine: Engine, layout: str, share: float) -> None:
        spec, group = engine
        whole = busy(spec, 9, layout=layout, capacity=NO_CAPACITY, form="topk", special=True)
        needed = expect(whole).dispatched.plan.rows_per_rank
        case = replace(whole, capacities=tuple(int(share * rows) for rows in needed))
        for rank, seen in enumerate(check_case(group, case)):
            assert seen.overflow == (share < 1)
            assert seen.handle.num_rows == seen.handle.capacity == int(share * needed[rank])
            assert seen.handle.tokens_per_expert is None

    def test_some_sums_and_gradients_are_others_than_without(self, engine: Engine) -> None:
        """Control: the comparison sees what is dropped."""
        spec, group = engine
        whole = busy(spec, 9, layout="expert_major", capacity=NO_CAPACITY, form="topk", special=False)
        right = expect(whole)
        half = tuple(rows // 2 for rows in right.dispatched.plan.rows_per_rank)
        cut = replace(whole, capacities=half)
        fed = expect(cut)
        observed = group.run(lambda rank, buffer: run_case(cut, fed, rank, buffer))
        lines = [line for rank, seen in enumerate(observed) for line in differences(cut, right, rank, seen)]
        for name in ("overflow", "out", "gradient of x", "gradient of the weights"):
            assert any(f", {name}: " in line for line in lines), lines

    def test_a_cached_dispatch_has_the_same_capacity(self, engine: Engine) -> None:
        spec, group = engine
        case = busy(spec, 4, form="topk", layout="compact", capacity=20, special=False)

        def step(rank: int, buffer: Buffer) -> None:
            arguments = arguments_of(case, rank, buffer)
            first = buffer.dispatch(**arguments)
            assert len(first.rows) == len(first.row_experts) == 20 + rank and bool(first.overflow)
            for capacity in (None, 20 + rank):
                pending = buffer.dispatch_async(
                    arguments["x"], handle=first.handle, capacity=capacity,
                    dispatch_dtype=case.dispatch_dtype,
                )  # fmt: skip
                again = pending.wait()
                assert pending.num_rows == 20 + rank and torch.equal(again.rows, first.rows)
                assert bool(again.overflow) and torch.equal(again.tokens_per_expert, first.tokens_per_expert)

        group.run(step)

    @pytest.mark.parametrize("layout", ["expert_major", "compact"])
    @pytest.mark.parametrize("share", [0.4, 1.0, 1.6])
    def test_rows_that_did_not_come_are_padding_if_asked_for(
        self, engine: Engine, layout: str, share: float
    ) -> None:
        spec, group = engine
        whole = busy(spec, 9, layout=layout, capacity=NO_CAPACITY, form="map", special=True, **FP8)
        needed = expect(whole).dispatched.plan.rows_per_rank
        capacities = tuple(int(share * rows) + 1 for rows in needed)
        case = replace(whole, capacities=capacities, padded=(True,) * spec.num_ranks)
        for rank, seen in enumerate(check_case(group, case)):  # all rows are compared, and their gradients
            assert len(seen.rows) == len(seen.grad_expert_rows) == capacities[rank]
            missing = seen.rows[needed[rank] :]
            assert torch.equal(missing, torch.zeros_like(missing)) and len(missing) == max(
                0, capacities[rank] - needed[rank]
            )

    def test_a_handle_keeps_that_it_pads(self, engine: Engine) -> None:
        spec, group = engine
        case = busy(spec, 4, form="topk", capacity=400, padded=True, special=False)

        def step(rank: int, buffer: Buffer) -> None:
            arguments = arguments_of(case, rank, buffer)
            first = buffer.dispatch(**arguments)
            assert first.handle.pad_to_capacity and not bool(first.overflow)
            rest = {"dispatch_dtype": case.dispatch_dtype}
            again = buffer.dispatch_async(arguments["x"], handle=first.handle, **rest).wait()
            assert torch.equal(again.rows, first.rows) and first.rows[-1].eq(0).all()
            plain = buffer.dispatch(**(arguments | {"pad_to_capacity": False}))
            with pytest.raises(InputError, match="pad_to_capacity = True but the handle has False"):
                buffer.dispatch(arguments["x"], handle=plain.handle, pad_to_capacity=True, **rest)

        group.run(step)

    @pytest.mark.skipif(ON_GPUS, reason="there all ranks give one, or none")
    def test_it_may_be_given_on_some_ranks_only(self, engine: Engine) -> None:
        _, group = engine

        def step(rank: int, buffer: Buffer) -> None:
            capacity = 300 if rank % 2 else None
            x, idx = torch.ones(6, 128), torch.arange(12).reshape(6, 2)
            result = buffer.dispatch(x, idx, dispatch_dtype="bf16", capacity=capacity)
            assert torch.equal(buffer.combine(result.rows, result.handle), 2 * x)
            assert (result.overflow is None) == (capacity is None)

        group.run(step)


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """What torch hands out without writing to it holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialised_is_nan")
@pytest.mark.parametrize("padded", [True, False])
def test_a_dense_product_over_all_rows_has_the_gradients_of_exact_counts(padded: bool) -> None:
    """Without padding (negative control) one row that did not come makes every weight's gradient NaN."""
    spec = EngineSpec(num_experts=8, hidden=128)
    case = make_case(
        3, spec, num_tokens=(7, 5, 0, 8), hidden=128, dtype=torch.float32, dispatch_dtype="bf16",
        grad_dtype="bf16", form="topk", top_k=3, focus="spread", weighted=False, special=False,
        layout="expert_major", expert_alignment=1, capacity=NO_CAPACITY,
    )  # fmt: skip

    def weight_gradient(rank: int, buffer: Buffer, **options: Any) -> Tensor:
        given = case.inputs[rank].on(buffer.device)
        # Sums of integers: the order of a product does not matter.
        x = given.x.mul(4).round()
        weight_HH = torch.eye(128, device=buffer.device).requires_grad_()
        result = buffer.dispatch(x, given.topk_idx, dispatch_dtype="bf16", **options)
        out = buffer.combine(result.rows @ weight_HH, result.handle)
        out.backward(torch.ones_like(out))
        assert weight_HH.grad is not None
        return weight_HH.grad.cpu()

    def step(rank: int, buffer: Buffer) -> bool:
        exact = weight_gradient(rank, buffer)
        cut = weight_gradient(rank, buffer, capacity=90, pad_to_capacity=padded)
        assert exact.isfinite().all()
        return torch.equal(cut, exact) if padded else not bool(cut.isnan().all())

    with spec.group() as group:
        assert group.run(step) == [padded] * 4
