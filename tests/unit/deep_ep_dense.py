"""A small mixture of experts on one device: its inputs, and what callers of DeepEP must get from them.

An expert multiplies a token by its factors, column by column. Tokens, factors and gradients are small
integers, and weights are quarters. So every value and every sum has at most 8 significant bits, which BF16
holds exactly (a float32 gradient of a factor has more): results must be equal in any order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tests.unit.deep_ep_gpus import drawn_on_cpu

H, E = 640, 12  # H / 128 = 5 blocks: no multiple of 4, which int32 scales are packed by
BLOCK = 128
EVERY = 40  # Only each 40th column has a gradient: a weight's gradient is then at most 16 * 4 * 3 = 192.


class Tokens(NamedTuple):
    """x [T, H] bfloat16; idx [T, K] int64, -1: none; weights [T, K] float32; the output's grad [T, H]."""

    x: Tensor
    idx: Tensor
    weights: Tensor
    grad: Tensor


@dataclass(frozen=True)
class Case:
    """sizes: tokens of each rank. idle: a rank whose experts no token has. seed: of all numbers."""

    sizes: tuple[int, ...]
    topk: int = 4
    idle: int | None = None
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.sizes)

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return E // self.ranks

    @drawn_on_cpu
    def factors(self, rank: int | None = None) -> Tensor:
        """[E, H] of all experts, or [L, H] of a rank's: 1, 2 or 3."""
        every = torch.randint(1, 4, (E, H), generator=torch.Generator().manual_seed(self.seed)).float()
        return every if rank is None else every[rank * self.local : (rank + 1) * self.local]

    @drawn_on_cpu
    def tokens(self, rank: int) -> Tokens:
        """The first token has no expert, and of the others every fifth choice is dropped."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank + 1)
        size = (self.sizes[rank], self.topk)
        x = torch.randint(-2, 3, (size[0], H), generator=generator).float()
        # Some blocks are doubled, so that scales of a row differ, in either order.
        blocks = torch.arange(H) // BLOCK + torch.arange(size[0])[:, None]
        x = torch.where(blocks % 5 % 3 == 0, 2 * x, x).to(torch.bfloat16)
        score = torch.rand(size[0], E, generator=generator)
        if self.idle is not None:
            score[:, self.idle * self.local : (self.idle + 1) * self.local] = -1.0
        idx = score.argsort(dim=1, descending=True)[:, : self.topk].contiguous()
        idx[torch.rand(size, generator=generator) < 0.2] = -1
        idx[:1] = -1
        weights = torch.randint(1, 5, size, generator=generator).float() / 4
        grad = torch.randint(-1, 2, (size[0], H), generator=generator).float()
        grad[:, torch.arange(H) % EVERY != 0] = 0
        return Tokens(x, idx, weights, grad)

    def counts(self, rank: int) -> list[int]:
        """Tokens of each of a rank's experts."""
        idx = torch.cat([self.tokens(source).idx.flatten() for source in range(self.ranks)])
        return [int((idx == expert).sum()) for expert in range(rank * self.local, (rank + 1) * self.local)]


class Dense(NamedTuple):
    """out and x_grad [T, H], weights_grad [T, K] of each rank; factors_grad [E, H], of all tokens."""

    out: list[Tensor]
    x_grad: list[Tensor]
    weights_grad: list[Tensor]
    factors_grad: Tensor


@torch.inference_mode(False)
def dense(case: Case, *, changed: bool = False) -> Dense:
    """changed: one weight of each rank is a quarter too large, for negative controls."""
    given = [case.tokens(rank) for rank in range(case.ranks)]
    weights = [tokens.weights.clone() for tokens in given]
    if changed:
        for tokens, of in zip(given, weights, strict=True):
            for first in (tokens.idx >= 0).nonzero()[:1]:
                of[tuple(first)] += 0.25
    idx = torch.cat([tokens.idx for tokens in given])
    x = torch.cat([tokens.x for tokens in given]).float().requires_grad_()
    weight, factors = torch.cat(weights).requires_grad_(), case.factors().requires_grad_()
    chosen = factors[idx.clamp(min=0)] * (idx >= 0).unsqueeze(-1)
    out = (weight.unsqueeze(-1) * x.unsqueeze(1) * chosen).sum(1)
    (out * torch.cat([tokens.grad for tokens in given])).sum().backward()
    x_grad, weights_grad, factors_grad = x.grad, weight.grad, factors.grad
    assert x_grad is not None and weights_grad is not None and factors_grad is not None
    outs, x_grads, weights_grads = (
        list(tensor.detach().split(case.sizes)) for tensor in (out, x_grad, weights_grad)
    )
    return Dense(outs, x_grads, weights_grads, factors_grad)


def check_out(case: Case, rank: int, out: Tensor) -> None:
    """out is the dense result, and not that of another weight."""
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.float(), dense(case).out[rank])
    if case.sizes[rank] > 0:
        assert not torch.equal(out.float(), dense(case, changed=True).out[rank]), "the check is blind"


class Grads(NamedTuple):
    """What one rank's backward gave: of x, of its weights, of its experts' factors."""

    x: Tensor | None
    weights: Tensor | None
    factors: Tensor | None


def check_grads(case: Case, rank: int, got: Grads) -> None:
    """They are the dense ones; those of x and of factors are not those of another weight."""
    assert got.x is not None and got.weights is not None and got.factors is not None
    wanted, wrong, mine = (
        dense(case),
        dense(case, changed=True),
        slice(rank * case.local, (rank + 1) * case.local),
    )
    assert torch.equal(got.x.float(), wanted.x_grad[rank])
    assert torch.equal(got.weights, wanted.weights_grad[rank])
    assert torch.equal(got.factors, wanted.factors_grad[mine])
    if case.sizes[rank] > 0:
        assert not torch.equal(got.x.float(), wrong.x_grad[rank]), "the check is blind"
        assert got.weights.any()
    changed_here = not torch.equal(wanted.factors_grad[mine], wrong.factors_grad[mine])
    assert torch.equal(got.factors, wrong.factors_grad[mine]) != changed_here


# ---- FP8 as callers make it: a scale for 128 columns, here a power of two, so that codes are exact


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [T, H] float8_e4m3fn, scales [T, H / 128] float32) whose product is x."""
    blocks = x.float().view(len(x), H // BLOCK, BLOCK)
    scales = torch.exp2((blocks.abs().amax(2).clamp(min=1e-4) / 448).log2().ceil())
    codes = (blocks / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(len(x), H)
    assert torch.equal(values(codes, scales), x.float())
    return codes, scales


def values(codes: Tensor, scales: Tensor | None) -> Tensor:
    """float32 [T, H] of rows as they are, or of codes with their scales."""
    if scales is None:
        return codes.float()
    return codes.float() * scales.repeat_interleave(BLOCK, 1)


def packed(scales: Tensor) -> Tensor:
    """[T, 2] int32: exponents of 5 scales as bytes, column by column, with columns of 4 k rows."""
    exponents = torch.zeros(len(scales), 8, dtype=torch.uint8)
    exponents[:, : scales.shape[1]] = (scales.log2() + 127).to(torch.uint8)
    by_columns = torch.zeros(2, -(-len(scales) // 4) * 4, dtype=torch.int32).t()[: len(scales)]
    return by_columns.copy_(exponents.view(torch.int32))


def unpacked(words: Tensor) -> Tensor:
    """The scales of `packed`."""
    exponents = words.contiguous().view(torch.uint8)
    assert not exponents[:, H // BLOCK :].any()
    return torch.exp2(exponents[:, : H // BLOCK].float() - 127)
