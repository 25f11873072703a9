"""Random groups for claims about the oracle, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uccl_ep_train.oracle.reference import (
    Routing,
)

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


def assert_all_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert len(a) == len(b)
    assert [same_bits(x, y) for x, y in zip(a, b, strict=True)] == [True] * len(a)
