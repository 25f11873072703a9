"""Bytes that dispatch and combine send, and the time that they take at given rates, under uniform routing.

Uniform: a token's groups are any `group_topk` of the router's groups, its experts any top-k of the experts in
these. Then the number of chosen experts in a set is hypergeometric. Trained routers are less even, so some
ranks get more.

A row goes once over the NIC to every other domain that wants it, to one rank there (the rail). Inside a
domain it goes once to every rank that wants it. Combine sends a sum for each of these rows the other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from recipes.models.architecture import Model
from recipes.models.layout import FULL, Layout
from recipes.plan.hardware import Node

FIXED_SECONDS = 85e-6
"""What a dispatch with a new plan, or a combine, takes beyond its bytes, inside one domain and over several.

Measured on H200 with 4096 tokens of 7168, top-8 of 256. One domain, 64 SMs: 334 µs for 82.4 MB, 560 to 582
for 159.6 (bench/results/h200_x4_backward.json). Two, 24 SMs and the loop transport at 50 GB/s: 678 µs for
30.3 MB, 1224 to 1241 for 58.5 (bench/results/h200_x2_two_domains.json)."""
_FP8_BLOCK = 128


@dataclass(frozen=True)
class Bytes:
    """What leaves a rank, on average: inside its domain and for others."""

    link: float
    nic: float

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.link + other.link, self.nic + other.nic)

    def __mul__(self, times: float) -> Bytes:
        return Bytes(self.link * times, self.nic * times)

    def seconds(self, node: Node) -> float:
        """Both networks work at the same time."""
        return max(self.link / node.link_rate, self.nic / node.nic_rate)


@dataclass(frozen=True)
class Spread:
    """Where one token's rows go, on average, besides the rank and the domain that the row is in already."""

    rows_link: float  # to ranks, from the rail or source in their domain
    rows_nic: float  # to other domains
    pairs_link: float  # (token, expert) pairs behind these rows
    pairs_nic: float


def spread(model: Model, num_ranks: int, domain_size: int) -> Spread:
    """The spread in an expert parallel group with domains of `domain_size` ranks."""
    size = min(domain_size, num_ranks)
    rank = _mean_hit(model, num_ranks)
    domain = _mean_hit(model, num_ranks // size)
    others = num_ranks / size - 1
    # One rank of a domain has the row already: the source, or the rail that the row came to.
    return Spread(
        rows_link=rank * (size - 1) * num_ranks / size,
        rows_nic=domain * others,
        pairs_link=model.topk * (size - 1) / size,
        pairs_nic=model.topk * others * size / num_ranks,
    )


def _mean_hit(model: Model, num_parts: int) -> float:
    """The mean probability that a token reaches a part of the experts. Parts are equally large, but not
    alike: a group may end inside one."""
    size = model.num_experts // num_parts
    return sum(hit_probability(model, range(i * size, (i + 1) * size)) for i in range(num_parts)) / num_parts


def hit_probability(model: Model, experts: range) -> float:
    """The probability that a token chooses at least one of these (consecutive) experts."""
    groups = model.router.num_groups or 1
    chosen = model.router.group_topk or groups
    size = model.num_experts // groups
    inside = [sum(1 for e in experts if e // size == g) for g in range(groups)]
    # ways[n][s]: subsets of n groups that have s of the experts together
    ways: list[dict[int, int]] = [{0: 1}] + [{} for _ in range(chosen)]
    for num in inside:
        for n in range(chosen, 0, -1):
            for s, count in ways[n - 1].items():
                ways[n][s + num] = ways[n].get(s + num, 0) + count
    open_experts = chosen * size
    missed = sum(count * comb(open_experts - s, model.topk) for s, count in ways[chosen].items())
    return 1 - missed / (comb(groups, chosen) * comb(open_experts, model.topk))


def row_bytes(model: Model, dtype: str) -> int:
    """Bytes of a row on the wire of uccl_ep, with the last block filled up. FP8 has an FP32 scale per block;
    the scales are padded to 16 bytes."""
    num_blocks = -(-model.hidden_size // _FP8_BLOCK)
    if dtype == "bf16":
        return 2 * _FP8_BLOCK * num_blocks
    return _FP8_BLOCK * num_blocks + -(-4 * num_blocks // 16) * 16


@dataclass(frozen=True)
class Traffic:
    """The traffic of one rank in one MoE layer, for one micro-batch."""

    dispatch: Bytes
    combine: Bytes
    gradients: Bytes  # combine's backward, a dispatch; the backward of dispatch is a combine
    again: bool  # backward repeats dispatch and combine, to recompute the layer
    several_domains: bool

    @property
    def total(self) -> Bytes:
        """Forward and backward."""
        return (self.dispatch + self.combine) * (2 if self.again else 1) + self.gradients + self.combine

    def seconds(self, node: Node) -> dict[str, float]:
        """Seconds of dispatch and of combine in forward, and of all of forward and backward."""
        dispatch, combine, gradients = (
            b.seconds(node) + FIXED_SECONDS for b in (self.dispatch, self.combine, self.gradients)
        )
        both = (dispatch + combine) * (2 if self.again else 1) + gradients + combine
        return {"dispatch": dispatch, "combine": combine, "all": both}


def of_layer(model: Model, layout: Layout, node: Node, dtype: str, grad_dtype: str = "bf16") -> Traffic:
    """The traffic of uccl_ep. FlexDispatcher's DeepEP and HybridEP send the same rows in BF16."""
    at = spread(model, layout.ep, node.gpus)
    tokens = layout.tokens_per_pass
    value = 4  # bytes of a pair's probability

    def dispatched(row: int) -> Bytes:
        return Bytes(
            tokens * (at.rows_link * row + at.pairs_link * value),
            tokens * (at.rows_nic * row + at.pairs_nic * value),
        )

    sums = row_bytes(model, "bf16")
    return Traffic(
        dispatch=dispatched(row_bytes(model, dtype)),
        combine=Bytes(tokens * at.rows_link * sums, tokens * at.rows_nic * sums),
        gradients=dispatched(row_bytes(model, grad_dtype)),
        again=layout.recompute == FULL or "moe" in layout.recompute,
        several_domains=layout.ep > node.gpus,
    )


def of_stock_layer(model: Model, layout: Layout, node: Node) -> Traffic:
    """The traffic of Megatron's alltoall dispatcher: a BF16 row for every pair, wherever it goes."""
    size = min(node.gpus, layout.ep)
    pairs = layout.tokens_per_pass * model.topk * 2 * model.hidden_size
    one_way = Bytes(pairs * (size - 1) / layout.ep, pairs * (layout.ep - size) / layout.ep)
    again = layout.recompute == FULL or "moe" in layout.recompute
    return Traffic(one_way, one_way, one_way, again, layout.ep > node.gpus)
