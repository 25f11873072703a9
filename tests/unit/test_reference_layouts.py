"""Claims about the oracle's compact rows, codes and capacities, by hand."""

from __future__ import annotations

import torch

from uccl_ep_train.oracle.reference import Dispatched, ReferenceGroup, Routing


def by_hand(layout: str = "compact", **options: list[int]) -> tuple[ReferenceGroup, Dispatched]:
    """Two ranks in two domains, two experts each; rows are [10 * source + token]."""
    x = [torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[10.0], [11.0]])]
    idx = [torch.tensor([[3, 0], [-1, 2], [-1, -1]]), torch.tensor([[1, 0], [3, 0]])]
    weights = [torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]), torch.tensor([[0.7, 0.8], [0.9, 1.0]])]
    group = ReferenceGroup([0, 1], 4, source_order=options.pop("source_order", None), dispatch_dtype="bf16")
    routings = [Routing.from_topk(i, w, 4) for i, w in zip(idx, weights, strict=True)]
    return group, group.dispatch(x, routings, layout=layout, **options)


def test_compact_rows_are_in_the_order_of_source_and_token() -> None:
    _, sent = by_hand()
    assert [rows.flatten().tolist() for rows in sent.rows] == [[0, 10, 11], [0, 1, 11]]
    assert sent.row_experts is not None and sent.row_weights is not None
    assert [entry.tolist() for entry in sent.row_experts] == [
        [[0, -1], [0, 1], [0, -1]],
        [[1, -1], [0, -1], [1, -1]],
    ]
    assert torch.equal(sent.row_weights[0], torch.tensor([[0.2, 0], [0.8, 0.7], [1.0, 0]]))
    assert torch.equal(sent.row_weights[1], torch.tensor([[0.1, 0], [0.4, 0], [0.9, 0]]))
    assert [counts.tolist() for counts in sent.plan.tokens_per_expert] == [[3, 1], [1, 2]]
    # Control: another order of the sources.
    _, swapped = by_hand(source_order=[1, 0])
    assert [rows.flatten().tolist() for rows in swapped.rows] == [[10, 11, 0], [11, 0, 1]]


def test_a_compact_row_counts_once_in_the_sum_and_its_weights_gradients_once_per_pair() -> None:
    group, sent = by_hand()
    rows = [torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[8.0], [16.0], [32.0]])]
    grads = [torch.arange(6.0).reshape(3, 2), torch.arange(10.0, 16.0).reshape(3, 2)]
    back = group.dispatch_backward(rows, grads, sent.plan)
    assert [out.flatten().tolist() for out in back.outputs] == [[9, 16, 0], [2, 36]]
    assert back.grad_weights is not None
    # Token 10 names expert 1 first: its columns are in the order of experts.
    assert [entry.tolist() for entry in back.grad_weights] == [[[10, 0], [0, 12], [0, 0]], [[3, 2], [14, 4]]]
    # Control: expert-major, the same token has a row for each of its experts.
    _, major = by_hand("expert_major")
    assert [len(entry) for entry in major.rows] == [4, 3]


def test_rows_beyond_the_capacity_are_absent() -> None:
    group, sent = by_hand(capacities=[2, 3])
    assert [rows.flatten().tolist() for rows in sent.rows] == [[0, 10], [0, 1, 11]]
    assert sent.plan.overflow == (True, False)
    assert [counts.tolist() for counts in sent.plan.tokens_per_expert] == [[3, 1], [1, 2]]
    rows = [torch.tensor([[1.0], [2.0]]), torch.tensor([[8.0], [16.0], [32.0]])]
    grads = [torch.ones(2, 2), torch.ones(3, 2)]
    back = group.dispatch_backward(rows, grads, sent.plan)
    assert [out.flatten().tolist() for out in back.outputs] == [[9, 16, 0], [2, 32]]
    assert back.grad_weights is not None
    assert back.grad_weights[1].tolist() == [[1, 1], [1, 0]]  # token 11 has lost expert 0
    _, whole = by_hand(capacities=[9, 9])
    assert whole.plan.overflow == (False, False) and len(whole.rows[0]) == 3


def test_padding_of_fp8_rows_is_code_0_and_scale_1() -> None:
    group = ReferenceGroup([0], 2)
    x = [torch.full((3, 128), -448.0 * 4, dtype=torch.bfloat16)]
    routing = Routing.from_topk(torch.tensor([[1], [1], [0]]), None, 2)
    plan = group.dispatch(x, [routing], expert_alignment=2).plan
    (rows,) = group.fp8_rows(x, plan)
    assert rows.codes.view(torch.uint8)[:, 5].tolist() == [0xFE, 0, 0xFE, 0xFE]
    assert rows.scales.flatten().tolist() == [4, 1, 4, 4]
