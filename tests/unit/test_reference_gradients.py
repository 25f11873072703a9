"""Claims about the oracle's weights and gradients, against closed forms and autograd, each with a control."""

from __future__ import annotations

import pytest
import torch

from tests.unit.oracle_cases import LAYOUTS, TWO_BY_TWO, Case, assert_all_equal, same_bits
from uccl_ep_train.oracle import fp8
from uccl_ep_train.oracle.reference import (
    ReferenceGroup,
    Routing,
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_identity_experts_return_each_token_times_the_sum_of_its_weights(layout: str) -> None:
    """Exact for rows and weights of few bits; and weights sent as their own gradients come back unchanged."""
    case = Case(LAYOUTS[layout], torch.float32, seed=5)
    group = ReferenceGroup(LAYOUTS[layout], case.num_experts, dispatch_dtype="bf16")
    x = [torch.randint(-8, 8, x.shape, generator=case.rng).float() for x in case.x]
    weights = [torch.randint(1, 16, w.shape, generator=case.rng) / 16 for w in case.weights]
    routings = [Routing.from_topk(i, w, case.num_experts) for i, w in zip(case.idx, weights, strict=True)]
    sent = group.dispatch(x, routings, expert_alignment=3)
    assert sent.row_weights is not None
    weighted = [rows * w.unsqueeze(1) for rows, w in zip(sent.rows, sent.row_weights, strict=True)]
    kept = [w.masked_fill(idx < 0, 0.0) for idx, w in zip(case.idx, weights, strict=True)]
    total = [(x_TH * w.sum(dim=1, keepdim=True)) for x_TH, w in zip(x, kept, strict=True)]
    outputs = group.combine(weighted, sent.plan).outputs
    assert all(map(torch.equal, outputs, total))
    assert not all(map(torch.equal, group.combine(sent.rows, sent.plan).outputs, total)), (
        "control: unweighted"
    )
    back = group.dispatch_backward(sent.rows, sent.row_weights, sent.plan)
    assert back.grad_weights is not None
    assert_all_equal(back.grad_weights, kept)
    assert not all(map(torch.equal, back.grad_weights, weights)), "control: something was dropped"


def test_gradients_are_those_of_autograd_through_a_dense_formula() -> None:
    """experts: row -> weight * row * (1 + expert); in FP32, against autograd in FP64."""
    domain_of = LAYOUTS["3x2"]
    case = Case(domain_of, torch.float32, seed=3)
    group = ReferenceGroup(domain_of, case.num_experts, dispatch_dtype="bf16")
    sent = group.dispatch(case.x, case.routings)
    assert sent.row_weights is not None
    experts = torch.arange(case.num_experts).split(3)
    gains = [
        (1.0 + e).repeat_interleave(n) for e, n in zip(experts, sent.plan.tokens_per_expert, strict=True)
    ]
    grad_out = case.rows_like(case.x)
    grad_expert_out, _ = group.combine_backward(grad_out, sent.plan)
    scales = [w * g for w, g in zip(sent.row_weights, gains, strict=True)]
    grad_rows = [grad * s.unsqueeze(1) for grad, s in zip(grad_expert_out, scales, strict=True)]
    per_row = zip(grad_expert_out, sent.rows, gains, strict=True)
    grad_row_weights = [(grad * row).sum(dim=1) * gain for grad, row, gain in per_row]
    back = group.dispatch_backward(grad_rows, grad_row_weights, sent.plan)
    assert back.grad_weights is not None
    for rank in range(len(domain_of)):
        x = case.x[rank].double().requires_grad_()
        weights = case.weights[rank].double().requires_grad_()
        gain_TK = (1.0 + case.idx[rank]).masked_fill(case.idx[rank] < 0, 0.0)
        out = (weights * gain_TK).sum(dim=1, keepdim=True) * x
        out.backward(grad_out[rank].double())
        assert x.grad is not None and weights.grad is not None
        torch.testing.assert_close(back.outputs[rank].double(), x.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(back.grad_weights[rank].double(), weights.grad, rtol=1e-5, atol=1e-4)
        assert len(x) == 0 or weights.grad.abs().max() > 1, "control: zeros would not pass"


def test_the_map_form_gives_the_same_rows_and_returns_gradients_in_its_own_shape() -> None:
    case = Case(TWO_BY_TWO, torch.bfloat16)
    group = ReferenceGroup(TWO_BY_TWO, case.num_experts)
    as_map = [Routing.from_map(r.routed_TE, r.weights_TE) for r in case.routings]
    one, two = group.dispatch(case.x, case.routings), group.dispatch(case.x, as_map)
    assert one.row_weights is not None and two.row_weights is not None
    assert_all_equal([*one.rows, *one.row_weights], [*two.rows, *two.row_weights])
    assert torch.equal(one.wire.bytes, two.wire.bytes)
    grads = [group.dispatch_backward(d.rows, d.row_weights, d.plan).grad_weights for d in (one, two)]
    assert grads[0] is not None and grads[1] is not None
    for grad_TK, grad_TE, routing in zip(*grads, case.routings, strict=True):
        assert same_bits(routing.in_own_form(grad_TE), grad_TK) and same_bits(grad_TE, routing.weights_TE)


def test_a_routed_probability_of_zero_still_has_its_slot() -> None:
    group = ReferenceGroup([0], 2, dispatch_dtype="bf16")
    routed, probs = torch.tensor([[True, False]]), torch.tensor([[0.0, 0.5]])
    sent = group.dispatch([torch.ones(1, 1)], [Routing.from_map(routed, probs)])
    assert sent.rows[0].tolist() == [[1.0]] and sent.row_weights is not None
    assert sent.row_weights[0].tolist() == [0.0], "0.5 belongs to an expert that is not routed"
    back = group.dispatch_backward(sent.rows, [torch.tensor([7.0])], sent.plan)
    assert back.grad_weights is not None and back.grad_weights[0].tolist() == [[7.0, 0.0]]


def test_fp8_is_applied_to_every_row_once_whichever_domain_it_stays_in() -> None:
    case = Case(TWO_BY_TWO, torch.bfloat16)
    for mode in fp8.SCALE_MODES:
        fp8_group = ReferenceGroup(TWO_BY_TWO, case.num_experts, fp8_scale=mode, grad_dtype="fp8")
        seen = [fp8.dequantize(*fp8.quantize(x, mode)) for x in case.x]
        plain = fp8_group.dispatch(seen, case.routings, dispatch_dtype="bf16")
        sent = fp8_group.dispatch(case.x, case.routings)
        assert_all_equal(sent.rows, plain.rows)
        assert_all_equal(fp8_group.combine_backward(case.x, sent.plan)[0], plain.rows)
        unquantised, _ = fp8_group.combine_backward(case.x, sent.plan, grad_dtype="bf16")
        assert not all(map(torch.equal, unquantised, plain.rows)), "control"
