"""A group, a model and its routing: rows and pairs that go from rank to rank.

Uniform: a token's groups are any `group_topk` of the router's groups, its experts any top-k of the experts in
these. Then the number of chosen experts in a set is hypergeometric. Trained routers are less even.

A row goes once over the NIC to every other domain that wants it, to one rank there (the rail). Inside a
domain it goes once to every rank that wants it. Combine sends a sum for each of these rows the other way.

Shape suffixes: S sources (1: all are alike), R ranks, D domains, T tokens of a rank, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import comb
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from uccl_ep_train.core.topology import Topology
from uccl_ep_train.errors import InputError
from uccl_ep_train.settings.checks import FP8_BLOCK, HIDDEN_UNIT

Counts = NDArray[np.float64]
_SAMPLED_TOKENS = 2048
"""Of a rank, drawn at most; counts are scaled to the rest."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a token chooses `topk` of `num_experts`. group_topk: of `num_groups` groups of experts; None:
    all."""

    num_experts: int
    topk: int
    num_groups: int | None = None
    group_topk: int | None = None

    def check(self) -> None:
        """Raises InputError."""
        groups = 1 if self.num_groups is None else self.num_groups
        chosen = groups if self.group_topk is None else self.group_topk
        if not 1 <= self.topk <= self.num_experts:
            raise InputError(f"topk = {self.topk}: allowed is 1 .. {self.num_experts}, the number of experts")
        if groups < 1 or self.num_experts % groups or not 1 <= chosen <= groups:
            raise InputError(
                f"num_groups = {self.num_groups}, group_topk = {self.group_topk}: allowed are equal groups "
                "of the "
                f"{self.num_experts} experts, and 1 .. num_groups of them for a token"
            )
        if chosen * (self.num_experts // groups) < self.topk:
            raise InputError(f"topk = {self.topk}: {chosen} groups have fewer experts")


@lru_cache(maxsize=1 << 14)
def hit_probability(router: Router, first: int, end: int) -> float:
    """The probability that a token chooses at least one of the experts first .. end - 1."""
    groups = router.num_groups or 1
    chosen = router.group_topk or groups
    size = router.num_experts // groups
    inside = [max(0, min(end, (g + 1) * size) - max(first, g * size)) for g in range(groups)]
    # ways[n][s]: subsets of n groups that have s of the experts together
    ways: list[dict[int, int]] = [{0: 1}] + [{} for _ in range(chosen)]
    for num in inside:
        for n in range(chosen, 0, -1):
            for s, count in ways[n - 1].items():
                ways[n][s + num] = ways[n].get(s + num, 0) + count
    open_experts = chosen * size
    missed = sum(count * comb(open_experts - s, router.topk) for s, count in ways[chosen].items())
    return 1 - missed / (comb(groups, chosen) * comb(open_experts, router.topk))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one operation is asked to do.

    domains  ranks of each domain, consecutive; sizes may differ
    tokens   of a rank
    dtype    of dispatched rows on the wire: "fp8" | "bf16"; combine sends BF16 sums
    codes    experts get FP8 codes and scales instead of BF16 rows
    skew     standard deviation of the experts' logits; 0: uniform
    trace    a router's choices, [R T, K], rank 0's first; None: drawn
    """

    domains: tuple[int, ...]
    router: Router
    tokens: int = 4096
    hidden: int = 7168
    dtype: str = "fp8"
    codes: bool = False
    skew: float = 0.0
    seed: int = 0
    trace: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if not self.domains or min(self.domains) < 1:
            raise InputError(f"domains = {self.domains}: allowed is a number of ranks, at least 1, for each")
        self.router.check()
        if self.router.num_experts % self.num_ranks:
            raise InputError(
                f"num_experts = {self.router.num_experts}: allowed is a multiple of the number of ranks, "
                f"{self.num_ranks}: {self._multiples}"
            )
        if self.tokens < 1 or self.hidden < 1 or self.hidden % HIDDEN_UNIT:
            raise InputError(
                f"tokens = {self.tokens}, hidden = {self.hidden}: allowed are at least 1, and a multiple of "
                f"{HIDDEN_UNIT}"
            )
        if self.dtype not in ("fp8", "bf16") or (self.codes and self.dtype != "fp8"):
            raise InputError(f"dtype = {self.dtype!r}: allowed is 'fp8' | 'bf16', and codes with 'fp8' only")
        if self.skew < 0:
            raise InputError(f"skew = {self.skew}: allowed is at least 0")
        needed = (self.num_ranks * self.tokens, self.router.topk)
        if self.trace is not None and self.trace.shape != needed:
            raise InputError(f"trace has the shape {self.trace.shape}: allowed is {needed}")

    @classmethod
    def split(cls, num_ranks: int, domain_size: int, **more: object) -> Shape:
        """Domains of `domain_size` ranks; the last may be smaller."""
        if num_ranks < 1 or domain_size < 1:
            raise InputError(f"{num_ranks} ranks in domains of {domain_size}: allowed is at least 1 of each")
        size = min(domain_size, num_ranks)
        sizes = [size] * (num_ranks // size) + ([num_ranks % size] if num_ranks % size else [])
        return cls(domains=tuple(sizes), **more)  # type: ignore[arg-type]

    @property
    def num_ranks(self) -> int:
        return sum(self.domains)

    @property
    def _multiples(self) -> str:
        """Of the number of ranks, next to the number of experts."""
        below, ranks = self.router.num_experts // self.num_ranks, self.num_ranks
        return " or ".join(str(n * ranks) for n in (below, below + 1) if n * ranks >= self.router.topk)

    @property
    def is_even(self) -> bool:
        """Whether one rank stands for all."""
        return self.skew == 0 and self.trace is None and len(set(self.domains)) == 1

    @cached_property
    def first_of(self) -> list[int]:
        """The first rank of each domain, and the number of ranks. [D + 1]"""
        return [int(n) for n in np.concatenate([[0], np.cumsum(self.domains)])]

    @cached_property
    def topology(self) -> Topology:
        return Topology.from_domains([d for d, size in enumerate(self.domains) for _ in range(size)])

    @cached_property
    def counts(self) -> RowCounts:
        return _expected(self) if self.skew == 0 and self.trace is None else _drawn(self)

    def row_bytes(self, dtype: str) -> int:
        """Of a row on the wire, see `row_bytes`, as GPUs stage it: filled up to 128."""
        return -(-row_bytes(self.hidden, dtype) // 128) * 128


@dataclass(frozen=True)
class RowCounts:
    """Of one operation; [S, ...] with S = 1 where all sources are alike.

    to_domain_SD  tokens of a source with an expert in the domain
    to_rank_SR    tokens of a source with an expert at the rank
    pairs_SR      pairs of token and expert from the source to the rank
    """

    to_domain_SD: Counts
    to_rank_SR: Counts
    pairs_SR: Counts

    def of(self, source: int) -> int:
        return source if len(self.to_domain_SD) > 1 else 0


def _expected(shape: Shape) -> RowCounts:
    router, ranks = shape.router, shape.num_ranks
    each = router.num_experts // ranks

    def tokens(first: int, end: int) -> float:
        return shape.tokens * hit_probability(router, first * each, end * each)

    firsts = shape.first_of
    to_domain = [tokens(first, end) for first, end in pairwise(firsts)]
    to_rank = [tokens(r, r + 1) for r in range(ranks)]
    pairs = np.full((1, ranks), shape.tokens * router.topk / ranks)
    return RowCounts(np.array([to_domain]), np.array([to_rank]), pairs)


def _drawn(shape: Shape) -> RowCounts:
    router, ranks = shape.router, shape.num_ranks
    rng = np.random.default_rng(shape.seed)
    logits = shape.skew * rng.standard_normal(router.num_experts)
    num = shape.tokens if shape.trace is not None else min(shape.tokens, _SAMPLED_TOKENS)
    found: list[list[Counts]] = [[], [], []]
    for source in range(ranks):
        if shape.trace is not None:
            chosen_TK = shape.trace[source * num : (source + 1) * num]
        else:
            chosen_TK = draw(router, num, logits, rng)
        pairs_TR = np.zeros((num, ranks))
        np.add.at(pairs_TR, (np.arange(num)[:, None], chosen_TK // (router.num_experts // ranks)), 1)
        hit_TD = np.add.reduceat(pairs_TR, shape.first_of[:-1], axis=1) > 0
        for into, counted in zip(found, (hit_TD, pairs_TR > 0, pairs_TR), strict=True):
            into.append(counted.sum(0) * (shape.tokens / num))
    return RowCounts(*(np.array(rows, dtype=np.float64) for rows in found))


def draw(router: Router, num_tokens: int, logits_E: Counts, rng: np.random.Generator) -> NDArray[np.int64]:
    """[num_tokens, K] experts without replacement, likelier with a larger logit (the Gumbel trick)."""
    score_TE = rng.gumbel(size=(num_tokens, router.num_experts)) + logits_E
    groups, chosen = router.num_groups or 1, router.group_topk or router.num_groups or 1
    if chosen < groups:
        best_TG = rng.random((num_tokens, groups)).argsort(1)[:, :chosen]
        open_TG = np.zeros((num_tokens, groups), bool)
        np.put_along_axis(open_TG, best_TG, True, 1)
        score_TE = np.where(np.repeat(open_TG, router.num_experts // groups, 1), score_TE, -np.inf)
    return np.argpartition(-score_TE, router.topk - 1, axis=1)[:, : router.topk]


def read_trace(path: str | Path, num_tokens: int, router: Router, layer: int = 0) -> NDArray[np.int64]:
    """[num_tokens, K]: a layer's choices from a file of `python -m recipes.launch --router-trace`.

    The file has topk_idx [S, L, T, K], S steps, L layers, T tokens of all ranks, and num_experts. Raises
    InputError where it is no such file, or of another router, or has too few tokens.
    """
    try:
        with np.load(path, allow_pickle=False) as saved:
            idx_SLTK, num_experts = saved["topk_idx"], int(saved["num_experts"])
    except Exception as error:  # what numpy and zipfile raise of damaged files has no common base
        raise InputError(f"{path} is no router trace: {error}") from None
    if idx_SLTK.ndim != 4 or idx_SLTK.size == 0 or not np.issubdtype(idx_SLTK.dtype, np.integer):
        raise InputError(
            f"{path}: topk_idx is {idx_SLTK.dtype} {idx_SLTK.shape}; allowed are integers [S, L, T, K]"
        )
    if not 0 <= layer < idx_SLTK.shape[1]:
        raise InputError(f"{path}: layer = {layer}; allowed is 0 .. {idx_SLTK.shape[1] - 1}")
    if idx_SLTK.min() < 0 or idx_SLTK.max() >= num_experts:
        raise InputError(
            f"{path}: experts from {idx_SLTK.min()} to {idx_SLTK.max()}; allowed is 0 .. {num_experts - 1}"
        )
    if (num_experts, idx_SLTK.shape[3]) != (router.num_experts, router.topk):
        raise InputError(
            f"{path} is of top-{idx_SLTK.shape[3]} of {num_experts}, not top-{router.topk} of "
            f"{router.num_experts}"
        )
    tokens = idx_SLTK[:, layer].reshape(-1, router.topk)
    if len(tokens) < num_tokens:
        raise InputError(f"{path} has {len(tokens)} tokens of a layer, not {num_tokens} of all ranks")
    return tokens[:num_tokens].astype(np.int64)


def row_bytes(hidden: int, dtype: str) -> int:
    """Bytes of a row between ranks, filled up to a multiple of 32 elements. FP8 has an FP32 scale per block;
    the scales are padded to 16 bytes."""
    hidden += -hidden % HIDDEN_UNIT
    if dtype == "bf16":
        return 2 * hidden
    return hidden + -(-4 * -(-hidden // FP8_BLOCK) // 16) * 16


@dataclass(frozen=True)
class Bytes:
    """What leaves a rank, on average: inside its domain and for others."""

    link: float
    nic: float

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.link + other.link, self.nic + other.nic)

    def __mul__(self, times: float) -> Bytes:
        return Bytes(self.link * times, self.nic * times)


@dataclass(frozen=True)
class Spread:
    """Where one token's rows go, on average, besides the rank and the domain that the row is in already."""

    rows_link: float  # to ranks, from the rail or source in their domain
    rows_nic: float  # to other domains
    pairs_link: float  # (token, expert) pairs behind these rows
    pairs_nic: float

    def bytes(self, tokens: float, row: int, value: int) -> Bytes:
        """Of `tokens` tokens with rows of `row` bytes and `value` bytes beside each pair."""
        return Bytes(
            tokens * (self.rows_link * row + self.pairs_link * value),
            tokens * (self.rows_nic * row + self.pairs_nic * value),
        )


def spread(router: Router, domains: Sequence[int]) -> Spread:
    """The spread in an expert parallel group with domains of so many ranks, mean over sources."""
    ranks = sum(domains)
    each = router.num_experts // ranks
    firsts = [sum(domains[:d]) for d in range(len(domains))]
    rank_hits = [hit_probability(router, r * each, (r + 1) * each) for r in range(ranks)]
    nic = link = 0.0
    for first, size in zip(firsts, domains, strict=True):
        nic += hit_probability(router, first * each, (first + size) * each) * (ranks - size) / ranks
        # One rank of a domain has the row already: the source, or the rail that the row came to.
        link += sum(rank_hits[first : first + size]) * (size - 1) / size
    pairs_link = router.topk * sum(size / ranks * (size - 1) / size for size in domains)
    pairs_nic = router.topk * sum(size / ranks * (ranks - size) / ranks for size in domains)
    return Spread(link, nic, pairs_link, pairs_nic)


def stock_bytes(shape: Shape) -> Bytes:
    """What Megatron's all-to-all sends one way: a BF16 row for every pair, wherever it goes."""
    ranks = shape.num_ranks
    pairs = shape.tokens * shape.router.topk * 2 * shape.hidden
    own = sum(size * size for size in shape.domains) / ranks  # ranks of a rank's own domain, mean
    return Bytes(pairs * (own - 1) / ranks, pairs * (ranks - own) / ranks)
