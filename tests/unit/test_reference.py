"""Claims about the oracle (`uccl_ep_train/oracle/reference.py`), each with a control that would fail.

The oracle works with whole segments of rows. Here it meets a brute force that walks token by token in numpy
and shares nothing with it, and examples worked by hand. The brute force belongs here: other tests are not to
have a second oracle. Sums and gradients: `test_reference_sums.py`, `test_reference_gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.oracle_cases import LAYOUTS, Case, assert_all_equal
from uccl_ep_train.errors import ConfigError, DtypeError, RoutingError, ShapeError
from uccl_ep_train.oracle.reference import (
    ReferenceGroup,
    Routing,
    WireCounts,
    members_of_domains,
    rail,
)

Row = np.ndarray  # float32 [H]


# ---- the brute force: lists and dictionaries, one token at a time


def round_bf16(x: Row) -> Row:
    """float32 values of the nearest BF16 (ties to even) of finite values, on the bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def keep(x: Row) -> Row:
    return x


def through_fp8(x: Row) -> Row:
    """A BF16 row there and back with the least power-of-two scale that fits, by torch's float8 cast."""
    blocks = []
    for block in x.reshape(-1, 128):
        scale = 2.0**-117
        while 448.0 * scale < np.abs(block).max():
            scale *= 2.0
        codes = torch.from_numpy(block / np.float32(scale)).to(torch.float8_e4m3fn)
        blocks.append(codes.float().numpy() * np.float32(scale))
    return np.concatenate(blocks)


def brute_slots(
    routings: Sequence[dict[int, dict[int, float]]], experts: range, order: Sequence[int], align: int
):
    """Per slot of a rank (source, token, expert), or None for padding."""
    slots: list[tuple[int, int, int] | None] = []
    for e in experts:
        mine = [(s, t, e) for s in order for t in sorted(routings[s]) if e in routings[s][t]]
        slots += mine + [None] * (-len(mine) % align)
    return slots


def brute_sum(rows: Sequence[Row], rounding: Callable[[Row], Row]) -> Row:
    acc = np.zeros_like(rows[0])
    for row in rows:
        acc = (acc + row).astype(np.float32)
    return rounding(acc)


def brute_token(
    parts: dict[int, Row], owner_of: Callable[[int], int], domain_of: Sequence[int], source: int, hop, last
) -> Row:
    """Combine for one token: ``parts`` maps expert to row, ``hop`` and ``last`` are the roundings."""
    by_owner: dict[int, list[Row]] = {}
    for e in sorted(parts):
        by_owner.setdefault(owner_of(e), []).append(parts[e])
    folded = {owner: brute_sum(rows, hop) for owner, rows in by_owner.items()}
    by_domain: dict[int, list[Row]] = {}
    for owner in sorted(folded):
        by_domain.setdefault(domain_of[owner], []).append(folded[owner])
    incoming: list[Row] = []
    for d in sorted(by_domain, key=domain_of.index):
        incoming += by_domain[d] if d == domain_of[source] else [brute_sum(by_domain[d], hop)]
    return brute_sum(incoming, last)


class BruteForce:
    def __init__(self, case: Case, domain_of: Sequence[int], order: Sequence[int], align: int):
        self.case, self.domain_of = case, domain_of
        self.routings = [
            {
                t: {int(e): float(w) for e, w in zip(idx[t], weights[t], strict=True) if e >= 0}
                for t in range(len(idx))
            }
            for idx, weights in zip(case.idx, case.weights, strict=True)
        ]
        n = case.num_experts // case.num_ranks
        self.owner_of = lambda expert: expert // n
        self.slots = [
            brute_slots(self.routings, range(r * n, r * n + n), order, align) for r in range(case.num_ranks)
        ]

    def dispatch(self, x: Sequence[Tensor], staged: Callable[[Row], Row]) -> list[Tensor]:
        zero = np.zeros(x[0].shape[1], dtype=np.float32)
        rows = [
            [zero if slot is None else staged(x[slot[0]][slot[1]].float().numpy()) for slot in slots]
            for slots in self.slots
        ]
        return [
            torch.from_numpy(np.array(r, dtype=np.float32).reshape(-1, len(zero))).to(x[0].dtype)
            for r in rows
        ]

    def weights(self) -> list[Tensor]:
        return [
            torch.tensor(
                [0.0 if slot is None else self.routings[slot[0]][slot[1]][slot[2]] for slot in slots]
            )
            for slots in self.slots
        ]

    def combine(self, rows: Sequence[Tensor], hop: Callable[[Row], Row]) -> list[Tensor]:
        dtype, hidden = rows[0].dtype, rows[0].shape[1]
        last = round_bf16 if dtype == torch.bfloat16 else keep
        parts: dict[tuple[int, int], dict[int, Row]] = {}
        for slots, mine in zip(self.slots, rows, strict=True):
            for slot, row in zip(slots, mine, strict=True):
                if slot is not None:
                    parts.setdefault(slot[:2], {})[slot[2]] = row.float().numpy()
        out = [np.zeros((len(idx), hidden), dtype=np.float32) for idx in self.case.idx]
        for (s, t), of_token in parts.items():
            out[s][t] = brute_token(of_token, self.owner_of, self.domain_of, s, hop, last)
        return [torch.from_numpy(o).to(dtype) for o in out]

    def weight_gradients(self, grads: Sequence[Tensor]) -> list[Tensor]:
        result = [torch.zeros_like(w) for w in self.case.weights]
        for slots, mine in zip(self.slots, grads, strict=True):
            for slot, grad in zip(slots, mine, strict=True):
                if slot is not None:
                    s, t, e = slot
                    result[s][t, self.case.idx[s][t].tolist().index(e)] = grad
        return result


SETTINGS = {  # dtype, dispatch_dtype, grad_dtype, combine_wire_dtype
    "fp8": (torch.bfloat16, "fp8", "fp8", "bf16"),
    "bf16": (torch.bfloat16, "bf16", "bf16", "bf16"),
    "bf16_wire_fp32": (torch.bfloat16, "bf16", "bf16", "fp32"),
    "fp32": (torch.float32, "bf16", "bf16", "bf16"),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_a_brute_force_token_by_token_in_every_bit(layout: str, setting: str) -> None:
    dtype, wire, grad_wire, combine_wire = SETTINGS[setting]
    domain_of, align = LAYOUTS[layout], 1 if setting == "bf16" else 4
    case = Case(domain_of, dtype, k=4, seed=hash_of(layout + setting))
    order = torch.randperm(case.num_ranks, generator=case.rng).tolist()
    group = ReferenceGroup(
        domain_of, case.num_experts, source_order=order,
        dispatch_dtype=wire, grad_dtype=grad_wire, combine_wire_dtype=combine_wire,
    )  # fmt: skip
    brute = BruteForce(case, domain_of, order, align)
    hop = round_bf16 if dtype == torch.bfloat16 and combine_wire == "bf16" else keep

    sent = group.dispatch(case.x, case.routings, expert_alignment=align)
    assert_all_equal(sent.rows, brute.dispatch(case.x, through_fp8 if wire == "fp8" else keep))
    assert sent.row_weights is not None
    assert_all_equal(sent.row_weights, brute.weights())

    expert_out = case.rows_like(sent.rows)
    assert_all_equal(group.combine(expert_out, sent.plan).outputs, brute.combine(expert_out, hop))

    grad_out = case.rows_like(case.x)
    grad_rows, _ = group.combine_backward(grad_out, sent.plan)
    assert_all_equal(grad_rows, brute.dispatch(grad_out, through_fp8 if grad_wire == "fp8" else keep))

    grad_row_weights = [torch.randn(len(rows), generator=case.rng) for rows in sent.rows]
    back = group.dispatch_backward(grad_rows, grad_row_weights, sent.plan)
    assert_all_equal(back.outputs, brute.combine(grad_rows, hop))
    assert back.grad_weights is not None
    assert_all_equal(back.grad_weights, brute.weight_gradients(grad_row_weights))


def test_the_brute_force_notices_another_order_of_sources_domains_and_roundings() -> None:
    """Control of the comparison above: each of these changes must break it."""
    domain_of = LAYOUTS["interleaved"]
    case = Case(domain_of, torch.bfloat16, k=6)
    group = ReferenceGroup(domain_of, case.num_experts)
    sent = group.dispatch(case.x, case.routings)
    reordered = BruteForce(case, domain_of, [1, 0, 3, 2], 1)
    assert not all(map(torch.equal, sent.rows, reordered.dispatch(case.x, through_fp8)))
    expert_out = case.rows_like(sent.rows)
    outputs = group.combine(expert_out, sent.plan).outputs
    right = BruteForce(case, domain_of, range(4), 1)
    assert_all_equal(outputs, right.combine(expert_out, round_bf16))
    assert not all(map(torch.equal, outputs, right.combine(expert_out, keep)))
    other_domains = BruteForce(case, [0, 0, 1, 1], range(4), 1)
    assert not all(map(torch.equal, outputs, other_domains.combine(expert_out, round_bf16)))


def hash_of(text: str) -> int:
    return sum(index * ord(letter) for index, letter in enumerate(text, 1))


# ---- by hand


def by_hand(source_order: Sequence[int] | None = None, align: int = 1):
    """Two ranks in two domains, two experts each; rows are [10 * source + token]."""
    x = [torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[10.0], [11.0]])]
    idx = [torch.tensor([[3, 0], [-1, 2], [-1, -1]]), torch.tensor([[0, 1], [3, 0]])]
    weights = [torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]), torch.tensor([[0.7, 0.8], [0.9, 1.0]])]
    group = ReferenceGroup([0, 1], 4, source_order=source_order, dispatch_dtype="bf16")
    routings = [Routing.from_topk(i, w, 4) for i, w in zip(idx, weights, strict=True)]
    return group, group.dispatch(x, routings, expert_alignment=align)


def test_slots_are_expert_major_then_source_then_token_by_hand() -> None:
    _, sent = by_hand()
    assert [rows.flatten().tolist() for rows in sent.rows] == [[0, 10, 11, 10], [1, 0, 11]]
    assert [counts.tolist() for counts in sent.plan.tokens_per_expert] == [[3, 1], [1, 2]]
    assert sent.row_weights is not None
    expected = [torch.tensor([0.2, 0.7, 1.0, 0.8]), torch.tensor([0.4, 0.1, 0.9])]
    assert_all_equal(sent.row_weights, expected)
    # Control: another order of the sources moves rows inside the experts, and only there.
    _, swapped = by_hand(source_order=[1, 0])
    assert [rows.flatten().tolist() for rows in swapped.rows] == [[10, 11, 0, 10], [1, 11, 0]]


def test_each_expert_is_padded_with_zero_rows_by_hand() -> None:
    group, sent = by_hand(align=2)
    assert [rows.flatten().tolist() for rows in sent.rows] == [[0, 10, 11, 0, 10, 0], [1, 0, 0, 11]]
    assert [counts.tolist() for counts in sent.plan.tokens_per_expert] == [[4, 2], [2, 2]]
    assert [counts.tolist() for counts in sent.plan.tokens_per_expert_exact] == [[3, 1], [1, 2]]
    assert sent.row_weights is not None and sent.row_weights[0][[3, 5]].tolist() == [0, 0]
    # What the experts write into padding rows goes nowhere; into a real row, it shows.
    rows = [torch.zeros(6, 1), torch.zeros(4, 1)]
    rows[0][3], rows[0][5], rows[1][1] = torch.nan, torch.inf, 7.0
    assert all((out == 0).all() for out in group.combine(rows, sent.plan).outputs)
    rows[1][2] = 5.0
    assert group.combine(rows, sent.plan).outputs[0].flatten().tolist() == [5, 0, 0]


def test_wire_counts_by_hand() -> None:
    """A row counts once per foreign domain, a pair once; nothing counts inside a domain."""
    group, sent = by_hand()
    # Rank 0 sends tokens 0 (expert 3) and 1 (expert 2); rank 1 tokens 0 (experts 0, 1) and 1 (expert 0).
    assert_counts(sent.wire, [[0, 2], [2, 0]], [[0, 2 * 4 + 2 * 4], [2 * 4 + 3 * 4, 0]])
    combined = group.combine(sent.rows, sent.plan)
    assert_counts(combined.wire, [[0, 2], [2, 0]], [[0, 2 * 4], [2 * 4, 0]])
    backward = group.dispatch_backward(sent.rows, sent.row_weights, sent.plan)
    assert_counts(backward.wire, [[0, 2], [2, 0]], [[0, 2 * 4 + 3 * 4], [2 * 4 + 2 * 4, 0]])
    _, gradients = group.combine_backward(combined.outputs, sent.plan)
    assert_counts(gradients, [[0, 2], [2, 0]], [[0, 2 * 4], [2 * 4, 0]])
    # Control: the same routing in one domain.
    one_domain = ReferenceGroup([0, 0], 4, dispatch_dtype="bf16")
    again = one_domain.dispatch(combined.outputs, sent.plan.routings)
    assert_counts(again.wire, [[0], [0]], [[0], [0]])


def assert_counts(counts: WireCounts, rows: list[list[int]], num_bytes: list[list[int]]) -> None:
    assert (counts.rows.tolist(), counts.bytes.tolist()) == (rows, num_bytes)


def test_a_row_crosses_once_per_domain_and_returns_through_the_rail_of_its_source() -> None:
    """Domains of 3 + 1 ranks, every token to every expert; FP8 out, BF16 back: 144 and 256 bytes a row."""
    domain_of, hidden = LAYOUTS["3+1"], 128
    routings = [Routing.from_map(torch.ones(5, 4, dtype=torch.bool), None) for _ in domain_of]
    x = [torch.ones(5, hidden, dtype=torch.bfloat16) for _ in domain_of]
    group = ReferenceGroup(domain_of, 4)
    sent = group.dispatch(x, routings)
    assert sent.row_weights is None
    assert_counts(sent.wire, [[0, 5], [0, 5], [0, 5], [5, 0]], [[0, 720], [0, 720], [0, 720], [720, 0]])
    back = group.combine(sent.rows, sent.plan)
    assert back.wire.rows.tolist() == [[0, 0, 0, 5], [0] * 4, [0] * 4, [5, 5, 5, 0]]
    assert torch.equal(back.wire.bytes, back.wire.rows * 256)
    wide = ReferenceGroup(domain_of, 4, combine_wire_dtype="fp32").combine(sent.rows, sent.plan)
    assert torch.equal(wide.wire.bytes, back.wire.rows * 512)


def test_domains_are_numbered_by_lowest_rank_and_rails_wrap_around_the_smaller_domain() -> None:
    members = members_of_domains([8, 3, 8, 3, 8, 1])
    assert members == [[0, 2, 4], [1, 3], [5]]
    assert [rail(members, source, 1) for source in (0, 2, 4, 5)] == [1, 3, 1, 1]
    assert [rail(members, source, 0) for source in (1, 3, 5)] == [0, 2, 0]


# ---- refusals


def test_what_cannot_work_is_refused_by_name() -> None:
    with pytest.raises(RoutingError, match="twice"):
        Routing.from_topk(torch.tensor([[1, 1]]), None, 4)
    for expert in (-2, 4):
        with pytest.raises(RoutingError, match=r"0\.\.3"):
            Routing.from_topk(torch.tensor([[expert, 1]]), None, 4)
    for bad in ({"source_order": [0, 0]}, {"combine_wire_dtype": "fp8"}):
        with pytest.raises(ConfigError):
            ReferenceGroup([0, 1], 4, **bad)
    with pytest.raises(ConfigError, match="3 experts"):
        ReferenceGroup([0, 1], 3)
    group = ReferenceGroup([0], 2)
    routing = Routing.from_topk(torch.tensor([[1]]), torch.ones(1, 1), 2)
    with pytest.raises(DtypeError, match="float32"):
        group.dispatch([torch.ones(1, 128)], [routing])
    with pytest.raises(ShapeError):
        group.dispatch([torch.ones(2, 128, dtype=torch.bfloat16)], [routing])
    sent = group.dispatch([torch.ones(1, 128, dtype=torch.bfloat16)], [routing])
    with pytest.raises(ShapeError):
        group.combine([torch.ones(2, 128)], sent.plan)
    with pytest.raises(DtypeError, match="float32"):
        group.combine_backward([torch.ones(1, 128)], sent.plan, grad_dtype="fp8")
