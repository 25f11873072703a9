"""Tokens of four ranks, and what each rank must get of them and back, in plain torch.

What an expert makes of a token is random, so that a sum in another order or with another rounding has other
bits.

Shapes: T tokens, H hidden, K experts per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.unit.deep_ep_gpus import drawn_on_cpu
from uccl_ep_train.deep_ep.utils.math import align

H, E, K = 256, 12, 5
SIZES = (20, 0, 33, 7)
RANKS, LOCAL, MOST, ALIGNMENT = len(SIZES), E // len(SIZES), 40, 8


@drawn_on_cpu
def tokens_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], topk_idx [T, K], topk_weights [T, K]."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(SIZES[rank], H, generator=generator).to(torch.bfloat16)
    idx = torch.rand(SIZES[rank], E, generator=generator).argsort(dim=1)[:, :K].contiguous()
    idx[torch.rand(SIZES[rank], K, generator=generator) < 0.2] = -1
    return x, idx, torch.rand(SIZES[rank], K, generator=generator)


@drawn_on_cpu
def outputs_of(rank: int) -> Tensor:
    """[T, E, H] bfloat16: what each expert makes of each token of a rank."""
    generator = torch.Generator().manual_seed(500 + rank)
    return torch.randn(SIZES[rank], E, H, generator=generator).to(torch.bfloat16)


@dataclass(frozen=True)
class Expected:
    """Of one rank. tokens: (source, token) by source and token. pairs: (expert, source, token)."""

    rank: int

    def here(self, source: int) -> Tensor:
        idx = tokens_of(source)[1]
        return torch.where((idx >= 0) & (idx // LOCAL == self.rank), idx - self.rank * LOCAL, -1)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        found = [(source, (self.here(source) >= 0).any(1).nonzero()) for source in range(RANKS)]
        return [(source, int(token)) for source, tokens in found for token in tokens]

    @property
    def pairs(self) -> list[tuple[int, int, int]]:
        return [
            (expert, source, token)
            for expert in range(LOCAL)
            for source, token in self.tokens
            if expert in self.here(source)[token]
        ]

    @property
    def counts(self) -> list[int]:
        return [sum(pair[0] == expert for pair in self.pairs) for expert in range(LOCAL)]

    def slots(self, alignment: int) -> list[int]:
        """The row of each pair."""
        rows, start = [], 0
        for count in self.counts:
            rows += range(start, start + count)
            start += align(count, alignment)
        return rows

    def column(self, expert: int, source: int, token: int) -> int:
        return self.here(source)[token].tolist().index(expert)


def rounded_sum(rows: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = torch.zeros(H)
    for row in rows:
        total = total + row.float()
    return total.to(dtype)


def combined(rank: int, domain_size: int, wire: torch.dtype, biases: tuple[Tensor, ...] = ()) -> Tensor:
    """Biases, then experts ascending in a rank, ranks in a domain, domains; rounded to `wire` on each way."""
    idx, outputs, sums = tokens_of(rank)[1], outputs_of(rank), []
    for token, experts in enumerate(idx.tolist()):
        addends: list[Tensor] = []
        for domain in range(RANKS // domain_size):
            pieces = []
            for owner in range(domain * domain_size, (domain + 1) * domain_size):
                named = sorted(expert for expert in experts if expert >= 0 and expert // LOCAL == owner)
                if named:
                    pieces.append(rounded_sum([outputs[token, expert] for expert in named], wire))
            is_own = domain == rank // domain_size
            addends += pieces if is_own or not pieces else [rounded_sum(pieces, wire)]
        sums.append(rounded_sum([*(bias[token] for bias in biases), *addends], torch.bfloat16))
    return torch.stack(sums) if sums else outputs.new_zeros(0, H)
