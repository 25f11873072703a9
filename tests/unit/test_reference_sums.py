"""Claims about the oracle's sums: order, beginning, how often they are rounded; each with a control."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.unit.oracle_cases import LAYOUTS, TWO_BY_TWO, same_bits
from uccl_ep_train.oracle.reference import (
    ReferenceGroup,
    Routing,
    make_plan,
)


def combine_one_token(rows: Sequence[Tensor], domain_of: Sequence[int], **options: str) -> Tensor:
    """The sum of ``rows`` (each [H]) for one token of rank 0, one expert a rank, row i from expert i."""
    group = ReferenceGroup(domain_of, len(domain_of), dispatch_dtype="bf16", **options)
    routed = torch.zeros(1, len(domain_of), dtype=torch.bool)
    routed[0, : len(rows)] = True
    nothing = torch.zeros(0, len(domain_of), dtype=torch.bool)
    routings = [Routing.from_map(routed if rank == 0 else nothing, None) for rank in range(len(domain_of))]
    plan = make_plan(routings, len(domain_of), range(len(domain_of)))
    empty = rows[0].new_zeros(0, len(rows[0]))
    per_rank = [rows[r].unsqueeze(0) if r < len(rows) else empty for r in range(len(domain_of))]
    return group.combine(per_rank, plan).outputs[0][0]


def random_rows(count: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(4096, generator=rng).to(dtype) for _ in range(count)]


FOUR_RANK_LAYOUTS = [LAYOUTS[name] for name in ("1x4", "2x2", "4x1", "3+1", "interleaved")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_experts_give_the_same_bits_in_every_domain_layout(dtype: torch.dtype) -> None:
    """One fp32 addition and one rounding, wherever the two rows meet. Three BF16 rows depend on it."""
    a, b, c = random_rows(3, dtype)
    for layout in FOUR_RANK_LAYOUTS:
        assert same_bits(combine_one_token([a, b], layout), (a.float() + b.float()).to(dtype))
    # Control: 2x2 adds c after the others, 1+3 adds b and c first.
    assert not same_bits(combine_one_token([a, b, c], TWO_BY_TWO), combine_one_token([a, b, c], [0, 1, 1, 1]))


def test_four_fp32_rows_are_added_in_the_order_of_ranks_inside_domains() -> None:
    a, b, c, d = random_rows(4, torch.float32)
    assert same_bits(combine_one_token([a, b, c, d], LAYOUTS["1x4"]), ((a + b) + c) + d)
    assert same_bits(combine_one_token([a, b, c, d], LAYOUTS["4x1"]), ((a + b) + c) + d)
    assert same_bits(combine_one_token([a, b, c, d], LAYOUTS["2x2"]), (a + b) + (c + d))
    assert same_bits(combine_one_token([a, b, c, d], LAYOUTS["interleaved"]), (a + c) + (b + d))
    assert same_bits(combine_one_token([a, b, c, d], LAYOUTS["3+1"]), ((a + b) + c) + d)
    # Control: these orders are not the same bits on this data.
    assert len({tuple(s.tolist()) for s in (((a + b) + c) + d, (a + b) + (c + d), (a + c) + (b + d))}) == 3


def test_bf16_rows_are_rounded_once_per_hop_and_not_in_between() -> None:
    """Own domain: one rounding in all. Another domain: one more, on its relay; none with an fp32 wire."""
    a, b, c, d = (row.float() for row in random_rows(4, torch.bfloat16))
    rows = [row.to(torch.bfloat16) for row in (a, b, c, d)]
    one_rounding = (((a + b) + c) + d).to(torch.bfloat16)
    relayed = ((a + b) + (c + d).to(torch.bfloat16).float()).to(torch.bfloat16)
    unrounded = ((a + b) + (c + d)).to(torch.bfloat16)
    assert same_bits(combine_one_token(rows, LAYOUTS["1x4"]), one_rounding)
    assert same_bits(combine_one_token(rows, TWO_BY_TWO), relayed)
    assert same_bits(combine_one_token(rows, TWO_BY_TWO, combine_wire_dtype="fp32"), unrounded)
    assert not same_bits(relayed, unrounded) and not same_bits(relayed, one_rounding)


def test_two_experts_of_one_rank_are_rounded_by_the_fold() -> None:
    a, b, c = (row.float() for row in random_rows(3, torch.bfloat16))
    group = ReferenceGroup([0, 0], 4)
    routed = torch.tensor([[True, False, True, True]])
    plan = make_plan([Routing.from_map(routed, None), Routing.from_map(routed[:0], None)], 4, [0, 1])
    rows = [a.unsqueeze(0).to(torch.bfloat16), torch.stack([b, c]).to(torch.bfloat16)]
    folded = (a + (b + c).to(torch.bfloat16).float()).to(torch.bfloat16)
    assert same_bits(group.combine(rows, plan).outputs[0][0], folded)
    assert not same_bits(folded, (a + (b + c)).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_start_at_plus_zero_on_every_hop(dtype: torch.dtype) -> None:
    zero, minus_zero = torch.zeros(1, dtype=dtype), torch.full((1,), -0.0, dtype=dtype)
    for layout in ([0], [0, 1], [0, 0]):
        assert same_bits(combine_one_token([minus_zero] * len(layout), layout), zero)
    # A token without experts is +0.0 too; a dispatched row, which is a copy, keeps its sign.
    routing = Routing.from_topk(torch.tensor([[-1], [0]]), None, 1)
    group = ReferenceGroup([0], 1, dispatch_dtype="bf16")
    sent = group.dispatch([torch.stack([minus_zero, minus_zero])], [routing])
    assert same_bits(sent.rows[0], minus_zero.unsqueeze(0))
    assert same_bits(group.combine(sent.rows, sent.plan).outputs[0], torch.stack([zero, zero]))


@pytest.mark.parametrize(
    ("dtype", "integer", "odd", "canonical"),
    [(torch.bfloat16, torch.int16, -3, 0x7FC0), (torch.float32, torch.int32, -3, 0x7FC00000)],
)
def test_nans_of_sums_are_canonical_and_nans_of_copies_keep_their_bits(
    dtype, integer, odd, canonical
) -> None:
    odd_nan = torch.tensor([odd], dtype=integer).view(dtype)
    inf = torch.tensor([torch.inf], dtype=dtype)
    expected = torch.tensor([canonical], dtype=integer).view(dtype)
    for layout in ([0, 0, 0], [0, 0, 1], [0, 1, 2]):
        assert same_bits(combine_one_token([odd_nan, inf], layout), expected)
        assert same_bits(combine_one_token([inf, -inf], layout), expected)
        assert same_bits(combine_one_token([inf, inf], layout), inf)
    group = ReferenceGroup([0], 1, dispatch_dtype="bf16")
    routing = Routing.from_topk(
        torch.tensor([[0]]), odd_weight := torch.tensor([[-3]]).int().view(torch.float32), 1
    )
    sent = group.dispatch([odd_nan.unsqueeze(0)], [routing])
    assert same_bits(sent.rows[0], odd_nan.unsqueeze(0)) and not same_bits(odd_nan, expected)
    assert sent.row_weights is not None and same_bits(sent.row_weights[0], odd_weight[0])
    back = group.dispatch_backward(sent.rows, sent.row_weights, sent.plan)
    assert back.grad_weights is not None and same_bits(back.grad_weights[0], odd_weight)
