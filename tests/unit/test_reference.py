"""Claims about the oracle (`uccl_ep_train/reference.py`), each with a control that would fail.

The oracle works with whole segments of rows. Here it meets a brute force that walks token by token in numpy
and shares nothing with it, examples worked by hand, and torch's autograd.

Longer than 400 lines because the brute force belongs to it: other tests are not to have a second oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from uccl_ep_train import fp8
from uccl_ep_train.errors import ConfigError, DtypeError, RoutingError, ShapeError
from uccl_ep_train.reference import (
    ReferenceGroup,
    Routing,
    WireCounts,
    make_plan,
    members_of_domains,
    rail,
)

Row = np.ndarray  # float32 [H]
LAYOUTS = {
    "1x4": [0, 0, 0, 0],
    "2x2": [0, 0, 1, 1],
    "4x1": [3, 2, 1, 0],
    "2x1": [0, 1],
    "3x2": [0, 0, 1, 1, 2, 2],
    "3+1": [5, 5, 5, 1],
    "interleaved": [9, 4, 9, 4],
}
TWO_BY_TWO = LAYOUTS["2x2"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def random_topk(num_tokens: int, num_experts: int, k: int, rng: torch.Generator, drop: float = 0.0) -> Tensor:
    """int64 [T, K], distinct experts in random order, some dropped."""
    idx = torch.rand(num_tokens, num_experts, generator=rng).argsort(dim=1)[:, :k]
    return idx.masked_fill(torch.rand(idx.shape, generator=rng) < drop, -1)


class Case:
    """A random group: unequal T (rank 1 has none), dropped tokens, rows with signed zeros and subnormals."""

    def __init__(
        self, domain_of: Sequence[int], dtype: torch.dtype, k: int = 3, seed: int = 0, hidden: int = 256
    ):
        rng = torch.Generator().manual_seed(seed)
        self.num_ranks = len(domain_of)
        self.num_experts = 3 * self.num_ranks
        num_tokens = [0 if rank == 1 else 4 + rank for rank in range(self.num_ranks)]
        self.idx = [random_topk(n, self.num_experts, k, rng, drop=0.2) for n in num_tokens]
        self.weights = [torch.rand(idx.shape, generator=rng) for idx in self.idx]
        self.routings = [
            Routing.from_topk(i, w, self.num_experts) for i, w in zip(self.idx, self.weights, strict=True)
        ]
        self.x = [self.rows(n, hidden, dtype, rng) for n in num_tokens]
        self.rng = rng

    @staticmethod
    def rows(num_rows: int, hidden: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
        x = torch.randn(num_rows, hidden, generator=rng)
        x[:, 0:5], x[:, 5:9], x[:, 9] = 0.0, -0.0, 1e-39
        return x.to(dtype)

    def rows_like(self, like: Sequence[Tensor]) -> list[Tensor]:
        return [self.rows(t.shape[0], t.shape[1], t.dtype, self.rng) for t in like]


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


def assert_all_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert len(a) == len(b)
    assert [same_bits(x, y) for x, y in zip(a, b, strict=True)] == [True] * len(a)


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


# ---- sums


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


# ---- experts, weights and gradients


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
