"""The engine does what the oracle says, bit for bit: rows, weights, sums and all gradients, on every layout.

Negative controls: an oracle that was told something slightly different must disagree with the same engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases import (
    LAYOUTS,
    PLAIN,
    Case,
    EngineSpec,
    RankInput,
    check_case,
    differences,
    expect,
    make_case,
    run_case,
    with_inputs,
)
from tests.harness import RankGroup

# 24 experts divide over 2, 3, 4 and 6 ranks.
SPECS = {name: EngineSpec(domains=domains, num_experts=24, hidden=1024) for name, domains in LAYOUTS.items()}
WIRES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16, "dispatch_dtype": "bf16", "grad_dtype": "bf16"},
    "fp32": {"dtype": torch.float32, "dispatch_dtype": "bf16", "grad_dtype": "bf16"},
    "fp8": {"dtype": torch.bfloat16, "dispatch_dtype": "fp8", "grad_dtype": "bf16"},
    "fp8 both ways": {"dtype": torch.bfloat16, "dispatch_dtype": "fp8", "grad_dtype": "fp8"},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Iterator[tuple[EngineSpec, RankGroup]]:
    spec = SPECS[request.param]
    with spec.group() as group:
        yield spec, group


Layout = tuple[EngineSpec, RankGroup]


class TestEveryLayout:
    @pytest.mark.parametrize("wire", WIRES)
    @pytest.mark.parametrize("form", ["topk", "map"])
    def test_rows_sums_and_gradients_are_the_oracles(self, layout: Layout, wire: str, form: str) -> None:
        spec, group = layout
        tokens = [19, 0, 40, 7, 33, 1][: spec.num_ranks]
        case = make_case(
            11, spec, num_tokens=tokens, hidden=256, form=form, top_k=4, focus="spread", density=0.2,
            drop_rate=0.1, weighted=True, special=True, **WIRES[wire],
        )  # fmt: skip
        check_case(group, case)

    @pytest.mark.parametrize("top_k", range(1, 9))
    def test_top_1_to_8(self, layout: Layout, top_k: int) -> None:
        spec, group = layout
        check_case(group, make_case(top_k, spec, form="topk", top_k=top_k, focus="spread", drop_rate=0.0))

    @pytest.mark.parametrize("hidden", [32, 96, 128, 384, 992, 1024])
    def test_rows_of_any_width_up_to_the_buffers(self, layout: Layout, hidden: int) -> None:
        spec, group = layout
        check_case(group, make_case(hidden, spec, hidden=hidden, focus="spread", drop_rate=0.0))

    def test_all_tokens_to_one_expert(self, layout: Layout) -> None:
        spec, group = layout
        for seed in range(4):
            check_case(group, make_case(seed, spec, focus="expert", drop_rate=0.0, density=1.0))

    def test_dropped_tokens_give_zero_rows_and_zero_gradients(self, layout: Layout) -> None:
        spec, group = layout
        case = make_case(
            3, spec, num_tokens=[9] * spec.num_ranks, form="topk", drop_rate=0.6, weighted=True, biased=False
        )
        dropped = [(entry.topk_idx < 0) for entry in case.inputs if entry.topk_idx is not None]
        assert sum(int(mask.all(dim=1).sum()) for mask in dropped) > 0
        for mask, seen in zip(dropped, check_case(group, case), strict=True):
            assert seen.grad_weights is not None
            assert not seen.out[mask.all(dim=1)].any() and not seen.grad_weights[mask].any()
            assert seen.grad_weights[~mask].any() or not (~mask).any()
        check_case(group, make_case(4, spec, form="topk", drop_rate=1.0))

    def test_ranks_without_tokens(self, layout: Layout) -> None:
        spec, group = layout
        one_speaks = [0] * (spec.num_ranks - 1) + [23]
        for wire in WIRES.values():
            check_case(
                group, make_case(1, spec, num_tokens=one_speaks, focus="spread", drop_rate=0.0, **wire)
            )
            check_case(group, make_case(2, spec, num_tokens=[0] * spec.num_ranks, **wire))

    @pytest.mark.parametrize("alignment", [2, 16, 128])
    def test_segments_are_padded_with_zero_rows(self, layout: Layout, alignment: int) -> None:
        spec, group = layout
        case = make_case(
            8, spec, expert_alignment=alignment, focus="spread", hidden=128, weighted=True, **PLAIN
        )
        for seen in check_case(group, case):
            assert not (seen.tokens_per_expert % alignment).any()
            assert len(seen.rows) == seen.handle.num_rows == int(seen.tokens_per_expert.sum())

    def test_without_weights_none_travel(self, layout: Layout) -> None:
        spec, group = layout
        for form in ("topk", "map"):
            for seen in check_case(group, make_case(6, spec, form=form, weighted=False)):
                assert seen.row_weights is None and seen.grad_weights is None

    def test_the_bits_are_the_same_every_time(self, layout: Layout) -> None:
        spec, group = layout
        case = make_case(12, spec, num_tokens=[30] * spec.num_ranks, special=True, **WIRES["fp8 both ways"])
        expected = expect(case)
        for _ in range(5):
            check_case(group, case, expected)

    @pytest.mark.parametrize("wrong", ["an expert", "a weight", "a row", "alignment", "source order", "wire"])
    def test_an_oracle_that_was_told_something_else_disagrees(self, layout: Layout, wrong: str) -> None:
        spec, group = layout
        tokens = [20] * spec.num_ranks
        case = make_case(
            21, spec, num_tokens=tokens, form="topk", top_k=4, drop_rate=0.0, weighted=True, special=False,
            expert_alignment=1, focus="spread", **WIRES["fp8"], **PLAIN,
        )  # fmt: skip
        told, where = WRONG[wrong]
        expected = expect(told(case))
        # Inputs beyond the case come from the right oracle, or they would not have the right shapes.
        right = expect(case)
        mixed = replace(
            expected,
            **{
                name: getattr(right, name)
                for name in ("expert_rows", "grad_out", "grad_rows", "grad_row_weights")
            },
        )
        observed = group.run(lambda rank, buffer: run_case(case, right, rank, buffer))
        found = [line for rank, seen in enumerate(observed) for line in differences(case, mixed, rank, seen)]
        assert any(where in line for line in found), found


def _change_first(change: Callable[[RankInput], RankInput]) -> Callable[[Case], Case]:
    return lambda case: with_inputs(case, lambda rank, entry: change(entry) if rank == 0 else entry)


def _other_expert(entry: RankInput) -> RankInput:
    assert entry.topk_idx is not None
    topk_idx = entry.topk_idx.clone()
    unused = next(expert for expert in range(24) if expert not in topk_idx[5])
    topk_idx[5, 1] = unused
    return replace(entry, topk_idx=topk_idx)


def _other_weight(entry: RankInput) -> RankInput:
    assert entry.topk_weights is not None
    weights = entry.topk_weights.clone()
    weights[0, 0] += 0.5
    return replace(entry, topk_weights=weights)


def _other_row(entry: RankInput) -> RankInput:
    x = entry.x.clone()
    x[3, 7] += 4.0
    return replace(entry, x=x)


def _other_order(case: Case) -> Case:
    return replace(case, spec=replace(case.spec, source_order=tuple(reversed(range(case.spec.num_ranks)))))


WRONG: dict[str, tuple[Callable[[Case], Case], str]] = {
    "an expert": (_change_first(_other_expert), "tokens_per_expert"),
    "a weight": (_change_first(_other_weight), "row_weights"),
    "a row": (_change_first(_other_row), "rows"),
    "alignment": (lambda case: replace(case, expert_alignment=8), "tokens_per_expert"),
    "source order": (_other_order, "rows"),
    "wire": (lambda case: replace(case, dispatch_dtype="bf16"), "rows"),
}


def test_torchs_default_device_changes_nothing() -> None:
    """What is the host's (counts) stays there."""
    spec = EngineSpec()
    case = make_case(5, spec, focus="spread", drop_rate=0.0)
    expected = expect(case)

    def elsewhere(rank: int, buffer: Any) -> Any:
        with torch.device("meta"):
            return run_case(case, expected, rank, buffer)

    with spec.group() as group:
        for rank, seen in enumerate(group.run(elsewhere)):
            assert not differences(case, expected, rank, seen)


class TestSettings:
    @pytest.mark.parametrize("num_experts", [1, 2, 4, 16, 64])
    def test_from_one_to_64_experts(self, num_experts: int) -> None:
        domains = {1: (0,), 2: LAYOUTS["2x1"]}.get(num_experts, LAYOUTS["2x2"])
        spec = EngineSpec(domains=domains, num_experts=num_experts)
        with spec.group() as group:
            for seed in range(4):
                check_case(group, make_case(seed, spec, focus="spread"))

    @pytest.mark.parametrize("layout_name", ["1x4", "2x2", "4x1"])
    def test_tokens_may_reach_more_than_32_of_256_experts(self, layout_name: str) -> None:
        spec = EngineSpec(domains=LAYOUTS[layout_name], num_experts=256, hidden=128)
        case = make_case(
            5,
            spec,
            num_tokens=[6, 3, 0, 9],
            hidden=128,
            form="map",
            density=0.3,
            focus="spread",
            weighted=True,
        )
        reach = [entry.routing_map.sum(dim=1) for entry in case.inputs if entry.routing_map is not None]
        assert max(int(counts.max()) for counts in reach if len(counts)) == 256
        assert min(int(counts.min()) for counts in reach if len(counts)) > 32
        with spec.group() as group:
            check_case(group, case)

    @pytest.mark.parametrize("order", [(1, 0, 3, 2), (3, 2, 1, 0), (0, 2, 1, 3)])
    def test_sources_stand_in_the_order_that_was_set(self, order: tuple[int, ...]) -> None:
        for domains in (LAYOUTS["2x2"], LAYOUTS["interleaved"]):
            spec = EngineSpec(domains=domains, source_order=order)
            with spec.group() as group:
                for wire in ("fp32", "fp8"):
                    check_case(group, make_case(9, spec, focus="spread", drop_rate=0.0, **WIRES[wire]))

    @pytest.mark.parametrize("layout_name", ["2x2", "3+1", "4x1"])
    def test_partial_sums_travel_in_fp32_if_set(self, layout_name: str) -> None:
        spec = EngineSpec(domains=LAYOUTS[layout_name], num_experts=24, combine_wire_dtype="fp32")
        case = make_case(
            7, spec, num_tokens=[25] * 4, form="topk", top_k=8, drop_rate=0.0, special=False, focus="spread",
            **WIRES["bf16"],
        )  # fmt: skip
        with spec.group() as group:
            observed = check_case(group, case)
        # Control: with BF16 between the hops some sums do come out differently.
        rounded = expect(replace(case, spec=replace(spec, combine_wire_dtype="bf16")))
        found = [
            line for rank, seen in enumerate(observed) for line in differences(case, rounded, rank, seen)
        ]
        assert any(", out: " in line for line in found)

    def test_fp8_scales_may_stay_unrounded(self) -> None:
        spec = EngineSpec(fp8_scale="fp32", num_experts=24)
        case = make_case(7, spec, num_tokens=[25] * 4, special=True, focus="spread", **WIRES["fp8 both ways"])
        with spec.group() as group:
            observed = check_case(group, case)
        rounded = expect(replace(case, spec=replace(spec, fp8_scale="pow2")))
        found = [
            line for rank, seen in enumerate(observed) for line in differences(case, rounded, rank, seen)
        ]
        assert any(", rows: " in line for line in found)


def test_fp32_equals_a_dense_layer_with_weights_and_gradients() -> None:
    """Independent of the oracle: a dense computation in float64, where every expert is a matrix."""
    spec = EngineSpec(domains=LAYOUTS["2x2"], num_experts=8, hidden=128)
    case = make_case(
        2, spec, num_tokens=[13, 5, 0, 8], hidden=128, form="topk", top_k=3, drop_rate=0.2, weighted=True,
        special=False, expert_alignment=4, focus="spread", **WIRES["fp32"],
    )  # fmt: skip
    case = with_inputs(case, lambda rank, entry: replace(entry, x=entry.x / 64))
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(8, 128, 128, generator=generator) / 11
    grad_out = [torch.randn(entry.x.shape, generator=generator) for entry in case.inputs]

    def layer(rank: int, buffer: Any) -> tuple[torch.Tensor, ...]:
        given = case.inputs[rank].on(buffer.device)
        x = given.x.clone().requires_grad_()
        assert given.topk_weights is not None
        weights = given.topk_weights.clone().requires_grad_()
        result = buffer.dispatch(x, given.topk_idx, weights, expert_alignment=case.expert_alignment)
        first, outputs = 0, []
        for local, count in enumerate(result.tokens_per_expert.tolist()):
            outputs.append(result.rows[first : first + count] @ matrices[2 * rank + local].to(buffer.device))
            first += count
        out = buffer.combine(torch.cat(outputs) * result.row_weights[:, None], result.handle)
        out.backward(grad_out[rank].to(buffer.device))
        assert x.grad is not None and weights.grad is not None
        return out.detach().cpu(), x.grad.cpu(), weights.grad.cpu()

    with RankGroup(4, spec.config() | {"dispatch_dtype": "bf16"}) as group:
        results = group.run(layer)
    for given, grads, (out, grad_x, grad_weights) in zip(case.inputs, grad_out, results, strict=True):
        x64 = given.x.double().requires_grad_()
        assert given.topk_weights is not None and given.topk_idx is not None
        w64 = given.topk_weights.double().requires_grad_()
        every_TEH = torch.einsum("th,ehj->tej", x64, matrices.double())
        chosen_TKH = every_TEH.gather(1, given.topk_idx.clamp(min=0)[:, :, None].expand(-1, -1, 128))
        dense = (chosen_TKH * (w64 * (given.topk_idx >= 0))[:, :, None]).sum(dim=1)
        dense.backward(grads.double())
        assert x64.grad is not None and w64.grad is not None
        for seen, wanted in ((out, dense), (grad_x, x64.grad), (grad_weights, w64.grad)):
            torch.testing.assert_close(seen.double(), wanted, rtol=1e-4, atol=1e-5)
